"""Attention with thresholded coefficients: one signature, several backends.

    O = sigma(scale Q K^T) V,   sigma = prox_xi (soft_threshold) or prox_xi o softmax (thresholded_softmax)

- eager: explicit coefficients [B, H, T, S]; any device, twice differentiable, dropout and softcap.
- cpu: blocked, memory linear in T and S (`attention_cpu`).
- triton: the same on a GPU (`attention_triton`): bfloat16 and float16, and float32 if it is asked for.

B batch, H heads, G key-value heads (H a multiple of G), T queries, S keys, D and E sizes of keys and values.
Source: arXiv 2511.20194, sec. 3.
"""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from . import coefficients as sigma
from .attention_cpu import TILE, attention_cpu
from .precision import wide_dtype


KINDS = ("soft_threshold", "thresholded_softmax")
BACKENDS = ("eager", "cpu", "triton")
HAS_TRITON = find_spec("triton") is not None
HALF_PRECISION = (torch.bfloat16, torch.float16)
TRITON_DTYPES = (torch.float32, *HALF_PRECISION)
LARGEST_TRITON_SIZE = 256  # of a head: larger ones do not fit into a GPU's registers


class Sparsity(NamedTuple):
    """Shares of zeros per head among what the causal window (not the mask) allows, means over the batch."""

    elements: Float[Tensor, " H"]  # coefficients that are exactly zero
    tiles: Float[Tensor, " H"]  # tiles of coefficients, `TILE` queries by `TILE` keys, that are all zero


def sparse_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S E"],
    *,
    coefficients: str,
    threshold: float | Float[Tensor, "..."],
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    return_sparsity: bool = False,
) -> Float[Tensor, "B H T E"] | tuple[Float[Tensor, "B H T E"], Sparsity]:
    """Outputs [B, H, T, E], and how sparse their coefficients were if `return_sparsity`.

    Args:
        coefficients: "soft_threshold" or "thresholded_softmax".
        threshold: xi >= 0, a number or a tensor that broadcasts to [B, H]; gradients flow to a tensor.
        scale: Factor on the scores. None: D^-0.5.
        mask: Broadcasts to [B, H, T, S]; True where a query may use a key. Without any such key a query's output is 0.
        causal: Query t may use keys up to t + S - T: the last query sees all keys.
        window: With `causal`, only the last `window` of these keys.
        softcap: Scores become `softcap * tanh(scores / softcap)`. Eager only.
        dropout: Probability of setting a coefficient to zero, the others scaled up. Eager only.
        backend: "eager", "cpu" or "triton". None: the fastest that can do it.

    Raises:
        ImportError: `backend="triton"` without Triton.
        ValueError: shapes that do not fit, a negative number as the threshold (a tensor's values are not read), or
            something that the forced backend cannot do.
    """
    batch, heads, queries, _ = query.shape
    _check(query, key, value, coefficients, threshold, mask, causal, window, dropout, backend)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    xi = torch.as_tensor(threshold, dtype=wide_dtype(query), device=query.device).expand(batch, heads)
    backend = backend or _fastest(query, key, value, scale, softcap, dropout)
    if backend == "eager":
        allowed = allowed_keys(queries, key.shape[2], mask, causal, window, query.device)
        alpha = eager_coefficients(query, key, coefficients, xi, scale, allowed, softcap)
        output = decode(torch.nn.functional.dropout(alpha, dropout).to(query.dtype), value)
        return (output, explicit_sparsity(alpha, causal, window)) if return_sparsity else output
    if softcap is not None or dropout:
        raise ValueError(f'backend={backend!r} knows neither softcap ({softcap}) nor dropout ({dropout}); use "eager"')
    attend = _triton() if backend == "triton" else attention_cpu
    output, alive, nonzero = attend(
        query, key, value, xi, mask, coefficients, scale, causal, window or 0, return_sparsity
    )
    return (output, sparsity(alive, nonzero, queries, key.shape[2], causal, window)) if return_sparsity else output


def _fastest(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, dropout: float) -> str:
    # a single query has one row of coefficients: there is nothing to save
    if softcap is not None or dropout or query.shape[2] == 1:
        return "eager"
    if query.device.type == "cpu":
        return "cpu"
    # float32 in Triton is three products of tensor cores: to be asked for
    known = query.dtype in HALF_PRECISION and query.dtype == key.dtype == value.dtype and scale != 0
    small = max(query.shape[-1], value.shape[-1]) <= LARGEST_TRITON_SIZE
    return "triton" if query.device.type == "cuda" and HAS_TRITON and known and small else "eager"


