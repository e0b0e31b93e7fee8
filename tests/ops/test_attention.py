"""Backends of sparse_attention against the textbook coefficients: values and gradients."""

import jaxtyping
import pytest
import torch

from hf_sparsecoding.ops import reference
from hf_sparsecoding.ops.attention import allowed_keys, sparse_attention
from hf_sparsecoding.ops.attention_cpu import TILE

from .tolerance import DTYPES, assert_close, bfloat16_grid


KINDS = {"soft_threshold": 0.5, "thresholded_softmax": 0.02}  # with a threshold that leaves some and drops some
BACKENDS = ("eager", "cpu")


def operands(batch=2, heads=4, groups=2, queries=7, keys=7, size=4, value_size=3, seed=0):
    shapes = [(batch, heads, queries, size), (batch, groups, keys, size), (batch, groups, keys, value_size)]
    return [bfloat16_grid(*shape, seed=seed + number) for number, shape in enumerate(shapes)]


def textbook(query, key, value, xi, kind, allowed, scale=None):
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return reference.coefficients(kind, scores, allowed, xi[..., None, None]) @ value


def check(kind, backend, query, key, value, dtype=torch.float64, mask=None, causal=False, window=None, **options):
    """Values and gradients, those of a threshold per head too, against the textbook's."""
    xi = KINDS[kind] * torch.linspace(0.5, 1.5, query.shape[1], dtype=torch.float64)
    exact = [tensor.clone().requires_grad_() for tensor in (query, key, value, xi)]
    allowed = allowed_keys(query.shape[2], key.shape[2], mask, causal, window)
    wanted = textbook(*exact, kind, allowed, options.get("scale"))
    tested = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]
    tested.append(xi.clone().to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_())
    value = sparse_attention(
        *tested[:3],
        coefficients=kind,
        threshold=tested[3],
        mask=mask,
        causal=causal,
        window=window,
        backend=backend,
        **options,
    )
    assert value.dtype == dtype
    assert_close(value, wanted)
    cotangent = bfloat16_grid(*wanted.shape, seed=9)
    gradients = torch.autograd.grad(value, tested, cotangent.to(dtype))
    for gradient, expected in zip(gradients, torch.autograd.grad(wanted, exact, cotangent), strict=True):
        if dtype == torch.bfloat16:
            gradient = gradient.bfloat16()  # the threshold's is a sum of rounded products
        assert_close(gradient, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (7, 1), (7, 7), (7, 65), (65, 7), (65, 65), (130, 200)])
def test_sizes(kind, backend, causal, queries, keys):
    batch = 1 if queries * keys > 5000 else 2
    check(kind, backend, *operands(batch, 2, 1, queries, keys), causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(1000, 1000), (1, 1000), (65, 1000)])
def test_long(kind, backend, queries, keys):
    check(kind, backend, *operands(1, 1, 1, queries, keys), causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(kind, backend, dtype):
    check(kind, backend, *operands(keys=20), dtype=dtype, causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads_groups", [(4, 4), (4, 1), (6, 3)])
def test_grouped_queries(kind, backend, heads_groups):
    check(kind, backend, *operands(1, *heads_groups), causal=True, scale=0.7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 3, 40, 128, 1000])
def test_windows(kind, backend, window):
    check(kind, backend, *operands(1, 1, 1, 20, 160), causal=True, window=window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (2, 1, 1, 9), (1, 1, 7, 9), (9,)])
