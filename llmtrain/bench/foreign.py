"""Decoding of one request beside litgpt and llama.cpp, which live in an environment of their own.

Each of them is a process that answers prompts over a pipe (`foreign_side.py`); a lap is a whole answer, so
the reading of the prompt and the way through the pipe count. Does not know how that environment is set up.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llmtrain.bench.decoding import COMPILED, FRAMEWORK, agreement
from llmtrain.bench.foreign_side import LITGPT, LLAMA_CPP
from llmtrain.bench.rounds import Rounds, take_turns
from llmtrain.checkpoint import load_model_folder
from llmtrain.generation import Engine, SamplingParams

SCRIPT = Path(__file__).with_name("foreign_side.py")
PATIENCE = 120.0  # seconds that one answer may take
# What runs beside each of our dtypes: (side, its dtype). On llama.cpp fp16 is the usual half precision.
BESIDE = {
    torch.float32: ((LITGPT, "float32"), (LLAMA_CPP, "float32")),
    torch.bfloat16: ((LITGPT, "bfloat16"), (LLAMA_CPP, "bfloat16"), (LLAMA_CPP, "float16")),
}


class ForeignError(Exception):
    """The other side cannot be measured; the message is its own reason."""


class ForeignSide:
    """A process of another environment that has loaded the model and decodes what it is asked.

    Args:
        python: That environment's Python.
        wanted: What to load: `side`, `weights`, `config`, `dtype`, `threads`, `length`, `scratch`.
        log: Where its own messages go.
        script: What it runs.
        patience: Seconds that one answer may take.

    Raises:
        ForeignError: It cannot load that, or does not answer.
    """

    def __init__(
        self, python: Path, wanted: dict[str, Any], *, log: Path, script: Path = SCRIPT, patience: float = PATIENCE
    ) -> None:
        self._log, self._patience = log, patience
        with log.open("w", encoding="utf-8") as messages:
            self._process = subprocess.Popen(
                [str(python), "-I", str(script)],  # -I: its own packages only, whatever PYTHONPATH names here
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                encoding="utf-8",
                env={**os.environ, "OMP_NUM_THREADS": str(wanted["threads"])},
            )
        try:
            self.version: str = self._ask(wanted)["version"]
        except BaseException:
            self.close()
            raise

    def decode(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The greedy continuation."""
        return self._ask({"prompt": list(prompt), "new_tokens": new_tokens})["tokens"]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> ForeignSide:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._patience, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise ForeignError(f"ended, or gave no answer in {self._patience:g} s; its last words: {said[-1:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise ForeignError(reply["error"])
        return reply


@dataclass
class PeersResult:
    """Laps of one dtype.

    Attributes:
        rounds: The laps; sides are `llmtrain`, `llmtrain compiled` and those of `peers`.
        peers: The other sides that ran, and what each of them is.
        missing: Those that did not, and why.
        agreement: For every side but ours, the share of tokens before the first that differs from ours, 0 to 1.
    """

    rounds: Rounds
    peers: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)


class PeersBench:
    """One model folder, for our engine and as what the others read.

    Args:
        folder: The model folder; its shape must be Llama's.
        work: A folder for the others' files.
        python: The Python of the environment with the others.
        prompt_tokens: Length of the prompt.
        new_tokens: Length of the answer.

    Raises:
        ValueError: The model has another shape than Llama's, is an adapter, or has a shorter context.
    """

    def __init__(self, folder: Path, *, work: Path, python: Path, prompt_tokens: int, new_tokens: int) -> None:
        loaded = load_model_folder(folder, device=torch.device("cpu"), dtype=torch.float32)
        config = loaded.config
        if config.family != "llama" or config.rope_scaling is not None or loaded.adapter_folder is not None:
            raise ValueError(
                f"{folder} is not a plain Llama model (family {config.family}), the one shape that is converted for "
                "litgpt and llama.cpp here; name another folder with model=…."
            )
        if prompt_tokens + new_tokens > config.max_position_embeddings:
            raise ValueError(
                f"prompt_tokens={prompt_tokens} and new_tokens={new_tokens} must together be at most "
                f"{config.max_position_embeddings}, the context of {folder}."
            )
        self._folder, self._work, self._python, self._config = folder, work, python, config.to_hf()
        self._new_tokens, self._length = new_tokens, prompt_tokens + new_tokens
        special = set(loaded.tokenizer.special_ids.values())
        ordinary = torch.tensor([token for token in range(loaded.tokenizer.vocab_size) if token not in special])
        drawn = torch.randint(len(ordinary), (prompt_tokens,), generator=torch.Generator().manual_seed(0))
        self._prompt: list[int] = ordinary[drawn].tolist()
        self._weights = work / "weights.safetensors"
        state = loaded.model.state_dict()
        if config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        save_file({name: weight.contiguous() for name, weight in state.items()}, self._weights)

    def measure(
        self,
        dtype: torch.dtype,
        rounds: Rounds,
        *,
        compiled: bool = True,
        report: Callable[[int, Mapping[str, float]], None] = lambda number, rates: None,
    ) -> PeersResult:
        """Lets all sides that can be loaded take turns; rates are new tokens per second."""
        result = PeersResult(rounds)
        said: dict[str, list[int]] = {}

        def lap(side: str, decode: Callable[[], list[int]]) -> Callable[[], float]:
            def run() -> float:
                said[side] = decode()
                assert len(said[side]) == self._new_tokens, f"{side} said {len(said[side])} tokens"
                return len(said[side])

            return run

        with ExitStack() as processes:
            sides = {FRAMEWORK: lap(FRAMEWORK, self._ours(dtype, compiled=False))}
            if compiled:
                sides[COMPILED] = lap(COMPILED, self._ours(dtype, compiled=True))
            for kind, their_dtype in BESIDE[dtype]:
                name = f"{kind} {their_dtype}"
                try:
                    foreign = processes.enter_context(self._start(kind, their_dtype))
                except ForeignError as error:
                    result.missing[name] = str(error)
                    continue
                result.peers[name] = foreign.version
                sides[name] = lap(name, lambda side=foreign: side.decode(self._prompt, self._new_tokens))  # type: ignore[misc]
            if result.peers:
                take_turns(sides, rounds, report=report)
        ours = said.pop(FRAMEWORK, [])
        result.agreement = {side: round(agreement([ours], [tokens]), 4) for side, tokens in said.items()}
        return result

    def _ours(self, dtype: torch.dtype, *, compiled: bool) -> Callable[[], list[int]]:
        loaded = load_model_folder(self._folder, device=torch.device("cpu"), dtype=dtype)
        engine = Engine(loaded.model, loaded.tokenizer, max_rows=1, max_length=self._length, compile=compiled)
        greedy = SamplingParams(temperature=0.0, max_new_tokens=self._new_tokens, ignore_eos=True)
        return lambda: engine.generate([self._prompt], greedy)[0].token_ids

    def _start(self, side: str, dtype: str) -> ForeignSide:
        wanted = {
            "side": side,
            "dtype": dtype,
            "weights": str(self._weights),
            "config": self._config,
            "threads": torch.get_num_threads(),
            "length": self._length,
            "scratch": str(self._work),
        }
        return ForeignSide(self._python, wanted, log=self._work / f"{side}-{dtype}.log")
