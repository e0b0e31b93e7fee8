"""Transfer between contexts against the reference: values and gradients, both forms, shared and per-head lambda."""

import jaxtyping
import pytest
import torch

from hf_sparsecoding.ops import absolute_transfer, aligned_decode, reference, transferred_coefficients

from .tolerance import assert_close, bfloat16_grid


SHAPES = [(1, 1), (1, 7), (2, 3), (8, 1), (2, 13)]  # (contexts, tokens of each)


def operands(contexts: int, length: int, per_head: bool, dtype=torch.float64) -> list[torch.Tensor]:
    tokens = (contexts + 1) * length
    alpha = bfloat16_grid(2, 3, tokens, tokens, seed=0)
    values = bfloat16_grid(2, 3, tokens, 5, seed=1)
    weight = bfloat16_grid(3 if per_head else 1, contexts, seed=2)
    return [operand.to(dtype).requires_grad_() for operand in (alpha, values, weight)]


def decoded(alpha, values, weight, length, aligned):
    if aligned:
        return aligned_decode(alpha, values, weight, length)
    out = alpha @ values
    return torch.cat([out[:, :, :-length], out[:, :, -length:] + absolute_transfer(out, weight, length)], 2)


def expected_decoded(alpha, values, weight, length, aligned):
    return reference.context_transfer(alpha, weight, length, aligned) @ values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("contexts", "length"), SHAPES)
def test_outputs_and_gradients_equal_the_reference(contexts, length, aligned, per_head, dtype):
    exact, operands_ = operands(contexts, length, per_head), operands(contexts, length, per_head, dtype)
    expected, value = (f(*o, length, aligned) for f, o in ((expected_decoded, exact), (decoded, operands_)))
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
    alpha, values, weight = torch.zeros(1, 1, 10, 10), torch.zeros(1, 1, 10, 2), torch.zeros(1, 2)
    for call in (
        lambda: absolute_transfer(values, weight, 3),
        lambda: aligned_decode(alpha, values, weight, 3),
        lambda: transferred_coefficients(alpha, weight, 3, aligned=True),
    ):
        with pytest.raises(ValueError, match="10 tokens are not 2 contexts and a target of 3 tokens each"):
            call()


@pytest.mark.slow
def test_aligned_decoding_compiles():
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        alpha, values, weight = operands(2, 3, per_head=True)
        results = []
        for function in (aligned_decode, torch.compile(aligned_decode, fullgraph=True)):
            inputs = [tensor.clone().requires_grad_() for tensor in (alpha, values, weight)]
            out = function(*inputs, 3)
            results.append((out, torch.autograd.grad((out * out.detach().cos()).sum(), inputs)))
        (expected, gradients), (actual, compiled) = results
        assert_close(actual, expected)
        for one, other in zip(compiled, gradients, strict=True):
            assert_close(one, other)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_aligned_decoding_under_autocast():
    """As with torch's own products: the output is bfloat16, the gradients have their operands' types."""
    exact = operands(2, 7, per_head=True, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = aligned_decode(*exact, 7)
    expected = expected_decoded(*exact, 7, aligned=True)
    assert value.dtype == torch.bfloat16
    torch.testing.assert_close(value.float(), expected, rtol=0.05, atol=0.1)
    gradients = torch.autograd.grad(value.float().square().sum(), exact)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, wanted, rtol=0.1, atol=0.02 * wanted.abs().max().item())
