"""The memory formula against what autograd keeps; against whole processes in tests/bench/test_trials.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from llmtrain.model import ModelConfig, build_model, loss_sum, parameter_count
from llmtrain.training.deepspeed.config import BUCKET_ELEMENTS, deepspeed_config
from llmtrain.training.memory import Workload, training_memory

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS, LENGTH = 3, 16  # so that no activation has as many elements as a matrix


def kept_for_backward(config: ModelConfig, *, precision: str, autocast: bool, recompute: bool) -> int:
    """Bytes that autograd saves in a forward pass with the loss, weights and their bf16 copies left out."""
    model = build_model(config, seed=0).train()
    if precision == "bf16" and not autocast:
        model = model.bfloat16()
    model.gradient_checkpointing = recompute
    left_out = {parameter.numel() for parameter in model.parameters() if parameter.dim() > 1}
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        weight = tensor.numel() in left_out and tensor.dim() == 2 and not tensor.is_leaf and autocast
        if not weight and storage.data_ptr() not in {p.untyped_storage().data_ptr() for p in model.parameters()}:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no later storage has its address
        return tensor

    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        loss_sum(model, ids, ids)
    return sum(storages.values())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("precision", "stage"), [("fp32", 1), ("bf16", 1), ("bf16", 0)], ids=["fp32", "bf16", "autocast"]
)
def test_activations_are_what_autograd_keeps(precision, stage, recompute):
    """By the difference of two depths, so that what is there once (rotary tables, ids, the loss) drops out."""
    found, said = [], []
    for layers in (2, 5):
        config = ModelConfig(**SHAPE | {"num_hidden_layers": layers, "vocab_size": 509})
        autocast = stage == 0 and precision == "bf16"
        found.append(kept_for_backward(config, precision=precision, autocast=autocast, recompute=recompute))
        work = Workload(config, ROWS, LENGTH, gradient_checkpointing=recompute)
        memory = training_memory(work, precision=precision, zero_stage=stage)
        said.append(memory.activations)
    assert said[1] - said[0] == found[1] - found[0]


def test_the_loss_is_bounded_by_the_budget():
    config = ModelConfig(**SHAPE | {"vocab_size": 1 << 17})
    few, many, more = (training_memory(Workload(config, rows, 1024)).logits for rows in (1, 2, 4))
    assert few == 12 * (1 << 17) * 1024
    assert many == more == 3 << 30


def test_zero_stages_shard_what_they_say():
    config = ModelConfig(**SHAPE)
    count = parameter_count(config)
    one, two, three = (training_memory(Workload(config, 1, 8), zero_stage=stage, world_size=2) for stage in (1, 2, 3))
    assert one.optimizer == two.optimizer == three.optimizer == 4 * 3 * count // 2
    assert (one.gradients, two.gradients) == (6 * count, 2 * count)
    assert (two.weights, three.weights) == (2 * count, count)
    alone = training_memory(Workload(config, 1, 8), zero_stage=0)
    assert (alone.weights, alone.gradients, alone.optimizer) == (4 * count, 4 * count, 8 * count)


def test_a_gpu_takes_buckets_whole_and_saves_in_the_hosts_memory():
    config = ModelConfig(**SHAPE)
    count = parameter_count(config)
    place = {"zero_stage": 2, "world_size": 2, "on_cpu": False, "precision": "fp32"}
    memory = training_memory(Workload(config, 1, 8), **place)
    assert memory.buffers >= 2 * 4 * BUCKET_ELEMENTS
    assert (memory.allocator, memory.saving, memory.host) == (0, 0, 12 * count)
    offloaded = training_memory(Workload(config, 1, 8, offload_optimizer=True), **place)
    assert (offloaded.optimizer, offloaded.gradients) == (0, 0)
    assert offloaded.host == 12 * count + 4 * (3 * count + count) // 2
    both = Workload(config, 1, 8, offload_optimizer=True, offload_parameters=True)
    third = training_memory(both, **place | {"zero_stage": 3})
    assert (third.state, third.host) == (0, offloaded.host + 4 * count // 2)


def test_a_cpu_has_what_is_offloaded_in_the_same_memory():
    config = ModelConfig(**SHAPE)
    count = parameter_count(config)
    work = Workload(config, 1, 8, offload_optimizer=True)
    memory = training_memory(work, zero_stage=2, world_size=2, precision="fp32")
    assert (memory.optimizer, memory.gradients, memory.host) == (4 * 4 * count // 2, 0, 0)
    assert training_memory(work, zero_stage=0).optimizer == 8 * count  # without DeepSpeed nothing is offloaded


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_buckets_are_those_that_deepspeed_is_given(stage):
    zero = deepspeed_config(stage=stage, accelerator="cuda", bf16=True)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == BUCKET_ELEMENTS


def test_the_total_is_the_sum_of_the_parts():
    memory = training_memory(Workload(ModelConfig(**SHAPE), 1, 8), zero_stage=0)
    parts = memory.to_dict()
    assert memory.saving > 0, "so small a batch that saving takes more than training"
    assert parts.pop("total") == sum(parts.values())
