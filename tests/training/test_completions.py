import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_sparsecoding.training import completions
from hf_sparsecoding.training.completions import (
    Completion,
    collate,
    completion_logits,
    completion_loss,
    encode,
    exact_match,
    pad_token_id,
    selects_positions,
)
from tests.tiny_models import VOCABULARY, adapted, tiny_model, tokens
from tests.training.character_model import character_tokenizer


def llama_tokenizer(merges: list[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """In Llama's manner: a space is "▁", one is put before a text, <s> is added, merges cross word boundaries."""
    units = ["<unk>", "<s>", "</s>", "▁", "\n", *"abcdefg", *("".join(merge) for merge in merges)]
    bpe = models.BPE({unit: index for index, unit in enumerate(units)}, list(merges), unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def units(tokenizer, example: Completion) -> tuple[list[str], list[str]]:
    return tuple(tokenizer.convert_ids_to_tokens(list(ids)) for ids in (example.prompt, example.completion))


def random_examples(lengths=((5, 1), (9, 3), (7, 2), (3, 4))) -> list[Completion]:
    ids = tokens(len(lengths), 16).tolist()
    return [Completion(tuple(row[:p]), tuple(row[p : p + c])) for row, (p, c) in zip(ids, lengths, strict=True)]


class TestEncode:
    def test_characters(self):
        tokenizer = character_tokenizer()
        (example,) = encode(tokenizer, ["1 2 "], ["3"], append_eos=True)
        assert units(tokenizer, example) == (["1", " ", "2", " "], ["3", "</s>"])

    def test_first_token_once(self):
        tokenizer = llama_tokenizer()
        examples = encode(tokenizer, ["ab", "<s>ab"], ["c", "c"])
        assert units(tokenizer, examples[0]) == (["<s>", "▁", "a", "b"], ["c"])
        assert units(tokenizer, examples[1])[0].count("<s>") == 1

    @pytest.mark.parametrize(("prompt", "completion"), [("a", "b"), ("a ", "b"), ("a", " b"), ("a\n", "b c")])
    def test_prompt_is_what_generation_reads(self, prompt, completion):
        tokenizer = llama_tokenizer([("a", "b"), ("▁", "b")])
        (example,) = encode(tokenizer, [prompt], [completion])
        assert list(example.prompt) == tokenizer(prompt)["input_ids"]
        text = "".join(units(tokenizer, example)[0][1:] + units(tokenizer, example)[1])
        assert text == "▁" + (prompt + completion).replace(" ", "▁")

    def test_merged_boundary_is_reported(self, caplog):
        encode(llama_tokenizer([("a", "b")]), ["a", "c"], ["b", "b"])
        assert "1 of 2 completions merge with their prompt" in caplog.text

    @pytest.mark.parametrize(("prompt", "completion", "part"), [("a", "", "completion ''"), ("", "a", "prompt ''")])
    def test_empty_texts(self, prompt, completion, part):
        with pytest.raises(ValueError, match=f"example 1: the {part} has no tokens"):
            encode(character_tokenizer(), ["a", prompt], ["b", completion])

    def test_no_end_of_sequence(self):
        tokenizer = character_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(ValueError, match="append_eos needs a tokenizer with an end-of-sequence token"):
            encode(tokenizer, ["a"], ["b"], append_eos=True)

    def test_nothing_and_padding(self):
        assert encode(character_tokenizer(), [], []) == []
        tokenizer = character_tokenizer()
        assert pad_token_id(tokenizer) == tokenizer.eos_token_id == 2


class TestCollate:
    def test_ragged(self):
        batch = collate([Completion((3, 4), (5, 6)), Completion((7,), (8,))], pad=0)
        assert batch["input_ids"].tolist() == [[3, 4, 5], [7, 0, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert batch["predicts"].tolist() == [[False, True, True], [True, False, False]]
        assert batch["labels"].tolist() == [5, 6, 8]
        assert batch["weights"].tolist() == [0.25, 0.25, 0.5]

    def test_equal_lengths_need_no_mask(self):
        assert "attention_mask" not in collate([Completion((3, 4), (5,)), Completion((4, 3), (5,))], pad=0)


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=32)).eval()


def prompt_tuned() -> torch.nn.Module:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return get_peft_model(tiny_model(), config).eval()


class TestLogits:
    @pytest.mark.parametrize(
        "make", [tiny_model, lambda: tiny_model("gemma2"), gpt2, lambda: adapted(tiny_model(), num_contexts=2)]
    )
    def test_selected_positions_equal_all_positions(self, make, monkeypatch):
        model, batch = make(), collate(random_examples(), pad=0)
        assert selects_positions(model)
        selected = completion_logits(model, batch)
        monkeypatch.setattr(completions, "selects_positions", lambda model: False)
        torch.testing.assert_close(selected, completion_logits(model, batch))

    @pytest.mark.parametrize("make", [tiny_model, gpt2, prompt_tuned])
    def test_padding_changes_nothing(self, make):
        model, examples = make(), random_examples()
        alone = torch.cat([completion_logits(model, collate([example], pad=0)) for example in examples])
        torch.testing.assert_close(completion_logits(model, collate(examples, pad=0)), alone, rtol=1e-4, atol=1e-5)

    def test_virtual_tokens_need_all_positions(self):
        assert not selects_positions(prompt_tuned())

    def test_loss_is_the_mean_over_examples(self):
        model, examples = tiny_model(), random_examples()
        alone = [completion_loss(model, collate([example], pad=0)) for example in examples]
        torch.testing.assert_close(completion_loss(model, collate(examples, pad=0)), torch.stack(alone).mean())


def test_exact_match_is_greedy_generation():
    model = adapted(tiny_model(), num_contexts=2)
    examples = random_examples(((4, 2), (6, 3), (5, 1), (6, 2), (3, 3)))
    written = []
    for example in examples:
        prompt = torch.tensor([example.prompt])
        count = len(example.completion)
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        written.append(tuple(output[0, prompt.shape[1] :].tolist()))
    # what the model would write is right, anything else is wrong
    right = [Completion(e.prompt, w) if i % 2 else e for i, (e, w) in enumerate(zip(examples, written, strict=True))]
    expected = [example.completion == w for example, w in zip(right, written, strict=True)]
    assert set(expected) == {True, False}
    for batch_size in (1, 2, 8):
        assert exact_match(model, right + right[:2], pad=0, batch_size=batch_size) == expected + expected[:2]


def test_exact_match_needs_every_token_and_keeps_the_mode():
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)).train()
    (example,) = random_examples(((5, 1),))
    with torch.no_grad():
        first = completion_logits(model.eval(), collate([example], 0)).argmax().item()
    wrong = Completion(example.prompt, (first, first, first, first))
    model.train()
    assert exact_match(model, [Completion(example.prompt, (first,)), wrong], 0, 2) == [True, False]
    assert model.training
