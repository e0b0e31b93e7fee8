"""Whatever is done to the key-value cache is done to the adapter's state in it; what cannot be done says so."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer, Fp8QuantizedLayer
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from hf_sparsecoding import SparseCodingConfig
from hf_sparsecoding.adapter import cache as adapter_cache
from hf_sparsecoding.adapter.cache import TransferHistory
from tests.tiny_models import adapted, tiny_model, tokens


SEGMENTS = {"contexts": "segments", "segment_token_ids": list(range(3, 20))}
KINDS = {"lags": {"lags": [1, 2, 5]}, "segments": SEGMENTS}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=["full", "windows"])
def base(request):
    return tiny_model() if request.param == "full" else tiny_model("gemma3_text", **WINDOWS)


@pytest.fixture(params=KINDS)
def model(request, base):
    return adapted(base, **KINDS[request.param])


def filled(model, ids, cache=None):
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(ids, past_key_values=cache)
    return cache


def assert_continues(model, cache, ids, rows=slice(None), **arguments) -> None:
    """The next tokens, decoded with the cache of `ids`, come out as from the whole text."""
    following = tokens(len(ids), 4, seed=9)[rows]
    decoded = [model(following[:, t : t + 1], past_key_values=cache).logits for t in range(2)]
    decoded.append(model(following[:, 2:], past_key_values=cache).logits)
    full = model(torch.cat([ids[rows], following], 1), use_cache=False).logits[:, -4:]
    torch.testing.assert_close(torch.cat(decoded, 1), full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("removed", [0, 1, 3, 8])
def test_crop(model, removed):
    ids = tokens(2, 9)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()  # or transformers' sliding layers cannot be cropped
    filled(model, ids, cache)
    cache.crop(-removed)
    assert_continues(model, cache, ids[:, : 9 - removed])


def test_crop_in_the_middle_of_a_segment_and_again():
    model = adapted(tiny_model(), **SEGMENTS)
    ids = torch.tensor([[30, 31, 3, 32, 33, 34, 4, 35, 36, 5, 37]])
    cache = filled(model, ids)
    for length in (8, 6, 3):
        cache.crop(length - cache.get_seq_length())
        assert_continues(model, copy.deepcopy(cache), ids[:, :length])


def test_crop_deeper_than_what_is_kept(monkeypatch):
    monkeypatch.setattr(adapter_cache, "ROLLBACK_TOKENS", 4)
    model = adapted(tiny_model(), lags=[1, 2, 5])
    ids = tokens(2, 20)
    cache = filled(model, ids)
    assert cache.layers[0].history.outputs.shape[1] == 5 + 4
    cache.crop(-4)
    assert_continues(model, cache, ids[:, :16])

    cache = filled(model, ids)
    cache.crop(-5)
    with pytest.raises(RuntimeError, match="cropped.*4 past outputs are left where 5 are needed.*empty cache"):
        model(ids[:, 15:16], past_key_values=cache)
    cache = filled(model, ids)
    cache.crop(-12)
    with pytest.raises(RuntimeError, match="0 past outputs are left"):
        model(ids[:, 8:9], past_key_values=cache)
    # all is well again from an empty cache on
    cache.reset()
    assert_continues(model, filled(model, ids, cache), ids)


def test_a_short_text_can_be_cropped_to_nothing():
    model = adapted(tiny_model(), lags=[1, 2, 5])
    cache = filled(model, tokens(1, 6))
    cache.crop(-6)
    ids = tokens(1, 7, seed=1)
    assert_continues(model, filled(model, ids, cache), ids)


def test_reorder(model):
    ids, order = tokens(3, 9), torch.tensor([2, 0, 0])
    cache = filled(model, ids)
    cache.reorder_cache(order)
    assert_continues(model, cache, ids[order])


def test_batch_select(model):
    ids, kept = tokens(3, 9), torch.tensor([2, 1])
    cache = filled(model, ids)
    cache.batch_select_indices(kept)
    assert_continues(model, cache, ids[kept])


def test_batch_repeat(model):
    ids = tokens(2, 9)
    cache = filled(model, ids)
    cache.batch_repeat_interleave(2)
    assert_continues(model, cache, ids.repeat_interleave(2, 0))


def test_reset(model):
    cache = filled(model, tokens(2, 9))
    cache.reset()
    ids = tokens(3, 5, seed=1)  # another batch size, too
    assert_continues(model, filled(model, ids, cache), ids)


@pytest.mark.parametrize("kind", KINDS)
def test_reset_and_reorder_of_a_static_cache(kind):
    model = adapted(tiny_model(), **KINDS[kind])
    cache = filled(model, tokens(2, 9), StaticCache(config=model.config, max_cache_len=20))
    addresses = [layer.history.outputs.data_ptr() for layer in cache.layers]
    cache.reset()
    ids, order = tokens(2, 5, seed=1), torch.tensor([1, 1])
    filled(model, ids, cache)
    cache.reorder_cache(order)
    assert_continues(model, cache, ids[order])
    assert [layer.history.outputs.data_ptr() for layer in cache.layers] == addresses


def test_pickle_and_deepcopy(model):
    ids = tokens(2, 9)
    cache = filled(model, ids)
    before = pickle.dumps(cache)
    assert_continues(model, copy.deepcopy(cache), ids)
    assert_continues(model, pickle.loads(before), ids)
    assert cache.get_seq_length() == cache.layers[1].history.seen == 9
    assert_continues(model, cache, ids)
    restored = pickle.loads(before)
    assert type(restored.layers[0]) is type(cache.layers[0])
    restored.reorder_cache(torch.tensor([1, 0]))
    assert_continues(model, restored, ids[[1, 0]])


@pytest.mark.parametrize("kind", KINDS)
def test_pickle_and_deepcopy_of_a_static_cache(kind):
    model = adapted(tiny_model(), **KINDS[kind])
    ids = tokens(2, 9)
    cache = filled(model, ids, StaticCache(config=model.config, max_cache_len=20))
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert_continues(model, copied, ids)


def test_a_pickled_cache_in_a_fresh_process(tmp_path):
    """The class is made at run time: the pickle must not name it, and brings the import with it."""
    cache = filled(adapted(tiny_model()), tokens(2, 9))
    file = tmp_path / "cache.pickle"
    file.write_bytes(pickle.dumps(cache))
    code = (
        "import pickle, sys\n"
        "cache = pickle.load(open(sys.argv[1], 'rb'))\n"
        "cache.crop(-2)\n"
        "layer = cache.layers[1]\n"
        "print(type(layer).__name__, layer.history.seen, tuple(layer.history.outputs.shape))\n"
    )
    process = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True)
    assert process.stdout.strip() == "DynamicLayerWithHistory 7 (2, 7, 4, 8)", process.stderr


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_windows_shorter_than_the_text(kind, cache_class):
    model = adapted(tiny_model("gemma3_text", **WINDOWS), **KINDS[kind])
    arguments = {"max_cache_len": 24} if cache_class is StaticCache else {}
    for length in (3, 5, 6, 7, 15):
        ids = tokens(2, length)
        cache = filled(model, ids, cache_class(config=model.config, **arguments))
        assert_continues(model, cache, ids)


def test_windows_in_every_layer():
    model = adapted(tiny_model("mistral", sliding_window=4), lags=[1, 6])
    ids = tokens(2, 9)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)):
        assert_continues(model, filled(model, ids, cache), ids)
    # the static cache does not know how long the text can be, so segments refuse it
    model = adapted(tiny_model("mistral", sliding_window=4), **SEGMENTS)
    assert_continues(model, filled(model, ids), ids)
    with pytest.raises(RuntimeError, match="layers all have sliding windows.*Use a dynamic cache"):
        filled(model, ids, StaticCache(config=model.config, max_cache_len=20))


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_cache(kind, monkeypatch):
    # with a type that loses nothing the outputs must be those of the full forward
    monkeypatch.setattr(Fp8QuantizedLayer, "fp8_dtype", torch.float32)
    model = adapted(tiny_model(), **KINDS[kind])
    ids = tokens(2, 9)
    assert_continues(model, filled(model, ids, QuantizedCache("fp8", model.config)), ids)


@pytest.mark.skipif(
    not (is_optimum_quanto_available() or is_hqq_available()), reason="no backend for caches quantized in groups"
)
@pytest.mark.parametrize("kind", KINDS)
def test_cache_quantized_in_groups(kind):
    backend = "quanto" if is_optimum_quanto_available() else "hqq"
    model = adapted(tiny_model(), **KINDS[kind])
    ids = tokens(2, 9)
    # all keys fit into the part that is not quantized, so that the outputs are those of the full forward
    cache = QuantizedCache(backend, model.config, residual_length=64)
    assert_continues(model, filled(model, ids, cache), ids)


class ThirdPartyLayer(DynamicLayer):
    """A cache layer of a class that the package has never seen."""


def test_foreign_cache_layers():
    model = adapted(tiny_model())
    ids = tokens(2, 9)
    cache = DynamicCache(config=model.config)
    cache.layers = [ThirdPartyLayer() for _ in cache.layers]
    filled(model, ids, cache)
    assert isinstance(cache.layers[0], ThirdPartyLayer)
    assert_continues(model, pickle.loads(pickle.dumps(cache)), ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_a_cache_that_was_filled_while_the_adapter_was_off(kind, cache_class):
    model = adapted(tiny_model(), **KINDS[kind])
    ids = tokens(2, 9)

    def empty():
        return cache_class(config=model.config, **({"max_cache_len": 20} if cache_class is StaticCache else {}))

    cache = empty()
    with model.disable_adapter():
        filled(model, ids, cache)
    with pytest.raises(RuntimeError, match="cache holds 9 tokens, but the adapter saw 0 of them.*empty cache"):
        model(ids[:, :1], past_key_values=cache)

    cache = filled(model, ids, empty())
    with model.disable_adapter():
        model(ids[:, :2], past_key_values=cache)
    with pytest.raises(RuntimeError, match="cache holds 11 tokens, but the adapter saw 9 of them"):
        model(ids[:, :1], past_key_values=cache)
    # cropped to where the adapter was on, or emptied, it is of use again
    if cache_class is DynamicCache:
        cache = filled(model, ids)
        with model.disable_adapter():
            model(ids[:, :2], past_key_values=cache)
        cache.crop(-2)
        assert_continues(model, cache, ids)
    cache.reset()
    assert_continues(model, filled(model, ids, cache), ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_the_adapter_serves_the_base_model(kind):
    """Switched off for good, the adapter leaves no trace but what it did to the earlier tokens."""
    model = adapted(tiny_model(), **KINDS[kind])
    cache, following = filled(model, tokens(2, 9)), tokens(2, 1, seed=3)
    twin = DynamicCache([(layer.keys.clone(), layer.values.clone()) for layer in cache.layers])
    with model.disable_adapter():
        decoded = model(following, past_key_values=cache).logits
    assert torch.equal(decoded, tiny_model()(following, past_key_values=twin).logits)


def test_another_adapter_takes_over():
    """Both adapters read the same outputs, so that a change of the adapter needs no new cache."""
    model = adapted(tiny_model(), lags=[1, 2, 5])
    model.add_adapter("near", SparseCodingConfig(lags=[1], init_weights=False))
    model.add_adapter("rows", SparseCodingConfig(**SEGMENTS, init_weights=False))
    ids, following = tokens(2, 9), tokens(2, 1, seed=3)
    for first, second in [("default", "near"), ("near", "default"), ("rows", "near"), ("near", "rows")]:
        model.set_adapter(first)
        cache = filled(model, ids)
        reference = copy.deepcopy(cache)
        model.set_adapter(second)
        decoded = model(following, past_key_values=cache).logits
        # a second oracle of the same state: all histories hold every output here
        assert cache.layers[0].history.seen == 10
        for layer, other in zip(cache.layers, reference.layers, strict=True):
            torch.testing.assert_close(layer.history.outputs[:, :9], other.history.outputs)
        assert not torch.allclose(decoded, model(torch.cat([ids, following], 1)).logits[:, -1:])
        model.set_adapter(first)
        assert_continues(model, reference, ids)


def test_an_adapter_with_deeper_contexts_takes_over(monkeypatch):
    monkeypatch.setattr(adapter_cache, "ROLLBACK_TOKENS", 2)
    model = adapted(tiny_model(), lags=[1])
    model.add_adapter("far", SparseCodingConfig(lags=[7], init_weights=False))
    ids = tokens(1, 12)
    cache = filled(model, ids)
    static = filled(model, ids, StaticCache(config=model.config, max_cache_len=20))
    model.set_adapter("far")
    with pytest.raises(RuntimeError, match="an adapter with deeper contexts was set; 3 past outputs are left where 7"):
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(RuntimeError, match="static cache keeps 1 past outputs, the active adapter needs 7"):
        model(ids[:, :1], past_key_values=static)


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_segments_that_the_cache_does_not_know(cache_class):
    model = adapted(tiny_model(), contexts="segments")
    ids, segments = tokens(1, 6), torch.tensor([[0, 0, 1, 1, 2, 2]])
    arguments = {"max_cache_len": 20} if cache_class is StaticCache else {}
    cache = cache_class(config=model.config, **arguments)
    model(ids, segment_ids=segments, past_key_values=cache)
    with pytest.raises(ValueError, match="pass segment_ids"):
        model(ids[:, :1], past_key_values=cache)

    # an adapter that came after the tokens
    cache = cache_class(config=model.config, **arguments)
    model(ids, segment_ids=segments, past_key_values=cache)
    model.add_adapter("newlines", SparseCodingConfig(**SEGMENTS, init_weights=False))
    model.set_adapter("newlines")
    with pytest.raises(RuntimeError, match="tokens whose segments are not known.*empty cache"):
        model(ids[:, :1], past_key_values=cache)
    assert_continues(model, filled(model, ids), ids)


def test_the_state_stays_small(monkeypatch):
    """Lags keep a fixed number of outputs however long the text becomes, and keep no memory of the others alive."""
    monkeypatch.setattr(adapter_cache, "ROLLBACK_TOKENS", 3)
    model = adapted(tiny_model(), lags=[2])
    cache = filled(model, tokens(1, 30))
    for _ in range(3):
        model(tokens(1, 1), past_key_values=cache)
    outputs = cache.layers[0].history.outputs
    assert outputs.shape[1] == 5
    assert outputs.untyped_storage().nbytes() == outputs.numel() * outputs.element_size()


def test_gradients_flow_through_the_cache():
    model = adapted(tiny_model(), lags=[1, 2]).train()
    ids = tokens(1, 8)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :5], past_key_values=cache)
        decoded = model(ids[:, 5:], past_key_values=cache).logits.square().sum()
        full = model(ids, use_cache=False).logits[:, 5:].square().sum()
        gradients = [torch.autograd.grad(value, trained) for value in (decoded, full)]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-3, rtol=1e-4)


def test_history_rows_follow_the_segments():
    history = TransferHistory(depth=None)
    outputs, segments = torch.randn(2, 5, 3, 4), torch.arange(20).view(2, 5, 2)
    history.append(outputs, {"a": segments})
    history.append(outputs, {"a": segments, "late": segments})
    assert set(history.segments) == {"a"}
    history.crop(7)
    history.repeat_batch(2)
    history.index_batch(torch.tensor([3]))
    assert history.outputs.shape == (1, 7, 3, 4)
    assert torch.equal(history.segments["a"], torch.cat([segments, segments], 1)[1:, :7])
    assert torch.equal(history.outputs, torch.cat([outputs, outputs], 1)[1:, :7])
