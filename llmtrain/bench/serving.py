"""What the HTTP server costs: tokens per second of many streaming clients beside the engine alone with as many rows.

Server and engine are in this process, as they are when serving; the clients are in another one, as they are elsewhere,
and do as little as a client can. `python -m llmtrain.bench.serving FOLDER` measures it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmtrain.bench.rounds import Ratio, Rounds, take_turns
from llmtrain.checkpoint import load_model_folder
from llmtrain.generation import Engine, SamplingParams
from llmtrain.serve.app import Limits, create_app
from llmtrain.serve.runner import Runner
from llmtrain.serve.server import bind, served

ALONE, SERVED = "engine", "served"
MARK = 0.6


@dataclass(frozen=True)
class ServingResult:
    """The laps of both sides.

    Attributes:
        ratio: Tokens per second, served beside the engine alone.
        cpu: Tokens per second of this process's processor time, likewise: what the server's Python takes.
    """

    ratio: Ratio
    cpu: Ratio


def measure_serving(
    folder: Path,
    rounds: Rounds,
    *,
    clients: int = 16,
    new_tokens: int = 256,
    report: Callable[[int, Mapping[str, float]], None] = lambda number, rates: None,
) -> ServingResult:
    """Measures one model folder; both sides have the same prompts, seeds and settings, and one thread.

    Args:
        folder: The model.
        rounds: Fresh rounds.
        clients: How many stream at once; the engine has as many rows.
        new_tokens: Tokens of each answer.
        report: Called after each round with both rates.
    """
    loaded = load_model_folder(folder)
    prompts = [loaded.tokenizer.begin(loaded.tokenizer.encode(f"{number}. "))[:8] for number in range(clients)]
    asked: dict[str, Any] = {"max_tokens": new_tokens, "temperature": 1, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    bodies = [json.dumps({"prompt": ids, "seed": seed, **asked}) for seed, ids in enumerate(prompts)]
    params = [SamplingParams(temperature=1, max_new_tokens=new_tokens, seed=i, ignore_eos=True) for i in range(clients)]
    alone, shared = (Engine(loaded.model, loaded.tokenizer, max_rows=clients) for _ in range(2))
    runner = Runner(shared, max_waiting=0)
    app = create_app(runner, models=["m"], limits=Limits(max_tokens=new_tokens))
    spent: dict[str, list[float]] = {ALONE: [], SERVED: []}
    with served(app, bind("127.0.0.1", 0)) as url, _ClientProcess(url, bodies) as process:

        def lap(side: str, generate: Callable[[], int]) -> int:
            before = time.process_time()
            tokens = generate()
            assert tokens == clients * new_tokens, f"{tokens} tokens came, not {clients} × {new_tokens}"
            spent[side].append(tokens / (time.process_time() - before))
            return tokens

        def by_engine() -> int:
            return sum(len(each.token_ids) for each in alone.generate(prompts, params))

        sides = {ALONE: lambda: lap(ALONE, by_engine), SERVED: lambda: lap(SERVED, process.lap)}
        take_turns(sides, rounds, report=report)
    cpu = Ratio(*(spent[side][rounds.warmup_rounds :] for side in (SERVED, ALONE)))
    return ServingResult(rounds.compare(SERVED, ALONE), cpu)


class _ClientProcess:
    """Clients in a process of their own, which start together when asked."""

    def __init__(self, url: str, bodies: Sequence[str]):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_be_clients, args=(theirs, url, list(bodies)), daemon=True)

    def __enter__(self) -> _ClientProcess:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(False)
        self._process.join(10)

    def lap(self) -> int:
        """Every client asks once; returns the tokens that came."""
        self._pipe.send(True)
        tokens: int = self._pipe.recv()
        return tokens


def _be_clients(pipe: Connection, url: str, bodies: list[str]) -> None:
    while pipe.recv():
        pipe.send(asyncio.run(_all(url, bodies)))


async def _all(url: str, bodies: Sequence[str]) -> int:
    return sum(await asyncio.gather(*(_ask(url, body) for body in bodies)))


async def _ask(url: str, body: str) -> int:
    """One streamed request over a bare socket; returns its tokens, one per chunk that has a choice."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = body.encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
    received = await reader.read()
    writer.close()
    usage = received.rpartition(b'"completion_tokens": ')[2].partition(b",")[0]
    return int(usage)


def main(folder: str, rounds: str = "7") -> None:
    """Prints both ratios."""
    import torch

    torch.set_num_threads(1)

    def report(number: int, rates: Mapping[str, float]) -> None:
        print(number, {side: round(rate) for side, rate in rates.items()}, flush=True)

    result = measure_serving(Path(folder), Rounds(int(rounds)), report=report)
    for name, ratio in (("tokens/s", result.ratio), ("tokens per second of processor time", result.cpu)):
        print(f"{name}: {ratio.median:.2f} of the engine alone ({ratio.low:.2f} to {ratio.high:.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
