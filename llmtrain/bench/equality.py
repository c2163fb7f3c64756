"""Does a strategy compute what plain PyTorch computes? The same steps through `fit` and in a bare loop, compared.

Every case trains a tiny model on examples of unequal lengths with unequal masks, some of them without a single trained
token, so that padding, accumulation, ranks and masks all have something to get wrong. `fit` runs in processes of its
own, as many as the case says, on the CPU: what is asked is arithmetic, which a device rounds and does not change.

    python -m llmtrain.bench.equality cases.json results.pt      one rank of a launch; see `ranks.launch`

Does not know settings files, nor which differences are small enough.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.ranks import NO_COMPILER, launch
from llmtrain.data.batches import pad_examples
from llmtrain.data.examples import Example
from llmtrain.data.modules import FinetuneDataModule
from llmtrain.model import ModelConfig, Transformer, build_model, loss_sum
from llmtrain.training.optim import build_optimizer

ROWS = 8  # examples of a global batch, whatever the processes and the accumulation
LR = 1e-3
CLIP = 1.0  # the gradient's norm is above 1.2 at every step, so this one bites; a quarter of it would not
_VOCABULARY, _PAD = 61, 0
_EXAMPLES = 40


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        strategy: `single`, `deepspeed_1`, `deepspeed_2` or `deepspeed_3`.
        processes: Ranks.
        accumulation: Micro-batches per step and rank.
        clip: Largest norm of the gradient.
        optimizer: `adamw` or `muon`.
        precision: `fp32` or `bf16`.
        options: Further arguments of the strategy.
        steps: Optimiser steps.
        rows: Examples of a global batch.
        lora: Train an adapter instead of all weights.
        gradient_checkpointing: Recompute activations in backward.
        lightnings: Scale the gradient as Lightning's own strategy does.
    """

    strategy: str
    processes: int = 1
    accumulation: int = 1
    clip: float | None = None
    optimizer: str = "adamw"
    precision: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 20
    rows: int = ROWS
    lora: bool = False
    gradient_checkpointing: bool = False
    lightnings: bool = False

    @property
    def name(self) -> str:
        """Every value that says something, joined."""
        values = asdict(self) | {"options": "+".join(self.options)}
        said = {key: value for key, value in values.items() if value not in (None, False, "")}
        return "-".join(key if value is True else str(value) for key, value in said.items())


@dataclass(frozen=True)
class Trained:
    """What came of a case.

    Attributes:
        losses: Of each step, as logged.
        norms: Of each step's gradient before clipping, as logged.
        weights: The final fp32 weights by name.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def tiny_model(*, lora: bool = False) -> Transformer:
    """Shapes chosen so that the slices of two processes cut through matrices, and one group needs padding.

    The weights start larger than usual, so that no gradient is so small that its rounding decides over Adam's steps.
    """
    config = ModelConfig(
        vocab_size=_VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        qk_norm=True,
        initializer_range=0.1,
    )
    model = build_model(config, seed=0)
    if lora:
        from llmtrain.adapters import attach

        attach(model, r=4, seed=0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():  # B = 0 would leave A without a gradient
            if "lora_B" in name:
                parameter.data.normal_(std=0.1, generator=generator)
    return model


@cache
def examples() -> list[Example]:
    """Random tokens of 2 to 24 positions; of every fifth none is trained, of the others any number of the last ones."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    made = []
    for number in range(_EXAMPLES):
        length = draw(2, 24)
        ids = torch.randint(1, _VOCABULARY, (length + 1,), generator=generator).tolist()
        trained = 0 if number % 5 == 0 else draw(1, length)
        labels = [-100] * (length - trained) + ids[length + 1 - trained :]
        made.append(Example(ids[:-1], labels, prompt="", completion="", prompt_ids=[]))
    return made


