"""The Triton kernels against the textbook: values and gradients. Without a GPU they run in Triton's interpreter."""

import contextlib
from unittest import mock

import jaxtyping
import pytest
import torch


pytest.importorskip("triton")

from triton import knobs

from hf_sparsecoding.ops import attention, attention_triton
from hf_sparsecoding.ops.attention import allowed_keys, sparse_attention
from hf_sparsecoding.ops.triton import tuning
from hf_sparsecoding.ops.triton.backward import backward_keys, backward_queries
from hf_sparsecoding.ops.triton.forward import forward

from .test_attention import KINDS, operands, textbook, with_dead_tiles
from .tolerance import assert_close, bfloat16_grid


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not knobs.runtime.interpret:
    raise RuntimeError(
        "without a GPU these tests need TRITON_INTERPRET=1 in the environment before triton is imported"
    )


def check(kind, query, key, value, dtype=torch.float32, mask=None, causal=False, window=None, **options):
    """Values and gradients, those of a threshold per head too, against the textbook's in float64."""
    xi = KINDS[kind] * torch.linspace(0.5, 1.5, query.shape[1], dtype=torch.float64)
    exact = [tensor.clone().requires_grad_() for tensor in (query, key, value, xi)]
    allowed = allowed_keys(query.shape[2], key.shape[2], mask, causal, window)
    wanted = textbook(*exact, kind, allowed, options.get("scale"))
    tested = [tensor.to(DEVICE, dtype).requires_grad_() for tensor in (query, key, value)]
    tested.append(xi.to(DEVICE, torch.float32).requires_grad_())
    output = attend(
        kind, *tested, mask=None if mask is None else mask.to(DEVICE), causal=causal, window=window, **options
    )
    assert output.dtype == dtype
    close(output, wanted)
    cotangent = bfloat16_grid(*wanted.shape, seed=9)
    gradients = torch.autograd.grad(output, tested, cotangent.to(DEVICE, dtype))
    for gradient, expected in zip(gradients, torch.autograd.grad(wanted, exact, cotangent), strict=True):
        close(gradient.to(dtype), expected)  # the threshold's is a sum of rounded products


def attend(kind, query, key, value, xi, **options):
    return sparse_attention(query, key, value, coefficients=kind, threshold=xi, backend="triton", **options)


def close(actual, expected):
    actual = actual.cpu()
    assert_close(actual.bfloat16() if actual.dtype == torch.float16 else actual, expected.detach())


SIZES = [(1, 1, False), (1, 7, True), (7, 1, False), (7, 65, True), (65, 7, True), (65, 65, False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys", "causal"), SIZES)
def test_sizes(kind, queries, keys, causal):
    check(kind, *operands(1, 2, 1, queries, keys), causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 7, 65, 130])
@pytest.mark.parametrize("keys", [1, 7, 65, 200])
def test_all_sizes(kind, queries, keys, causal):
    check(kind, *operands(1, 2, 1, queries, keys), causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(1000, 1000), (1, 1000), (65, 1000), (1000, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_long(kind, queries, keys, causal):
    check(kind, *operands(1, 1, 1, queries, keys), causal=causal)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind, dtype):
    check(kind, *operands(1, 2, 1, 7, 40), dtype=dtype, causal=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "groups", "size", "value_size"), [(4, 1, 17, 1), (6, 3, 1, 20)])
def test_grouped_queries_and_odd_head_sizes(kind, heads, groups, size, value_size):
    check(kind, *operands(2, heads, groups, 3, 5, size, value_size), causal=True, scale=0.7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_negative_scale(kind):
    check(kind, *operands(1, 2, 1, 5, 7), scale=-0.7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 40, 1000])
def test_windows(kind, window):
    check(kind, *operands(1, 1, 1, 20, 160), causal=True, window=window)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 2, 7, 9), (2, 1, 1, 9), (7, 9), (9,)])
def test_masks_of_every_shape_also_with_rows_that_allow_nothing(kind, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[..., 0] = False
    if len(shape) == 4:
        mask[0, :, 0] = False
    check(kind, *operands(2, 2, 1, 7, 9), mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_with_causality_and_a_window(kind):
    mask = torch.rand((1, 1, 7, 70), generator=torch.Generator().manual_seed(0)) < 0.6
    check(kind, *operands(1, 2, 1, 7, 70), mask=mask, causal=True, window=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 2, 70, 130), (2, 1, 1, 130), (1, 1, 70, 130)])
@pytest.mark.parametrize("window", [None, 5, 70])
def test_masks_over_many_tiles(kind, shape, window):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[..., 64:100] = False
    check(kind, *operands(2, 2, 1, 70, 130), mask=mask, causal=True, window=window)


