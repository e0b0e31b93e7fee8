"""Every family: what works, and a clear refusal of what cannot."""

import pytest
import torch
from peft import PeftModel
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_sparsecoding.adapter.layer import check_attention
from tests.tiny_models import FAMILIES, adapted, tiny_model, tokens


# shorter than the texts here
WINDOW = {"sliding_window": 5}

# row of the compatibility table -> transformers' model_type, what else its config needs, the adapter's target_modules
CASES = {
    **{family: (family, {}, None) for family in FAMILIES},
    "mistral, sliding window": ("mistral", WINDOW, None),
    "qwen2, sliding window": (
        "qwen2",
        {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, **WINDOW},
        None,
    ),
    **{family: (family, WINDOW, None) for family in ("gemma2", "gemma3_text", "olmo3", "cohere2")},
    "exaone4": ("exaone4", {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}, None),
    "gpt_oss": (
        "gpt_oss",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            **WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        None,
    ),
    "llama4_text": (
        "llama4_text",
        {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "no_rope_layers": [1, 0]},
        None,
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}, None),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, None),
    "arcee": ("arcee", {}, None),
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
    "ernie4_5": ("ernie4_5", {}, None),
    "helium": ("helium", {}, None),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}, None),
    "seed_oss": ("seed_oss", {}, None),
    "persimmon": ("persimmon", {}, None),
    "opt": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}, None),
    "gpt_neox": ("gpt_neox", {}, ["attention"]),
}

ADAPTER = {"lags": [1, 2, 7], "target_coefficient": True}


@pytest.fixture(params=CASES)
def family(request) -> str:
    return request.param


def base(family: str) -> PreTrainedModel:
    model_type, overrides, _ = CASES[family]
    return tiny_model(model_type, **overrides)


def adapt(family: str, **config) -> PeftModel:
    return adapted(base(family), target_modules=CASES[family][2], **{**ADAPTER, **config})


def check(name: str):
    """Mark a test as the column `name` of the families' table."""
    return pytest.mark.compatibility("families", name, row="family")


def greedy(model, ids, **arguments):
    arguments = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **arguments}
    arguments.setdefault("attention_mask", torch.ones_like(ids))
    output = model.generate(input_ids=ids, return_dict_in_generate=True, output_logits=True, **arguments)
    return output.sequences[:, ids.shape[1] :].tolist(), torch.stack(output.logits)


def assert_same(output, expected) -> None:
    assert output[0] == expected[0]
    torch.testing.assert_close(output[1], expected[1], atol=1e-3, rtol=1e-3)


@check("identity at the start")
def test_a_fresh_adapter_is_the_base_model(family, record_property):
    model, ids = base(family), tokens(2, 12)
    record_property("model", type(model).__name__)
    expected = model(ids, use_cache=False).logits
    model = adapt(family, init_weights=True)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    with adapt(family).disable_adapter():
        assert torch.equal(model(ids, use_cache=False).logits, expected)


@check("gradients")
def test_gradients_reach_every_number(family, record_property):
    model = adapt(family).train()
    record_property("trainable_parameters", model.get_nb_trainable_parameters()[0])
    ids = tokens(2, 12)
    model(ids, labels=ids).loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    for name, parameter in trained.items():
        assert parameter.grad.ne(0).all(), name
        assert parameter.grad.isfinite().all(), name


@check("cache")
@pytest.mark.parametrize(
    "config", [{}, {"lags": None, "contexts": "segments", "segment_token_ids": list(range(3, 20))}]
)
def test_cached_generation(family, config):
    model, ids = adapt(family, **config), tokens(2, 9)
    output = greedy(model, ids)
    assert_same(output, greedy(model, ids, use_cache=False))
    with model.disable_adapter():
        assert output[0] != greedy(model, ids)[0]


@check("left padding")
def test_left_padding(family):
    model, ids = adapt(family), tokens(2, 9)
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    sequences, logits = greedy(model, ids, attention_mask=mask)
    alone = greedy(model, ids[1:, 4:])
    assert sequences[1] == alone[0][0]
    torch.testing.assert_close(logits[:, 1:], alone[1], atol=1e-3, rtol=1e-3)


@check("beams")
def test_beams(family):
    model, ids = adapt(family), tokens(2, 9)
    assert greedy(model, ids, num_beams=3)[0] == greedy(model, ids, num_beams=3, use_cache=False)[0]


