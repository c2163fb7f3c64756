"""Says which process a run has lost, when a collective fails because another process has died, failed or hangs.

The error of a collective names an address and a line of C++. So the processes that are left tell each other, through
the key-value store at which they met, that they are still there: who does not is the one that was lost. Knows ranks;
nothing of models or of why a process died. Imports torch only when something is lost.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
ANSWER_SECONDS = 10.0
"""How long the processes that are left wait for each other before they call one lost."""

_BROKEN = ("gloo", "Gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_LATE = ("Timed out", "timed out", "timeout")


class LostProcessError(RuntimeError):
    """Another process of the run is gone; the message is one sentence that names it.

    Attributes:
        speaks: Whether this process is the one to tell the user; the other ranks stay quiet.
    """

    def __init__(self, sentence: str, *, speaks: bool = True) -> None:
        super().__init__(sentence)
        self.speaks = speaks


@contextmanager
def naming_the_lost(trainer: Any, *, timeout: float) -> Iterator[None]:
    """While inside, the failure of a collective becomes a `LostProcessError`.

    Any other error is this process's own: it passes, and the others are told.

    Args:
        trainer: The Lightning trainer, whose strategy says rank and world size.
        timeout: Seconds that a collective waits, for the sentence.
    """
    try:
        yield
    except Exception as error:
        if trainer.world_size == 1:
            raise
        if not _is_broken_connection(error):
            _leave_word(trainer.global_rank, f"failed ({' '.join(str(error).split())[:200] or type(error).__name__})")
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it at once to those that are left
        with _stderr_in_the_log():
            lost = _explain(error, trainer, timeout)
        launcher = trainer.strategy.launcher
        launcher.explained = True
        launcher.kill(signal.SIGKILL)
        raise lost from error


@contextmanager
def _stderr_in_the_log() -> Iterator[None]:
    """While inside, stack traces that torch's C++ writes about a store that is gone go to descriptor 1, the log's."""
    former = os.dup(2)
    os.dup2(1, 2)
    try:
        yield
    finally:
        os.dup2(former, 2)
        os.close(former)


def _is_broken_connection(error: Exception) -> bool:
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _BROKEN)


def _explain(error: Exception, trainer: Any, timeout: float) -> LostProcessError:
    import torch.distributed as dist

    late = any(sign in str(error) for sign in _LATE)
    own = None if late else trainer.strategy.launcher.find_lost(3 * POLL_SECONDS)
    if own is not None:
        return LostProcessError(_sentence(own))
    if not dist.is_initialized():
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "connectFullMesh" in str(error):
            return LostProcessError(
                f"rank {trainer.global_rank} met the others at {address} and cannot connect to them over the network "
                f"interface {os.environ.get('GLOO_SOCKET_IFNAME', 'of its host name')}; set GLOO_SOCKET_IFNAME to the "
                "one that leads to them"
            )
        return LostProcessError(
            f"rank {trainer.global_rank} did not meet all {trainer.world_size} processes at {address} within "
            f"{timeout:g} s (trainer.timeout); start as many, all with that address, and look whether one ended early"
        )
    words = _exchange_words(trainer.global_rank, trainer.world_size)
    if words is None:
        return LostProcessError(_sentence("rank 0 is gone"))
    failed = {rank: word for rank, word in words.items() if word}
    silent = [rank for rank in range(trainer.world_size) if rank not in words]
    speaks = trainer.global_rank == min(rank for rank, word in words.items() if not word)
    if failed:
        rank, word = next(iter(failed.items()))
        return LostProcessError(_sentence(f"rank {rank} {word}"), speaks=speaks)
    if silent:
        how = f"has not answered for {timeout:g} s (trainer.timeout)" if late else "is gone"
        names = " and ".join(f"rank {rank}" for rank in silent)
        return LostProcessError(_sentence(f"{names} {how}"), speaks=speaks)
    return LostProcessError(_sentence(f"a connection between the processes broke ({str(error).splitlines()[0]})"))


def _sentence(what: str) -> str:
    return f"{what}, and the others cannot go on without it; resume=auto goes on from the newest checkpoint"


def _key(rank: int) -> str:
    return f"llmtrain/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _leave_word(rank: int, word: str) -> bool:
    """Tells the others that this process is ending, and why; whether they can be told."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return False
    try:
        _store().set(_key(rank), word)
    except RuntimeError:
        return False
    return True


def _exchange_words(rank: int, world_size: int) -> dict[int, str] | None:
    """What each process that is left said when it ended ("" for one that lost another); None if the store is gone."""
    if not _leave_word(rank, ""):
        return None
    words = {rank: ""}
    end = time.monotonic() + ANSWER_SECONDS
    try:
        while len(words) < world_size and time.monotonic() < end:
            for other in range(world_size):
                if other not in words and _store().check([_key(other)]):
                    words[other] = _store().get(_key(other)).decode()
            time.sleep(POLL_SECONDS)
    except RuntimeError:
        return None
    if rank == 0:
        time.sleep(2 * POLL_SECONDS)  # the store may live in this process, and the others still read it
    return words
