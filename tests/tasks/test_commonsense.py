"""Commonsense records: wording, parsing, sizes, duplicates, what is refused."""

import json
import sys
from types import SimpleNamespace

import pytest

from hf_sparsecoding.tasks import commonsense
from hf_sparsecoding.tasks.commonsense import BENCHMARKS, MIXTURE, TASKS, load, parse_instruction, to_record
from tests.evaluation.commonsense_model import rows, write_data


# each benchmark's own fields, and the instruction that LLM-Adapters makes of them
OWN = {
    "boolq": (
        {"question": "is rain wet", "passage": "Rain falls.", "answer": False},
        "Please answer the following question with true or false, question: is rain wet?\n\nAnswer format: true/false",
        "false",
    ),
    "piqa": (
        {"goal": "Dry a cup.", "sol1": "Use water.", "sol2": "Use a towel.", "label": 1},
        "Please choose the correct solution to the question: Dry a cup.\n\nSolution1: Use water.\n\n"
        "Solution2: Use a towel.\n\nAnswer format: solution1/solution2",
        "solution2",
    ),
    "siqa": (
        {
            "context": "Al ran.",
            "question": "Why?",
            "answerA": "fun",
            "answerB": "fear",
            "answerC": "hunger",
            "label": "3",
        },
        "Please choose the correct answer to the question: Al ran. Why?\n\nAnswer1: fun Answer2: fear Answer3: hunger"
        "\n\nAnswer format: answer1/answer2/answer3",
        "answer3",
    ),
    "hellaswag": (
        {"activity_label": "Rowing", "ctx": "A man", "endings": ["rows.", "eats.", "flies.", "sits."], "label": "0"},
        "Please choose the correct ending to complete the given sentence: Rowing: A man\n\nEnding1: rows. Ending2: "
        "eats. Ending3: flies. Ending4: sits.\n\nAnswer format: ending1/ending2/ending3/ending4",
        "ending1",
    ),
    "winogrande": (
        {"sentence": "Ann thanked Eve because _ helped.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        "Please choose the correct answer to fill in the blank to complete the given sentence: Ann thanked Eve "
        "because _ helped.\n\nOption1: Ann Option2: Eve Answer format: option1/option2",
        "option2",
    ),
    "arc_easy": (
        {
            "question": "What is hot?",
            "choices": {"text": ["ice", "fire", "fog"], "label": ["1", "2", "3"]},
            "answerKey": "2",
        },
        "Please choose the correct answer to the question: What is hot?\n\nAnswer1: ice Answer2: fire Answer3: fog\n\n"
        "Answer format: answer1/answer2/answer3",
        "answer2",
    ),
    "openbookqa": (
        {
            "question_stem": "Cats are",
            "choices": {"text": ["a", "b", "c", "d"], "label": ["A", "B", "C", "D"]},
            "answerKey": "D",
        },
        "Please choose the correct answer to the question: Cats are\n\nAnswer1: a Answer2: b Answer3: c Answer4: d\n\n"
        "Answer format: answer1/answer2/answer3/answer4",
        "answer4",
    ),
}


@pytest.mark.parametrize("task", OWN)
def test_records_from_the_benchmarks_own_fields(task):
    row, instruction, label = OWN[task]
    record = to_record(task, row, "here")
    assert f"### Instruction:\n{instruction}\n\n### Response:\n" in record["prompt"]
    assert (record["label"], record["completion"]) == (label, f"the correct answer is {label}")
    # the same record from LLM-Adapters' form
    made = {"instruction": instruction, "input": "", "output": record["completion"], "answer": label}
    assert to_record(task, made, "here") == record


def test_options_are_read_from_the_end():
    """A question may quote what looks like an option."""
    question, options = parse_instruction(
        "Please choose the correct answer to the question: Is Answer1: right?\n\nAnswer1: no Answer2: yes\n\n"
        "Answer format: answer1/answer2"
    )
    assert (question, options) == ("Is Answer1: right?", {"answer1": "no", "answer2": "yes"})


def test_folders(tmp_path):
    write_data(tmp_path, tasks=("boolq",), train=4, test=3)
    assert [record["label"] for record in load(str(tmp_path), "boolq", "train")] == ["true", "false"] * 2
    # as LLM-Adapters lays them out, by line
    folder = tmp_path / "dataset" / "ARC-Easy"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows("arc_easy", 5)))
    assert len(load(str(tmp_path), "arc_easy", "train")) == 5
    (tmp_path / "commonsense_170k.json").write_text(json.dumps(rows("piqa", 2) + rows("boolq", 1)))
    mixture = load(str(tmp_path), MIXTURE, "train", any_size=True)
    assert [list(record["options"]) for record in mixture] == [["solution1", "solution2"]] * 2 + [["true", "false"]]
    assert {record["task"] for record in mixture} == {MIXTURE}


