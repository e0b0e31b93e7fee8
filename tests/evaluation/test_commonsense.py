"""The answer rule, generation, likelihoods against a direct computation, and the statistics."""

import math

import pytest
import torch

from hf_sparsecoding.evaluation import commonsense
from hf_sparsecoding.evaluation.commonsense import cloze, find_answer, generation
from hf_sparsecoding.evaluation.commonsense_statistics import (
    accuracies,
    against_base,
    mcnemar,
    mean_difference,
)
from hf_sparsecoding.reports.accuracy_bars import accuracy_bars
from hf_sparsecoding.reports.intervals import wilson
from hf_sparsecoding.reports.tables import accuracy_table, with_interval
from hf_sparsecoding.tasks.commonsense import BENCHMARKS, to_record
from hf_sparsecoding.training.completions import encode
from tests.evaluation.commonsense_model import rows, word_model, word_tokenizer
from tests.tiny_models import adapted


def records(task="arc_easy", count=5):
    return [to_record(task, row, "here") for row in rows(task, count)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("the correct answer is answer3", "answer3"),
        ("answer2, not answer1", "answer2"),
        ("it is Answer1", None),
        ("", None),
        ("no idea\n\n### Response:\nanswer1", None),
        ("answer6 or answer5", "answer5"),
    ],
)
def test_first_label_counts(text, answer):
    assert find_answer(text, BENCHMARKS["siqa"].labels) == answer


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("config", [None, {}, {"contexts": "segments", "segment_token_ids": [3]}], ids=str)
def test_batches_write_what_single_prompts_do(beams, config):
    tokenizer = word_tokenizer()
    model = word_model() if config is None else adapted(word_model(), **config)
    model.generation_config.repetition_penalty = 9.0  # the protocol has none
    items = records("arc_easy", 2) + records("piqa", 2)
    together = generation(model, tokenizer, items, beams=beams, max_new_tokens=5, batch_size=3)
    for record, answer in zip(items, together, strict=True):
        ids = torch.tensor([encode(tokenizer, [record["prompt"]], ["x"])[0].prompt])
        written = model.generate(ids, do_sample=False, num_beams=beams, max_new_tokens=5, repetition_penalty=1.0)
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer == {"label": record["label"], "chosen": None, "right": False, "text": text}


def test_prompts_that_do_not_fit_are_refused():
    model = word_model()
    model.config.max_position_embeddings = 100
    with pytest.raises(
        ValueError, match=r"arc_easy record 0 has \d+ tokens; with 32 new ones it exceeds the 100 positions"
    ):
        generation(model, word_tokenizer(), records())


def log_likelihood(model, tokenizer, context, continuation) -> float:
    before, whole = (tokenizer(text)["input_ids"] for text in (context, context + continuation))
    logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(logits[i - 1, whole[i]].item() for i in range(len(before), len(whole)))


@pytest.mark.parametrize("task", ["arc_easy", "winogrande", "hellaswag"])
def test_likelihoods_equal_a_direct_computation(task):
    pytest.importorskip("lm_eval")
    tokenizer, model, items = word_tokenizer(), adapted(word_model()), records(task, 3)
    for record, answer in zip(items, commonsense.likelihood(model, tokenizer, items, batch_size=4), strict=True):
        pairs = cloze(record)
        expected = [log_likelihood(model, tokenizer, *pair) for pair in pairs]
        assert list(answer["scores"].values()) == pytest.approx(expected, rel=1e-4)
        lengths = [len(text) for text in record["options"].values()] if task != "winogrande" else [1] * len(pairs)
        per_character = [score / length for score, length in zip(expected, lengths, strict=True)]
        labels = list(record["options"])
        assert answer["chosen"] == labels[per_character.index(max(per_character))]
        assert answer["right"] == (answer["chosen"] == record["label"])
        assert answer["plain_right"] == (labels[expected.index(max(expected))] == record["label"])
    by_label = commonsense.label_likelihood(model, tokenizer, items, batch_size=4)
    for record, answer in zip(items, by_label, strict=True):
        # lm-eval counts the newline before the response to it: the same for all labels
        context = record["prompt"].removesuffix("\n")
        expected = {
            label: log_likelihood(model, tokenizer, context, f"\nthe correct answer is {label}")
            for label in record["options"]
        }
        assert answer["scores"] == pytest.approx(expected, rel=1e-4)
        assert answer["chosen"] == max(expected, key=expected.get)


