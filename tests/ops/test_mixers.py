"""HYLA and the normalisations against the reference: values and gradients."""

import pytest
import torch

from hf_sparsecoding.ops import hyla, reference, rms_over_heads, rms_over_keys, rms_per_head
from hf_sparsecoding.ops.mixers import EPSILON

from .tolerance import assert_close, bfloat16_grid


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


@pytest.mark.parametrize("function", [rms_over_heads, rms_over_keys, rms_per_head])
def test_zeros_stay_zeros(function):
    zeros = torch.zeros(2, 3, 4, 5, requires_grad=True)
    out = function(zeros)
    assert (out == 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), zeros)
    assert gradient.isfinite().all()
