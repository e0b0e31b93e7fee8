"""Training on synthetic tasks: results, resuming, processes, what is refused."""

import json

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional
from transformers import AutoModelForTokenClassification

from hf_sparsecoding.evaluation.predictions import load_trained
from hf_sparsecoding.models.sparse_transformer.modeling_sparse_transformer import SparseTransformerOutput
from hf_sparsecoding.reports import results
from hf_sparsecoding.tasks.s_raven import SRaven
from hf_sparsecoding.training import synthetic
from hf_sparsecoding.training.synthetic import RULE_KINDS, TASKS, TrainingData, evaluate, make_model
from scripts import train_synthetic
from scripts.train_synthetic import ModelArguments
from tests.training.character_model import run_distributed


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
RAVEN = {"task": "raven", "task_options": '{"size": 20}', "patch_size": 10, "train_items": 10}
IMAGES = {"task": "compositional_images", "task_options": '{"pairs": 2}', "patch_size": 4}


def flags(output, **changes):
    values = {
        "task_options": '{"features": 2}',
        **TINY,
        "steps": 6,
        "batch_size": 8,
        "warmup_steps": 1,
        "learning_rate": 1e-2,
        "checkpoint_every": 2,
        "evaluate_every": 3,
        "eval_items": 20,
        "eval_batch_size": 8,
        "progress": False,
        "output_dir": output,
        **changes,
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def run_of(folder) -> dict:
    return results.load(folder / "results.json")["runs"][0]


def without_times(run: dict) -> dict:
    metrics = {name: value for name, value in run["metrics"].items() if name != "step_seconds"}
    return {**run, "metrics": metrics, "settings": {**run["settings"], "num_processes": None}}


def test_run_writes_model_and_results(tmp_path):
    options = {"mixer": "sparse_coding", "score_norm": "heads", "transfer": "aligned", "threshold": 0.5}
    assert train_synthetic.main(flags(tmp_path, experiment="tiny", seed=3, **options)) == 0
    written = results.load(tmp_path / "results.json")
    run = written["runs"][0]
    assert (written["experiment"], run["method"]) == ("tiny", "sparse_coding, transfer: aligned")
    assert (run["seed"], run["samples"]) == (3, 48)
    assert run["settings"]["threshold"] == 0.5
    assert [entry["samples"] for entry in run["history"]] == [24, 48]
    metrics = run["metrics"]
    assert {"accuracy", "accuracy_per_feature", "ood_accuracy", "ood_accuracy_per_feature"} <= metrics.keys()
    assert run["history"][-1]["ood_accuracy_per_feature"] == metrics["ood_accuracy_per_feature"]
    assert 0.1 < metrics["zero_share"] < 0.9
    assert metrics["zero_share"] == pytest.approx((metrics["zero_share_layer_0"] + metrics["zero_share_layer_1"]) / 2)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert run["trainable_parameters"] == model.num_parameters()
    # the saved model has the saved accuracy
    batch = SRaven(features=2).examples(0, 20, "ood", seed=0)
    predicted = model(torch.from_numpy(batch["inputs"])).logits.argmax(-1)
    right = predicted == torch.from_numpy(batch["labels"])
    assert metrics["ood_accuracy_per_feature"] == pytest.approx(right.float().mean().item())


@pytest.mark.parametrize("options", [RAVEN, IMAGES], ids=["raven", "compositional_images"])
def test_image_tasks(tmp_path, options):
    assert train_synthetic.main(flags(tmp_path, mixer="sparse_coding", transfer="aligned", **options)) == 0
    metrics = run_of(tmp_path)["metrics"]
    assert {"mse", "psnr", "psnr40_share", "ssim"} <= metrics.keys()
    assert ("ood_mse" in metrics) == (options is IMAGES)
    assert 0 < metrics["mse"] < 1


def test_resumed_run_equals_a_whole_one(tmp_path, monkeypatch):
    options = {"mixer": "sparse_coding", "transfer": "aligned", "threshold_warmup": 4}
    train_synthetic.main(flags(tmp_path / "whole", **options))
    original = synthetic.TrainingData.__call__

    def interrupted(self, start, count):
        if start >= 5 * 8:
            raise KeyboardInterrupt
        return original(self, start, count)

    with monkeypatch.context() as patch:
        patch.setattr(synthetic.TrainingData, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_synthetic.main(flags(tmp_path / "cut", **options))
    assert not (tmp_path / "cut" / "results.json").exists()
    train_synthetic.main(flags(tmp_path / "cut", **options))
    whole, cut = (without_times(run_of(tmp_path / name)) for name in ("whole", "cut"))
    assert cut == whole


@pytest.mark.parametrize(
    "options",
    [{}, {**IMAGES, "train_items": 24}, {"mixer": "sparse_coding", "eval_batch_size": 256}],
    ids=["s_raven", "compositional_images", "shares of zeros of one batch, which one process has"],
)
def test_two_processes_give_the_result_of_one(tmp_path, options):
    options = {"transfer": "aligned", "eval_batch_size": 3, **options}
    run_distributed(lambda: train_synthetic.main(flags(tmp_path / "two", **options)))
    train_synthetic.main(flags(tmp_path / "one", **options))
    one, two = (run_of(tmp_path / name) for name in ("one", "two"))
    assert two["settings"]["num_processes"] == 2
    for name, value in one["metrics"].items():
        if name != "step_seconds":
            assert two["metrics"][name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("options", [{}, {"transfer_stage": "scores"}, {"psi": "relu"}], ids=str)
@pytest.mark.parametrize("mixer", ["softmax", "sparse_coding", "hyla", "linear"])
def test_mixed_precision(tmp_path, mixer, options):
    options = {"mixer": mixer, "score_norm": "heads", "transfer": "aligned", **options}
    train_synthetic.main(flags(tmp_path, steps=2, evaluate_every=0, mixed_precision="bf16", **options))
    assert run_of(tmp_path)["metrics"]["train_loss"] < 3


@pytest.mark.usefixtures("fresh_accelerate")
def test_the_saved_model_is_measured_as_it_is_saved(tmp_path):
    """Training and the evaluations in between may run in bfloat16; the last one does not."""
    train_synthetic.main(flags(tmp_path, mixed_precision="bf16", **RAVEN))
    trained = load_trained(tmp_path)
    measured = evaluate(trained.model, trained.kind, trained.task, Accelerator(), 20, 8, 0)
    metrics = run_of(tmp_path)["metrics"]
    assert {name: metrics[name] for name in measured} == measured
    last = run_of(tmp_path)["history"][-1]
    assert last["validation_mse"] != metrics["validation_mse"]
    assert last["validation_mse"] == pytest.approx(metrics["validation_mse"], rel=0.01)


def test_fixed_problems_come_once_per_epoch():
    task = SRaven(features=2)
    data = TrainingData(task, seed=0, items=12)
    epoch = torch.cat([data(start, 4)["inputs"] for start in (0, 4, 8)])
    expected = torch.from_numpy(task.examples(0, 12, "train", 0)["inputs"])
    assert sorted(epoch.tolist()) == sorted(expected.tolist())
    fresh = TrainingData(task, seed=0)
    assert torch.equal(fresh(3, 5)["labels"], torch.from_numpy(task.examples(3, 5, "train", 0)["labels"]))


def test_metrics_are_means_over_all_problems():
    """A last batch that is smaller counts by its size."""
    task, kind = SRaven(features=2), TASKS["s_raven"]
    model = make_model(kind, task, "", ModelArguments(**{**TINY, "mixer": "sparse_coding"}).options())
    whole, parts = (evaluate(model, kind, task, Accelerator(), 21, size, 0) for size in (21, 8))
    assert parts == pytest.approx(whole)
    assert 0 < whole["zero_share"] < 1


def test_accuracy_is_told_apart_by_rule(monkeypatch):
    """A model that always repeats the last known panel of the row is right where nothing changes."""
    task, kind = SRaven(features=2, permute_features=False), TASKS["s_raven"]
    model = make_model(kind, task, "", ModelArguments(**TINY).options())

    def repeat(inputs):
        return SparseTransformerOutput(logits=functional.one_hot(inputs[:, -4:-2], 8))

    monkeypatch.setattr(model, "forward", repeat)
    metrics = evaluate(model, kind, task, Accelerator(), 300, 128, 0)
    rules = task.label_rules(300, "test", 0)
    assert metrics["accuracy_constant"] == metrics["ood_accuracy_constant"] == 1
    assert metrics["accuracy_progression"] == metrics["accuracy_distribute_three"] == 0
    assert 0 < metrics["accuracy_addition"] < 0.4  # where the second value is zero, or the first
    shares = {name: (RULE_KINDS[rules] == name).mean() for name in RULE_KINDS}
    by_rule = sum(shares[name] * metrics[f"accuracy_{name}"] for name in shares)
    assert by_rule == pytest.approx(metrics["accuracy_per_feature"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sraven"}, "unknown task 'sraven'; did you mean 's_raven'"),
        ({"task_options": "{"}, "task_options is not JSON"),
        ({"task_options": '{"feature": 2}'}, "no option 'feature'; did you mean 'features'"),
        ({"task_options": "[1]"}, "task_options must be an object"),
        ({"task_options": '{"features": "four"}'}, "features must be of type int, got 'four'"),
        ({"threshold_warmup": 3}, "threshold_warmup needs mixer=sparse_coding, got 'softmax'"),
        ({"threshold_warmup": 6, "mixer": "sparse_coding"}, r"must be below steps \(6\), got 6"),
        ({"mixer": "soft"}, "mixer must be one of .*, got 'soft'"),
        ({"contexts": "pairs"}, "contexts must be one of rows, panels for this task, got 'pairs'"),
        ({**IMAGES, "patch_size": 5}, "patch_size must divide the pictures' side of 12 pixels, got 5"),
        ({"task": "raven", "task_options": '{"size": 5}', "patch_size": 5}, "at least 6 pixels per side, got 5"),
        ({"task_options": '{"features": true}'}, "features must be of type int, got True"),
        ({"task_options": '{"held_out_share": 1}'}, "held_out_share must be between 0 and 1, both excluded, got 1"),
        ({"task_options": '{"split_seed": -1}'}, "split_seed must be at least 0, got -1"),
        ({**IMAGES, "task_options": '{"shapes": 3}'}, "shapes must be two whole numbers, fewest and most, got 3"),
        (
            {"task": "raven", "task_options": "{}", "batch_size": 16, "num_attention_heads": 16},
            "14,400 tokens in batches of 16 make 198 GiB of scores in every layer; take larger patches",
        ),
        ({"image_loss": "log_mse"}, "image_loss='log_mse' needs input_type='patches', got 'one_hot'"),
        ({"eval_items": 0}, "eval_items must be at least 1, got 0"),
        ({"train_items": -1}, "train_items must be at least 0, got -1"),
        ({"final_learning_rate_share": 0.1}, "needs schedule='cosine', got 'linear'"),
        ({"weight_decay_on": "some"}, "weight_decay_on must be one of all, matrices, got 'some'"),
    ],
)
def test_bad_input_is_found_before_training(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(train_synthetic, "train", None)
    with pytest.raises(ValueError, match=message):
        train_synthetic.main(flags(tmp_path, **changes))


def test_missing_torchmetrics_is_found_first(tmp_path, monkeypatch):
    monkeypatch.setattr(train_synthetic, "train", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install hf-sparsecoding\[plots\]"):
        train_synthetic.main(flags(tmp_path, **IMAGES))


def test_settings_are_json(tmp_path):
    train_synthetic.main(flags(tmp_path, steps=2, evaluate_every=0))
    assert json.loads((tmp_path / "results.json").read_text())["runs"][0]["settings"]["warmup_steps"] == 1