def test_cloze():
    record = {"task": "winogrande", "question": "Ann saw _ run.", "options": {"option1": "Eve", "option2": "Al"}}
    assert cloze(record) == [("Ann saw Eve", " run."), ("Ann saw Al", " run.")]
    record = {"task": "winogrande", "question": "The winner was _", "options": {"option1": "Ann", "option2": "Al"}}
    assert cloze(record) == [("The winner was", " Ann"), ("The winner was", " Al")]
    record = {"task": "hellaswag", "question": "Rowing: A man", "options": {"ending1": "rows."}}
    assert cloze(record) == [("Rowing: A man", " rows.")]
    record = {"task": "piqa", "question": "Dry a cup.", "options": {"solution1": "Use a towel."}}
    assert cloze(record) == [("Question: Dry a cup.\nAnswer:", " Use a towel.")]


def test_missing_lm_eval_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install hf-sparsecoding\[eval\]; --protocols generation does without"):
        commonsense.require_lm_eval()


def answers(**tasks):
    """{"generation": ...} of strings with a letter per item: r right, w wrong, n no answer."""
    kinds = {"r": ("a", True), "w": ("b", False), "n": (None, False)}
    return {
        "generation": {
            task: [dict(zip(("chosen", "right"), kinds[letter], strict=True)) for letter in letters]
            for task, letters in tasks.items()
        }
    }


def test_accuracies():
    found = accuracies(answers(boolq="rrrw", piqa="wn"))
    assert found.metrics == {
        "generation_boolq": 0.75,
        "generation_piqa": 0.0,
        "generation_mean": 0.375,
        "generation_unanswered_boolq": 0.0,
        "generation_unanswered_piqa": 0.5,
        "generation_unanswered_mean": 0.25,
    }
    # 4 / (1/4 + 1/2) = 5.3 trials of equal weight
    assert [found.items[f"generation_{name}"] for name in ("boolq", "piqa", "mean")] == [4, 2, 5]
    assert found.intervals["generation_mean"] == wilson(0.375, 5)


def test_mcnemar():
    assert mcnemar(0, 0) == 1
    assert mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(1, 8) == mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 2**9)
    assert 0 < mcnemar(600, 400) < 1e-9
    assert mcnemar(7, 3) == pytest.approx(0.34375)  # scipy.stats.binomtest(3, 10)


def test_paired_difference():
    own, base = [True] * 6 + [False] * 4, [True] * 3 + [False] * 7
    difference = mean_difference([(own, base), (base, base)])
    assert difference.value == pytest.approx(0.15)
    half = 1.959964 * math.sqrt(0.3 * 0.7 / 10) / 2
    assert (difference.low, difference.high) == pytest.approx((0.15 - half, 0.15 + half))
    compared = against_base(answers(boolq="rrrrrr"), answers(boolq="wwwwww"))
    assert compared["generation_boolq"] == {"difference": 1.0, "p": 2 / 64}
    assert compared["generation_mean"] == {"difference": 1.0, "low": 1.0, "high": 1.0}


def test_table_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    base, better = answers(boolq="wwwwwww", piqa="rw"), answers(boolq="rrrrrrr", piqa="rw")
    runs = []
    for method, own in (("base", base), ("lags", better)):
        found = accuracies(own)
        runs.append(
            {
                "method": method,
                "seed": 0,
                "settings": {"items": found.items},
                "metrics": found.metrics,
                "intervals": found.intervals,
            }
        )
    runs[1]["against_base"] = against_base(better, base)
    first, second = accuracy_table(runs, "generation", ["boolq", "piqa"]).splitlines()[2:]
    assert [cell.strip() for cell in first.split("|")[1:5]] == ["base", "0.000", "0.500", with_interval(0.25, 6)]
    cells = [cell.strip() for cell in second.split("|")]
    assert cells[1:4] == ["lags, seed 0", "1.000*", "0.500"]
    assert cells[5].startswith("+0.500 [")
    path = accuracy_bars(
        {"runs": [*runs, {**runs[1], "seed": 1}]}, "generation", ["boolq", "piqa"], tmp_path / "a.png"
    )
    assert path.stat().st_size > 5000
    with pytest.raises(ValueError, match="base has no metric 'likelihood_boolq'"):
        accuracy_bars({"runs": runs}, "likelihood", ["boolq"], tmp_path / "b.png")
