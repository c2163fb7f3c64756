"""Decoding tokens per second: our engine beside `generate` of `transformers`, on the same model folder.

Greedy, with a cache, a fixed number of new tokens, prompts of equal length; a lap is a whole call, so the reading of
the prompts counts on both sides. Does not know where the folder comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from llmtrain.bench.peers import TwinGenerator
from llmtrain.bench.rounds import Rounds, take_turns
from llmtrain.checkpoint import LoadedModel, load_model_folder
from llmtrain.generation import Engine, SamplingParams

FRAMEWORK, TWIN, COMPILED = "llmtrain", "transformers", "llmtrain compiled"


@dataclass(frozen=True)
class DecodingResult:
    """Laps of one batch size, and whether the two sides said the same.

    Attributes:
        rounds: The laps.
        agreement: Share of all positions up to which the two sides' greedy tokens are equal, 0 to 1. Below 1 where two
            logits tie within rounding: from there on the texts are different ones, of the same length.
    """

    rounds: Rounds
    agreement: float


class DecodingPair:
    """One model folder, loaded on both sides.

    Args:
        folder: The model folder.
        device: Where to decode.
        dtype: What both sides compute in; None is the dtype that the weights are stored in.
        prompt_tokens: Length of every prompt.
        new_tokens: Tokens to generate for each prompt.

    Raises:
        ValueError: The folder has no model, or prompt and answer exceed its context.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        prompt_tokens: int,
        new_tokens: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._loaded: LoadedModel = load_model_folder(folder, device=device, dtype=dtype)
        if self._loaded.adapter_folder is not None:
            raise ValueError(
                f"{folder} is an adapter, which transformers alone does not read; give the merged model folder."
            )
        limit = self._loaded.config.max_position_embeddings
        if prompt_tokens < 1 or new_tokens < 1 or prompt_tokens + new_tokens > limit:
            raise ValueError(
                f"prompt_tokens={prompt_tokens} and new_tokens={new_tokens} must each be at least 1 and together at "
                f"most {limit}, the context of {folder}."
            )
        self._twin = TwinGenerator(self._loaded.folder, device=device, dtype=dtype)
        self._device, self._prompt_tokens, self._new_tokens = device, prompt_tokens, new_tokens

    @property
    def dtype(self) -> str:
        """What both sides compute in."""
        return str(next(self._loaded.model.parameters()).dtype).removeprefix("torch.")

    def measure(
        self,
        batch_size: int,
        rounds: Rounds,
        *,
        report: Callable[[int, Mapping[str, float]], None] = lambda number, rates: None,
        compiled: bool = False,
    ) -> DecodingResult:
        """Lets the sides take turns, ours with a compiled step besides if asked; rates are new tokens per second."""
        prompts = self._prompts(batch_size)
        greedy = SamplingParams(temperature=0.0, max_new_tokens=self._new_tokens, ignore_eos=True)
        said: dict[str, list[list[int]]] = {}

        def ours(side: str) -> Callable[[], float]:
            engine = Engine(
                self._loaded.model,
                self._loaded.tokenizer,
                max_rows=batch_size,
                max_length=self._prompt_tokens + self._new_tokens,
                compile=side == COMPILED,
            )

            def lap() -> float:
                said[side] = [completion.token_ids for completion in engine.generate(prompts, greedy)]
                return self._counted(said[side], batch_size)

            return lap

        def theirs() -> float:
            said[TWIN] = self._twin.generate(prompts, new_tokens=self._new_tokens)
            return self._counted(said[TWIN], batch_size)

        sides = {side: ours(side) for side in ((FRAMEWORK, COMPILED) if compiled else (FRAMEWORK,))}
        take_turns({**sides, TWIN: theirs}, rounds, report=report)
        return DecodingResult(rounds, agreement(said[FRAMEWORK], said[TWIN]))

    def _prompts(self, batch_size: int) -> list[list[int]]:
        """Ordinary ids at random: what is said does not matter to the speed; that the rows differ might."""
        tokenizer = self._loaded.tokenizer
        special = set(tokenizer.special_ids.values())
        ordinary = torch.tensor([token for token in range(tokenizer.vocab_size) if token not in special])
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(ordinary), (batch_size, self._prompt_tokens), generator=generator)
        return ordinary[drawn].tolist()

    def _counted(self, answers: list[list[int]], batch_size: int) -> int:
        tokens = sum(map(len, answers))
        assert tokens == batch_size * self._new_tokens, f"{tokens} tokens came, not {batch_size} × {self._new_tokens}"
        return tokens


def agreement(left: list[list[int]], right: list[list[int]]) -> float:
    """Share of positions before the first difference of each row, over all rows."""
    equal = 0
    for a, b in zip(left, right, strict=True):
        equal += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return equal / max(1, sum(map(len, left)))
