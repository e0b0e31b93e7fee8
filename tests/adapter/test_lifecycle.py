"""Replicas, refusals without traces, names used again, and other methods' modules."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model

from hf_sparsecoding import SparseCodingConfig
from hf_sparsecoding.adapter.layer import SparseCodingAttention
from tests.tiny_models import adapted, tiny_model


def hooks(model):
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


def replica(module):
    """What nn.DataParallel makes of a module for another device, here on the same one."""
    copy = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        if child is not None:
            copy._modules[name] = replica(child)
    for name, parameter in module._parameters.items():
        copy._parameters[name] = parameter
    return copy


def test_a_replica_transfers_as_well():
    model = adapted(tiny_model())
    ids = torch.randint(3, 32, (2, 9))
    base = model.get_base_model()
    assert torch.equal(replica(base)(ids).logits, base(ids).logits)


def test_half_the_heads_are_refused():
    model = adapted(tiny_model())
    attention = next(module for module in model.modules() if isinstance(module, SparseCodingAttention))
    with pytest.raises(ValueError, match="tensor parallelism is not supported"):
        attention.lift(torch.zeros(1, 3, attention.width // 2), {}, {}, None)


def test_a_name_used_again_starts_afresh():
    base = tiny_model()
    ids = torch.randint(3, 32, (2, 9))
    expected = base(ids).logits
    get_peft_model(base, SparseCodingConfig(target_coefficient=True, init_weights=False))
    model = get_peft_model(base, SparseCodingConfig()).eval()
    assert torch.equal(model(ids).logits, expected)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable
    assert all("sparsecoding_lambda" in name for name in trainable)


@pytest.mark.parametrize(
    ("implementation", "config", "message"),
    [
        ("sdpa", {"target_modules": ["mlp"]}, "attention modules"),
        ("flex_attention", {"coefficients": "thresholded_softmax"}, "flex_attention"),
    ],
)
def test_a_refused_config_leaves_no_trace(implementation, config, message):
    base = tiny_model()
    base.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, SparseCodingConfig(**config))
    assert not hooks(base)
    assert not any(isinstance(module, SparseCodingAttention) for module in base.modules())


def test_unload_leaves_the_saved_modules_of_other_methods():
    base = tiny_model()
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), base, "lora")
    model = get_peft_model(base, SparseCodingConfig(), adapter_name="transfer")
    unloaded = model.unload()
    assert "lora" in unloaded.lm_head.modules_to_save
    assert not any(isinstance(module, SparseCodingAttention) for module in unloaded.modules())


def test_adapter_names_that_do_not_fit_the_batch():
    model = adapted(tiny_model())
    ids = torch.randint(3, 32, (3, 5))
    embeddings = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="one name per row|one per row"):
        model(inputs_embeds=embeddings, adapter_names=["default", "__base__"])


@pytest.mark.parametrize("positions", [None, torch.arange(9)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])])
def test_documents_packed_by_a_4d_mask_stay_apart(positions):
    model = adapted(tiny_model())
    ids = torch.randint(3, 32, (1, 9))
    allowed = torch.zeros(9, 9, dtype=torch.bool)
    allowed[:4, :4] = allowed[4:, 4:] = True
    mask = allowed.tril()[None, None]
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    expected = model(ids, **arguments).logits[:, 4:]
    other = ids.clone()
    other[:, :4] = 1 + (ids[:, :4] + 1) % 30
    assert torch.equal(model(other, **arguments).logits[:, 4:], expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layers_to_transform": [0, 7]}, "layers_to_transform has 7"),
        ({"contexts": "segments", "segment_token_ids": [10**6]}, "segment_token_ids has 1000000"),
    ],
)
def test_what_the_model_does_not_have(config, message):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(), SparseCodingConfig(**config))
