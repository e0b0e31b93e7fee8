"""Base models and PEFT adapters as scripts name them: a folder or Hub id, a file or JSON text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .command_line import NumberLoader, near_match, read_mapping


DTYPES = ("auto", "float32", "bfloat16", "float16")


def read_adapter_config(source: str) -> PeftConfig:
    """A PEFT config to train, from a YAML or JSON file, or from JSON text that starts with a brace."""
    if _is_json(source):
        try:
            values = json.loads(source)
        except json.JSONDecodeError as error:
            raise ValueError(f"adapter_config is not JSON ({error.msg} at column {error.colno}): {source}") from error
    else:
        values = read_mapping(source, NumberLoader)
    known = {str(getattr(kind, "value", kind)): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = values.get("peft_type")
    if kind not in known:
        raise ValueError(f"adapter_config needs a peft_type, got {kind!r}{near_match(str(kind), list(known))}")
    fields = [field.name for field in dataclasses.fields(known[kind]) if field.init]
    for name in values:
        if name not in fields:
            raise ValueError(f"adapter_config: {kind} has no field {name!r}{near_match(name, fields)}")
    # a saved adapter's config says true, which would freeze all
    return known[kind](**{"task_type": "CAUSAL_LM", **values, "inference_mode": False})


def adapter_values(config: PeftConfig) -> dict:
    """What a config holds, as JSON can; None is left out."""
    return {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items() if v is not None}


def adapter_label(source: str) -> str:
    """What results call the adapter of `read_adapter_config`: its file's name, or its method."""
    return read_adapter_config(source).peft_type.lower() if _is_json(source) else Path(source).stem


def _is_json(source: str) -> bool:
    return source.lstrip().startswith("{")


def longest_input(name: str) -> int | None:
    """Number of positions that the model was made for, where its config says so."""
    return getattr(AutoConfig.from_pretrained(name), "max_position_embeddings", None)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(name)


def load_model(name: str, dtype: str, **options: str) -> PreTrainedModel:
    """A causal language model from a folder or the Hub, in a data type of `DTYPES`; options as `from_pretrained`'s."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(name, dtype=kind, **options)


def base_model_of(adapter: str) -> str:
    """The base model that a saved adapter names."""
    name = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if not name:
        raise ValueError(f"the adapter {adapter} does not name its base model; give --model")
    return name
