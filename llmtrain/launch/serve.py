"""`llmtrain serve`: settings to a loaded model, an engine, and an HTTP server around it.

Checks settings, takes the address, loads, serves, and says at the end what was done. The server itself is
`llmtrain.serve`, which knows no settings.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.inference import load_model, make_engine

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.generation import Engine
    from llmtrain.serve.inside import Inside
    from llmtrain.serve.runner import Runner

logger = logging.getLogger(__name__)

KEY_VARIABLE = "LLMTRAIN_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LONGEST_NAME = 100


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Serves until SIGTERM or Ctrl-C.

    Returns:
        `url`, and what was done: `requests` by endpoint and outcome, `prompt_tokens`, `generated_tokens`.

    Raises:
        ValueError: A setting is wrong, the extra is not installed, the address is taken, or no model is there.
    """
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f'serve needs {" and ".join(missing)}: pip install "llmtrain[serve]" (or make setup)')
    key = api_key(settings.api_key_file)
    names = model_names(settings)
    from llmtrain.serve.server import bind

    taken = bind(settings.host, settings.port)
    try:
        return asyncio.run(_serve(settings, taken, names, key))
    finally:
        taken.close()


def api_key(file: str | None) -> str | None:
    """The key that requests must carry: from a file, or the environment. It is no setting, which everybody could read.

    Raises:
        ValueError: It is empty, or no header could carry it.
    """
    where = f"api_key_file={file}" if file is not None else KEY_VARIABLE
    try:
        key = Path(file).read_text("utf-8", "replace").strip() if file is not None else os.environ.get(KEY_VARIABLE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where} cannot be read ({getattr(error, 'strerror', error)})") from None
    if key is None:
        return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{where}: a key is printable ASCII without blanks, and not empty")
    return key


def model_names(settings: DictConfig) -> list[str]:
    """The names that requests may ask for: the base's, then the adapters'.

    Raises:
        ValueError: One is no name, or stands twice.
    """
    names = [settings.served_name, *map(str, settings.adapters)]
    for name in names:
        if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
            raise ValueError(f"{name!r} is no name for a model: take 1 to {_LONGEST_NAME} printable characters")
    for name, folder in settings.adapters.items():
        if name == settings.served_name:
            raise ValueError(f"adapters={{{name}: …}} has the name of the model itself: choose another, or served_name")
        if not isinstance(folder, str) or not folder:
            raise ValueError(f"adapters={{{name}: {folder}}} must name a folder")
    return names


def add_adapters(engine: Engine, loaded: LoadedModel, adapters: Mapping[str, str]) -> None:
    """Lays adapters onto the engine's model, under the names that requests choose them by.

    Raises:
        ValueError: A folder holds no adapter of this model.
    """
    from llmtrain.checkpoint import lay_adapter

    for name, folder in adapters.items():
        try:
            laid = lay_adapter(loaded, folder)
        except ValueError as error:
            raise ValueError(f"adapters={{{name}: {folder}}}: {error}") from error
        engine.add_adapter(name, laid.delta, eos_ids=laid.eos_ids)
        logger.info("adapter %s: %s", name, laid.folder)


def _inside(settings: DictConfig, runner: Runner, loaded: LoadedModel) -> Inside:
    from llmtrain.launch.inspect import model_facts
    from llmtrain.serve.inside import Inside

    base = model_facts(loaded)
    adapters = {name: {**base, "name": name, "adapter": folder} for name, folder in settings.adapters.items()}
    return Inside(runner, {settings.served_name: base, **adapters})


async def _serve(settings: DictConfig, taken: Any, names: list[str], key: str | None) -> dict[str, Any]:
    from llmtrain.serve.app import Limits, create_app
    from llmtrain.serve.runner import Runner
    from llmtrain.serve.server import serve

    loaded = load_model(settings)
    engine = make_engine(loaded, max_rows=settings.max_rows, max_length=settings.max_length, compile=settings.compile)
    add_adapters(engine, loaded, settings.adapters)
    runner = Runner(engine, max_waiting=settings.max_waiting)
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        max_tokens=min(settings.max_tokens, engine.max_length),
        request_timeout=settings.request_timeout,
    )
    here_only = settings.host in LOOPBACK
    app = create_app(
        runner,
        models=names,
        limits=limits,
        api_key=key,
        hosts=[*LOOPBACK, *settings.allowed_hosts] if here_only else None,
        inside=_inside(settings, runner, loaded) if settings.inspect else None,
    )
    host, port = taken.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if not here_only and key is None:
        logger.warning("%s is open to the network and asks for no key: set %s", url, KEY_VARIABLE)
    await serve(app, taken, grace=settings.shutdown_grace, ready=lambda: logger.info("serving on %s", url))
    done = runner.metrics
    return {
        "command": "serve",
        "url": url,
        "model": str(loaded.adapter_folder or loaded.folder),
        "requests": {f"{endpoint} {outcome}": count for (endpoint, outcome), count in sorted(done.requests.items())},
        "prompt_tokens": done.prompt_tokens,
        "generated_tokens": done.generated_tokens,
    }