@pytest.mark.parametrize("kind", KINDS)
def test_dead_tiles_are_found_and_change_nothing(kind):
    alive = torch.tensor([[1, 0], [0, 0]], dtype=torch.bool)
    tensors = [tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in with_dead_tiles(alive)]
    # a softmax spreads over the one tile of high scores, or over both
    options = {"coefficients": kind, "threshold": 0.5 if kind == "soft_threshold" else 0.006, "scale": 1.0}
    results, gradients = {}, {}
    for backend in ("eager", "triton"):
        # a softmax over all but equal scores cancels: float32 is too coarse to say what its gradients are
        operands = [tensor.double() for tensor in tensors] if backend == "eager" else tensors
        results[backend], found = sparse_attention(*operands, backend=backend, return_sparsity=True, **options)
        gradients[backend] = torch.autograd.grad(results[backend].square().sum(), tensors)
        assert found.tiles.tolist() == [1 - 1 / 4]
        assert found.elements.tolist() == pytest.approx([1 - 1 / 4])
    close(results["triton"], results["eager"])
    for ours, wanted in zip(gradients["triton"], gradients["eager"], strict=True):
        assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max() + 3e-7


@pytest.mark.parametrize("kind", KINDS)
def test_sparsity_is_that_of_the_explicit_coefficients(kind):
    query, key, value = (tensor.to(DEVICE, torch.float32) for tensor in operands(1, 2, 1, 70, 135))
    options = {"coefficients": kind, "threshold": 3 * KINDS[kind], "causal": True, "return_sparsity": True}
    _, ours = sparse_attention(query, key, value, backend="triton", **options)
    _, wanted = sparse_attention(query, key, value, backend="eager", **options)
    torch.testing.assert_close(ours.elements, wanted.elements)
    torch.testing.assert_close(ours.tiles, wanted.tiles)


