"""The model: configuration, transformer, key/value cache, loss and accounting. Needs torch and nothing else of ours."""

from llmtrain.model.accounting import flops_per_token, kv_cache_bytes_per_token, moment_count, parameter_count
from llmtrain.model.cache import KVCache
from llmtrain.model.compiled import CompiledOneToken
from llmtrain.model.config import ModelConfig, padded_vocab_size
from llmtrain.model.deltas import ModelDelta, RowDeltas
from llmtrain.model.loss import IGNORED, loss_sum, token_loss_sum
from llmtrain.model.one_token import OneToken, can_step
from llmtrain.model.transformer import Transformer, build_model

__all__ = [
    "IGNORED",
    "CompiledOneToken",
    "KVCache",
    "ModelConfig",
    "ModelDelta",
    "OneToken",
    "RowDeltas",
    "Transformer",
    "build_model",
    "can_step",
    "flops_per_token",
    "kv_cache_bytes_per_token",
    "loss_sum",
    "moment_count",
    "padded_vocab_size",
    "parameter_count",
    "token_loss_sum",
]
