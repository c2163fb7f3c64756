"""The engine's work beside `transformers` on one model folder: unequal requests, questions with choices, second turns.

Also what it costs the engine itself to be recorded for the inspector, and to have been.

All tokens are ordinary ids at random and every answer has its stated length, so that both sides do the same work
whatever the model says. Does not know where the folder comes from, nor which marks there are.

Shapes: N rows, I in features.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from llmtrain.bench.peers import TwinGenerator
from llmtrain.bench.rounds import Rounds, take_turns
from llmtrain.checkpoint import load_model_folder
from llmtrain.generation import Engine, SamplingParams
from llmtrain.inspector import record
from llmtrain.model import build_model

FRAMEWORK, TWIN, FLOOR, WHOLE = "llmtrain", "transformers", "its matrix products", "reading it all"
NEVER, RECORDED = "never recorded", "recorded"
ROWS = 16  # requests at once
HISTORY, TURN = 500, 20  # tokens of a conversation so far, and of what is added to it
SAMPLES = (3, 40)  # prompts and new tokens of the samples in training, as in configs/callbacks/samples.yaml

Report = Callable[[int, Mapping[str, float]], None]


class GenerationBench:
    """One model folder in one dtype, on both sides.

    Args:
        folder: The model folder.
        device: Where to compute.
        dtype: What in.
        items: Prompts of the unequal requests, and questions with choices.
        compile: Compile the decode step of the unequal requests and of the floor.
    """

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, items: int, compile: bool = False
    ) -> None:
        self._loaded = load_model_folder(folder, device=device, dtype=dtype)
        self._twin = TwinGenerator(self._loaded.folder, device=device, dtype=dtype)
        self._device, self._dtype, self._items, self._compile = device, dtype, items, compile
        tokenizer = self._loaded.tokenizer
        special = set(tokenizer.special_ids.values())
        self._ordinary = [token for token in range(tokenizer.vocab_size) if token not in special]
        self._draw = random.Random(0)

    def unequal(self, rounds: Rounds, report: Report) -> Rounds:
        """Prompts of 5–200 tokens and answers of 1–100, at most 16 at once; answers' tokens per second.

        The other side takes the prompts in fixed batches of 16, as they come, each until its longest answer is done.
        """
        prompts = [self._ids(self._draw.randint(5, 200)) for _ in range(self._items)]
        lengths = [self._draw.randint(1, 100) for _ in prompts]
        settings = [SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True) for length in lengths]
        engine = self._engine(ROWS, 304, compile=self._compile)

        def ours() -> float:
            answers = engine.generate(prompts, settings)
            assert [len(answer.token_ids) for answer in answers] == lengths
            return sum(lengths)

        def theirs() -> float:
            for start in range(0, len(prompts), ROWS):
                batch = slice(start, start + ROWS)
                self._twin.generate(prompts[batch], new_tokens=max(lengths[batch]))
            return sum(lengths)

        return take_turns({FRAMEWORK: ours, TWIN: theirs}, rounds, report=report)

    def choices(self, rounds: Rounds, report: Report) -> Rounds:
        """Questions of 50–200 tokens with four choices of 2–10 tokens, by likelihood; questions per second."""
        contexts = [self._ids(self._draw.randint(50, 200)) for _ in range(self._items)]
        pairs = [(context, self._ids(self._draw.randint(2, 10))) for context in contexts for _ in range(4)]
        found: dict[str, list[float]] = {}

        def ours() -> float:
            engine = self._engine(ROWS, 256)
            found[FRAMEWORK] = [score.logprob_sum for score in engine.score(pairs)]
            return len(contexts)

        def theirs() -> float:
            found[TWIN] = [self._twin.score(*pair) for pair in pairs]
            return len(contexts)

        take_turns({FRAMEWORK: ours, TWIN: theirs}, rounds, report=report)
        apart = max(abs(a - b) for a, b in zip(found[FRAMEWORK], found[TWIN], strict=True))
        assert apart < (1e-2 if self._dtype == torch.float32 else 10), f"the two sides' scores are {apart:g} apart"
        return rounds

    def second_turn(self, rounds: Rounds, report: Report, *, turns: int = 20) -> Rounds:
        """First tokens per second of turns after a history, beside turns whose whole prompt is new."""
        engines = {known: self._engine(1, HISTORY + TURN + 4) for known in (True, False)}
        history = self._ids(HISTORY)
        one = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
        engines[True].generate([history], one)

        def lap(known: bool) -> float:
            for _ in range(turns):
                [answer] = engines[known].generate([(history if known else self._ids(HISTORY)) + self._ids(TURN)], one)
                # By chance a turn begins with the former one's first token, which is then known too.
                assert HISTORY <= answer.num_cached_tokens <= HISTORY + 2 if known else not answer.num_cached_tokens
            return turns

        return take_turns({FRAMEWORK: lambda: lap(True), WHOLE: lambda: lap(False)}, rounds, report=report)

    def floor(self, rounds: Rounds, report: Report, *, tokens: int = 64) -> Rounds:
        """Decoding of one request beside `F.linear` over the same weights, one row; tokens per second."""
        engine = self._engine(1, 32 + tokens, compile=self._compile)
        settings = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        weights = [module.weight for module in self._loaded.model.modules() if isinstance(module, torch.nn.Linear)]
        rows = {
            size: torch.randn(1, size, dtype=self._dtype, device=self._device) for size in {w.shape[1] for w in weights}
        }

        def ours() -> float:
            engine.generate([self._ids(32)], settings)
            return tokens

        @torch.inference_mode()
        def products() -> float:
            for _ in range(tokens):
                for weight in weights:
                    F.linear(rows[weight.shape[1]], weight)
            return tokens

        return take_turns({FRAMEWORK: ours, FLOOR: products}, rounds, report=report)

    def recording(self, rounds: Rounds, report: Report, *, tokens: int = 256) -> Rounds:
        """One sampled request: not recorded by an engine that records others, by one that never does, and recorded."""
        engine, other = self._engine(1, 32 + tokens), self._engine(1, 32 + tokens)
        settings = SamplingParams(max_new_tokens=tokens, ignore_eos=True)

        def plain(engine: Engine) -> float:
            engine.generate([self._ids(32)], settings)
            return tokens

        def recorded() -> float:
            assert len(record(engine, self._ids(32), settings).steps) == tokens
            return tokens

        sides = {RECORDED: recorded, FRAMEWORK: lambda: plain(engine), NEVER: lambda: plain(other)}
        return take_turns(sides, rounds, report=report)

    def samples(self, rounds: Rounds) -> list[float]:
        """Seconds that a training run stands still while its fixed prompts are sampled once, in each round."""
        count, length = SAMPLES
        model = build_model(self._loaded.config, seed=0, device=self._device).train()
        prompts = [self._ids(TURN) for _ in range(count)]
        settings = SamplingParams(max_new_tokens=length, ignore_eos=True)

        def lap() -> float:
            Engine(model, self._loaded.tokenizer, max_rows=count).generate(prompts, settings)
            return 1.0

        take_turns({FRAMEWORK: lap}, rounds)
        return [1 / rate for rate in rounds.rates(FRAMEWORK)]

    def _engine(self, rows: int, length: int, *, compile: bool = False) -> Engine:
        return Engine(self._loaded.model, self._loaded.tokenizer, max_rows=rows, max_length=length, compile=compile)

    def _ids(self, count: int) -> list[int]:
        return self._draw.choices(self._ordinary, k=count)