def test_sizes_are_checked(tmp_path, caplog):
    write_data(tmp_path, tasks=("boolq",), test=3)
    with pytest.raises(ValueError, match="boolq has 3 test records in .*, published are 3,270; complete the file, or"):
        load(str(tmp_path), "boolq", "test")
    assert len(load(str(tmp_path), "boolq", "test", any_size=True)) == 3
    assert "boolq has 3 test records" in caplog.text
    (tmp_path / "boolq" / "train.json").write_text("[]")
    with pytest.raises(ValueError, match="boolq has no train records"):
        load(str(tmp_path), "boolq", "train")


def test_hub(monkeypatch):
    """Which parts of which data sets are asked for: the mixture has all six sizes of WinoGrande."""
    asked = []

    def load_dataset(name, part, split):
        asked.append((name, part, split))
        task = next(task for task in OWN if BENCHMARKS[task].hub[0] == name)
        return [OWN[task][0]]

    fake = SimpleNamespace(
        load_dataset=load_dataset, concatenate_datasets=lambda parts: [row for part in parts for row in part]
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    records = load("hub", MIXTURE, "train", any_size=True)
    assert len(records) == len(TASKS) + 5
    assert {record["task"] for record in records} == {MIXTURE}
    assert sum(name == "allenai/winogrande" for name, _, _ in asked) == 6
    asked.clear()
    assert load("hub", "winogrande", "test", any_size=True)[0]["label"] == "option2"
    load("hub", "openbookqa", "test", any_size=True)
    assert asked == [("allenai/winogrande", "winogrande_xl", "validation"), ("allenai/openbookqa", "main", "test")]

    def unreachable(*arguments, **options):
        raise ConnectionError("offline")

    monkeypatch.setattr(fake, "load_dataset", unreachable)
    with pytest.raises(OSError, match=r"boolq cannot be had from the Hub \(offline\); give a folder of files"):
        load("hub", "boolq", "train")


def test_duplicates_in_any_order_and_case():
    def record(task, question, *options):
        return {"task": task, "question": question, "options": dict(enumerate(options))}

    train = [record("a", "What?", "x", "y"), record("a", "Who?", "x", "y")]
    test = [record("a", "what?", "Y", " x"), record("a", "Who?", "x", "z"), record("b", "Where?", "x", "y")]
    assert commonsense.train_test_duplicates(train, test) == {"a": 1, "b": 0}


GOOD = rows("boolq", 1)[0]


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("boolq", 3, "record 0: a record must be an object, got 3"),
        ("boolq", {"instruction": "x"}, "record 0: the record lacks 'output'; it has instruction"),
        ("boolq", {**GOOD, "answer": "maybe"}, "record 0: the answer 'maybe' is none of the options true, false"),
        ("boolq", {**GOOD, "input": "x"}, "record 0: input must be empty, got 'x'"),
        ("boolq", {**GOOD, "instruction": "Is it?"}, "record 0: the instruction lacks its line 'Answer format: '"),
        ("boolq", {**GOOD, "output": None}, "record 0: .*NoneType"),
        ("boolq", {"passage": "x", "answer": True}, "record 0: the record lacks 'question'; it has passage, answer"),
        ("piqa", {**OWN["piqa"][0], "label": -1}, "the answer -1 is none of the options solution1, solution2"),
        ("siqa", {**OWN["siqa"][0], "label": "4"}, "the answer 'answer4' is none of the options"),
        ("openbookqa", {**OWN["openbookqa"][0], "answerKey": "E"}, "record 0: 'E' is not in list"),
        ("winogrande", {**OWN["winogrande"][0], "sentence": "Ann."}, "the sentence has no blank _"),
        (
            "arc_easy",
            {**GOOD, "instruction": "What?\n\nAnswer1: a\n\nAnswer format: answer1/answer2"},
            "announces answer2 but has no such option",
        ),
    ],
)
def test_bad_records_are_named(tmp_path, task, row, message):
    (tmp_path / task).mkdir()
    (tmp_path / task / "train.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path), task, "train")


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder: .*nowhere; give a folder with <task>/train.json, or 'hub'"):
        load(str(tmp_path / "nowhere"), "boolq", "train")
    with pytest.raises(ValueError, match=r"has no arc_easy/train.json or ARC-Easy/train.json"):
        load(str(tmp_path), "arc_easy", "train")
    (tmp_path / "boolq").mkdir()
    path = tmp_path / "boolq" / "train.json"
    for text, message in (('[\n{"a": }]', r"train.json:2: not JSON"), ("{}", "must hold a list of records, got dict")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path), "boolq", "train")
    path.unlink()
    path.with_suffix(".jsonl").write_text(f"{json.dumps(GOOD)}\n{{")
    with pytest.raises(ValueError, match=r"train.jsonl: record 1: not JSON"):
        load(str(tmp_path), "boolq", "train")


@pytest.mark.parametrize(
    ("task", "split", "message"),
    [
        ("boolqq", "train", "unknown task 'boolqq'; did you mean 'boolq'"),
        ("boolq", "validation", "split must be one of train, test .*, got 'validation'"),
        (MIXTURE, "test", "the mixture has only train"),
    ],
)
def test_unknown_names(tmp_path, task, split, message):
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path), task, split)
