"""lm-eval's requests per second: our adapter beside lm-eval's own `hf`, on the same model folder.

Three kinds of work as tasks have them: four-way questions, all with the same solved examples in front; answers up to a
stop string; whole texts. The words are drawn from a list, since only their number matters. Does not know where the
folder comes from, or tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.bench.rounds import Rounds, take_turns

FRAMEWORK, TWIN = "llmtrain", "lm-eval's hf"
KINDS = ("questions", "answers", "texts")
_WORDS = (
    "the",
    "river",
    "came",
    "down",
    "from",
    "hills",
    "turned",
    "past",
    "mill",
    "sea",
    "ships",
    "in",
    "light",
    "of",
)


@dataclass(frozen=True)
class _Request:
    """What lm-eval hands over, as far as a model looks at it."""

    args: tuple[Any, ...]


class HarnessPair:
    """One model folder, loaded on both sides.

    Args:
        folder: The model folder, without an adapter.
        device: `cpu` or `cuda`.
        batch_size: Requests at once, on both sides.
        questions: How many four-way questions; there are a tenth as many answers and texts.
    """

    def __init__(self, folder: Path, *, device: str, batch_size: int, questions: int) -> None:
        from lm_eval.models.huggingface import HFLM

        from llmtrain.evaluation.harness import FolderLM

        self.sides: dict[str, Any] = {
            FRAMEWORK: FolderLM(str(folder), device=device, batch_size=batch_size),
            TWIN: HFLM(str(folder), device=device, batch_size=batch_size),
        }
        draw = random.Random(0)

        def text(words: int) -> str:
            return " ".join(draw.choice(_WORDS) for _ in range(words))

        shots = text(100)
        few = max(1, questions // 10)
        self._requests: dict[str, list[_Request]] = {"questions": [], "answers": [], "texts": []}
        for _ in range(questions):
            context = f"{shots}\nQuestion: {text(12)}\nAnswer:"
            self._requests["questions"] += [_Request((context, f" {text(3)}")) for _ in range(4)]
        stop = {"until": ["\n\n"], "max_gen_toks": 48}
        self._requests["answers"] = [_Request((text(draw.randint(5, 60)), dict(stop))) for _ in range(few)]
        self._requests["texts"] = [_Request((text(draw.randint(20, 120)),)) for _ in range(few)]

    def measure(
        self,
        kind: str,
        rounds: Rounds,
        *,
        report: Callable[[int, Mapping[str, float]], None] = lambda number, rates: None,
    ) -> tuple[Rounds, float]:
        """Lets both sides take turns; rates are requests per second.

        Returns:
            The laps, and the largest difference of the sides' log-likelihoods; for answers, the share that differs.
        """
        requests = self._requests[kind]
        method = {"questions": "loglikelihood", "answers": "generate_until", "texts": "loglikelihood_rolling"}[kind]
        said: dict[str, list[Any]] = {}

        def lap(side: str) -> Callable[[], float]:
            def run() -> float:
                said[side] = getattr(self.sides[side], method)(requests, disable_tqdm=True)
                return float(len(requests))

            return run

        take_turns({side: lap(side) for side in self.sides}, rounds, report=report)
        pairs = list(zip(said[FRAMEWORK], said[TWIN], strict=True))
        if kind == "answers":
            return rounds, sum(ours != theirs for ours, theirs in pairs) / len(pairs)
        values = [(ours, theirs) if kind == "texts" else (ours[0], theirs[0]) for ours, theirs in pairs]
        return rounds, max(abs(ours - theirs) for ours, theirs in values)
