"""In which type sums and scores are computed."""

import torch
from torch import Tensor


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """float32 at least: half precision rounds a score across a threshold, and cannot count far."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
