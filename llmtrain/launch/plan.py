"""`llmtrain plan`: what a pretraining run will take, before it is started. It takes the settings of `pretrain`.

Reads the settings and shows the figures of `forecast`; no model is built, nothing is fetched or prepared. With
`plan.probe=true` it also runs ten real steps (`probing`) and compares.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import forecast, starting
from llmtrain.launch.forecast import Target

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.model import ModelConfig
    from llmtrain.training.geometry import BatchGeometry, RunLength
    from llmtrain.training.memory import TrainingMemory, Workload

logger = logging.getLogger(__name__)

_USUAL_MFU = 0.4  # of well-fed GPUs


@dataclass(frozen=True)
class Plan:
    """All figures of one run.

    Attributes:
        config: the model's shape.
        target: where it is to run.
        workload: what one process does at a time.
        stage: ZeRO stage of the strategy; 0 without DeepSpeed.
        batch: how a step is divided.
        length: how long the run is; `None` if only the corpus can say, which is not prepared yet.
        epoch_tokens: tokens of the prepared corpus; `None` if it is not prepared.
        mfu: share of the peak that is assumed.
        price_per_hour: of one device; `None` if not given.
        keep_last: checkpoints that stay; `None` keeps all.
        saves: whether checkpoints are written.
    """

    config: ModelConfig
    target: Target
    workload: Workload
    stage: int
    batch: BatchGeometry
    length: RunLength | None
    epoch_tokens: int | None
    mfu: float
    price_per_hour: float | None
    keep_last: int | None
    saves: bool

    @property
    def tokens(self) -> int | None:
        """Of the whole run."""
        if self.length is None:
            return None
        return self.length.steps * self.batch.rows * self.workload.sequence_length

    @property
    def flops(self) -> float | None:
        """Of the whole run, forward and backward."""
        from llmtrain.model import flops_per_token

        if self.tokens is None:
            return None
        return self.tokens * flops_per_token(self.config, self.workload.sequence_length)

    @property
    def seconds(self) -> float | None:
        """Of the steps alone."""
        return None if self.flops is None else forecast.training_seconds(self.flops, self.target, self.mfu)

    @property
    def stages(self) -> list[int]:
        """The ZeRO stages that the run could have: Muon cannot have the third, several processes need one."""
        stages = [1, 2] if self.workload.optimizer == "muon" else [1, 2, 3]
        return [0, *stages] if self.target.world_size == 1 else stages

    @property
    def memory(self) -> TrainingMemory:
        """Of one process under the run's strategy."""
        return self.memory_at(self.stage)

    def memory_at(self, stage: int) -> TrainingMemory:
        """Of one process at a ZeRO stage."""
        return forecast.memory(self.workload, self.target, stage)

    def largest_micro_batch(self, stage: int) -> int | None:
        """See `forecast.largest_micro_batch`."""
        return forecast.largest_micro_batch(self.workload, self.target, stage)

    def files(self) -> dict[str, int]:
        """Bytes on disk of a checkpoint; see `forecast.checkpoint_bytes`."""
        return forecast.checkpoint_bytes(self.config, optimizer=self.workload.optimizer)

    def cost(self, seconds: float | None) -> float | None:
        """Of all devices for so long."""
        if seconds is None or self.price_per_hour is None:
            return None
        return self.price_per_hour * self.target.world_size * seconds / 3600


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Plans the run of the settings.

    Returns:
        Parameters, steps, tokens, FLOPs, memory by stage, checkpoint sizes, seconds, cost; unknown ones are `None`.

    Raises:
        ValueError: A setting that could not work, here or in `pretrain`.
    """
    from llmtrain.launch.plan_text import describe

    _check(settings)
    plan = plan_from(settings)
    logger.info("\n%s", "\n".join(describe(plan)))
    results = to_results(plan)
    if settings.plan.probe:
        from llmtrain.launch.probing import describe_probe, probe

        found = probe(settings, plan)
        logger.info("\n%s", "\n".join(describe_probe(plan, found)))
        results["probe"] = found
    return results


def _check(settings: DictConfig) -> None:
    from llmtrain.training.hardware import GPUS

    plan = settings.plan
    if plan.device != "auto" and plan.device not in GPUS:
        raise ValueError(f"plan.device={plan.device} is unknown; use auto (this machine) or one of {', '.join(GPUS)}.")
    if plan.probe and plan.device != "auto":
        raise ValueError(f"plan.probe=true measures this machine, not plan.device={plan.device}; leave one out.")


def plan_from(settings: DictConfig) -> Plan:
    """The figures of the settings, everything checked as `pretrain` would."""
    from llmtrain.training.deepspeed.config import check_strategy
    from llmtrain.training.geometry import divide_batch

    rows = starting.check_anywhere(settings)
    trainer, length = settings.trainer, settings.data.sequence_length
    target = target_from(settings)
    check_strategy(
        **settings.strategy, devices=target.devices, num_nodes=target.num_nodes, optimizer=settings.optim.name,
        precision=target.precision,
    )  # fmt: skip
    batch = divide_batch(rows, micro_batch_size=trainer.micro_batch_size, world_size=target.world_size)
    config, epoch_rows = _shape_and_corpus(settings)
    starting.check_context(length, config.max_position_embeddings)
    return Plan(
        target=target,
        length=_length(settings, batch, epoch_rows),
        epoch_tokens=None if epoch_rows is None else epoch_rows * length,
        mfu=settings.plan.mfu,
        price_per_hour=settings.plan.price_per_hour,
        **_of_settings(settings, config, batch),
    )


def plan_of(
    settings: DictConfig, config: ModelConfig, batch: BatchGeometry, length: RunLength, *, epoch_rows: int
) -> Plan:
    """The plan of a run that is about to start on this machine, from settings of `pretrain`; nothing is measured."""
    from llmtrain.training import hardware

    trainer = settings.trainer
    machine = hardware.resolve_machine(trainer.accelerator, trainer.devices, trainer.num_nodes, trainer.precision)
    return Plan(
        target=forecast.present_target(machine, measure=False),
        length=length,
        epoch_tokens=epoch_rows * settings.data.sequence_length,
        mfu=_USUAL_MFU,
        price_per_hour=None,
        **_of_settings(settings, config, batch),
    )


def _of_settings(settings: DictConfig, config: ModelConfig, batch: BatchGeometry) -> dict[str, Any]:
    """The parts of a plan that only the settings decide."""
    from llmtrain.training.memory import Workload

    trainer, strategy = settings.trainer, settings.strategy
    workload = Workload(
        config=config,
        micro_batch_size=batch.micro_batch_size,
        sequence_length=settings.data.sequence_length,
        optimizer=settings.optim.name,
        gradient_checkpointing=trainer.gradient_checkpointing,
        **{key: value for key, value in strategy.items() if key != "name"},  # what is accumulated and offloaded
    )
    return {
        "config": config,
        "workload": workload,
        "stage": forecast.stage_of(strategy.name),
        "batch": batch,
        "keep_last": trainer.keep_last,
        "saves": trainer.checkpoint_every is not None,
    }


def target_from(settings: DictConfig) -> Target:
    """The machine at hand, or the named device, as often as the settings say; none of them need be started."""
    from llmtrain.training import hardware

    plan, trainer = settings.plan, settings.trainer
    num_nodes = 1 if trainer.num_nodes == "auto" else trainer.num_nodes
    if plan.device == "auto":
        accelerator = hardware.resolve_accelerator(trainer.accelerator)
        precision = hardware.resolve_precision(trainer.precision, accelerator)
        devices = hardware.resolve_devices(trainer.devices, accelerator)
        machine = hardware.Machine(accelerator, devices, num_nodes, precision)
        target = forecast.present_target(machine, measure=True)
    else:
        devices = 1 if trainer.devices == "auto" else hardware.resolve_devices(trainer.devices, "cpu")
        if trainer.precision not in hardware.PRECISIONS:
            raise ValueError(
                f"trainer.precision={trainer.precision!r} must be one of {', '.join(hardware.PRECISIONS)}."
            )
        precision = "bf16" if trainer.precision == "auto" else trainer.precision
        gpu = hardware.GPUS[plan.device]
        target = Target(plan.device, False, devices, num_nodes, precision, gpu.memory, gpu.peak(precision))
    return target if plan.memory_gb is None else replace(target, memory=int(plan.memory_gb * 1e9))


def _shape_and_corpus(settings: DictConfig) -> tuple[ModelConfig, int | None]:
    """The model's shape, and the windows of an epoch if the corpus is prepared."""
    from llmtrain.checkpoint import read_config
    from llmtrain.tokenizer import Tokenizer

    if settings.init is not None:
        folder = starting.init_folder(settings)
        found = _prepared(settings, Tokenizer.load(folder))
        return read_config(folder), found and found[1]
    found = _prepared(settings, None)
    vocab_size = found[0] if found else _vocab_size(settings)
    return starting.model_config(settings, vocab_size=vocab_size), found and found[1]


