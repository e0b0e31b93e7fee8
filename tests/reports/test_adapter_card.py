"""Cards of published adapters: what they say, and that the Hub's own classes read them as they were meant."""

import re

import pytest
from huggingface_hub import ModelCard

from hf_sparsecoding.reports.adapter_card import AdapterCard, choose_run, read_config, result_rows
from hf_sparsecoding.reports.intervals import wilson
from tests.reports.example_adapter import BASE_MODEL, CONFIG, evaluation_results, save_adapter, training_results
from tests.reports.example_results import example_run


def make_card(tmp_path, results=None, run=None, config=None, **changes) -> AdapterCard:
    folder = save_adapter(tmp_path / "adapter", **(config or {}))
    return AdapterCard(folder, "me/few", BASE_MODEL, results, run, **changes)


def card_of(tmp_path, results, **changes) -> AdapterCard:
    seed = changes.pop("seed", None)
    return make_card(tmp_path, results, choose_run(results, CONFIG, seed=seed), **changes)


def test_card_of_a_training(tmp_path):
    card = card_of(tmp_path, training_results(note="50 of 200 steps"), datasets=["me/puzzles"])
    (card.folder / "lambda.png").touch()
    text = card.render()
    for expected in (
        "# few\n",
        "type SPARSECODING for [me/base](https://huggingface.co/me/base): 16 trained numbers.",
        "pip install hf-sparsecoding",
        "| accuracy     |   400 | 0.400 [0.353, 0.449] | 0.720 [0.674, 0.762] | +0.320 [+0.255, +0.385] |",
        "| accuracy_add |   200 |",
        "| train_loss   |     - |                    - |                1.500 |                       - |",
        "![lambda](lambda.png)",
        "- `steps`: 50\n",
        "- `lags`: [1, 2]\n",
        "- few: 50 of 200 steps\n",
        "- One run, few, seed 0:",
        "python scripts/toy.py --all",
        "Run on 2026-01-02 with python 3.11, torch 2.0; 2 cores, CPU.",
        "@inproceedings{chen2025sparsecoding",
    ):
        assert expected in text
    for unwanted in ("step_seconds", "before", "`data`", "segment_token_ids", "inference_mode", "was loaded from"):
        assert unwanted not in text
    assert "\n\n\n" not in text


def test_card_of_an_evaluation_shows_the_base_model_beside(tmp_path):
    results = evaluation_results()
    with pytest.raises(ValueError, match=r"2 runs .* of: lags \(seed 0\), lags \(seed 1\); choose .* --seed"):
        choose_run(results, CONFIG)
    run = choose_run(results, CONFIG, seed=1)
    assert run["metrics"]["likelihood_easy"] == 0.7
    rows = {row.metric: row for row in result_rows(results, run)}
    assert (rows["likelihood_easy"].base.value, rows["likelihood_easy"].adapter.value) == (0.4, 0.7)
    assert {name: row.dataset for name, row in rows.items()} == {
        "likelihood_easy": "easy",
        "likelihood_very_easy": "very_easy",
        "likelihood_mean": "tasks",
        "train_loss": None,
    }
    assert rows["likelihood_very_easy"].adapter.interval == wilson(0.5, 100)
    assert {name: row.change for name, row in rows.items()} == {
        "likelihood_easy": "+0.300, p = 0.00012",
        "likelihood_very_easy": "+0.000 [-0.139, +0.139], n.s.",  # not paired: from the numbers of items
        "likelihood_mean": "+0.150 [-0.010, +0.310], n.s.",
        "train_loss": "-",
    }
    text = card_of(tmp_path, results, seed=1).render()
    assert re.search(r"\| likelihood_mean +\| +320 \| 0\.450 \[.*\] \| 0\.600 \[0\.510, 0\.690\] \|", text)
    assert '- `evaluation`:\n  - `tasks`: ["easy", "very_easy"]\n  - `beams`: 4\n' in text
    assert "- `training`:\n  - `steps`: 50\n\n" in text
    assert "McNemar" in text
    assert "McNemar" not in card_of(tmp_path, results, seed=0).render()


def test_metadata_reads_back_as_written(tmp_path):
    card = card_of(tmp_path, evaluation_results(), seed=0, datasets=["me/tasks"], license="odc-by")
    read = ModelCard(card.render())
    assert read.data.to_dict() == card.metadata().to_dict()
    assert ModelCard(str(read)).data.to_dict() == read.data.to_dict()
    expected = {
        "base_model": BASE_MODEL,
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "odc-by",
        "datasets": ["me/tasks"],
    }
    assert expected.items() <= read.data.to_dict().items()
    found = [(result.dataset_type, result.metric_type, result.metric_value) for result in read.data.eval_results]
    assert found == [("easy", "likelihood", 0.6), ("very_easy", "likelihood", 0.5), ("tasks", "likelihood_mean", 0.55)]


def test_groups_of_a_metric_stay_out_of_the_model_index(tmp_path):
    (result,) = card_of(tmp_path, training_results()).metadata().eval_results
    assert (result.dataset_type, result.metric_name, result.metric_value) == ("s_raven_text", "accuracy", 0.72)
    (result,) = card_of(tmp_path, training_results(task="", data="some/where/mine.jsonl")).metadata().eval_results
    assert result.dataset_name == "mine.jsonl"


def test_card_without_results(tmp_path):
    card = make_card(tmp_path, revision="v2")
    read = ModelCard(card.render())
    assert "model-index" not in read.data.to_dict()
    assert "model_name" not in read.data.to_dict()
    assert "16 trained numbers" in read.text
    assert "No results were published" in read.text
    assert 'from_pretrained("me/few", revision="v2")' in read.text
    assert not re.search("## (Results|Data|Command)", read.text)


def test_other_methods_need_no_import(tmp_path):
    card = make_card(tmp_path, config={"peft_type": "LORA"})
    text = card.render()
    assert card.metadata().tags == ["lora"]
    for ours in ("sparsecoding", "lambda", "merged"):
        assert ours not in text


def test_a_base_model_from_elsewhere_is_named(tmp_path):
    text = card_of(tmp_path, training_results(model="models/base")).render()
    assert "For the results, the base model was loaded from `models/base`." in text


def test_results_of_another_adapter_are_refused():
    same = {"num_contexts": 2, "lags": [2, 1], "peft_version": "0", "unknown": 1}
    assert choose_run(training_results(adapter_config=same), CONFIG)["method"] == "few"
    with pytest.raises(ValueError, match="num_contexts is 3 in the run 'few' and 2 in the adapter; give"):
        choose_run(training_results(adapter_config={"num_contexts": 3}), CONFIG)
    with pytest.raises(ValueError, match=r"0 runs may be this adapter's, of: few \(seed 0\)"):
        choose_run(training_results(), CONFIG, method="many")
    with pytest.raises(ValueError, match=r"0 runs .* of: base \(seed 0\)"):
        choose_run({"runs": [example_run("base")]}, CONFIG)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter in .*: adapter_config.json is missing"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing; give"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), r"adapter_config\.json:1: not JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "has no peft_type"),
        (lambda folder: save_adapter(folder, task_type="SEQ_CLS"), "task_type is 'SEQ_CLS'; cards are for causal"),
    ],
)
def test_no_adapter(tmp_path, damage, message):
    folder = save_adapter(tmp_path / "adapter")
    damage(folder)
    with pytest.raises(ValueError, match=message):
        read_config(folder)
