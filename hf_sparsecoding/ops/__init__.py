"""Tensor maths of sparse-coding attention: coefficients, and their transfer between contexts."""

from .attention import Sparsity, sparse_attention
from .coefficients import (
    COEFFICIENTS,
    linear,
    prox,
    relu,
    soft_threshold,
    softmax,
    thresholded_softmax,
    top_k,
)
from .contexts import absolute_transfer, aligned_decode, transferred_coefficients
from .mixers import hyla, rms_over_heads, rms_over_keys, rms_per_head
from .normalised_threshold import normalised_soft_threshold
from .transfer import context_sum, transfer, transfer_lags


__all__ = [
    "COEFFICIENTS",
    "Sparsity",
    "absolute_transfer",
    "aligned_decode",
    "context_sum",
    "hyla",
    "linear",
    "normalised_soft_threshold",
    "prox",
    "relu",
    "rms_over_heads",
    "rms_over_keys",
    "rms_per_head",
    "soft_threshold",
    "softmax",
    "sparse_attention",
    "thresholded_softmax",
    "top_k",
    "transfer",
    "transfer_lags",
    "transferred_coefficients",
]