def _prepared(settings: DictConfig, tokenizer: Any) -> tuple[int, int] | None:
    """Size of the vocabulary and windows of an epoch, if the corpus is prepared; a data set of the hub is not asked."""
    from omegaconf import OmegaConf

    from llmtrain.data.prepare import find_prepared
    from llmtrain.launch.prepare import corpus_from

    if settings.data.kind == "huggingface":
        return None
    values: dict[str, Any] = OmegaConf.to_container(settings.tokenizer, resolve=True)  # type: ignore[assignment]
    length = settings.data.sequence_length
    found = find_prepared(
        corpus_from(settings), data_dir=settings.paths.data_dir, tokenizer=tokenizer, sequence_length=length, **values
    )
    if found is None:
        return None
    rows = sum(shards.num_tokens // length for shards, _ in found[1].train)
    return found[0].vocab_size, rows


def _vocab_size(settings: DictConfig) -> int:
    from llmtrain.tokenizer import Tokenizer, byte_tokenizer

    tokenizer = settings.tokenizer
    if tokenizer.kind == "byte":
        return byte_tokenizer().vocab_size
    if tokenizer.kind == "file":
        return Tokenizer.load(tokenizer.path, add_special_tokens=True, pattern=tokenizer.pattern).vocab_size
    return tokenizer.vocab_size


def _length(settings: DictConfig, batch: BatchGeometry, epoch_rows: int | None) -> RunLength | None:
    from llmtrain.launch.fitting import checked_length

    trainer = settings.trainer
    if epoch_rows is None and trainer.max_epochs is not None:
        if trainer.max_steps is None and trainer.max_tokens is None:
            return None
        logger.warning("trainer.max_epochs=%g is left out: the corpus is not prepared yet", trainer.max_epochs)
        settings = settings.copy()
        settings.trainer.max_epochs = None
    return checked_length(
        settings, rows=batch.rows, epoch_rows=epoch_rows or 0, row_tokens=settings.data.sequence_length
    )


def to_results(plan: Plan) -> dict[str, Any]:
    """Everything as plain values, for the line of JSON."""
    from llmtrain.model import kv_cache_bytes_per_token, parameter_count

    target, stages = plan.target, plan.stages
    return {
        "command": "plan",
        "parameters": parameter_count(plan.config),
        "parameters_without_embeddings": parameter_count(plan.config, embeddings=False),
        "steps": plan.length and plan.length.steps,
        "tokens": plan.tokens,
        "epochs": plan.tokens / plan.epoch_tokens if plan.tokens and plan.epoch_tokens else None,
        "flops": plan.flops,
        "device": target.name,
        "devices": target.world_size,
        "precision": target.precision,
        "zero_stage": plan.stage,
        "micro_batch_size": plan.batch.micro_batch_size,
        "memory": {stage: plan.memory_at(stage).to_dict() for stage in stages},
        "device_memory": target.memory,
        "largest_micro_batch": {stage: plan.largest_micro_batch(stage) for stage in stages},
        "checkpoint": plan.files(),
        "peak_flops": target.peak_flops,
        "mfu": plan.mfu,
        "seconds": plan.seconds,
        "cost": plan.cost(plan.seconds),
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(plan.config, target.precision),
    }