@contextlib.contextmanager
def poisoned_allocations():
    """Memory that nobody has written holds nan, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_all_outputs_are_written(kind, masked):
    mask = None
    if masked:
        mask = torch.ones(70, dtype=torch.bool)
        mask[:66] = False
    with poisoned_allocations():
        assert torch.empty(3, device=DEVICE).isnan().all()
        check(kind, *operands(1, 2, 1, 3, 70), mask=mask, causal=True)
        check(kind, *operands(1, 1, 1, 70, 3), causal=True)


def surrounded(tensor):
    """The same numbers in the middle of a larger tensor of nan."""
    larger = torch.full([size + 4 for size in tensor.shape], torch.nan, dtype=tensor.dtype, device=tensor.device)
    inner = larger[tuple(slice(2, size + 2) for size in tensor.shape)]
    inner.copy_(tensor)
    return inner


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_the_operands_is_read(kind):
    tensors = [tensor.to(DEVICE, torch.float32) for tensor in operands(1, 2, 1, 5, 7)]
    xi = torch.tensor(KINDS[kind], device=DEVICE)
    plain, inside = ([change(tensor).requires_grad_() for tensor in tensors] for change in (torch.clone, surrounded))
    outputs = [attend(kind, *some, xi, causal=True) for some in (plain, inside)]
    cotangent = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted = torch.autograd.grad(outputs[0], plain, cotangent)
    ours = torch.autograd.grad(outputs[1], inside, surrounded(cotangent))
    torch.testing.assert_close([outputs[1], *ours], [outputs[0], *wanted], rtol=0, atol=0)


def test_not_a_number_is_not_hidden():
    query, key, value = (tensor.to(DEVICE, torch.float32) for tensor in operands())
    query[0, 0, 3, 0] = torch.nan
    mask = torch.ones(7, dtype=torch.bool, device=DEVICE)
    for kind in KINDS:
        out = attend(kind, query, key, value, 0.1, mask=mask)
        assert out[0, 0, 3].isnan().all()
        assert out[1].isfinite().all()


CHOICES = [(64, 64, True), (32, 128, False), (128, 32, False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kept", "step", "skip"), CHOICES)
def test_every_tuned_choice_gives_the_same(kind, kept, step, skip, monkeypatch):
    """Blocks larger and smaller than the tiles that are marked, with and without leaving out values."""
    monkeypatch.setattr(forward, "configs", [tuning.config("forward", tuning.Shape(kept, step, 4, 2), SKIP=skip)])
    shape = tuning.Shape(kept, min(step, 64), 4, 2)  # a list's step is at most a tile
    monkeypatch.setattr(backward_queries, "configs", [tuning.config("backward_queries", shape)])
    monkeypatch.setattr(backward_keys, "configs", [tuning.config("backward_keys", shape)])
    check(kind, *operands(1, 1, 1, 70, 135), causal=True)


def fitting(kernel, size, softmax, shared):
    """What is left to tune for numbers of two bytes on a GPU with so much shared memory."""
    table = [tuning.config(kernel, shape) for shapes in tuning.SHAPES[kernel].values() for shape in shapes]
    arguments = {"query": torch.zeros(1, dtype=torch.bfloat16), "BLOCK_D": size, "BLOCK_E": size, "SOFTMAX": softmax}
    properties = mock.Mock(shared_memory_per_block_optin=shared)
    with mock.patch("torch.cuda.get_device_properties", return_value=properties):
        return tuning.prune(kernel)(table, arguments)


@pytest.mark.parametrize("kernel", tuning.SHAPES)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("size", [16, 64, 128, 256])
def test_only_what_fits_is_tuned(kernel, size, softmax):
    large, small = fitting(kernel, size, softmax, 227 << 10), fitting(kernel, size, softmax, 99 << 10)
    assert 0 < len(set(map(str, small))) <= len(set(map(str, large)))
    assert set(map(str, small)) <= set(map(str, large))
    assert fitting(kernel, size, softmax, 0)  # the smallest is tried all the same: Triton says what is wrong
    wanted = {(shape.kept, shape.step) for shape in tuning.shapes(kernel, 2, size, softmax)}
    blocks = [(c.kwargs["BLOCK_M"], c.kwargs["BLOCK_N"]) for c in large]
    assert {block[::-1] if kernel == "backward_keys" else block for block in blocks} == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_break(kind, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of annotations
    tensors = [tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in operands(1, 2, 1, 3, 5)]
    xi = torch.tensor(KINDS[kind], device=DEVICE, requires_grad=True)

    def function(*arguments):
        return attend(kind, *arguments, causal=True)

    expected = function(*tensors, xi)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors, xi)
    torch.testing.assert_close(compiled, expected)
    ours, wanted = (torch.autograd.grad(output.sum(), (*tensors, xi)) for output in (compiled, expected))
    torch.testing.assert_close(ours, wanted)


def test_operators_keep_their_contract():
    query, key, value = (tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in operands(1, 2, 1, 3, 5))
    xi = torch.full((1, 2), 0.5, device=DEVICE, requires_grad=True)
    arguments = (query, key, value, xi, None, "soft_threshold", 0.5, True, 0, True, True)
    # not its check of gradients under a compiler, which `test_compiles_without_a_break` does
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.hf_sparsecoding.attention_triton.default, arguments, test_utils=checks)


def test_second_derivative_is_refused():
    query, key, value = (tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in operands(1, 2, 1, 3, 5))
    output = attend("soft_threshold", query, key, value, 0.5)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match='second derivative; use backend="eager"'):
        gradient.sum().backward()


def test_tiles_are_marked_only_for_gradients_and_counts():
    marked = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.hf_sparsecoding.attention_triton.default:
                marked.append(args[-1])
            return function(*args, **(kwargs or {}))

    query, key, value = (tensor.to(DEVICE, torch.float32) for tensor in operands(1, 1, 1, 2, 3))
    with Watch():
        attend("soft_threshold", query, key, value, 0.5)
        attend("soft_threshold", query, key, value, 0.5, return_sparsity=True)
        attend("soft_threshold", query.requires_grad_(), key, value, 0.5)
        with torch.no_grad():
            attend("soft_threshold", query, key, value, 0.5)
    assert marked == [False, True, True, False]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda tensors: [t.double() for t in tensors], {}, 'one type, .*float64.*use backend="eager"'),
        (lambda tensors: [tensors[0].bfloat16(), *tensors[1:]], {}, "one type, float32, bfloat16 or float16, got"),
        (
            lambda tensors: [torch.zeros(1, 4, 7, 300), torch.zeros(1, 2, 7, 300), tensors[2]],
            {},
            "of up to 256, got 300",
        ),
        (lambda tensors: tensors, {"scale": 0.0}, "a scale other than 0"),
        (lambda tensors: tensors, {"softcap": 2.0}, 'knows neither softcap .2.0. nor dropout .0.0.; use "eager"'),
    ],
)
def test_bad_arguments(change, options, message):
    tensors = change([tensor.float() for tensor in operands(1)])
    with pytest.raises(ValueError, match=message):
        attend("soft_threshold", *(tensor.to(DEVICE) for tensor in tensors), 0.1, **options)


def test_no_gpu_and_no_interpreter(monkeypatch):
    monkeypatch.setattr(attention_triton, "INTERPRETED", False)
    query, key, value = (tensor.float() for tensor in operands())
    with pytest.raises(ValueError, match="need tensors on a GPU, got cpu .or TRITON_INTERPRET=1"):
        attend("soft_threshold", query, key, value, 0.1)


def test_no_triton(monkeypatch):
    monkeypatch.setattr(attention, "HAS_TRITON", False)
    query, key, value = (tensor.float() for tensor in operands())
    with pytest.raises(ImportError, match="pip install 'hf-sparsecoding.triton.'"):
        attend("soft_threshold", query, key, value, 0.1)


def test_the_fastest(monkeypatch):
    """On a GPU Triton in half precision, where it is installed; for a single query explicit coefficients."""

    def fastest(queries=7, dtype=torch.bfloat16, size=4, device="cuda", value_dtype=None):
        def operand(length, dtype):
            shape = torch.Size((1, 2, length, size))
            return mock.Mock(spec=torch.Tensor, dtype=dtype, shape=shape, device=torch.device(device))

        tensors = operand(queries, dtype), operand(9, dtype), operand(9, value_dtype or dtype)
        return attention._fastest(*tensors, 0.5, None, 0.0)

    assert fastest() == fastest(dtype=torch.float16) == fastest(size=256) == "triton"
    assert fastest(device="cpu") == "cpu"
    for options in ({"queries": 1}, {"dtype": torch.float32}, {"size": 257}, {"value_dtype": torch.float16}):
        assert fastest(**options) == "eager", options
    monkeypatch.setattr(attention, "HAS_TRITON", False)
    assert fastest() == "eager"
