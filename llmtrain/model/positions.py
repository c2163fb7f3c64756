"""Where a token stands: rotary tables (with linear, llama3 and yarn scaling), sinusoidal vectors, packed documents.

Pure functions of a `ModelConfig`. The tables are fp32 and are no module buffers: a model that is converted to bf16 must
not round its angles (a bf16 angle is wrong by up to 2 radians at position 1,000).

Shapes: B rows, T positions, D head size, C hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmtrain.model.config import ModelConfig


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions, and the factor that scales cosine and sine.

    Returns:
        (D/2,) fp32 frequencies, and the attention factor (1.0 except for yarn).
    """
    head_dim = config.head_dim
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling["rope_type"] == "linear":
        return frequencies / float(scaling["factor"]), 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3_frequencies(frequencies, scaling), 1.0
    return _yarn_frequencies(frequencies, config)


def _llama3_frequencies(frequencies: Tensor, scaling: dict) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, the ones between blended (Llama 3.1's rule)."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn_frequencies(frequencies: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN, Peng et al. 2023 (arXiv:2309.00071): a ramp over the dimensions between kept and slowed frequencies."""
    scaling = config.rope_scaling
    assert scaling is not None
    factor = float(scaling["factor"])
    original = float(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    beta_fast, beta_slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def dimension_of(rotations: float) -> float:
        return config.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_attention_factor(factor, scaling.get("mscale"), scaling.get("mscale_all_dim"))
    return frequencies / factor * ramp + frequencies * (1 - ramp), float(attention_factor)


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def rotary_table(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `rotate` multiplies with: every angle's cosine, and its sine with the sign of the pair's half.

    Returns:
        Two (T, D) fp32 tensors for positions 0..length-1; the halves of D hold the same angles, the first half of the
        sines negated.
    """
    frequencies, factor = rotary_frequencies(config)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)  # (T, D/2)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + D/2]) by its position's angle (Hugging Face Llama's pairing).

    x[i]·cos - x[i + D/2]·sin and x[i + D/2]·cos + x[i]·sin, in three operations: swap the halves, multiply, add.

    Args:
        x: (..., T, D) queries or keys.
        cos, sin: from `rotary_table`, broadcastable to (..., T, D), in x's dtype.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def sinusoidal_table(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """Fixed position vectors of Vaswani et al. 2017, added to the embeddings.

    Scaled by `initializer_range`·√2, so that a position's vector starts with the size of an embedding row: with tied
    tables of standard deviation 0.02 the unscaled sinusoids drown the tokens.

    Returns:
        (T, C) fp32: sine on even, cosine on odd dimensions.
    """
    width = config.hidden_size
    exponent = torch.arange(0, width, 2, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, dtype=torch.float32), 1.0 / (10_000.0**exponent))
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]  # (T, C)
    return (table * (config.initializer_range * math.sqrt(2.0))).to(device)


def document_layout(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions and attention of rows that hold several documents end to end, none of which may see another.

    Args:
        document_ids: (B, T) which document a position belongs to; a document is one run of its own number in the row.

    Returns:
        (B, T) int64 positions, counted from each document's first token; (B, 1, T, T) bool, true where the query (third
        axis) sees the key: earlier positions of its own document, and itself.
    """
    time = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    positions = time - (time * begins).cummax(dim=1).values
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return positions, same & (time[:, None] >= time)
