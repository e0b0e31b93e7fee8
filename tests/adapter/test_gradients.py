"""Gradients of the adapter's numbers: all there, right, and the same under checkpointing, compilation and bfloat16."""

import jaxtyping
import pytest
import torch
from peft import get_peft_model, prepare_model_for_kbit_training
from torch.func import functional_call, grad, vmap

from hf_sparsecoding import SparseCodingConfig
from hf_sparsecoding.adapter import attention_function
from hf_sparsecoding.adapter.attention_function import thresholded_attention
from hf_sparsecoding.adapter.layer import LearnedThreshold
from tests.tiny_models import adapted, tiny_model, tokens


KINDS = {
    "lags": {"target_coefficient": True},
    "segments": {"contexts": "segments", "segment_token_ids": list(range(3, 20))},
    "thresholds": {"coefficients": "thresholded_softmax", "threshold": 0.05, "train_threshold": True},
    "soft thresholds": {
        "coefficients": "soft_threshold",
        "threshold": 0.1,
        "train_threshold": True,
        "per_head": False,
    },
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def batch():
    """Two texts; the second is shorter, padded on the left."""
    ids = tokens(2, 13)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients(model, loss_function, batch):
    model.zero_grad()
    loss_function(**batch).backward()
    return {name: parameter.grad.clone() for name, parameter in trained(model).items()}


def loss_of(model):
    return lambda **batch: model(**batch).loss


@each_kind
def test_gradients_equal_numeric_ones(kind, batch):
    """Along a random direction through all numbers, each of which has a gradient of its own."""
    model = adapted(tiny_model(), **KINDS[kind]).double()
    found = gradients(model, loss_of(model), batch)
    assert all(gradient.all() for gradient in found.values())
    torch.manual_seed(0)
    directions = {name: torch.randn_like(gradient) for name, gradient in found.items()}
    step, losses = 1e-4, []
    for sign in (1, -2):  # from where the numbers are: one step up, then two down
        for name, parameter in trained(model).items():
            parameter.data.add_(directions[name], alpha=sign * step)
        losses.append(model(**batch).loss.item())
    numeric = (losses[0] - losses[1]) / (2 * step)
    analytic = sum((found[name] * directions[name]).sum().item() for name in found)
    assert analytic == pytest.approx(numeric, rel=1e-2)


@each_kind
def test_a_fresh_adapter_gets_gradients_too(kind, batch):
    model = adapted(tiny_model(), init_weights=True, **KINDS[kind])
    assert all(gradient.any() for gradient in gradients(model, loss_of(model), batch).values())


@each_kind
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(kind, use_reentrant, batch):
    model = adapted(tiny_model(), **KINDS[kind]).train()
    expected = gradients(model, loss_of(model), batch)
    calls = []
    model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    found = gradients(model, loss_of(model), batch)
    assert len(calls) == 2  # forward, and again in backward
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_checkpointing_with_segments_given_by_hand(batch):
    model = adapted(tiny_model(), contexts="segments").train()
    batch = {**batch, "segment_ids": (torch.arange(13) // 4).expand(2, 13)}
    expected = gradients(model, loss_of(model), batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    for name, gradient in gradients(model, loss_of(model), batch).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def assert_compiles(kind, backend, batch):
    torch._dynamo.reset()
    model = adapted(tiny_model(), **KINDS[kind]).train()
    expected = gradients(model, loss_of(model), batch)
    compiled = torch.compile(loss_of(model), fullgraph=True, backend=backend)
    for name, gradient in gradients(model, compiled, batch).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["lags", "segments", "thresholds"])
def test_compiled_without_graph_breaks(monkeypatch, kind, batch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace the checks of annotations
    assert_compiles(kind, "aot_eager", batch)


@pytest.mark.slow
@each_kind
def test_compiled_by_inductor(monkeypatch, kind, batch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert_compiles(kind, "inductor", batch)


def assert_near(found, expected):
    """As near as bfloat16 comes: relative error of the whole gradient."""
    for name in expected:
        assert found[name].dtype == torch.float32
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        assert error < 0.15, f"{name}: {error:.3f}"


@pytest.mark.parametrize("kind", ["lags", "segments", "thresholds"])
def test_bfloat16_model_and_autocast(kind, batch):
    model = adapted(tiny_model().bfloat16().float(), **KINDS[kind])
    expected = gradients(model, loss_of(model), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(gradients(model, loss_of(model), batch), expected)
    half = adapted(tiny_model().bfloat16(), **KINDS[kind])
    assert half(**batch).logits.dtype == torch.bfloat16
    assert_near(gradients(half, loss_of(half), batch), expected)


def test_thresholded_attention_takes_the_type_of_autocast(monkeypatch, batch):
    """Rotary embeddings leave queries and keys in float32, which no kernel for half precision takes."""
    seen = []
    attend = attention_function.sparse_attention

    def noting(query, key, value, **arguments):
        seen.append((query.dtype, key.dtype, value.dtype))
        return attend(query, key, value, **arguments)

    monkeypatch.setattr(attention_function, "sparse_attention", noting)
    model = adapted(tiny_model(), coefficients="thresholded_softmax", threshold=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch)
    assert set(seen) == {(torch.bfloat16,) * 3}


def test_a_model_that_is_not_causal_stays_so():
    """Embedding models are made of decoders in this way; without padding they are given no mask."""
    ids = tokens(2, 9)
    for implementation in ("sdpa", "eager"):
        model = tiny_model(is_causal=False, attn_implementation=implementation)
        base = model(ids).logits
        changed = ids.clone()
        changed[:, -1] = ids[:, -1] + 1
        assert not torch.allclose(model(changed).logits[:, 0], base[:, 0])
        same = adapted(model, coefficients="thresholded_softmax", threshold=0.0, init_weights=True)
        torch.testing.assert_close(same(ids).logits, base, atol=1e-5, rtol=1e-4)


def test_bfloat16_does_not_flip_the_threshold():
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 64, 8, generator=generator).bfloat16()
    threshold = torch.full((1, 4), 0.5)

    def kept(dtype):
        tensors = (tensor.to(dtype) for tensor in (query, key, value))
        _, alpha = thresholded_attention(
            torch.nn.Module(), *tensors, None, "soft_threshold", threshold, scaling=0.35, explicit=True
        )
        return alpha != 0

    assert torch.equal(kept(torch.bfloat16), kept(torch.float32))


def test_after_prepare_model_for_kbit_training(batch):
    model = tiny_model()
    model.is_loaded_in_8bit = True  # the preparation then turns gradient checkpointing on
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": True})
    torch.manual_seed(1)
    model = get_peft_model(model, SparseCodingConfig(init_weights=False)).train()
    assert model.get_base_model().is_gradient_checkpointing
    plain = adapted(tiny_model()).train()
    expected = gradients(plain, loss_of(plain), batch)
    for name, gradient in gradients(model, loss_of(model), batch).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_the_threshold_in_use_is_never_negative():
    threshold = LearnedThreshold(3)
    threshold.weight.data = torch.tensor([-0.5, 0.0, 0.25])
    xi = threshold()
    assert xi.tolist() == [0, 0, 0.25]
    xi.sum().backward()
    assert threshold.weight.grad.tolist() == [1, 1, 1]


def test_a_threshold_comes_back_from_below_zero(batch):
    model = adapted(tiny_model(), num_contexts=0, target_coefficient=True, **KINDS["thresholds"])
    threshold = model.get_base_model().model.layers[1].self_attn.sparsecoding_threshold["default"]
    threshold.weight.data.fill_(-0.02)
    for _ in range(5):
        model.zero_grad()
        loss_of(model)(**batch).backward()
        assert threshold().min() >= 0
        assert threshold.weight.grad.all()
        threshold.weight.data.add_(threshold.weight.grad.abs().sign(), alpha=0.01)  # the way up is open
    assert threshold().min() > 0


@pytest.mark.parametrize(
    "config", [{"target_coefficient": True}, {"contexts": "segments", "segment_token_ids": list(range(3, 20))}]
)
def test_functional_transforms(config):
    """torch.func, as per-sample gradients and influence functions use it."""
    model, ids = adapted(tiny_model(), **config), tokens(3, 11)
    numbers = {name: value for name, value in model.named_parameters() if "sparsecoding" in name}

    def loss(numbers, row):
        inputs = {"input_ids": row[None], "labels": row[None], "use_cache": False}
        return functional_call(model, numbers, (), inputs).loss

    expected = [torch.autograd.grad(loss(numbers, row), list(numbers.values())) for row in ids]
    detached = {name: value.detach() for name, value in numbers.items()}
    actual = vmap(grad(loss), in_dims=(None, 0))(detached, ids)
    for i, per_row in enumerate(zip(*expected, strict=True)):
        torch.testing.assert_close(list(actual.values())[i], torch.stack(per_row), rtol=1e-4, atol=1e-5)
    assert all(value.any() for value in actual.values())
