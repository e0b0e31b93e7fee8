"""transformers' text-generation pipeline: a model with an adapter, and the folder of a saved one."""

import pytest
from transformers import AutoModelForCausalLM, pipeline

from tests.tiny_models import adapted
from tests.training.character_model import character_tokenizer, save_character_model


PROMPTS = ["1 2 3\n4 5 6\n7 8", "9 9\n", "the cat\nthe"]
KINDS = {
    "lags": {"lags": [1, 4], "target_coefficient": True},
    "segments": {"contexts": "segments", "segment_token_ids": character_tokenizer()("\n")["input_ids"]},
}
GREEDY = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}  # no text ends before the others


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_character_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "</s>", "left"
    return tokenizer


def texts(model, tokenizer, **arguments) -> list[str]:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    return [found[0]["generated_text"] for found in generator(PROMPTS, return_full_text=False, **GREEDY, **arguments)]


@pytest.mark.parametrize("kind", KINDS)
def test_pipeline(tmp_path, base, tokenizer, kind):
    model = adapted(AutoModelForCausalLM.from_pretrained(base), task_type="CAUSAL_LM", **KINDS[kind])
    expected = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        generated = model.generate(**inputs, **GREEDY)
        expected.append(tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :]))
    assert texts(model, tokenizer) == expected
    assert texts(model, tokenizer, batch_size=3) == expected  # with padding
    model.save_pretrained(tmp_path)
    assert texts(str(tmp_path), tokenizer) == expected
    with model.disable_adapter():
        plain = texts(model, tokenizer)
    assert plain == texts(base, tokenizer)
    assert plain != expected
