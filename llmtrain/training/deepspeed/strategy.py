"""Lightning's DeepSpeed strategy, mended to run on CPU processes and to scale the gradient once.

It knows the trainer and DeepSpeed's engine; models, losses and checkpoint folders are others' business.

What it changes, as tried with lightning 2.6.6 and deepspeed 0.19.8:

* Lightning refuses every accelerator but CUDA; here one or several CPU processes work alike.
* Lightning divides the loss by the accumulation and DeepSpeed divides it again; here it is divided once.
* Gradients are accumulated and reduced in fp32 in bf16 runs too (DeepSpeed: in bf16).
* One process does not send its gradients to itself (`trim.py`).
* DeepSpeed's log and prints go to python logging, and its files are checked before they are unpickled.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from torch import Tensor, nn

from llmtrain.training.cluster import Cluster, Launcher
from llmtrain.training.deepspeed import environment, files
from llmtrain.training.deepspeed.config import Stage, check_strategy, deepspeed_config
from llmtrain.training.deepspeed.trim import trim_single_process
from llmtrain.training.single import SingleStrategy


class _Precision(DeepSpeedPrecision):
    """DeepSpeed's precision, with the gradient scaled once."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning's closure has already divided the loss by accumulate_grad_batches.
        model.trainer.model.backward(tensor, *args, scale_wrt_gas=False, **kwargs)


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
            exclude_frozen_parameters=True,
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
        if not self._on_cpu:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        environment.settle_shared_memory_op(self.num_processes, num_nodes=self.num_nodes)
        if self.world_size == 1:
            environment.open_process_group_alone()
        if self.num_nodes > 1:
            assert self.cluster_environment is not None
            environment.choose_interface(self.cluster_environment.main_address)
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

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes DeepSpeed's files into the folder `filepath`, frozen weights left out; every rank must call it.

        Args:
            checkpoint: plain values to keep beside DeepSpeed's own.
            filepath: the folder.
            storage_options: not supported, as in Lightning.
        """
        engine = self.deepspeed_engine
        with files.plain_slice_mappings(engine.optimizer), files.without_frozen(engine), environment.quiet_stdout():
            super().save_checkpoint(files.client_state(checkpoint), filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restores weights, master weights and optimiser states; every rank must call it.

        The optimiser's settings (weight decay, momentum, …) stay those of this run.

        Args:
            checkpoint_path: a folder that `save_checkpoint` wrote.
            weights_only: ignored; DeepSpeed unpickles without restriction, so the files are checked first.

        Returns:
            What was given to `save_checkpoint`, and DeepSpeed's own entries.

        Raises:
            ValueError: a file holds anything but tensors, plain values and DeepSpeed's two classes, or was
                written by another number of processes.
        """
        self._check_files(Path(checkpoint_path))
        module = self.lightning_module
        assert module is not None
        strict = module.strict_loading
        groups = self.deepspeed_engine.optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        if not all(parameter.requires_grad for parameter in module.parameters()):
            module.strict_loading = False  # frozen weights are not in the file
        try:
            with environment.quiet_stdout():
                state = super().load_checkpoint(checkpoint_path)
        finally:
            module.strict_loading = strict
        for group, kept in zip(self.deepspeed_engine.optimizer.param_groups, settings, strict=True):
            group.update(kept)
        return state

    def _check_files(self, folder: Path) -> None:
        """Every rank looks at its share of the files; all raise alike if one of them is bad."""
        mine = files.check_files(folder, share=self.global_rank, shares=self.world_size)
        found: list[str | None] = [None] * self.world_size
        dist.all_gather_object(found, mine)
        for problem in found:
            if problem is not None:
                raise ValueError(f"{problem}.")


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
        A strategy with `last_grad_norm` and `fp32_state_dict`.

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