def data_of(case: Case) -> FinetuneDataModule:
    """The data module of a case."""
    micro_batch_size, rest = divmod(case.rows, case.processes * case.accumulation)
    assert not rest, case
    return FinetuneDataModule(
        examples(),
        [],
        pad_id=_PAD,
        micro_batch_size=micro_batch_size,
        accumulation=case.accumulation,
        total_steps=case.steps,
        seed=0,
    )


@cache
def plain(
    optimizer_name: str,
    clip: float | None,
    *,
    lora: bool = False,
    steps: int = 20,
    left_out: frozenset[int] = frozenset(),
) -> Trained:
    """The same global batches in plain PyTorch, in fp32, each in one piece: loss, backward, clip, step.

    Args:
        optimizer_name, clip, lora, steps: As in `Case`.
        left_out: Steps, counted from 0, that change nothing.
    """
    model = tiny_model(lora=lora).train()
    optimizer = build_optimizer(model, name=optimizer_name, lr=LR)
    data = data_of(Case("single", steps=steps))
    losses, norms = [], []
    for step in range(steps):
        rows = [examples()[number] for number in data.step_sample_ids(step)]
        batch = pad_examples(rows, pad_id=_PAD, rows=ROWS)
        total, count = loss_sum(model, batch["input_ids"], batch["labels"])
        loss = total / count
        loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norms.append(torch.nn.utils.clip_grad_norm_(trained, clip or math.inf).item())
        if step not in left_out:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, norms, {name: value.detach() for name, value in model.state_dict().items()})


