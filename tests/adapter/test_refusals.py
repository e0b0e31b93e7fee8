"""What cannot be adapted, loaded or called says so before anything runs, with the value and the cure."""

import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from peft.utils.error import NoMatchingPeftModuleError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.tiny_models import adapted, tiny_model, tokens


@pytest.mark.parametrize("target", ["q_proj", "mlp"])
def test_only_attention_modules_can_be_adapted(target):
    with pytest.raises(ValueError, match="target_modules must name attention modules such as 'self_attn', got a"):
        adapted(tiny_model(), target_modules=[target])


def test_targets_without_a_match():
    with pytest.raises(NoMatchingPeftModuleError, match="Target modules {'attn'} not found in the base model"):
        adapted(tiny_model(), target_modules=["attn"])


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_thresholds_need_an_attention_that_shows_its_scores(implementation):
    model = tiny_model()
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=f"attn_implementation='{implementation}' does not.*load the model with"):
        adapted(model, coefficients="soft_threshold")


def test_replacing_the_attention_under_a_threshold():
    model, ids = adapted(tiny_model(), coefficients="thresholded_softmax", threshold=0.1), tokens(1, 5)
    expected = model(ids).logits
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="would drop the threshold.*set_attn_implementation.'sparse_coding'"):
        model(ids)
    model.set_attn_implementation("sparse_coding")
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_thresholds_do_not_know_biases_in_the_mask(implementation):
    causal = torch.full((1, 1, 6, 6), -torch.inf).triu(1)
    model = adapted(tiny_model(attn_implementation=implementation), coefficients="soft_threshold", threshold=0.1)
    ids = tokens(1, 6)
    torch.testing.assert_close(model(ids, attention_mask=causal).logits, model(ids).logits)
    with pytest.raises(ValueError, match="LlamaAttention was given an attention mask with biases"):
        model(ids, attention_mask=causal - 0.1 * torch.ones(6, 6).tril(-1))


def test_what_is_not_part_of_the_language_model():
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=tiny_model().config,
            vision_config=CLIPVisionConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=28
            ),
            image_token_index=60,
        )
    )
    with pytest.raises(ValueError, match="CLIPAttention cannot be adapted.*leave it out with exclude_modules"):
        adapted(model)
    adapted(model, exclude_modules=".*vision.*")


def test_segments_must_be_given():
    ids = tokens(2, 6)
    with pytest.raises(ValueError, match="pass segment_ids .* or set segment_token_ids in the config"):
        adapted(tiny_model(), contexts="segments")(ids)
    model = adapted(tiny_model(), contexts="segments", segment_token_ids=[5])
    with pytest.raises(ValueError, match="segment_token_ids need input_ids; .* pass segment_ids"):
        model(inputs_embeds=model.get_input_embeddings()(ids))


@pytest.mark.parametrize("shape", [(2, 5), (1, 6), (6,)])
def test_segments_must_have_the_shape_of_the_tokens(shape):
    with pytest.raises(ValueError, match=r"segment_ids must have the shape .*\[2, 6\], got"):
        adapted(tiny_model(), contexts="segments")(tokens(2, 6), segment_ids=torch.zeros(shape, dtype=torch.long))


def test_adapter_names_must_be_known_and_one_per_row():
    model, ids = adapted(tiny_model()), tokens(2, 5)
    with pytest.raises(ValueError, match="unknown adapters other; known are default and __base__"):
        model(ids, adapter_names=["default", "other"])
    for names in (["default"], ["default"] * 3):
        with pytest.raises(ValueError, match=f"one name per row: got {len(names)} for 2 rows"):
            model(input_ids=ids, adapter_names=names)
        with pytest.raises(ValueError, match=f"one name per row: got {len(names)} for 2 rows"):
            model.generate(input_ids=ids, adapter_names=names, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"only be passed in evaluation mode; call model.eval\(\)"):
        model.train()(ids, adapter_names=["default"] * 2)


def test_an_adapter_of_another_head_count(tmp_path):
    adapted(tiny_model(num_attention_heads=8)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not fit the model: .* shape \[8, 3\], the model has \[4, 3\]"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # transformers' own check
        tiny_model().load_adapter(tmp_path)


@pytest.fixture
def saved(tmp_path):
    """Folder with a base model in "base" and an adapter of it in "adapter"."""
    tiny_model().save_pretrained(tmp_path / "base")
    model = adapted(tiny_model())
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


LOADERS = {
    "PeftModel": lambda folder: PeftModel.from_pretrained(tiny_model(), folder),
    "AutoPeftModel": AutoPeftModelForCausalLM.from_pretrained,
    "PeftModel.load_adapter": lambda folder: adapted(tiny_model()).load_adapter(folder, adapter_name="second"),
    "transformers": lambda folder: tiny_model().load_adapter(folder),
}


@pytest.mark.parametrize("kept", [4, 60, -1])
@pytest.mark.parametrize("loader", LOADERS)
def test_truncated_weights(saved, loader, kept):
    weights = saved / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    if loader == "transformers":  # reads the file itself
        with pytest.raises(SafetensorError, match="deserializing header"):
            LOADERS[loader](saved)
    else:
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors is truncated or corrupt .* again"):
            LOADERS[loader](saved)


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("loader", [*LOADERS, "transformers, asked for it"])
def test_pickled_weights_are_refused_and_never_run(saved, tmp_path, loader):
    trace = tmp_path / "code-ran"
    (saved / "adapter_model.safetensors").unlink()
    (saved / "adapter_model.bin").write_bytes(pickle.dumps(RunsCode(str(trace))))
    if loader == "transformers, asked for it":
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            tiny_model().load_adapter(saved, use_safetensors=False)
    elif loader == "transformers":  # looks for safetensors only
        with pytest.raises(OSError, match="adapter_model.safetensors"):
            LOADERS[loader](saved)
    else:
        with pytest.raises(ValueError, match=r"adapter_model\.bin is a pickle.*safe_serialization=True"):
            LOADERS[loader](saved)
    assert not trace.exists()


OFFLINE = """
import os
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_CACHE={cache!r})
from peft import PeftModel
from tests.tiny_models import tiny_model
PeftModel.from_pretrained(tiny_model(), "me/adapter")
"""


@pytest.mark.parametrize("pickled", [False, True])
def test_a_pickle_of_the_hub_in_the_cache_is_refused_offline(saved, tmp_path, pickled):
    repository = tmp_path / "models--me--adapter"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = shutil.copytree(saved, repository / "snapshots" / "abc")
    if pickled:
        state = load_file(snapshot / "adapter_model.safetensors")
        (snapshot / "adapter_model.safetensors").unlink()
        torch.save(state, snapshot / "adapter_model.bin")
    command = [sys.executable, "-c", OFFLINE.format(cache=str(tmp_path))]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    if pickled:
        assert re.search(r"ValueError: .*adapter_model\.bin is a pickle", process.stderr)
    else:
        assert process.returncode == 0, process.stderr


def test_a_pickle_beside_the_weights_is_ignored(saved, tmp_path):
    trace = tmp_path / "code-ran"
    (saved / "adapter_model.bin").write_bytes(pickle.dumps(RunsCode(str(trace))))
    for load in LOADERS.values():
        load(saved)
    assert not trace.exists()


def test_a_decoder_is_needed():
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, vocab_size=8)
    with pytest.raises(ValueError, match="SparseCoding adapts decoder-only models; t5 is an encoder-decoder"):
        adapted(T5ForConditionalGeneration(config))
