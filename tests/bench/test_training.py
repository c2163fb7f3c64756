"""`fit` is halted at step boundaries: every lap is whole steps of it, and each side gets its turn in each round."""

import csv

import numpy as np
import pytest

from llmtrain.bench.rounds import Rounds
from llmtrain.bench.training import BARE, FRAMEWORK, SETTLING_STEPS, TWIN, TrainingSetup, measure_training

pytestmark = [
    pytest.mark.medium,
    # lightning 2.6.6 and deepspeed 0.19.8 under torch 2.13
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`:UserWarning"),
]


class Stream:
    """A thousand random ordinary tokens."""

    num_tokens = 1000

    def read(self, start: int, count: int) -> np.ndarray:
        return np.random.default_rng(0).integers(6, 262, self.num_tokens)[start : start + count]


@pytest.mark.parametrize(
    ("precision", "optimizer", "accumulation", "strategy"),
    # bf16 and Muon: see test_command.py
    [("fp32", "adamw", 2, "deepspeed_1"), ("fp32", "adamw", 1, "single")],
)
def test_sides_take_turns(tiny_config, byte_tok, tmp_path, precision, optimizer, accumulation, strategy) -> None:
    """That the trainer stands at the step which the clock supposes is asserted in `measure_training` itself."""
    setup = TrainingSetup(
        config=tiny_config(),
        tokenizer=byte_tok,
        streams=[(Stream(), 1.0)],
        sequence_length=16,
        micro_batch_size=2,
        accumulation=accumulation,
        optimizer=optimizer,
        precision=precision,
        accelerator="cpu",
        fit_options={"strategy": strategy, "log_every": 2, "warmup_steps": 1000},
    )
    seen: list[int] = []
    rounds = Rounds(3, warmup_rounds=1)
    measure_training(setup, rounds, steps=3, run_dir=tmp_path, report=lambda number, rates: seen.append(number))
    assert seen == [0, 1, 2, 3]
    for theirs in (BARE, TWIN):
        assert len(rounds.compare(FRAMEWORK, theirs).per_round) == 3
    with (tmp_path / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps[-1] == 4 * (SETTLING_STEPS + 3) + 1
    assert {2, 4, 6} <= set(steps), "the framework's own logging goes on while it is measured"
