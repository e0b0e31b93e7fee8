"""Transfer between contexts against the reference: values and gradients, both forms, shared and per-head lambda."""

import pytest
import torch

from hf_sparsecoding.ops import absolute_transfer, aligned_transfer, reference, transferred_coefficients

from .tolerance import DTYPES, assert_close, bfloat16_grid


SHAPES = [(1, 1), (1, 7), (2, 3), (8, 1), (2, 13)]  # (contexts, tokens of each)


def operands(contexts: int, length: int, per_head: bool, dtype=torch.float64) -> list[torch.Tensor]:
    tokens = (contexts + 1) * length
    alpha = bfloat16_grid(2, 3, tokens, tokens, seed=0)
    values = bfloat16_grid(2, 3, tokens, 5, seed=1)
    weight = bfloat16_grid(3 if per_head else 1, contexts, seed=2)
    return [operand.to(dtype).requires_grad_() for operand in (alpha, values, weight)]


def received(alpha, values, weight, length, aligned):
    if aligned:
        return aligned_transfer(alpha, values, weight, length)
    return absolute_transfer(alpha @ values, weight, length)


def expected_received(alpha, values, weight, length, aligned):
    lifted = reference.context_transfer(alpha, weight, length, aligned)
    return ((lifted - alpha) @ values)[:, :, -length:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("contexts", "length"), SHAPES)
def test_outputs_and_gradients_equal_the_reference(contexts, length, aligned, per_head, dtype):
    exact, operands_ = operands(contexts, length, per_head), operands(contexts, length, per_head, dtype)
    expected, value = (f(*o, length, aligned) for f, o in ((expected_received, exact), (received, operands_)))
    assert_close(value, expected)
    cotangent = bfloat16_grid(*value.shape, seed=3)
    for gradient, wanted in zip(
        torch.autograd.grad(value, operands_, cotangent.to(dtype)),
        torch.autograd.grad(expected, exact, cotangent),
        strict=True,
    ):
        assert_close(gradient, wanted)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("contexts", "length"), SHAPES)
def test_coefficients_and_gradients_equal_the_reference(contexts, length, aligned, per_head):
    alpha, _, weight = operands(contexts, length, per_head)
    value = transferred_coefficients(alpha, weight, length, aligned)
    expected = (reference.context_transfer(alpha, weight, length, aligned) - alpha)[:, :, -length:]
    assert_close(value, expected)
    cotangent = bfloat16_grid(*value.shape, seed=3)
    for gradient, wanted in zip(
        torch.autograd.grad(value, [alpha, weight], cotangent),
        torch.autograd.grad(expected, [alpha, weight], cotangent),
        strict=True,
    ):
        assert_close(gradient, wanted)


def test_aligned_transfer_by_hand():
    """Two contexts of one token and a target: what context 0 does with itself, the target does with itself."""
    alpha = torch.zeros(1, 1, 3, 3)
    alpha[0, 0, 0, 0], alpha[0, 0, 1, 0], alpha[0, 0, 1, 1] = 2.0, 3.0, 5.0
    weight = torch.tensor([[10.0, 100.0]])
    moved = transferred_coefficients(alpha, weight, 1, aligned=True)
    # context 0 is two tokens away, context 1 one: its keys 0 and 1 become the target's keys 1 and 2
    assert moved[0, 0, 0].tolist() == [0.0, 300.0, 20.0 + 500.0]
    same_keys = transferred_coefficients(alpha, weight, 1, aligned=False)
    assert same_keys[0, 0, 0].tolist() == [20.0 + 300.0, 500.0, 0.0]


def test_tokens_that_are_no_contexts_are_refused():
    with pytest.raises(ValueError, match="10 tokens are not 2 contexts and a target of 3 tokens each"):
        absolute_transfer(torch.zeros(1, 1, 10, 2), torch.zeros(1, 2), 3)
