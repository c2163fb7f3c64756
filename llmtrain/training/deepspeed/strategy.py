"""Lightning's DeepSpeed strategy, mended to run on CPU processes and to scale the gradient once.

It knows the trainer and DeepSpeed's engine; models, losses and checkpoint folders are others' business.

What it changes, as tried with lightning 2.6.6 and deepspeed 0.19.8:

* Lightning refuses every accelerator but CUDA; here one or several CPU processes work alike.
* Lightning divides the loss by the accumulation and DeepSpeed divides it again; here it is divided once.
* A step whose gradient is not finite leaves nothing behind, with offload too.
* Gradients are accumulated and reduced in fp32 in bf16 runs too (DeepSpeed: in bf16).
* One process does not send its gradients to itself (`trim.py`).
* DeepSpeed's log and prints go to python logging, and its checkpoint files (pickles) are neither written nor read:
  `shard` says where the state lies, and `llmtrain.training.state` stores it.
"""

from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from torch import Tensor, nn

from llmtrain.training.cluster import Cluster, Launcher
from llmtrain.training.deepspeed import environment, partitions
from llmtrain.training.deepspeed.config import Stage, check_strategy, deepspeed_config
from llmtrain.training.deepspeed.trim import trim_single_process
from llmtrain.training.single import SingleStrategy
from llmtrain.training.state import Shard


class _Precision(DeepSpeedPrecision):
    """DeepSpeed's precision, with the gradient scaled once."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning's closure has already divided the loss by accumulate_grad_batches.
        model.trainer.model.backward(tensor, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        engine = model.trainer.model
        inner, whole_step = engine.optimizer, engine.is_gradient_accumulation_boundary()
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        if whole_step and inner.overflow and getattr(inner, "cpu_offload", False):
            # ZeRO 2 with offload in bf16 keeps the gradients of a skipped step and adds the next step's to them, so
            # that after one NaN every step would be skipped (deepspeed 0.19.8).
            inner.averaged_gradients = dict.fromkeys(inner.averaged_gradients)
        return result


class DeepSpeedStrategy(LightningDeepSpeedStrategy):
    """ZeRO 1, 2 or 3 on CPU processes or GPUs.

    Args:
        stage: ZeRO stage.
        accelerator: `cpu` or `cuda`.
        precision: `bf16` (bf16 weights, fp32 master weights and optimiser) or `fp32`.
        grad_accum_dtype: `fp32` or `bf16`: dtype of accumulated and reduced gradients in a bf16 run.
        offload_optimizer: optimiser states and master weights in host memory.
        offload_parameters: the parameters' shards in host memory (stage 3).
        timeout: of collectives.
    """

    def __init__(
        self,
        *,
        stage: Stage,
        accelerator: str,
        precision: str = "fp32",
        grad_accum_dtype: str = "fp32",
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        environment.prepare_import(accelerator)
        self._on_cpu = accelerator == "cpu"
        super().__init__(
            config=deepspeed_config(
                stage=stage,
                accelerator=accelerator,
                bf16=precision == "bf16",
                grad_accum_dtype=grad_accum_dtype,
                offload_optimizer=offload_optimizer,
                offload_parameters=offload_parameters,
            ),
            logging_level=environment.LOG_LEVEL,
            precision_plugin=_Precision("bf16-mixed" if precision == "bf16" else "32-true"),
            process_group_backend="gloo" if self._on_cpu else "nccl",
            timeout=timeout,
        )

    @property
    def root_device(self) -> torch.device:
        """This process's device. DeepSpeed wants an index on the CPU too, and as an int."""
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        if self._on_cpu:
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if self.num_nodes > 1:  # on GPUs too, where the ranks agree on signals through gloo
            assert self.cluster_environment is not None
            environment.choose_interface(self.cluster_environment.main_address)
        if not self._on_cpu:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        environment.settle_shared_memory_op(self.num_processes, num_nodes=self.num_nodes)
        if self.world_size == 1:
            environment.open_process_group_alone()
        with environment.quiet_stdout():
            self._init_deepspeed_distributed()
        environment.close_process_group_at_exit()

    def _configure_launcher(self) -> None:
        if isinstance(self.cluster_environment, Cluster):
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            super()._configure_launcher()

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        members = [list(group["params"]) for group in optimizer.param_groups]
        with environment.quiet_stdout():
            engine, optimizer = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        _assert_flat_order(optimizer, members)
        if self.world_size == 1:
            trim_single_process(engine)
        else:
            assert self._timeout is not None
            environment.limit_every_group(self._timeout)
        return engine, optimizer

    @property
    def last_grad_norm(self) -> float | None:
        """Norm of the last step's whole gradient before clipping; None before the first step.

        Reading it waits for the device.
        """
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was left out, on all ranks, because the gradient's norm was not finite.

        Every optimiser of DeepSpeed's reduces the norm over the ranks and reads it before it touches a weight, so this
        costs nothing more. (fp32 runs, too: `check_grad_overflow` is another, earlier look at each gradient.)
        """
        return bool(self.deepspeed_engine.optimizer.overflow)

    @torch.no_grad()
    def fp32_state_dict(self, module: nn.Module) -> dict[str, Tensor] | None:
        """Gathers a module's fp32 master weights on rank 0; every rank must call it, within the fit.

        Args:
            module: the plain model, or any part of the module that is trained.

        Returns:
            On rank 0 the module's state dict on the CPU, floating-point values in fp32, tied weights as one
            tensor. On other ranks None.
        """
        gathered: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) not in gathered:
                full = _full_value(value)
                keep = self.is_global_zero
                gathered[id(value)] = full.detach().to("cpu", copy=True) if keep else torch.empty(0)
            state[name] = gathered[id(value)]
        return state if self.is_global_zero else None

    def shard(self, module: nn.Module) -> Shard:
        """This rank's part of the training state of a module, within the fit."""
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        optimizer = self.deepspeed_engine.optimizer
        return Shard(
            shapes={name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in trained.items()},
            fragments=partitions.fragments(optimizer, {id(p): name for name, p in trained.items()}),
            optimizer_state=optimizer.optimizer.state,
            device=self.root_device,
        )

    def publish_weights(self) -> None:
        """Makes the weights that are computed with from the fp32 ones, after a shard was loaded. A collective."""
        partitions.publish_weights(self.deepspeed_engine.optimizer)