def train(case: Case, folder: Path) -> Trained | None:
    """One case through `fit`; every rank of the launch calls it, rank 0 gets the result.

    Args:
        case: What to train.
        folder: The run folder, new, the same on every rank.
    """
    from llmtrain.training.deepspeed.lightnings import lightnings_own_backward
    from llmtrain.training.fit import fit
    from llmtrain.training.former import METRICS_FILE
    from llmtrain.training.loggers import read_rows

    def write(place: Path, weights: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        place.mkdir(parents=True, exist_ok=True)
        torch.save(dict(weights), place / "weights.pt")

    folder.mkdir(parents=True, exist_ok=True)
    with lightnings_own_backward() if case.lightnings else nullcontext():
        result = fit(
            model=tiny_model(lora=case.lora),
            data=data_of(case),
            tokenizer=None,
            run_dir=folder,
            total_steps=case.steps,
            accumulation=case.accumulation,
            optimizer=case.optimizer,
            lr=LR,
            schedule="constant",
            grad_clip=case.clip,
            strategy=case.strategy,
            strategy_options=case.options,
            accelerator="cpu",
            devices=case.processes,
            precision=case.precision,
            gradient_checkpointing=case.gradient_checkpointing,
            validates=False,
            log_every=1,
            write_model=write,
        )
    if not result.is_main:
        return None
    rows = read_rows(folder / METRICS_FILE)
    return Trained(
        losses=[float(row["train/loss"]) for row in rows],
        norms=[float(row["train/grad_norm"]) for row in rows],
        weights=torch.load(result.model_dir / "weights.pt", weights_only=True),
    )


def train_all(cases: Sequence[Case], folder: Path, *, command: Sequence[str] = (), seconds: float = 600) -> dict:
    """Trains every case in processes started for it, those with the same number of processes in one launch.

    Args:
        cases: With names of their own.
        folder: For their files.
        command: What each rank runs, before its arguments; this module unless given.
        seconds: A launch that takes longer is ended.

    Returns:
        What the ranks 0 made of the cases, by name.

    Raises:
        RuntimeError: A launch failed; holds the end of what it wrote.
    """
    done: dict[str, Any] = {}
    for processes in sorted({case.processes for case in cases}):
        place = folder / str(processes)
        place.mkdir(parents=True)
        mine = [asdict(case) for case in cases if case.processes == processes]
        (place / "cases.json").write_text(json.dumps(mine), encoding="utf-8")
        words = [*(command or (sys.executable, "-m", __name__)), "cases.json", "results.pt"]
        launch(words, processes, place, seconds, variables=NO_COMPILER)
        done |= torch.load(place / "results.pt", weights_only=True)
    return done


def loss_distance(ours: Trained, theirs: Trained) -> float:
    """The largest relative difference of the losses over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))


def weight_distance(ours: Trained, theirs: Trained) -> float:
    """The largest ‖Δ‖/‖w‖ over all tensors, for the final weights."""
    assert ours.weights.keys() == theirs.weights.keys()
    pairs = ((ours.weights[name], value) for name, value in theirs.weights.items())
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def gradient_ratio(ours: Trained, theirs: Trained) -> float:
    """The first step's gradient norm over the other's."""
    return ours.norms[0] / theirs.norms[0]


OURS, LIGHTNINGS = "llmtrain", "Lightning's own"
_GRADIENT_LIMIT, _LOSS_LIMIT, _WEIGHT_LIMIT = 1e-5, 1e-6, 1e-5


@dataclass(frozen=True)
class Row:
    """One line of the table: a case against plain PyTorch.

    Attributes:
        strategy: Its name, and what is offloaded.
        processes: Ranks.
        scaling: Who scales the gradient.
        gradient: Norm of the first step's gradient over plain PyTorch's.
        loss: Largest relative difference of the losses.
        weights: Largest ‖Δ‖/‖w‖ of the final weights.
    """

    strategy: str
    processes: int
    scaling: str
    gradient: float
    loss: float
    weights: float

    @property
    def equal(self) -> bool:
        """Whether the first gradient agrees to 1e-5, the losses to 1e-6 and the weights to 1e-5."""
        near = abs(self.gradient - 1) <= _GRADIENT_LIMIT
        return near and self.loss <= _LOSS_LIMIT and self.weights <= _WEIGHT_LIMIT


def measure(folder: Path) -> list[Row]:
    """Twenty steps with accumulation 4 and clipping under every strategy, and with Lightning's scaling of the gradient.

    Args:
        folder: An empty folder for the runs.
    """
    offload = {"offload_optimizer": True}
    strategies: list[tuple[str, dict[str, Any]]] = [
        *((f"deepspeed_{stage}", {}) for stage in (1, 2, 3)),
        ("deepspeed_2", offload),
        ("deepspeed_3", offload | {"offload_parameters": True}),
    ]
    cases = [Case("single", 1, 4, CLIP)]
    cases += [Case(name, processes, 4, CLIP, options=more) for processes in (1, 2) for name, more in strategies]
    cases += [Case(name, 2, 4, CLIP, lightnings=True) for name, more in strategies if not more]
    done = train_all(cases, folder)
    rows = []
    for case in cases:
        ours, theirs = Trained(**done[case.name]), plain(case.optimizer, case.clip)
        rows.append(
            Row(
                " + ".join([case.strategy, *case.options]),
                case.processes,
                LIGHTNINGS if case.lightnings else OURS,
                gradient_ratio(ours, theirs),
                loss_distance(ours, theirs),
                weight_distance(ours, theirs),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows for the terminal."""
    head = f"{'strategy':<56}{'processes':>9}  {'scaling':<16}{'gradient':>9}{'loss':>10}{'weights':>10}"
    lines = [
        f"{row.strategy:<56}{row.processes:>9}  {row.scaling:<16}{row.gradient:>9.4f}{row.loss:>10.1e}"
        f"{row.weights:>10.1e}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main(cases: Path, results: Path) -> None:
    """One rank of a launch: trains the cases of a file one after the other."""
    torch.set_num_threads(1)
    done = {}
    for values in json.loads(cases.read_text(encoding="utf-8")):
        case = Case(**values)
        trained = train(case, results.parent / "runs" / case.name)
        if trained is not None:
            done[case.name] = asdict(trained)
    if done:
        torch.save(done, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
