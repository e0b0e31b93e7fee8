"""HYLA and the normalisations against the reference: values and gradients."""

from functools import partial

import pytest
import torch

from hf_sparsecoding.ops import (
    hyla,
    normalised_soft_threshold,
    normalised_threshold,
    reference,
    rms_over_heads,
    rms_over_keys,
    rms_per_head,
)
from hf_sparsecoding.ops.mixers import EPSILON

from .tolerance import DTYPES, assert_close, bfloat16_grid


def assert_same(function, expected, operands):
    value, wanted = function(*operands), expected(*operands)
    assert_close(value, wanted)
    cotangent = bfloat16_grid(*value.shape, seed=9)
    for gradient, exact in zip(
        torch.autograd.grad(value, operands, cotangent), torch.autograd.grad(wanted, operands, cotangent), strict=True
    ):
        assert_close(gradient, exact)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 9)])
def test_hyla(queries, keys):
    alpha = bfloat16_grid(2, 3, queries, keys, seed=0).requires_grad_()
    values = bfloat16_grid(2, 3, keys, 5, seed=1).requires_grad_()
    assert_same(hyla, reference.hyla, [alpha, values])


@pytest.mark.parametrize(("function", "dim"), [(rms_over_heads, 1), (rms_over_keys, -1), (rms_per_head, -1)])
def test_normalisations(function, dim):
    scores = bfloat16_grid(2, 3, 7, 5, seed=0).requires_grad_()
    assert_same(function, lambda tensor: reference.rms_normalised(tensor, dim, EPSILON), [scores])
    size = function(scores).square().mean(dim)
    assert_close(size, torch.ones_like(size) - EPSILON / (scores.square().mean(dim) + EPSILON))


def test_mean_over_the_keys_that_count():
    scores = bfloat16_grid(2, 3, 4, 7, seed=0)
    scores[:, :, 1, 5:] = scores[:, :, 2, 1:] = 0
    normalised = rms_over_keys(scores, count=torch.tensor([[7], [5], [1], [7]]))
    for row, keys in enumerate((7, 5, 1, 7)):
        expected = reference.rms_normalised(scores[:, :, row, :keys], -1, EPSILON)
        assert_close(normalised[:, :, row, :keys], expected)


@pytest.mark.parametrize("function", [rms_over_heads, rms_over_keys, rms_per_head])
def test_zeros_stay_zeros(function):
    zeros = torch.zeros(2, 3, 4, 5, requires_grad=True)
    out = function(zeros)
    assert (out == 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), zeros)
    assert gradient.isfinite().all()


def normalised_then_thresholded(scores, threshold, over="heads"):
    dim = {"heads": 1, "keys": -1}[over]
    return reference.coefficients(
        "soft_threshold", reference.rms_normalised(scores, dim, EPSILON), threshold=threshold
    )


# one key alone has a gradient of eps: there is nothing to compare
SIZES = [("heads", 1, 1), ("heads", 7, 7), ("heads", 3, 65), ("keys", 1, 2), ("keys", 7, 7), ("keys", 3, 65)]


@pytest.mark.parametrize("block", [1, 100, 1 << 18])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize(("over", "queries", "keys"), SIZES)
def test_normalised_threshold(over, queries, keys, threshold, block, monkeypatch):
    monkeypatch.setattr(normalised_threshold, "BLOCK_ELEMENTS", block)
    scores = bfloat16_grid(5, 3, queries, keys, seed=0).requires_grad_()
    assert_same(
        lambda s: normalised_soft_threshold(s, threshold, over),
        lambda s: normalised_then_thresholded(s, threshold, over),
        [scores],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalised_threshold_in_every_dtype(dtype):
    exact = bfloat16_grid(2, 4, 7, 7, seed=0)
    value = normalised_soft_threshold(exact.to(dtype), 0.3, "heads")
    assert value.dtype == dtype
    assert_close(value, normalised_then_thresholded(exact, 0.3))


def test_normalised_threshold_of_zeros_and_of_a_learned_xi():
    zeros = torch.zeros(2, 3, 4, 5, requires_grad=True)
    out = normalised_soft_threshold(zeros, 0.1, "heads")
    (gradient,) = torch.autograd.grad(out.sum(), zeros)
    assert (out == 0).all()
    assert (gradient == 0).all()
    scores = bfloat16_grid(2, 3, 4, 5, seed=0).requires_grad_()
    xi = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for over in ("heads", "keys"):
        assert_same(
            partial(normalised_soft_threshold, over=over),
            partial(normalised_then_thresholded, over=over),
            [scores, xi],
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_half_precision_scores(dtype):
    """Their squares leave the range of float16."""
    scores = torch.full((1, 3, 2, 2), 300.0, dtype=dtype)
    torch.testing.assert_close(rms_over_heads(scores), torch.ones_like(scores))
    value = normalised_soft_threshold(scores, 0.3, "heads")
    torch.testing.assert_close(value, torch.full_like(scores, 0.7), rtol=0.01, atol=0)


def test_no_problems_at_all():
    assert normalised_soft_threshold(torch.zeros(0, 3, 4, 4), 0.3, "heads").shape == (0, 3, 4, 4)
