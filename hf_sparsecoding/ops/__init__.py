"""Tensor maths of sparse-coding attention: coefficients, and their transfer between contexts."""

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
from .transfer import context_sum, transfer, transfer_lags


__all__ = [
    "COEFFICIENTS",
    "context_sum",
    "linear",
    "prox",
    "relu",
    "soft_threshold",
    "softmax",
    "thresholded_softmax",
    "top_k",
    "transfer",
    "transfer_lags",
]
