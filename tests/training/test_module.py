"""The loss of a step and the seeds of dropout, apart from any trainer, and through one."""

from __future__ import annotations

import csv

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.model import build_model, loss_sum
from llmtrain.training.module import dropout_seed, has_dropout

numbers = st.integers(0, 2**40)


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=2, max_size=20, unique=True))
def test_dropout_seeds_differ(places):
    seeds = [dropout_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_dropout_is_noticed_in_the_model_and_in_an_adapter(tiny_config):
    assert has_dropout(build_model(tiny_config(dropout=0.1), seed=0))
    model = build_model(tiny_config(), seed=0)
    assert not has_dropout(model)
    model.lora = torch.nn.ModuleList([torch.nn.Dropout(0.05)])
    assert has_dropout(model)


def test_the_logged_loss_is_the_summed_loss_over_the_trained_tokens(train, tmp_path, tiny_config, micro_batches):
    """Of the first step, against the plain model on the same windows."""
    from llmtrain.data.windows import read_windows
    from tests.training.conftest import RandomTokens

    train(tmp_path, steps=1, dropout=0.0, warmup_steps=0)
    ids = [sample for _, _, samples in micro_batches for sample in samples]
    stream = RandomTokens(5000, 1)
    windows = torch.from_numpy(read_windows([stream], torch.zeros(4, dtype=int).numpy(), torch.tensor(ids).numpy(), 32))
    model = build_model(tiny_config(), seed=0)
    total, count = loss_sum(model, windows[:, :-1], windows[:, 1:])
    with (tmp_path / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["train/loss"]) == pytest.approx(total.item() / count.item(), rel=1e-6)
    mean = total / count
    mean.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(row["train/grad_norm"]) == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        pytest.param("deepspeed_1", marks=pytest.mark.medium),
        pytest.param("deepspeed_2", marks=pytest.mark.medium),
    ],
)
def test_accumulation_does_not_change_the_gradient(train, tmp_path, strategy):
    """The same 8 rows per step as 1, 2 and 8 micro-batches: equal losses and gradient norms."""
    runs = []
    for rows, accumulation in ((8, 1), (4, 2), (1, 8)):
        folder = tmp_path / f"{rows}x{accumulation}"
        train(folder, steps=3, rows=rows, accumulation=accumulation, dropout=0.0, strategy=strategy, val_every=None)
        with (folder / "metrics.csv").open() as file:
            runs.append([(float(row["train/loss"]), float(row["train/grad_norm"])) for row in csv.DictReader(file)])
    for other in runs[1:]:
        for (loss, norm), (other_loss, other_norm) in zip(runs[0], other, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-5)
            assert other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("strategy", ["single", pytest.param("deepspeed_1", marks=pytest.mark.medium)])
def test_unequal_masks_weigh_by_token_not_by_micro_batch(train, tmp_path, byte_tok, tiny_config, strategy):
    """Rows with 3 and 97 trained labels, as one micro-batch of 2 or two of 1."""
    from llmtrain.data.examples import Example
    from llmtrain.data.modules import FinetuneDataModule
    from llmtrain.training.fit import fit

    def example(length: int, trained: int) -> Example:
        ids = [6 + (7 * i) % 250 for i in range(length)]
        labels = [-100] * (length - trained) + ids[length - trained :]
        return Example(input_ids=ids, labels=labels, prompt="", completion="", prompt_ids=[])

    examples = [example(10, 3), example(120, 97)]
    figures = []
    for rows, accumulation in ((2, 1), (1, 2)):
        data = FinetuneDataModule(
            examples,
            [],
            pad_id=byte_tok.pad_id,
            micro_batch_size=rows,
            accumulation=accumulation,
            total_steps=2,
            seed=0,
        )
        folder = tmp_path / str(rows)
        folder.mkdir()
        fit(
            model=build_model(tiny_config(), seed=0), data=data, tokenizer=byte_tok, run_dir=folder, total_steps=2,
            accumulation=accumulation, strategy=strategy, accelerator="cpu", devices=1, precision="fp32",
            validates=False, log_every=1,
        )  # fmt: skip
        with (folder / "metrics.csv").open() as file:
            figures.append([(float(r["train/loss"]), float(r["train/grad_norm"])) for r in csv.DictReader(file)])
    for (loss, norm), (other_loss, other_norm) in zip(*figures, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert other_norm == pytest.approx(norm, rel=1e-5)
