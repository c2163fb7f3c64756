"""Optimisers and schedules: parameter groups, AdamW, Muon, learning-rate factors.

Torch only. It knows no Lightning and no DeepSpeed; what Muon must know about sharding
(that its parameters may have become one flat slice) it finds out from the tensors it is given.
"""

from llmtrain.training.optim.build import build_optimizer, check_grad_clip, check_optimizer
from llmtrain.training.optim.groups import parameter_groups
from llmtrain.training.optim.muon import Muon
from llmtrain.training.optim.schedules import AUTO_WARMUP, resolve_warmup, schedule

__all__ = [
    "AUTO_WARMUP",
    "Muon",
    "build_optimizer",
    "check_grad_clip",
    "check_optimizer",
    "parameter_groups",
    "resolve_warmup",
    "schedule",
]
