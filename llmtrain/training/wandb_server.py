"""Whether a Weights & Biases run can be online: who is logged in, which server, and whether it is reached from here.

Asks the environment and the network as W&B does, without starting W&B. Knows nothing of runs or figures.
"""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
import socket
import threading
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline")
_PORTS = {"http": 80, "https": 443}


def resolve_mode(mode: str) -> Literal["online", "offline"]:
    """What a run is: `online` or `offline`. A setting wins over `WANDB_MODE`, which is asked for `auto` only.

    Args:
        mode: `auto` (online only if logged in and the server answers), `online` or `offline`.

    Raises:
        ValueError: for an unknown mode, or `online` without a login or a server that answers.
    """
    if mode not in MODES:
        raise ValueError(f"logger.mode={mode!r} must be auto, online or offline.")
    wished = os.environ.get("WANDB_MODE", "") if mode == "auto" else mode
    if wished in ("offline", "dryrun"):
        return "offline"
    problem = _problem()
    if problem is None:
        return "online"
    if mode == "online":
        raise ValueError(
            f"logger.mode=online: {problem}; or take logger.mode=offline, which `wandb sync` uploads later."
        )
    log.warning("W&B keeps this run offline: %s; `wandb sync` uploads it later", problem)
    return "offline"


def _problem() -> str | None:
    """Why a run cannot be online, and what to do; `None` if it can."""
    if not has_login():
        return "nobody is logged in here (run `wandb login`)"
    host, port, through = address()
    if not answers(host, port):
        return f"{host}:{port}{through} does not answer (check the network, HTTPS_PROXY and WANDB_BASE_URL)"
    return None


def server() -> str:
    """The server's address, as W&B reads it."""
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def address() -> tuple[str, int, str]:
    """Host and port that a connection to the server opens, and a remark if they are a proxy's."""
    from urllib.request import getproxies, proxy_bypass

    url = urlsplit(server())
    host = url.hostname or ""
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(host):
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return through.hostname or "", through.port or _PORTS.get(through.scheme, 80), f", the proxy to {host},"
    return host, url.port or _PORTS.get(url.scheme, 443), ""


def has_login() -> bool:
    """Whether W&B would find a key, looked for where W&B looks; asking W&B itself would start its service."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    given = os.environ.get("NETRC")
    candidates = [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in candidates:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(urlsplit(server()).hostname or "") is not None:
                return True
    return False


def answers(host: str, port: int, *, seconds: float = 3.0) -> bool:
    """Whether a host takes a connection in time. In a thread, as looking up a name cannot be given a limit."""
    reached = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=seconds):
            reached.set()

    threading.Thread(target=connect, daemon=True).start()
    return reached.wait(seconds)
