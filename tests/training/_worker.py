"""Trains many small cases in one or several processes and writes what came of them.

Started by `test_deepspeed.py`, once per number of processes, since starting costs more than training.
usage: LOCAL_RANK=… python _worker.py cases.json results.pt processes cpu|cuda
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from llmtrain.model import ModelConfig, Transformer, build_model
from llmtrain.training import state
from llmtrain.training.deepspeed import build_strategy
from llmtrain.training.optim import build_optimizer

ROWS = 8  # of a global batch, whatever the processes and the accumulation
STEPS = 5


def tiny(frozen: bool = False) -> Transformer:
    """Shapes chosen so that slices of two processes cut through matrices, and one group needs padding.

    The weights start larger than the default, so that no gradient is so small that its rounding decides.
    """
    config = ModelConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        qk_norm=True,
        initializer_range=0.1,
    )
    model = build_model(config, seed=0)
    if frozen:
        model.model.layers[0].requires_grad_(False)
    return model


def global_batch(step: int) -> torch.Tensor:
    """(ROWS, 13) token ids."""
    return torch.randint(0, 61, (ROWS, 13), generator=torch.Generator().manual_seed(100 + step))


def mean_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    return build_optimizer(model, name=name, lr=1e-3, muon_lr=0.02, eps=1e-6)


class Module(pl.LightningModule):
    """The least that Lightning trains; records the global loss and the gradient norm of every step.

    At the end of the fit, while the engine still stands, it takes the weights and saves, if told where.
    """

    def __init__(self, case: dict[str, Any], save_to: Path | None) -> None:
        super().__init__()
        self.case = case
        self.save_to = save_to
        self.model = tiny(case.get("frozen", False))
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.state: dict[str, torch.Tensor] | None = None
        self._sum = torch.zeros(())

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss = mean_loss(self.model, ids)
        self._sum = self._sum.to(loss.device) + loss.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        accumulation = self.case["accumulation"]
        if (index + 1) % accumulation == 0:
            mean = self.trainer.strategy.reduce(self._sum / accumulation, reduce_op="mean")
            self.losses.append(float(mean))
            self.norms.append(self.trainer.strategy.last_grad_norm)
            self._sum = torch.zeros(())

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        self.state = strategy.fp32_state_dict(self.model)
        assert (self.state is not None) == self.trainer.is_global_zero
        if self.save_to is not None:
            save(strategy, self.model, self.save_to)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model, self.case["optimizer"])


def save(strategy: Any, model: nn.Module, folder: Path) -> None:
    shard = strategy.shard(model)
    state.save(shard, state.plan(shard), folder)


class Restore(pl.Callback):
    """Loads a training state, and saves it again at once beside where it came from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        groups = trainer.optimizers[0].param_groups
        usual = groups[0]["weight_decay"]
        groups[0]["weight_decay"] = 0.123
        state.load(trainer.strategy.shard(module.model), self.folder)
        trainer.strategy.publish_weights()
        save(trainer.strategy, module.model, self.folder.with_name(f"{self.folder.name}-again"))
        assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.123, "a changed setting was lost"
        trainer.optimizers[0].param_groups[0]["weight_decay"] = usual


def batches(case: dict[str, Any], rank: int, world: int, start: int, steps: int) -> list[torch.Tensor]:
    """This rank's micro-batches: rows go to micro-batches first, then to ranks."""
    micro = ROWS // world // case["accumulation"]
    rows = [global_batch(step).view(case["accumulation"], world, micro, 13) for step in range(start, steps)]
    return [row[i, rank] for row in rows for i in range(case["accumulation"])]


def train(
    case: dict[str, Any],
    processes: int,
    accelerator: str,
    *,
    start: int = 0,
    steps: int = STEPS,
    save_to: Path | None = None,
    restore: Restore | None = None,
) -> Module:
    strategy = build_strategy(
        case["strategy"],
        devices=processes,
        accelerator=accelerator,
        precision=case["precision"],
        optimizer=case["optimizer"],
        **case.get("options", {}),
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=processes,
        max_steps=steps - start,
        accumulate_grad_batches=case["accumulation"],
        gradient_clip_val=case["clip"],
        callbacks=[restore] if restore else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module(case, save_to)
    data = batches(case, trainer.global_rank, processes, start, steps)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return module


def run(case: dict[str, Any], processes: int, accelerator: str, folder: Path) -> dict[str, Any]:
    """One case; with `resume` it is interrupted after that many steps and goes on in a new trainer."""
    start, restore = case.get("resume", 0), None
    losses, norms = [], []
    if start:
        first = train(case, processes, accelerator, steps=start, save_to=folder / case["name"])
        losses, norms = first.losses, first.norms
        restore = Restore(folder / case["name"])
    module = train(case, processes, accelerator, start=start, restore=restore)
    return {
        "losses": losses + module.losses,
        "norms": norms + module.norms,
        "state": module.state,
        "dtypes": sorted({str(p.dtype) for p in module.model.parameters()}),
    }


def main(cases: Path, results: Path, processes: int, accelerator: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    done = {case["name"]: run(case, processes, accelerator, results.parent) for case in json.loads(cases.read_text())}
    if torch.distributed.get_rank() == 0:
        torch.save(done, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
