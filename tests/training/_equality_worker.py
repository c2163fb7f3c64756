"""One rank of a launch of `test_equality.py`: trains many small cases through `fit` and writes what came of them.

usage: LOCAL_RANK=… python _equality_worker.py specs.json results.pt

A spec is {"name", "case": the fields of `equality.Case`} and, if wanted, "gradients" (of the first step), "bad"
({"kind", "steps", "rank", "micro_batch"}: where a loss or a gradient is made non-finite), "rehearsed": false, or
"windows" (a run with validation and samples) in the place of "case".
"""

import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmtrain.bench import equality
from llmtrain.data.modules import FinetuneDataModule, PretrainDataModule
from llmtrain.training.module import LanguageModule


class InfiniteGradient(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


class Observer:
    """Hooks of the one LightningModule, exchanged for the length of a run."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.bad = spec.get("bad") or {"steps": []}
        self.gradients: dict[str, Tensor] = {}
        self.before: list[Tensor] = []
        self.states = 0
        self.rehearsals = 0
        self.unchanged: list[bool] = []
        self.originals = {name: vars(LanguageModule).get(name) for name in ("batch_loss", "on_train_batch_end")}
        self.rehearse = FinetuneDataModule.largest_batch

    def __enter__(self) -> "Observer":
        observer = self
        batch_loss, batch_end = self.originals["batch_loss"], self.originals["on_train_batch_end"]

        def spoiled_loss(module: LanguageModule, batch: dict) -> Tensor:
            total = batch_loss(module, batch)
            if "step_tokens" in batch or not module.training:
                return observer.spoil(module, total)
            observer.rehearsals += 1
            return total

        def before_step(module: LanguageModule, optimizer: Any) -> None:
            if module.trainer.global_step in observer.bad["steps"]:
                observer.before = everything(module)

        def after_step(module: LanguageModule, outputs: Any, batch: dict, index: int) -> None:
            batch_end(module, outputs, batch, index)
            whole = (index + 1) % module.trainer.accumulate_grad_batches == 0
            if observer.spec.get("gradients") and whole and module.trainer.global_step == 1:
                observer.gradients = first_gradients(module)
            optimizer = module.trainer.strategy.optimizers[0]
            states = getattr(optimizer, "optimizer", optimizer).state.values()
            moments = [value.numel() for state in states for value in state.values() if value.ndim]
            observer.states = sum(moments) * module.trainer.world_size
            if observer.before and whole:
                after = everything(module)
                pairs = zip(observer.before, after, strict=True)
                observer.unchanged.append(all(torch.equal(one, other) for one, other in pairs))
                observer.before = []

        LanguageModule.batch_loss = spoiled_loss
        LanguageModule.on_before_optimizer_step = before_step
        LanguageModule.on_train_batch_end = after_step
        if not self.spec.get("rehearsed", True):
            FinetuneDataModule.largest_batch = lambda self: None
        return self

    def __exit__(self, *error: object) -> None:
        del LanguageModule.on_before_optimizer_step
        for name, original in self.originals.items():
            setattr(LanguageModule, name, original)
        FinetuneDataModule.largest_batch = self.rehearse

    def spoil(self, module: LanguageModule, total: Tensor) -> Tensor:
        trainer, bad = module.trainer, self.bad
        micro_batch = trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches
        here = (trainer.global_rank, micro_batch) == (bad.get("rank"), bad.get("micro_batch", 0))
        if trainer.global_step not in bad["steps"] or not here:
            return total
        # A constant: to autograd nothing is wrong with a NaN loss.
        return total + torch.nan if bad["kind"] == "loss" else InfiniteGradient.apply(total)


def first_gradients(module: LanguageModule) -> dict[str, Tensor]:
    """The whole, reduced, clipped gradients of the first step by name; under ZeRO every rank takes part.

    Read from AdamW's first moment, which is a tenth of them after that step: every strategy keeps that one in fp32.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    strategy = module.trainer.strategy
    optimizer = strategy.optimizers[0]
    if hasattr(optimizer, "_hp_optimizer_states_linked"):  # ZeRO 1, 2 link after the first group's step, too early
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()

    def moment(parameter: Tensor) -> Tensor:
        if hasattr(strategy, "deepspeed_engine"):
            return safe_get_full_optimizer_state(parameter, "exp_avg")
        return optimizer.state[parameter]["exp_avg"]

    return {name: moment(p).flatten() * 10 for name, p in module.model.named_parameters() if p.requires_grad}


def everything(module: LanguageModule) -> list[Tensor]:
    """Copies of this rank's weights, master weights and optimiser states."""
    optimizer = module.trainer.strategy.optimizers[0]
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors = [getattr(parameter, "ds_tensor", parameter) for parameter in module.parameters()]
    for key, state in inner.state.items():
        tensors += [key, *(value for value in state.values() if isinstance(value, Tensor))]
    return [tensor.detach().clone() for tensor in tensors]


def run_case(spec: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    with Observer(spec) as observer:
        trained = equality.train(equality.Case(**spec["case"]), folder)
    unchanged = observer.unchanged
    if torch.distributed.is_initialized():
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, unchanged)
        unchanged = [flag for flags in every for flag in flags]
    if trained is None:
        return None
    return {
        **asdict(trained),
        "gradients": observer.gradients,
        "unchanged": unchanged,
        "states": observer.states,
        "rehearsals": observer.rehearsals,
        "skipped": [row["train/skipped_steps"] for row in rows_of(folder)],
    }


class RandomTokens:
    """A stream of 16 different ids."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self.num_tokens = num_tokens
        self.tokens = np.random.default_rng(seed).integers(6, 22, num_tokens).astype(np.int64)

    def read(self, start: int, count: int) -> np.ndarray:
        return self.tokens[start : start + count]


def windows_data(options: dict[str, Any], processes: int) -> Any:
    """A data module: token windows, or examples with a validation part."""
    split = {"accumulation": options["accumulation"], "total_steps": options["steps"], "seed": 0}
    split["micro_batch_size"] = 4 // processes // options["accumulation"]
    if options.get("examples"):
        return FinetuneDataModule(equality.examples(), equality.examples()[: options["validation"]], pad_id=0, **split)
    streams = [(RandomTokens(1000, 1), 1.0)]
    return PretrainDataModule(
        streams, RandomTokens(options["validation"], 2), eos_id=0, sequence_length=16, **split
    )  # fmt: skip


def run_windows(options: dict[str, Any], folder: Path, processes: int) -> list[dict[str, str]]:
    from llmtrain.generation import SamplingParams
    from llmtrain.model import ModelConfig, build_model
    from llmtrain.tokenizer import byte_tokenizer
    from llmtrain.training.fit import fit

    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig(
        vocab_size=320, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    fit(
        model=build_model(config, seed=0),
        data=windows_data(options, processes),
        tokenizer=byte_tokenizer(),
        run_dir=folder,
        total_steps=options["steps"],
        accumulation=options["accumulation"],
        strategy=options["strategy"],
        accelerator="cpu",
        devices=processes,
        precision="fp32",
        log_every=1,
        val_every=2,
        sample_every=1,
        sample_prompts=["ab"],
        sampling=SamplingParams(max_new_tokens=3, seed=0),
    )
    return rows_of(folder)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main(specs: Path, results: Path) -> None:
    torch.set_num_threads(1)
    done = {}
    for spec in json.loads(specs.read_text(encoding="utf-8")):
        folder = results.parent / "runs" / spec["name"]
        if "windows" in spec:
            done[spec["name"]] = run_windows(spec["windows"], folder, spec["processes"])
        else:
            done[spec["name"]] = run_case(spec, folder)
    if torch.distributed.get_rank() == 0 if torch.distributed.is_initialized() else True:
        torch.save(done, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