@check("static cache")
def test_static_cache(family):
    model, ids = adapt(family), tokens(2, 9)
    assert_same(greedy(model, ids, cache_implementation="static"), greedy(model, ids, use_cache=False))


@check("thresholded softmax")
def test_thresholded_softmax(family):
    """With a threshold of 0 it is the base model's softmax; above, coefficients change and a cache changes nothing."""
    ids = tokens(2, 9)
    config = {"coefficients": "thresholded_softmax", "train_threshold": True}
    if family == "gpt_oss":
        with pytest.raises(ValueError, match='passes s_aux to its attention function.*use coefficients="base"'):
            adapt(family, **config)(ids)
        pytest.skip("attention sinks are not supported, and it says so")
    plain, zero = (adapt(family, **extra)(ids, use_cache=False).logits for extra in ({}, config))
    torch.testing.assert_close(zero, plain, atol=1e-3, rtol=1e-3)
    model = adapt(family, **config, threshold=0.05)
    assert not torch.allclose(model(ids, use_cache=False).logits, plain)
    assert_same(greedy(model, ids), greedy(model, ids, use_cache=False))


# what cannot be adapted

GATED = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2}
SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
GEMMA3N = {**SHARED, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}

NO_KEYWORDS = "does not pass keyword arguments on to its attention modules"

# row -> how to make the model, target_modules, what the refusal says
REFUSED = {
    "qwen3_next": (lambda: tiny_model("qwen3_next", **GATED, num_experts=4), None, NO_KEYWORDS),
    "qwen3_5_text": (lambda: tiny_model("qwen3_5_text", **GATED), None, NO_KEYWORDS),
    "bitnet": (lambda: tiny_model("bitnet"), None, "changes the attention outputs .attn_sub_norm. before the output"),
    "gemma3n_text": (lambda: tiny_model("gemma3n_text", **GEMMA3N), None, "shares another layer's keys and values"),
    "gemma4_text": (
        lambda: tiny_model("gemma4_text", **SHARED, global_head_dim=8),
        None,
        "shares another layer's keys and values",
    ),
    "stablelm": (lambda: tiny_model("stablelm"), None, NO_KEYWORDS),
    "bloom": (lambda: tiny_model("bloom"), ["self_attention"], NO_KEYWORDS),
    "gpt2": (lambda: tiny_model("gpt2"), ["attn"], "GPT2Attention without an output projection"),
    "mamba": (lambda: tiny_model("mamba"), ["mixer"], NO_KEYWORDS),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(**T5)), None, "t5 is an encoder-decoder"),
    "bart": (lambda: BartForConditionalGeneration(BartConfig(**BART)), None, "bart is an encoder-decoder"),
}


@pytest.mark.compatibility("refused", "refused", row="family")
@pytest.mark.parametrize("family", REFUSED)
def test_refusals_say_why(family, record_property):
    make, target_modules, message = REFUSED[family]
    model = make()
    record_property("model", type(model).__name__)
    with pytest.raises(ValueError, match=message) as error:
        adapted(model, target_modules=target_modules)
    record_property("reason", str(error.value))


@pytest.mark.compatibility("refused", "refused", row="family")
@pytest.mark.parametrize("family", ["nemotron"])
def test_refused_at_the_first_forward(family, record_property):
    """Its decoder layer takes keyword arguments and drops them, which nothing shows before."""
    model = tiny_model(family)
    record_property("model", type(model).__name__)
    with pytest.raises(RuntimeError, match="passes no keyword arguments on and cannot be adapted") as error:
        adapted(model)(tokens(1, 4))
    record_property("reason", str(error.value))


def test_a_gate_in_the_query_projection():
    attention = tiny_model("qwen3_next", **GATED, num_experts=4).model.layers[1].self_attn
    with pytest.raises(ValueError, match="changes the attention outputs .q_proj. before the output projection"):
        check_attention(attention)


@pytest.mark.parametrize(("family", "config"), [("gemma3n_text", GEMMA3N), ("gemma4_text", SHARED)])
def test_layers_with_their_own_keys_can_be_adapted(family, config):
    if family == "gemma4_text":
        config = {**config, "global_head_dim": 8}
    model, ids = adapted(tiny_model(family, **config), **ADAPTER, layers_to_transform=[0, 1]), tokens(2, 9)
    assert_same(greedy(model, ids), greedy(model, ids, use_cache=False))