def _triton():
    if not HAS_TRITON:
        raise ImportError("backend=\"triton\" needs Triton: pip install 'hf-sparsecoding[triton]'")
    # late: it starts a compiler
    from .attention_triton import attention_triton

    return attention_triton


def eager_coefficients(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B G S D"],
    kind: str,
    threshold: Float[Tensor, "b H"],
    scale: float,
    allowed: Bool[Tensor, "..."] | None,
    softcap: float | None = None,
) -> Float[Tensor, "B H T S"]:
    """`sigma(scale Q K^T)` in float32 at least: bfloat16's rounding of a score crosses xi."""
    groups, wide = key.shape[1], wide_dtype(query)
    with _without_autocast(query.device.type):
        # the heads of a group share their keys: no copy of these
        scores = (query.to(wide).unflatten(1, (groups, -1)).flatten(2, 3) @ key.to(wide).mT) * scale
    scores = scores.unflatten(2, (-1, query.shape[2])).flatten(1, 2)  # [B, H, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return sigma.COEFFICIENTS[kind](scores, threshold=threshold[:, :, None, None].to(wide), mask=allowed)


def _without_autocast(device_type: str) -> AbstractContextManager:
    return torch.autocast(device_type, enabled=False) if is_autocast_available(device_type) else nullcontext()


def decode(alpha: Float[Tensor, "B H T S"], value: Float[Tensor, "B G S E"]) -> Float[Tensor, "B H T E"]:
    """`alpha psi`; the heads of a group share their values."""
    grouped = alpha.unflatten(1, (value.shape[1], -1)).flatten(2, 3) @ value
    return grouped.unflatten(2, (-1, alpha.shape[2])).flatten(1, 2)


def allowed_keys(
    queries: int,
    keys: int,
    mask: Bool[Tensor, "..."] | None,
    causal: bool,
    window: int | None = None,
    device: torch.device | None = None,
) -> Bool[Tensor, "..."] | None:
    """Which keys a query may use, as one mask; None: all."""
    if not causal:
        return mask
    inside = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if window is not None:
        inside = inside.triu(keys - queries - window + 1)
    return inside if mask is None else inside & mask


def sparsity(
    alive: Bool[Tensor, "B H blocks tiles"],
    nonzero: Float[Tensor, "B H"],
    queries: int,
    keys: int,
    causal: bool,
    window: int | None,
) -> Sparsity:
    """From the tiles that hold a coefficient and the number of coefficients that are not zero."""
    inside = allowed_keys(queries, keys, None, causal, window)
    inside = torch.ones(queries, keys, dtype=torch.bool) if inside is None else inside
    possible = tiles_with_any(inside).sum().clamp(min=1).to(alive.device)
    return Sparsity(
        1 - nonzero.mean(0) / max(1, int(inside.sum())), 1 - alive.sum((2, 3)).to(nonzero.dtype).mean(0) / possible
    )


def explicit_sparsity(alpha: Float[Tensor, "B H T S"], causal: bool, window: int | None = None) -> Sparsity:
    """Of coefficients that are there as a matrix."""
    nonzero = (alpha != 0).detach()
    counts = nonzero.sum((2, 3)).to(wide_dtype(alpha))  # half precision cannot count that far
    return sparsity(tiles_with_any(nonzero), counts, *alpha.shape[2:], causal, window)


def tiles_with_any(tensor: Bool[Tensor, "*batch T S"]) -> Bool[Tensor, "*batch blocks tiles"]:
    """Whether a tile of `TILE` x `TILE` holds a True."""
    queries, keys = tensor.shape[-2:]
    padded = torch.nn.functional.pad(tensor, (0, -keys % TILE, 0, -queries % TILE))
    return padded.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).any(-1).any(-2)


def _check(query, key, value, coefficients, threshold, mask, causal, window, dropout, backend) -> None:
    if coefficients not in KINDS:
        raise ValueError(f"coefficients must be one of {', '.join(KINDS)}, got {coefficients!r}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "cpu" and query.device.type != "cpu":
        raise ValueError(f'backend="cpu" needs tensors on the CPU, got {query.device}')
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} heads do not share {key.shape[1]} key-value heads evenly")
    if not isinstance(threshold, Tensor) and not threshold >= 0:  # nan neither
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean (True: may be used), got {mask.dtype}")
    if mask is not None:
        torch.broadcast_shapes(mask.shape, (*query.shape[:3], key.shape[2]))
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window must be at least 1 and needs causal=True, got window={window}, causal={causal}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
