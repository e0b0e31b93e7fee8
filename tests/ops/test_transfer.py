"""Transfer on attention outputs against the reference, which transfers the coefficients themselves."""

import importlib

import jaxtyping
import pytest
import torch

from hf_sparsecoding.ops import context_sum, reference, transfer, transfer_lags

from .tolerance import DTYPES, assert_close, bfloat16_grid


BATCH, HEADS, DIM = 2, 3, 4
LENGTHS = (1, 2, 7, 65)
WEIGHT_SHAPES = [(1, 1), (1, HEADS), (BATCH, 1), (BATCH, HEADS)]

module = importlib.import_module(
    "hf_sparsecoding.ops.transfer"
)  # the package's attribute of that name is the function


def make_ages(kind: str, past: int, length: int) -> torch.Tensor | None:
    """Ages of the `length` tokens after `past`."""
    index = torch.arange(past + length)
    if kind == "one document":
        return None
    if kind == "packed":  # documents of 5 tokens, the same in all rows
        return (index % 5)[None, past:]
    return torch.stack([index, index - 4])[:, past:]  # "left-padded": the second row begins with 4 padding tokens


def make_inputs(total, num_contexts, weight_shape=(1, HEADS), target_shape=None):
    """psi, weight and target (or None) on a grid that every dtype holds exactly."""
    psi = bfloat16_grid(BATCH, total, HEADS, DIM, seed=0)
    weight = bfloat16_grid(*weight_shape, num_contexts, seed=1)
    return [psi, weight, None if target_shape is None else bfloat16_grid(*target_shape, seed=2)]


def run(function, inputs, dtype=torch.float64, *, zero_if_unused=False):
    """Value, and gradients of all inputs, under a cotangent that is the same for every function."""
    inputs = [None if value is None else value.to(dtype).requires_grad_() for value in inputs]
    value = function(*inputs)
    cotangent = bfloat16_grid(*value.shape, seed=3).to(value.dtype)
    leaves = [leaf for leaf in inputs if leaf is not None]
    return value, torch.autograd.grad(value, leaves, cotangent, materialize_grads=zero_if_unused)


def reference_transfer(rows, past=0):
    """With alpha the identity, psi is the attention outputs."""

    def function(psi, weight, target=None):
        alpha = torch.eye(psi.shape[1], dtype=psi.dtype).expand(BATCH, HEADS, -1, -1)
        return reference.transfer(alpha, psi.transpose(1, 2), weight, rows, target, past)

    return function


def lag_transfer(lags, ages, past=0):
    def function(psi, weight, target=None):
        return transfer_lags(
            psi[:, past:], weight, lags, target=target, age=ages, history=psi[:, :past] if past else None
        )

    return function


def row_transfer(rows, past=0):
    def function(psi, weight, target=None):
        return transfer(psi[:, past:], weight, rows, target=target, history=psi[:, :past] if past else None)

    return function


def assert_equals_reference(fast, oracle, inputs, dtypes=DTYPES):
    expected, expected_gradients = run(oracle, inputs, zero_if_unused=True)
    for dtype in dtypes:
        value, gradients = run(fast, inputs, dtype)
        assert value.dtype == dtype
        assert_close(value, expected)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("age_kind", ["one document", "packed", "left-padded"])
@pytest.mark.parametrize("lags", [(1, 2, 3), (4,), (1, 6, 2)])
@pytest.mark.parametrize("length", LENGTHS)
def test_lags_equal_reference(length, lags, age_kind):
    ages = make_ages(age_kind, 0, length)
    rows = reference.context_rows(length, lags, ages)
    inputs = make_inputs(length, len(lags), target_shape=(1, HEADS))
    assert_equals_reference(lag_transfer(lags, ages), reference_transfer(rows), inputs)


@pytest.mark.parametrize("weight_shape", WEIGHT_SHAPES)
@pytest.mark.parametrize("target_shape", [None, *WEIGHT_SHAPES])
def test_weights_per_head_and_row_equal_reference(weight_shape, target_shape):
    lags, ages = (1, 3), make_ages("left-padded", 0, 7)
    rows = reference.context_rows(7, lags, ages)
    inputs = make_inputs(7, 2, weight_shape, target_shape)
    assert_equals_reference(lag_transfer(lags, ages), reference_transfer(rows), inputs)
    assert_equals_reference(row_transfer(rows), reference_transfer(rows), inputs)


@pytest.mark.parametrize("rows_per_block", [1, 2, 3])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("age_kind", ["one document", "packed", "left-padded"])
def test_block_boundaries(monkeypatch, rows_per_block, past, age_kind):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", rows_per_block * BATCH * HEADS * DIM)
    lags, ages = (1, 2, 5), make_ages(age_kind, past, 7)
    rows = reference.context_rows(7, lags, ages, past)
    inputs = make_inputs(past + 7, 3, target_shape=(1, HEADS))
    assert_equals_reference(lag_transfer(lags, ages, past), reference_transfer(rows, past), inputs, [torch.float64])


def test_more_contexts_than_tokens():
    lags = tuple(range(1, 10))
    rows = reference.context_rows(2, lags, None)
    assert_equals_reference(lag_transfer(lags, None), reference_transfer(rows), make_inputs(2, 9))


