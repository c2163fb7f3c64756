"""The logged loss is the sum over trained tokens / their number, computed here by hand; packed and padded alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llmtrain.checkpoint import load_model_folder
from llmtrain.data.examples import Example
from llmtrain.data.modules import FinetuneDataModule
from llmtrain.model import build_model
from llmtrain.training.fit import fit
from tests.training.conftest import metrics

STRATEGIES = ["single", pytest.param("deepspeed_1", marks=pytest.mark.medium)]


def example(length: int, trained: int, seed: int) -> Example:
    ids = torch.randint(6, 260, (length + 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Example(ids[:-1], [-100] * (length - trained) + ids[length + 1 - trained :], "", "", [])


# Rows with 3 and with 97 trained tokens, and one with none; validation has an incomplete last batch.
SIZES = [(10, 3), (120, 97), (40, 0), (7, 7), (60, 20), (25, 1), (33, 32), (4, 2)]
TRAIN = [example(*sizes, seed=number) for number, sizes in enumerate(SIZES)]
VALIDATION = [example(*sizes, seed=100 + number) for number, sizes in enumerate([(90, 5), (12, 12), (30, 9)])]


def by_hand(model, examples) -> float:
    """Example by example, token by token, without padding."""
    total, count = 0.0, 0
    with torch.no_grad():
        for each in examples:
            scores = F.log_softmax(model(torch.tensor([each.input_ids]))[0].double(), dim=-1)
            chosen = [(place, label) for place, label in enumerate(each.labels) if label != -100]
            total -= sum(float(scores[place, label]) for place, label in chosen)
            count += len(chosen)
    return total / count


@pytest.fixture
def tune(tiny_config, byte_tok):
    def run(run_dir, *, rows: int, accumulation: int, strategy: str = "single", packing_length: int | None = None):
        run_dir.mkdir()
        data = FinetuneDataModule(
            TRAIN, VALIDATION, pad_id=byte_tok.pad_id, micro_batch_size=rows, accumulation=accumulation, total_steps=4,
            seed=0, packing_length=packing_length,
        )  # fmt: skip
        fit(
            model=build_model(tiny_config(), seed=0), data=data, tokenizer=byte_tok, run_dir=run_dir, total_steps=4,
            accumulation=accumulation, strategy=strategy, accelerator="cpu", devices=1, precision="fp32", log_every=1,
            val_every=1, schedule="constant", checkpoint_every=1, keep_last=None,
        )  # fmt: skip
        return data, metrics(run_dir)

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("packing_length", [None, 120])
def test_the_logged_losses_are_those_computed_by_hand(tune, tmp_path, tiny_config, strategy, packing_length):
    data, rows = tune(
        tmp_path / "run", rows=2, accumulation=2, strategy=strategy, packing_length=packing_length
    )  # fmt: skip
    model = build_model(tiny_config(), seed=0)
    for step, row in enumerate(rows):
        step_examples = [TRAIN[number] for number in data.step_sample_ids(step)]
        assert float(row["train/loss"]) == pytest.approx(by_hand(model, step_examples), rel=1e-6)
        model = load_model_folder(tmp_path / "run" / "checkpoints" / f"step-{step + 1:06d}").model
        assert float(row["val/loss"]) == pytest.approx(by_hand(model, VALIDATION), rel=1e-6)
    trained = sum(
        example.trained_tokens for step in range(4) for example in (TRAIN[n] for n in data.step_sample_ids(step))
    )
    assert int(rows[-1]["tokens"]) == trained


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packing_changes_positions_and_no_number(tune, tmp_path, strategy):
    """Same samples, same losses, same gradients to the rounding of sums, for every split of the step."""
    _, padded = tune(tmp_path / "padded", rows=4, accumulation=1, strategy=strategy)
    for rows, accumulation in ((4, 1), (2, 2), (1, 4)):
        folder = tmp_path / f"{rows}"
        _, packed = tune(folder, rows=rows, accumulation=accumulation, strategy=strategy, packing_length=128)
        for one, other in zip(packed, padded, strict=True):
            for key in ("train/loss", "train/grad_norm", "val/loss"):
                assert float(one[key]) == pytest.approx(float(other[key]), rel=1e-5), key
            assert one["tokens"] == other["tokens"]
