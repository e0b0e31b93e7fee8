"""Positions by counting tokens: rotary, T5's relative bias, ALiBi.

H heads, T queries, S keys, D head dim.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotate(
    vectors: Float[Tensor, "*batch N D"], places: Int[Tensor, " N"], theta: float
) -> Float[Tensor, "*batch N D"]:
    """Rotary positions: (x_i, x_{i + D/2}) turned by `place * theta^(-2 i / D)`. Source: arXiv 2104.09864."""
    half = vectors.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=vectors.device, dtype=torch.float32) / half)
    angles = places[:, None] * rates  # [N, D / 2]
    cosine, sine = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def relative_buckets(distances: Int[Tensor, "T S"], buckets: int, furthest: int) -> Int[Tensor, "T S"]:
    """T5's buckets of the distance back to a key: one each for the near half, logarithmic ones up to `furthest` for
    the rest. Source: arXiv 1910.10683, sec. 2.1."""
    distances = distances.clamp(min=0)
    exact = buckets // 2
    scaled = (distances.clamp(min=1) / exact).log() / math.log(furthest / exact) * (buckets - exact)
    return torch.where(distances < exact, distances, (exact + scaled.long()).clamp(max=buckets - 1))


def alibi_slopes(heads: int, device: torch.device | None = None) -> Float[Tensor, " H"]:
    """Penalty per token of distance: 2^(-8 h / H) for head h = 1 .. H. Source: arXiv 2108.12409, sec. 3."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=device, dtype=torch.float32))
