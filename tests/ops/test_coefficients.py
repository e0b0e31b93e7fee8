"""Coefficients against the reference: values and gradients, every mask, odd lengths, three dtypes."""

import jaxtyping
import pytest
import torch

from hf_sparsecoding.ops import COEFFICIENTS, prox, reference, soft_threshold, softmax, thresholded_softmax, top_k

from .tolerance import DTYPES, assert_close, bfloat16_grid


BATCH, HEADS = 2, 2
LENGTHS = (1, 2, 7, 65)
OPTIONS = {
    "softmax": {},
    "soft_threshold": {"threshold": 0.25},
    "thresholded_softmax": {"threshold": 0.0625},
    "top_k": {"k": 3},
    "relu": {},
    "linear": {},
}


def make_mask(kind: str, length: int) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if kind == "none":
        return None
    if kind == "causal":
        return causal
    if kind == "random":  # rows without any key among them
        return torch.rand(BATCH, 1, length, length, generator=generator) < 0.4
    padding = torch.arange(length) >= length // 2
    return causal & padding  # "left-padded": the padding's own rows are fully masked


def make_scores(length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Distinct in every row, so that top-k is unique; in steps of 1/16, so that some lie on the threshold."""
    generator = torch.Generator().manual_seed(length)
    ranks = torch.rand(BATCH, HEADS, length, length, generator=generator).argsort(-1)
    return ((ranks - length // 2).double() / 16).to(dtype).requires_grad_()


def value_and_gradients(function, inputs, cotangent):
    value = function(*inputs)
    return value, torch.autograd.grad(value, inputs, cotangent.to(value.dtype))


def test_every_coefficient_function_is_tested():
    assert set(OPTIONS) == set(COEFFICIENTS)


@pytest.mark.parametrize("mask_kind", ["none", "causal", "random", "left-padded"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_equals_reference(kind, length, mask_kind):
    mask, options = make_mask(mask_kind, length), OPTIONS[kind]
    cotangent = bfloat16_grid(BATCH, HEADS, length, length, seed=1)
    expected, expected_gradients = value_and_gradients(
        lambda s: reference.coefficients(kind, s, mask, **options), [make_scores(length)], cotangent
    )
    for dtype in DTYPES:
        value, gradients = value_and_gradients(
            lambda s: COEFFICIENTS[kind](s, **options, mask=mask), [make_scores(length, dtype)], cotangent
        )
        assert value.dtype == dtype
        assert_close(value, expected)
        assert_close(gradients[0], expected_gradients[0])
        if mask is not None:
            assert not value.detach()[~mask.expand(value.shape)].any()


@pytest.mark.parametrize("kind", ["soft_threshold", "thresholded_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threshold_per_head_equals_reference(kind, dtype):
    mask = make_mask("random", 7)
    threshold = torch.tensor([0.0, 0.125], dtype=torch.float64, requires_grad=True)
    cotangent = bfloat16_grid(BATCH, HEADS, 7, 7, seed=1)
    expected, expected_gradients = value_and_gradients(
        lambda s, xi: reference.coefficients(kind, s, mask, xi[:, None, None]), [make_scores(7), threshold], cotangent
    )
    value, gradients = value_and_gradients(
        lambda s, xi: COEFFICIENTS[kind](s, xi[:, None, None], mask),
        [make_scores(7, dtype), threshold.detach().to(dtype).requires_grad_()],
        cotangent,
    )
    assert_close(value, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("function", [soft_threshold, thresholded_softmax])
def test_gradcheck_with_threshold_per_head(function):
    scores = make_scores(5)
    threshold = torch.tensor([0.03, 0.1], dtype=torch.float64, requires_grad=True)
    mask = make_mask("causal", 5)
    assert torch.autograd.gradcheck(lambda s, xi: function(s, xi[:, None, None], mask), (scores, threshold))


@pytest.mark.parametrize("threshold", [0.3, torch.tensor(0.3, dtype=torch.float64)])
def test_prox_is_the_formula(threshold):
    values = [-2.0, -0.3, -0.1, 0.0, 0.1, 0.3, 2.0]
    expected = torch.tensor([reference.prox(v, 0.3) for v in values], dtype=torch.float64)
    torch.testing.assert_close(prox(torch.tensor(values, dtype=torch.float64), threshold), expected)


def test_zero_threshold_changes_nothing():
    scores = make_scores(7, torch.float32)
    assert torch.equal(soft_threshold(scores, 0.0), scores)
    assert torch.equal(thresholded_softmax(scores, 0.0), softmax(scores))


def test_thresholded_softmax_rounds_after_the_threshold():
    scores = torch.zeros(3, 3, dtype=torch.bfloat16)  # coefficients of 1/3, which bfloat16 rounds up to 0.33398
    assert not thresholded_softmax(scores, 0.3335).any()
    torch.testing.assert_close(thresholded_softmax(scores, 0.33), torch.full_like(scores, 1 / 3 - 0.33))


@pytest.mark.parametrize("kind", OPTIONS)
def test_extreme_scores_stay_finite(kind):
    scores = torch.tensor([[3e38, -3e38, 0.0]], requires_grad=True)
    value = COEFFICIENTS[kind](scores, **OPTIONS[kind], mask=torch.tensor([[True, False, True]]))
    value.sum().backward()
    assert value.isfinite().all()
    assert scores.grad.isfinite().all()


def test_top_k_keeps_at_most_k():
    alpha = top_k(make_scores(7, torch.float32), 3)
    assert ((alpha > 0).sum(-1) == 3).all()
    torch.testing.assert_close(alpha.sum(-1), torch.ones_like(alpha[..., 0]))


@pytest.mark.parametrize("k", [0, -1])
def test_top_k_refuses_k_below_one(k):
    with pytest.raises(ValueError, match=f"k must be at least 1, got {k}"):
        top_k(torch.zeros(2, 2), k)


@pytest.mark.parametrize("kind", OPTIONS)
def test_compiled_equals_eager(monkeypatch, kind):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of annotations
    mask, cotangent = make_mask("random", 7), bfloat16_grid(BATCH, HEADS, 7, 7, seed=1)

    def run(scores):
        return COEFFICIENTS[kind](scores, **OPTIONS[kind], mask=mask)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    value, gradients = value_and_gradients(run, [make_scores(7, torch.float32)], cotangent)
    compiled_value, compiled_gradients = value_and_gradients(compiled, [make_scores(7, torch.float32)], cotangent)
    torch.testing.assert_close(compiled_value, value)
    torch.testing.assert_close(compiled_gradients, gradients)
