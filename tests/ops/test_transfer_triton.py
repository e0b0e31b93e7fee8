"""The Triton kernels of the transfer along lags against torch's operations. Without a GPU: in Triton's interpreter."""

import pytest
import torch


pytest.importorskip("triton")

from triton import knobs

from hf_sparsecoding.ops import attention_triton, transfer_lags
from hf_sparsecoding.ops.transfer_triton import transfer_lags_triton

from .tolerance import assert_close, bfloat16_grid


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not knobs.runtime.interpret:
    raise RuntimeError("without a GPU these tests need TRITON_INTERPRET=1 before triton is imported")


def check(length, past, lags, dtype=torch.float32, heads=3, size=5, weight_shape=None, target=True, ages=None):
    """Values and gradients against `transfer_lags` in float64."""
    outputs, history = bfloat16_grid(2, length, heads, size, seed=0), bfloat16_grid(2, past, heads, size, seed=1)
    weight = bfloat16_grid(*(weight_shape or (1, heads)), len(lags), seed=2)
    exact = [outputs, history, weight, *([bfloat16_grid(1, heads, seed=3)] if target else [])]
    tested = [t.to(DEVICE, dtype if n < 2 else torch.float32).requires_grad_() for n, t in enumerate(exact)]
    exact = [tensor.requires_grad_() for tensor in exact]

    def run(function, tensors, ages):
        outputs, history, weight, *target = tensors
        return function(outputs, history, weight, target[0] if target else None, ages)

    wanted = run(lambda o, h, w, t, a: transfer_lags(o, w, lags, target=t, age=a, history=h), exact, ages)
    ours = run(
        lambda o, h, w, t, a: transfer_lags_triton(torch.cat([h, o], 1), w, lags, t, a, length),
        tested,
        None if ages is None else ages.to(DEVICE),
    )
    cotangent = bfloat16_grid(*wanted.shape, seed=4)
    gradients = torch.autograd.grad(ours, tested, cotangent.to(DEVICE, dtype))
    expected = torch.autograd.grad(wanted, exact, cotangent)
    for actual, value in zip((ours, *gradients), (wanted, *expected), strict=True):
        if value.numel():  # there may be no history
            assert_close(actual.detach().cpu(), value.detach())


@pytest.mark.parametrize("length", [1, 7, 65])
@pytest.mark.parametrize("past", [0, 3])
def test_lengths(length, past):
    check(length, past, (1, 64, 2))


@pytest.mark.slow
@pytest.mark.parametrize("past", [0, 70])
def test_long(past):
    check(1000, past, (1, 2, 500), ages=(torch.arange(past, past + 1000) % 300)[None])


@pytest.mark.parametrize("weight_shape", [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("target", [False, True])
def test_shared_and_own_weights(weight_shape, target):
    check(7, 2, (3, 1), weight_shape=weight_shape, target=target)


@pytest.mark.parametrize("rows", [1, 2])
def test_documents(rows):
    check(70, 3, (1, 5), ages=(torch.arange(rows * 70).view(rows, 70) % 9))


def test_many_channels_in_half_precision():
    check(7, 1, (2, 4), torch.bfloat16, heads=3, size=33)


def test_what_is_refused(monkeypatch):
    full, weight = torch.zeros(1, 3, 1, 2, dtype=torch.float64, device=DEVICE), torch.zeros(1, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="take float32, bfloat16 or float16, got torch.float64"):
        transfer_lags_triton(full, weight, (1,), None, None, 3)
    monkeypatch.setattr(attention_triton, "INTERPRETED", False)
    with pytest.raises(ValueError, match="need tensors on a GPU, got cpu"):
        transfer_lags_triton(full.cpu().float(), weight.cpu(), (1,), None, None, 3)


def test_second_derivative_is_refused():
    full = torch.ones(1, 3, 1, 2, device=DEVICE, requires_grad=True)
    lifted = transfer_lags_triton(full, torch.ones(1, 1, 1, device=DEVICE), (1,), None, None, 3)
    (gradient,) = torch.autograd.grad(lifted.square().sum(), full, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()
