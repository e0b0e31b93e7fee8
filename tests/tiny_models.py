"""Tiny random models of many families, and adapters on them that are not the identity."""

from typing import Any

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_sparsecoding import SparseCodingConfig


VOCABULARY = 64

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # far from the usual 0.02, so that attention is not close to uniform and layers are not close to the identity
    "initializer_range": 0.2,
}

SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# transformers model_type -> what its config needs besides SIZES; the default windows are longer than every test's text
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "phi": {},
    "phi3": {},
    "granite": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "smollm3": {"no_rope_layers": [1, 0]},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {**SLIDING, "logit_scale": 1.0},
    "glm": {},
    "glm4": {},
    "starcoder2": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
}


def tiny_model(family: str = "llama", seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """A random model of a transformers `model_type`, in evaluation mode. Ids from 3 on are plain tokens."""
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **config_overrides})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def adapted(model: PreTrainedModel, seed: int = 1, **config: Any) -> PeftModel:
    """The model with an adapter that is not the identity (unless `init_weights=True`), in evaluation mode."""
    torch.manual_seed(seed)
    return get_peft_model(model, SparseCodingConfig(**{"init_weights": False, **config})).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random plain token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
