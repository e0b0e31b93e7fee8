"""How far a fast path may be from the reference, fixed by its dtype."""

import torch


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The largest error, relative to the largest expected value, is within the tolerance of the actual dtype."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.to(expected.dtype) - expected).abs().max()
    assert error <= TOLERANCE[actual.dtype] * expected.abs().max().clamp(min=1e-3), f"error {error:.2e}"


def bfloat16_grid(*shape: int, seed: int) -> torch.Tensor:
    """Random float64 numbers that bfloat16 holds exactly: one reference then serves every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().double()