def test_without_contexts_rescales_heads():
    psi, _, target = make_inputs(7, 1, target_shape=(1, HEADS))
    for function in (
        lambda psi, target: transfer_lags(psi, None, (), target=target),
        lambda psi, target: transfer(psi, None, None, target=target),
    ):
        assert_equals_reference(function, lambda psi, target: psi * (1 + target)[..., None], [psi, target])


@pytest.mark.parametrize("compiling", [False, True])
def test_a_small_target_is_not_rounded_away_in_half_precision(monkeypatch, compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    outputs = torch.randn(2, 64, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    small = torch.full((1, 3), 0.003)
    for lifted in (transfer_lags(outputs, None, (), target=small), transfer(outputs, None, None, target=small)):
        share = ((lifted - outputs).double() * outputs).sum() / outputs.double().square().sum()
        assert share == pytest.approx(0.003, rel=0.1)


def test_transfer_of_outputs_is_transfer_of_coefficients():
    lags = (1, 2)
    psi, weight, _ = make_inputs(7, 2)
    alpha = bfloat16_grid(BATCH, HEADS, 7, 7, seed=4).tril()

    def on_outputs(alpha, psi, weight):
        return transfer_lags((alpha @ psi.transpose(1, 2)).transpose(1, 2), weight, lags)

    def on_coefficients(alpha, psi, weight):
        return reference.transfer(alpha, psi.transpose(1, 2), weight, reference.context_rows(7, lags, None))

    assert_equals_reference(on_outputs, on_coefficients, [alpha, psi, weight], [torch.float64])


SEGMENTS = [[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("past", [0, 1, 4])
def test_segments_equal_reference(past):
    ages = list(range(7))
    rows = torch.stack([reference.segment_rows(labels, ages, 2) for labels in SEGMENTS])[:, past:]
    assert (rows >= 0).any()
    inputs = make_inputs(7, 2, target_shape=(1, HEADS))
    assert_equals_reference(row_transfer(rows, past), reference_transfer(rows, past), inputs)


@pytest.mark.parametrize("age_kind", ["one document", "packed", "left-padded"])
def test_decoding_step_by_step_equals_whole_sequence(age_kind):
    lags, length = (1, 3, 8), 12
    psi, weight, target = make_inputs(length, 3, target_shape=(1, HEADS))
    ages = make_ages(age_kind, 0, length)
    whole = transfer_lags(psi, weight, lags, target=target, age=ages)
    for step in range(length):
        history = psi[:, max(step - max(lags), 0) : step]
        one = transfer_lags(
            psi[:, step : step + 1],
            weight,
            lags,
            target=target,
            age=None if ages is None else ages[:, step : step + 1],
            history=history,
        )
        torch.testing.assert_close(one, whole[:, step : step + 1])


def test_without_any_context_the_outputs_stay_as_they_are():
    psi, weight, _ = make_inputs(7, 2)
    rows = torch.full((1, 7, 2), -1)
    assert torch.equal(transfer(psi, weight, rows), psi)
    assert not context_sum(psi, weight, rows).any()
    assert torch.equal(transfer_lags(psi, weight, (1, 2), age=torch.full((1, 7), -1)), psi)


def test_gradcheck():
    lags, ages = (1, 2), make_ages("left-padded", 2, 5)
    rows = reference.context_rows(5, lags, ages, 2)
    inputs = [value.requires_grad_() for value in make_inputs(7, 2, target_shape=(1, HEADS))]
    assert torch.autograd.gradcheck(lag_transfer(lags, ages, past=2), inputs)
    assert torch.autograd.gradcheck(row_transfer(rows, past=2), inputs)


@pytest.mark.parametrize("frozen", ["psi", "weight"])
def test_gradients_only_where_asked_for(frozen):
    psi, weight, _ = make_inputs(7, 2)
    psi.requires_grad_(frozen != "psi")
    weight.requires_grad_(frozen != "weight")
    rows = reference.context_rows(7, (1, 2), None)
    (transfer_lags(psi, weight, (1, 2)) + context_sum(psi, weight, rows)).sum().backward()
    assert (psi.grad is None) == (frozen == "psi")
    assert (weight.grad is None) == (frozen == "weight")


def test_shapes_are_checked():
    psi, weight, _ = make_inputs(7, 2)
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        transfer_lags(psi, weight[0], (1, 2))


@pytest.mark.parametrize(("age_kind", "past"), [("one document", 0), ("left-padded", 3)])
def test_compiled_equals_eager(monkeypatch, age_kind, past):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of annotations
    lags, ages = (1, 2, 9), make_ages(age_kind, past, 7)
    rows = reference.context_rows(7, lags, ages, past)
    inputs = make_inputs(past + 7, 3, target_shape=(1, HEADS))

    def both(psi, weight, target):
        return lag_transfer(lags, ages, past)(psi, weight, target) + row_transfer(rows, past)(psi, weight)

    value, gradients = run(both, inputs)
    compiled_value, compiled_gradients = run(torch.compile(both, fullgraph=True, backend="aot_eager"), inputs)
    torch.testing.assert_close(compiled_value, value)
    torch.testing.assert_close(compiled_gradients, gradients)
