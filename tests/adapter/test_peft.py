"""One adapter through peft's interface: identity, counts, switching off, unloading, refusals, copies."""

import copy
import pickle

import pytest
import torch
from peft import (
    get_layer_status,
    get_model_status,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils.hotswap import hotswap_adapter

from hf_sparsecoding import SparseCodingConfig
from hf_sparsecoding.adapter.layer import SparseCodingAttention
from tests.tiny_models import adapted, tiny_model, tokens


KINDS = {
    "lags": {},
    "lags per layer": {"lags": [1, 4], "per_head": False},
    "segments": {"contexts": "segments", "segment_token_ids": list(range(3, 20))},
    "target": {"target_coefficient": True},
    "rescaling": {"num_contexts": 0, "target_coefficient": True},
    "thresholded softmax": {"coefficients": "thresholded_softmax", "threshold": 0.05, "train_threshold": True},
    "soft threshold": {"coefficients": "soft_threshold", "threshold": 0.1},
}
THRESHOLDS = [kind for kind, fields in KINDS.items() if "threshold" in fields]

each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def ids():
    return tokens(2, 11)


@pytest.fixture(scope="module")
def base_logits(ids):
    return tiny_model()(ids).logits


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in THRESHOLDS])
def test_a_fresh_adapter_is_the_identity_bit_for_bit(kind, ids, base_logits):
    assert torch.equal(adapted(tiny_model(), init_weights=True, **KINDS[kind])(ids).logits, base_logits)


def test_threshold_zero_is_softmax(ids, base_logits):
    model = adapted(tiny_model(), init_weights=True, coefficients="thresholded_softmax", train_threshold=True)
    torch.testing.assert_close(model(ids).logits, base_logits, rtol=1e-4, atol=1e-5)


@each_kind
def test_without_init_weights_it_is_not_the_identity(kind, ids, base_logits):
    assert (adapted(tiny_model(), **KINDS[kind])(ids).logits - base_logits).abs().max() > 0.01


@each_kind
def test_a_disabled_adapter_is_the_base_model_bit_for_bit(kind, ids, base_logits):
    model = adapted(tiny_model(), **KINDS[kind])
    lifted = model(ids).logits
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, base_logits)
    assert torch.equal(model(ids).logits, lifted)
    model.base_model.disable_adapter_layers()
    assert torch.equal(model(ids).logits, base_logits)
    model.base_model.enable_adapter_layers()
    assert torch.equal(model(ids).logits, lifted)


@each_kind
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_unload_gives_the_base_model_back(kind, implementation, ids):
    base = tiny_model(attn_implementation=implementation)
    expected, types = base(ids).logits, [type(module) for module in base.modules()]
    model = adapted(base, **KINDS[kind])
    model(ids)
    unloaded = model.unload()
    assert unloaded is base
    assert [type(module) for module in base.modules()] == types
    assert base.config._attn_implementation == implementation
    for module in base.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_pre_hooks_with_kwargs
        assert not module._forward_hooks
    assert not hasattr(base, "peft_config")
    assert torch.equal(base(ids).logits, expected)
    assert not torch.equal(adapted(base, **KINDS[kind])(ids).logits, expected)  # and it can be adapted again


@pytest.mark.parametrize(("per_head", "expected"), [(False, 96), (True, 32 * 96)])
def test_number_of_trainable_parameters(per_head, expected, capsys):
    model = tiny_model(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, head_dim=2)
    model = get_peft_model(model, SparseCodingConfig(per_head=per_head))
    model.print_trainable_parameters()
    assert f"trainable params: {expected:,} ||" in capsys.readouterr().out
    assert {p.numel() for p in model.parameters() if p.requires_grad} == {expected // 32}


def test_target_coefficient_and_threshold_count_one_per_head():
    counts = {"target_coefficient": True, "coefficients": "soft_threshold", "train_threshold": True}
    model = adapted(tiny_model(num_hidden_layers=1), **counts)
    assert model.get_nb_trainable_parameters()[0] == 4 * 3 + 4 + 4
    model = adapted(tiny_model(num_hidden_layers=1), per_head=False, **counts)
    assert model.get_nb_trainable_parameters()[0] == 3 + 1 + 4


def test_merging_is_refused_with_a_reason():
    model = adapted(tiny_model())
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(NotImplementedError, match="cannot be merged: it moves attention outputs between tokens"):
            merge()


def test_mixed_models_and_hot_swapping_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'SPARSECODING' is not compatible with the `PeftMixedModel`"):
        get_peft_model(tiny_model(), SparseCodingConfig(), mixed=True)
    model = adapted(tiny_model())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Hotswapping only supports .* but SPARSECODING was passed"):
        hotswap_adapter(model, tmp_path, "default")
    injected = tiny_model()
    injected.load_adapter(tmp_path)
    with pytest.raises(ValueError, match="Hotswapping is currently only supported for LoRA"):
        injected.load_adapter(tmp_path, adapter_name="default", hotswap=True)


@each_kind
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stand_alone(kind, duplicate, ids):
    model = adapted(tiny_model(), **KINDS[kind])
    expected = model(ids).logits
    twin = duplicate(model)
    assert torch.equal(twin(ids).logits, expected)
    for name, parameter in twin.named_parameters():
        if "sparsecoding" in name:
            parameter.data.add_(0.5)
    assert not torch.equal(twin(ids).logits, expected)
    assert torch.equal(model(ids).logits, expected)


@each_kind
def test_state_dict_round_trip(kind, ids):
    model = adapted(tiny_model(), **KINDS[kind])
    state = get_peft_model_state_dict(model)
    assert set(state) == {n.replace(".default", "") for n, p in model.named_parameters() if p.requires_grad}
    other = adapted(tiny_model(), seed=2, **KINDS[kind])
    assert not torch.equal(other(ids).logits, model(ids).logits)
    set_peft_model_state_dict(other, state)
    assert torch.equal(other(ids).logits, model(ids).logits)


def test_status():
    model = adapted(tiny_model(), layers_to_transform=[1])
    (layer,) = get_layer_status(model)
    assert layer.name == "model.model.layers.1.self_attn"
    assert layer.module_type == "sparsecoding.SparseCodingAttention"
    assert layer.available_adapters == ["default"]
    status = get_model_status(model)
    assert status.peft_types == {"default": "SPARSECODING"}
    assert (status.num_adapter_layers, status.trainable_params) == (1, 12)
    assert status.enabled is True
    model.base_model.disable_adapter_layers()
    assert get_model_status(model).enabled is False


def test_target_modules_choose_the_layers():
    def adapted_layers(**fields):
        layers = adapted(tiny_model(num_hidden_layers=4), **fields).get_base_model().model.layers
        return [i for i, layer in enumerate(layers) if isinstance(layer.self_attn, SparseCodingAttention)]

    assert adapted_layers() == [0, 1, 2, 3]
    assert adapted_layers(layers_to_transform=[1, 3]) == [1, 3]
    assert adapted_layers(layers_to_transform=2, layers_pattern="layers") == [2]
    assert adapted_layers(target_modules=r".*\.[01]\.self_attn") == [0, 1]
    assert adapted_layers(exclude_modules=r".*\.[01]\.self_attn") == [2, 3]