def _assert_flat_order(optimizer: Any, members: list[list[Tensor]]) -> None:
    """Holds if ZeRO 1 and 2 laid each group's parameters end to end in order, as Muon relies on."""
    flats = getattr(optimizer, "bit16_groups_flat", None) or getattr(optimizer, "bf16_groups_flat", None)
    if flats is None:  # ZeRO 3
        return
    for flat, group in zip(flats, members, strict=True):
        address = flat.data_ptr()
        for parameter in group:
            assert parameter.data_ptr() == address, "DeepSpeed's flat group is not in the order of the parameters"
            address += parameter.numel() * parameter.element_size()


def _full_value(value: Tensor) -> Tensor:
    """The whole fp32 value of a parameter or buffer, on every rank."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if hasattr(value, "ds_id") and not value.requires_grad:  # ZeRO 3 keeps no master weight of frozen ones
        with GatheredParameters([value]):
            return value.detach().float().clone()
    full = safe_get_full_fp32_param(value) if isinstance(value, nn.Parameter) else None
    if full is None:  # frozen, or a buffer
        return value.float() if value.is_floating_point() else value
    return full.view(value.ds_shape if hasattr(value, "ds_shape") else value.shape)


def build_strategy(
    name: str,
    *,
    devices: int,
    accelerator: str,
    precision: str,
    num_nodes: int = 1,
    optimizer: str = "adamw",
    grad_accum_dtype: str = "fp32",
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    timeout: float = 1800.0,
) -> Strategy:
    """Builds a run's strategy; its precision plug-in is inside, so `Trainer(precision=…)` stays unset.

    Args:
        name: `single`, `deepspeed_1`, `deepspeed_2` or `deepspeed_3`.
        devices: processes per machine.
        accelerator: `cpu` or `cuda`.
        precision: `fp32` or `bf16`.
        num_nodes: machines.
        optimizer: the optimiser's name, to refuse what does not go together.
        grad_accum_dtype, offload_optimizer, offload_parameters: see `DeepSpeedStrategy`.
        timeout: seconds that a collective waits for the other processes.

    Returns:
        A strategy with `last_grad_norm`, `last_step_skipped`, `fp32_state_dict`, `shard` and `publish_weights`.

    Raises:
        ValueError: settings that do not go together.
    """
    check_strategy(
        name,
        devices=devices,
        num_nodes=num_nodes,
        optimizer=optimizer,
        precision=precision,
        grad_accum_dtype=grad_accum_dtype,
        offload_optimizer=offload_optimizer,
        offload_parameters=offload_parameters,
    )
    if name == "single":
        return SingleStrategy(accelerator=accelerator, precision=precision)
    return DeepSpeedStrategy(
        stage=int(name.removeprefix("deepspeed_")),  # type: ignore[arg-type]
        timeout=timedelta(seconds=timeout),
        accelerator=accelerator,
        precision=precision,
        grad_accum_dtype=grad_accum_dtype,
        offload_optimizer=offload_optimizer,
        offload_parameters=offload_parameters,
    )