def test_masks_of_every_shape_also_with_rows_that_allow_nothing(kind, backend, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[..., 0] = False
    if len(shape) == 4:
        mask[0, :, 0] = False
    check(kind, backend, *operands(keys=9), mask=mask)
    check(kind, backend, *operands(keys=9), mask=mask, causal=True, window=5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    query, key, value = (tensor.requires_grad_() for tensor in operands(1, 2, 1, 5, 5))
    xi = torch.tensor([[0.3, 0.6]], dtype=torch.float64) * (1 if kind == "soft_threshold" else 0.2)

    def attend(query, key, value, xi):
        return sparse_attention(query, key, value, coefficients=kind, threshold=xi, causal=True, backend="cpu")

    assert torch.autograd.gradcheck(attend, (query, key, value, xi.requires_grad_()))


def with_dead_tiles(alive, size=8):
    """Queries and keys of blocks that meet only where `alive` (blocks, tiles) says so."""
    key = torch.eye(alive.shape[1], dtype=torch.float64).repeat_interleave(TILE, 0) * 4
    query = alive.double().repeat_interleave(TILE, 0)
    noise = torch.Generator().manual_seed(0)
    key = key + 0.01 * torch.rand(key.shape, generator=noise, dtype=torch.float64)
    value = torch.randn(len(key), size, generator=noise, dtype=torch.float64)
    return query[None, None], key[None, None], value[None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_dead_tiles_are_left_out_and_change_nothing(kind):
    alive = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    query, key, value = (tensor.requires_grad_() for tensor in with_dead_tiles(alive))
    # a softmax spreads over 2 tiles of equal scores and over 4 in the row without any
    options = {"coefficients": kind, "threshold": 0.5 if kind == "soft_threshold" else 0.0025, "scale": 1.0}
    results, gradients = {}, {}
    for backend in BACKENDS:
        results[backend], found = sparse_attention(query, key, value, backend=backend, return_sparsity=True, **options)
        gradients[backend] = torch.autograd.grad(results[backend].square().sum(), (query, key, value))
        assert found.tiles.tolist() == [1 - 4 / 12]
        assert found.elements.tolist() == pytest.approx([1 - 4 / 12])
    assert_close(results["cpu"], results["eager"])
    for ours, wanted in zip(gradients["cpu"], gradients["eager"], strict=True):
        assert_close(ours, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [[[1, 1, 1, 1, 1], [0, 1, 0, 0, 0]], [[0, 0, 0, 0, 0], [1, 0, 0, 1, 0]]])
def test_tiles_change_nothing_whether_searched_or_not(kind, blocks):
    """Without counting, a block of which most tiles are alive ends the search for a while; nan keeps a tile alive."""
    query, key, value = with_dead_tiles(torch.tensor(blocks, dtype=torch.bool))
    # tiles of keys that are not whole, too
    operands = [tensor[:, :, :-3].detach().requires_grad_() for tensor in (query, key, value)]
    options = {"coefficients": kind, "threshold": 0.5 if kind == "soft_threshold" else 0.0018, "scale": 1.0}
    results, gradients = {}, {}
    for backend in BACKENDS:
        results[backend] = sparse_attention(*operands, backend=backend, **options)
        gradients[backend] = torch.autograd.grad(results[backend].square().sum(), operands)
    assert_close(results["cpu"], results["eager"])
    for ours, wanted in zip(gradients["cpu"], gradients["eager"], strict=True):
        assert_close(ours, wanted)
    broken = operands[0].detach().clone()
    broken[0, 0, 3, 0] = torch.nan
    assert sparse_attention(broken, *operands[1:], backend="cpu", **options)[0, 0, 3].isnan().all()


def test_sparsity_counts_only_what_is_allowed():
    query, key, value = operands(1, 1, 1, 5, 5)
    options = {"coefficients": "soft_threshold", "causal": True, "return_sparsity": True}
    for backend in BACKENDS:
        _, dense = sparse_attention(query, key, value, threshold=0.0, backend=backend, **options)
        _, empty = sparse_attention(query, key, value, threshold=100.0, backend=backend, **options)
        assert (dense.elements.item(), dense.tiles.item()) == (0, 0)
        assert (empty.elements.item(), empty.tiles.item()) == (1, 1)


def test_memory_is_linear():
    """No tensor of T x S is ever made: the largest is a block of rows."""
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            made.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    length = 8 * TILE
    query, key, value = (tensor.float() for tensor in operands(1, 1, 1, length, length))
    from hf_sparsecoding.ops import attention_cpu as module

    xi = torch.full((1, 1), 0.5)
    with Watch():
        module.attention_cpu._init_fn(query, key, value, xi, None, "soft_threshold", 0.5, False, 0, False)
    assert TILE * length <= max(made) < length * length / 4


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_break(kind, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of annotations
    query, key, value = (tensor.float().requires_grad_() for tensor in operands())
    xi = torch.tensor(KINDS[kind], requires_grad=True)

    def attend(query, key, value, xi):
        return sparse_attention(query, key, value, coefficients=kind, threshold=xi, causal=True, backend="cpu")

    expected = attend(query, key, value, xi)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(query, key, value, xi)
    torch.testing.assert_close(compiled, expected)
    for ours, wanted in zip(
        torch.autograd.grad(compiled.sum(), (query, key, value, xi)),
        torch.autograd.grad(expected.sum(), (query, key, value, xi)),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted)


def test_operators_keep_their_contract():
    query, key, value = (tensor.requires_grad_() for tensor in operands())
    xi = torch.full((2, 4), 0.5, dtype=torch.float64, requires_grad=True)
    arguments = (query, key, value, xi, None, "soft_threshold", 0.5, True, 0, True)
    torch.library.opcheck(torch.ops.hf_sparsecoding.attention_cpu.default, arguments)


def test_second_derivative_is_refused():
    query, key, value = (tensor.requires_grad_() for tensor in operands())
    out = sparse_attention(query, key, value, coefficients="soft_threshold", threshold=0.5, backend="cpu")
    (gradient,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match='second derivative; use backend="eager"'):
        gradient.sum().backward()


def test_not_a_number_is_not_hidden():
    query, key, value = operands()
    query[0, 0, 3, 0] = torch.nan
    mask = torch.ones(7, dtype=torch.bool)
    for kind in KINDS:
        for backend in BACKENDS:
            out = sparse_attention(query, key, value, coefficients=kind, threshold=0.1, backend=backend, mask=mask)
            assert out[0, 0, 3].isnan().all()
            assert out[1].isfinite().all()


def test_softcap_and_dropout_take_the_explicit_coefficients():
    query, key, value = operands(batch=1, keys=50)
    options = {"coefficients": "soft_threshold", "threshold": 0.1}
    capped = sparse_attention(query, key, value, softcap=0.5, **options)
    scores = 0.5 * torch.tanh(query @ key.repeat_interleave(2, 1).mT * 0.5 / 0.5)
    expected = reference.coefficients("soft_threshold", scores, threshold=0.1) @ value.repeat_interleave(2, 1)
    assert_close(capped, expected)
    torch.manual_seed(0)
    dropped = torch.stack([sparse_attention(query, key, value, dropout=0.5, **options) for _ in range(400)])
    plain = sparse_attention(query, key, value, **options)
    assert (dropped.std(0) > 0).all()
    assert (dropped.mean(0) - plain).abs().max() < 6 * (dropped.std(0) / 20).max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coefficients": "sparsemax"}, "coefficients must be one of soft_threshold, thresholded_softmax"),
        ({"threshold": -0.1}, "threshold must be at least 0, got -0.1"),
        ({"backend": "gpu"}, "backend must be one of eager, cpu, triton, got 'gpu'"),
        ({"mask": torch.zeros(7)}, "mask must be boolean"),
        ({"window": 3}, "window must be at least 1 and needs causal=True"),
        ({"window": 0, "causal": True}, "window must be at least 1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": 0.1, "backend": "cpu"}, 'knows neither softcap .None. nor dropout .0.1.; use "eager"'),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        sparse_attention(*operands(), **{"coefficients": "soft_threshold", "threshold": 0.1, **options})


def test_heads_must_share_evenly():
    with pytest.raises(ValueError, match="4 heads do not share 3 key-value heads evenly"):
        sparse_attention(*operands(groups=3), coefficients="soft_threshold", threshold=0.1)
