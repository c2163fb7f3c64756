"""The DeepSpeed configuration of a run, as a plain dictionary, and which settings go together.

Pure: imports neither deepspeed nor lightning, so that settings are refused in the first second.
"""

from typing import Any, Literal

from llmtrain.training.ranges import shown

Stage = Literal[1, 2, 3]
BUCKET_ELEMENTS = 50_000_000
"""Of the buckets in which gradients are reduced and weights gathered.

DeepSpeed allocates a bucket anew at every step, so its default of 5e8 is 2 GB in fp32.
"""
STRATEGIES = ("single", "deepspeed_1", "deepspeed_2", "deepspeed_3")


def check_strategy(
    name: str,
    *,
    devices: int = 1,
    num_nodes: int = 1,
    optimizer: str = "adamw",
    precision: str = "fp32",
    grad_accum_dtype: str = "fp32",
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> None:
    """Refuses combinations that cannot work. The arguments are those of `build_strategy`.

    Raises:
        ValueError: one sentence saying which setting to change.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy={shown(name)} is unknown; choose one of {', '.join(STRATEGIES)}.")
    if devices < 1 or num_nodes < 1:
        raise ValueError(f"trainer.devices={devices} and trainer.num_nodes={num_nodes} must both be at least 1.")
    if name == "single" and devices * num_nodes > 1:
        raise ValueError(f"strategy=single runs one process, not {devices * num_nodes}; choose strategy=deepspeed_1.")
    if grad_accum_dtype not in ("fp32", "bf16"):
        raise ValueError(f"strategy.grad_accum_dtype={shown(grad_accum_dtype)} is unknown; choose fp32 or bf16.")
    if grad_accum_dtype == "bf16" and precision != "bf16":
        raise ValueError(
            f"strategy.grad_accum_dtype=bf16 needs a bf16 run, and trainer.precision is {precision}; leave it fp32."
        )
    offload = offload_optimizer or offload_parameters
    if name == "single" and (offload or grad_accum_dtype != "fp32"):
        raise ValueError(
            "strategy=single neither offloads nor accumulates in bf16; choose strategy=deepspeed_1, 2 or 3."
        )
    if offload_parameters and name != "deepspeed_3":
        raise ValueError(
            f"strategy.offload_parameters=true needs strategy=deepspeed_3; {name} keeps the parameters whole."
        )
    if optimizer == "muon":
        _check_muon(name, offload)


def _check_muon(name: str, offload: bool) -> None:
    if name == "deepspeed_3":
        raise ValueError(
            "optim.name=muon cannot run under strategy=deepspeed_3, where no process ever sees a whole gradient"
            " matrix; choose strategy=deepspeed_2 or optim.name=adamw."
        )
    if offload:
        raise ValueError(
            "optim.name=muon cannot be offloaded: its matrices are gathered on the device at every step; set"
            " strategy.offload_optimizer=false or optim.name=adamw."
        )


def deepspeed_config(
    *,
    stage: Stage,
    accelerator: str,
    bf16: bool,
    grad_accum_dtype: str = "fp32",
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`.

    Lightning adds `gradient_accumulation_steps` and `gradient_clipping` from the trainer.

    Args:
        stage: ZeRO stage.
        accelerator: `cpu` or `cuda`.
        bf16: bf16 weights with fp32 master weights; else everything is fp32.
        grad_accum_dtype: `fp32` or `bf16`, in which gradients are accumulated and reduced in a bf16 run.
        offload_optimizer: keep optimiser states and master weights in host memory.
        offload_parameters: keep the parameters' shards in host memory (stage 3).
    """
    on_cpu = accelerator == "cpu"
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": not on_cpu,  # a CPU has no second stream: overlapping only adds a buffer
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if on_cpu and stage == 1:
        # Copying gradients into a bucket fights fragmentation of GPU memory; here it costs four copies a step.
        zero["contiguous_gradients"] = False
    host = {"device": "cpu", "pin_memory": not on_cpu}
    if offload_optimizer:
        zero["offload_optimizer"] = host
    if offload_parameters:
        zero["offload_param"] = host
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # required; DeepSpeed only counts samples with it, and nobody asks
        "zero_allow_untested_optimizer": True,  # fused AdamW and our Muon
        "zero_force_ds_cpu_optimizer": False,  # offload keeps our optimiser, too
        "zero_optimization": zero,
    }
    if bf16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": grad_accum_dtype}
        config["communication_data_type"] = grad_accum_dtype
    return config
