"""Prepares a process so that DeepSpeed can be imported and started on it: accelerator, logging, compiler.

It knows nothing of models, stages or Lightning. Everything here must happen before the first
`import deepspeed`, or between that and the start of its process group.
"""

import atexit
import contextlib
import io
import logging
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from llmtrain.data.locking import locked
from llmtrain.training import placement

logger = logging.getLogger(__name__)

LOG_LEVEL = logging.INFO


def prepare_import(accelerator: str) -> None:
    """Chooses DeepSpeed's accelerator, imports DeepSpeed and moves its log off stdout.

    Args:
        accelerator: `cpu` or `cuda`. Left alone, DeepSpeed takes CUDA wherever there is a card, even if the
            trainer runs on the CPU.

    Raises:
        RuntimeError: DeepSpeed was imported before and already settled on another accelerator.
    """
    os.environ["DS_ACCELERATOR"] = accelerator
    _add_environment_to_path()
    with quiet_stdout(), warnings.catch_warnings():
        # Deprecations of torch and pydantic that DeepSpeed's own modules trigger; nobody here can mend them.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    chosen = get_accelerator().device_name()
    if chosen != accelerator:
        raise RuntimeError(
            f"DeepSpeed runs on {chosen!r} in this process and cannot change to {accelerator!r}; start anew."
        )
    redirect_logger(deepspeed.utils.logging.logger)
    # DeepSpeed calls collectives by the names that torch 2.13 began to replace, at every step.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning
    )


def redirect_logger(deepspeed_logger: logging.Logger) -> None:
    """Hands DeepSpeed's records to python logging instead of its own handler on stdout."""
    for handler in list(deepspeed_logger.handlers):
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            deepspeed_logger.removeHandler(handler)
    deepspeed_logger.propagate = True
    deepspeed_logger.setLevel(LOG_LEVEL)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Turns what DeepSpeed and torch's extension builder print into INFO records of DeepSpeed's logger."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        for line in text.getvalue().splitlines():
            if line.strip():
                logging.getLogger("DeepSpeed").info("%s", line)


def _add_environment_to_path() -> None:
    """Makes a `ninja` installed beside this interpreter findable, as in an environment not activated."""
    folder = Path(sys.executable).parent
    if shutil.which("ninja") is None and (folder / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), str(folder)]))


def open_process_group_alone() -> None:
    """One process meets itself in memory: a network port could be taken by another run before it is opened."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def limit_every_group(timeout: timedelta) -> None:
    """Lets the collectives of every process group wait so long and no longer.

    DeepSpeed makes groups of its own, with torch's default of half an hour, and reduces gradients in one of them.
    """
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def close_process_group_at_exit() -> None:
    """Ends gloo's threads before the interpreter: left running, they abort a process that is done."""
    atexit.unregister(_close_process_group)
    atexit.register(_close_process_group)


def _close_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def choose_interface(main_address: str) -> None:
    """Tells gloo to talk through the network that leads to rank 0's machine, unless `GLOO_SOCKET_IFNAME` says.

    Left alone, gloo takes the address that this machine's own name resolves to, which is often the loopback's.
    """
    import psutil

    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(main_address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: the system only picks the way
            mine = probe.getsockname()[0]
    except OSError as error:
        sentence = "MASTER_ADDR=%s is not reachable from here (%s)."
        logger.warning(sentence, main_address, error.strerror, extra={"of_this_rank": True})
        return
    for name, addresses in psutil.net_if_addrs().items():
        if mine in (each.address.partition("%")[0] for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def settle_shared_memory_op(processes: int, *, num_nodes: int = 1) -> None:
    """Decides whether DeepSpeed may use its shared-memory op for several CPU processes.

    DeepSpeed's start on CPU compiles the op and raises where it cannot. One process has nobody to talk to;
    several can always talk through gloo, which is what ZeRO's collectives use in any case (the op serves
    `inference_all_reduce` only).

    Args:
        processes: processes on this machine.
        num_nodes: machines; the memory of several is not shared.
    """
    import deepspeed.ops

    if "__compatible_ops__" in vars(deepspeed.ops):  # settled by an earlier fit of this process
        return
    wanted = processes > 1 and num_nodes == 1
    usable = wanted and _compiles()
    # Reading DeepSpeed's own table would probe every op it has with the compiler, which takes seconds; this
    # entry is the only one that is read.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": usable}
    if wanted and not usable and placement.here().is_first:
        logger.warning(
            "DeepSpeed's shared-memory op could not be compiled (it needs a C++ compiler and ninja);"
            " the processes talk through gloo instead, with the same results."
        )


def _compiles() -> bool:
    """Whether the op can be had, found out by compiling it (DeepSpeed would find out by raising)."""
    compiler = os.environ.get("CXX", "c++").split()
    if sys.platform != "linux" or not compiler or not shutil.which(compiler[0]) or not shutil.which("ninja"):
        return False
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    try:
        with quiet_stdout(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _alone_in_the_build_folder(builder.name):
                builder.load(verbose=False)
    except Exception as error:  # whatever a foreign compiler does must not end the run
        logging.getLogger("DeepSpeed").info("The shared-memory op did not compile: %s", error)
        return False
    return True


@contextlib.contextmanager
def _alone_in_the_build_folder(op: str) -> Iterator[None]:
    """While inside, no other process of ours builds the op, and no lock of one that was killed is in the way.

    Torch's extension builder locks with a file that a killed process leaves behind, and waits for it for ever. Ours the
    system gives back; and whoever holds it knows that the other file has no owner.
    """
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(op, False))
    with locked(folder / "llmtrain.lock", work=f"building DeepSpeed's {op}"):
        (folder / "lock").unlink(missing_ok=True)
        yield
