"""Saving, and loading by every road: in this process and in a fresh one."""

import os
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

from hf_sparsecoding import SparseCodingConfig
from tests.tiny_models import adapted, tiny_model, tokens


KINDS = {
    "lags": {"lags": [1, 4], "target_coefficient": True},
    "segments, one layer": {
        "contexts": "segments",
        "segment_token_ids": list(range(3, 20)),
        "layers_to_transform": [1],
    },
    "thresholds": {"coefficients": "thresholded_softmax", "threshold": 0.05, "train_threshold": True},
    "fixed threshold, no contexts": {
        "num_contexts": 0,
        "target_coefficient": True,
        "coefficients": "soft_threshold",
        "threshold": 0.1,
    },
    "with the head": {"modules_to_save": ["lm_head"]},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def ids():
    return tokens(2, 11)


@each_kind
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_save_and_load(tmp_path, ids, kind, low_cpu_mem_usage):
    model = adapted(tiny_model(), task_type="CAUSAL_LM", **KINDS[kind])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1)
    model.save_pretrained(tmp_path)
    expected = model(ids).logits

    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(loaded(ids).logits, expected)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert {**loaded.peft_config["default"].to_dict(), "inference_mode": False} == model.peft_config[
        "default"
    ].to_dict()

    injected = tiny_model()
    injected.load_adapter(tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(injected(ids).logits, expected)


def test_names_of_the_saved_numbers(tmp_path):
    model = adapted(
        tiny_model(num_hidden_layers=1), target_coefficient=True, coefficients="soft_threshold", train_threshold=True
    )
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as weights:
        shapes = {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118 (not a dict)
    attention = "base_model.model.model.layers.0.self_attn"
    assert shapes == {
        f"{attention}.sparsecoding_lambda.weight": [4, 3],
        f"{attention}.sparsecoding_target.weight": [4],
        f"{attention}.sparsecoding_threshold.weight": [4],
    }


def test_several_adapters_are_saved_each_in_its_folder(tmp_path, ids):
    model = adapted(tiny_model())
    model.add_adapter("second", SparseCodingConfig(lags=[5], init_weights=False))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    loaded.load_adapter(tmp_path / "second", adapter_name="second")
    for name in ("default", "second"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_loading_for_training_goes_on_where_it_stopped(tmp_path, ids):
    model = adapted(tiny_model())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path, is_trainable=True)
    assert loaded.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()
    loaded(ids, labels=ids).loss.backward()
    assert all(parameter.grad.any() for parameter in loaded.parameters() if parameter.requires_grad)


FRESH_PROCESS = """
import sys
import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM

folder, base = sys.argv[1:]
ids, expected = torch.load(folder + "/expected.pt")
try:
    PeftConfig.from_pretrained(folder)
except KeyError as error:
    assert error.args == ("SPARSECODING",), error
else:
    raise AssertionError("peft knows SPARSECODING before hf_sparsecoding is imported")

import hf_sparsecoding

def base_model():
    return AutoModelForCausalLM.from_pretrained(base)

def injected():
    model = base_model()
    model.load_adapter(folder)
    return model

def added():
    model = base_model()
    model.add_adapter(hf_sparsecoding.SparseCodingConfig(), "fresh")
    model.load_adapter(folder, "trained")
    model.set_adapter("trained")
    return model

models = {
    "PeftModel": PeftModel.from_pretrained(base_model(), folder),
    "AutoPeftModel": AutoPeftModelForCausalLM.from_pretrained(folder),
    "load_adapter": injected(),
    "add_adapter": added(),
    "AutoModel": AutoModelForCausalLM.from_pretrained(folder),
}
for name, model in models.items():
    assert torch.equal(model.eval()(ids).logits, expected), name
print("all equal")
"""


def test_a_fresh_process_needs_only_the_import(tmp_path, ids):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_model().save_pretrained(base)
    model = adapted(tiny_model(), lags=[1, 4], target_coefficient=True)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    torch.save([ids, model(ids).logits], folder / "expected.pt")
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, folder, base],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.stdout.endswith("all equal\n"), result.stderr
