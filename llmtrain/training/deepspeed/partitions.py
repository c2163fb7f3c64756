"""Where the fp32 weights and optimiser states of each parameter lie inside DeepSpeed's ZeRO optimisers.

ZeRO 1 and 2 lay the parameters of a group end to end and give each rank an equal stretch of the whole; ZeRO 3 cuts
every parameter into equal stretches and lays a rank's own end to end. Both keep them as flat fp32 partitions, which is
what the inner optimiser updates. It knows DeepSpeed's optimisers as of 0.19.8, and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.training.state import Fragment


def fragments(optimizer: Any, names: Mapping[int, str]) -> list[Fragment]:
    """This rank's stretches of the trained parameters.

    Args:
        optimizer: the engine's ZeRO optimiser.
        names: name of each trained parameter by its id.
    """
    return list(_stage_3(optimizer, names) if hasattr(optimizer, "fp16_groups") else _stage_1_and_2(optimizer, names))


def _stage_1_and_2(optimizer: Any, names: Mapping[int, str]) -> Iterator[Fragment]:
    for flat, group in zip(*_flat_groups(optimizer), strict=True):
        for parameter in group:
            place = parameter._hp_mapping
            if place is not None:  # some of it is in this rank's partition
                inside, here = place.lp_fragment_address, place.hp_fragment_address
                yield Fragment(names[id(parameter)], flat, here.start, inside.start, inside.numel)


def _flat_groups(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """The fp32 partition and the parameters of each group; bf16 under stage 1 has an optimiser class of its own."""
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
    return optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups


def _stage_3(optimizer: Any, names: Mapping[int, str]) -> Iterator[Fragment]:
    for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        offset = 0
        for parameter in group:
            size = parameter.partition_numel()
            start = dist.get_rank() * size
            count = min(size, parameter.ds_numel - start)  # the last stretches are filled up
            if count > 0:
                yield Fragment(names[id(parameter)], flat, offset, start, count)
            offset += size


@torch.no_grad()
def publish_weights(optimizer: Any) -> None:
    """Makes the weights that are computed with from the fp32 ones, as at the end of a step. A collective."""
    if not hasattr(optimizer, "fp16_groups"):
        optimizer.update_lp_params()
        return
    # Parameters that are kept whole are let go, and gathered again when they are used. DeepSpeed's own loading gathers
    # them at once; if some are frozen its record of the first step is then wrong, and it stops at the third.
    optimizer.checkpoint_event_prologue()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
