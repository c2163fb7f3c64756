"""Says which process a run has lost, when a collective fails because another process has died, failed or hangs.

The error of a collective names an address and a line of C++. So the processes that are left tell each other, through
the key-value store at which they met, that they are still there: who does not is the one that was lost. Who fails by
itself leaves the reason there; the store may live in rank 0 and end with it, so the others listen for its word while
they train, and it stays until they have heard. Knows ranks; nothing of models or of why a process died.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llmtrain.training import placement

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
ANSWER_SECONDS = 10.0
"""How long the processes that are left wait for each other before they call one lost."""
LINGER_SECONDS = 3 * POLL_SECONDS
"""How long rank 0 stays after an error of its own, so that the others hear it."""

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
    if trainer.world_size == 1:
        yield
        return
    try:
        with _Listener() as listener:
            yield
    except Exception as error:
        if not _is_broken_connection(error):
            word = f"failed ({' '.join(str(error).split())[:200] or type(error).__name__})"
            if _leave_word(trainer.global_rank, word) and trainer.global_rank == 0:
                time.sleep(LINGER_SECONDS)
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it at once to those that are left
        with _stderr_in_the_log():
            lost = _explain(error, trainer, timeout, listener.word)
        launcher = trainer.strategy.launcher
        launcher.explained = True
        launcher.kill(signal.SIGKILL)
        raise lost from error


class _Listener:
    """While inside, on ranks above 0, listens for the reason why rank 0 fails.

    Attributes:
        word: The reason; empty as long as there is none.
    """

    def __init__(self) -> None:
        self.word = ""
        self._over = threading.Event()

    def __enter__(self) -> _Listener:
        if not placement.here().is_first:
            threading.Thread(target=self._listen, name="listen-to-rank-0", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _listen(self) -> None:
        import torch.distributed as dist

        while not self.word and not self._over.wait(POLL_SECONDS):
            try:
                if dist.is_initialized() and _store().check([_key(0)]):
                    self.word = _store().get(_key(0)).decode()
            except (RuntimeError, ValueError):
                return  # the store has gone, and asking it again would fill the screen with stack traces


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


def _explain(error: Exception, trainer: Any, timeout: float, heard: str) -> LostProcessError:
    """What became of which process.

    Args:
        error: What the collective says.
        trainer: The Lightning trainer.
        timeout: Seconds that a collective waits.
        heard: Why rank 0 has failed, if it has said so.
    """
    import torch.distributed as dist

    if heard:
        return LostProcessError(_sentence(f"rank 0 {heard}"), speaks=trainer.global_rank == 1)
    late = any(sign in str(error) for sign in _LATE)
    own = None if late else trainer.strategy.launcher.find_lost(3 * POLL_SECONDS)
    if own is not None:
        return LostProcessError(_sentence(next(iter(_reasons(trainer.world_size)), own)))
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


def _reasons(world_size: int) -> list[str]:
    """Which processes have said so far that they failed, and why."""
    import torch.distributed as dist

    found: list[str] = []
    with suppress(RuntimeError):
        for rank in range(world_size if dist.is_initialized() else 0):
            word = _store().get(_key(rank)).decode() if _store().check([_key(rank)]) else ""
            found += [f"rank {rank} {word}"] if word else []
    return found


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
