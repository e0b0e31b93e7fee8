"""The README's examples run as they stand, on a tiny model in place of the published one."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_sparsecoding.reports.readme import examples, run_examples
from scripts.run_readme import HUB_ID


README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def local_model(tmp_path):
    """A tiny Llama that reads single characters, saved as a folder."""
    vocabulary = {character: index for index, character in enumerate(["<pad>", "</s>", *"0123456789 \n"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_examples_run(local_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run_examples(README.read_text(encoding="utf-8"), {HUB_ID: str(local_model)})
    assert "trainable params: 24 ||" in printed["quick-start"]
    assert "train_loss" in printed["train"]
    assert printed["load"]
    assert printed["adapters"].startswith("[")


def test_every_example_has_a_name():
    with pytest.raises(ValueError, match="has no line"):
        examples("```python\nprint(1)\n```\n")
