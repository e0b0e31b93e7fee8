"""Training on ridge regression: results, resuming, processes, known solutions, what is refused; its configs."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_sparsecoding.models.linear_attention.configuration_linear_attention import KINDS
from hf_sparsecoding.reports import results
from hf_sparsecoding.tasks.ridge_regression import RidgeRegression, loss
from hf_sparsecoding.training import TrainingArguments, synthetic
from hf_sparsecoding.training.command_line import parse
from scripts import sweep, train_ridge
from scripts.train_ridge import SOLUTIONS, RidgeArguments, make_model
from tests.training.character_model import run_distributed


TASK = RidgeRegression(num_features=2, num_examples=4)
CONFIGS = sorted(Path("scripts/configs/ridge_regression").glob("*.yaml"))
SWEEPS = [path for path in CONFIGS if "experiment:" in path.read_text()]


def flags(output, **changes):
    values = {
        "num_features": 2,
        "num_examples": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
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


@pytest.mark.parametrize("kind", KINDS)
def test_run_writes_model_and_results(tmp_path, kind):
    assert train_ridge.main(flags(tmp_path, kind=kind, experiment="tiny", seed=3)) == 0
    written = results.load(tmp_path / "results.json")
    run = written["runs"][0]
    assert (written["experiment"], run["method"]) == ("tiny", kind)
    assert (run["seed"], run["samples"], run["settings"]["penalty"]) == (3, 48, TASK.penalty)
    assert [entry["samples"] for entry in run["history"]] == [24, 48]
    assert run["history"][-1]["test_loss"] == run["metrics"]["test_loss"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert run["trainable_parameters"] == model.num_parameters()
    # the saved model has the saved loss
    batch = TASK.examples(0, 20, "test", seed=0)
    predicted = model(torch.from_numpy(batch["inputs"])).logits[:, 0]
    expected = (predicted - torch.from_numpy(batch["labels"])).square().mean().item()
    assert run["metrics"]["test_loss"] == pytest.approx(expected, rel=1e-5)


def test_known_solutions(tmp_path):
    problems = TASK.generate(20, "test", seed=0)
    for kind in SOLUTIONS:
        train_ridge.main(flags(tmp_path / kind, kind=kind, method=kind))
    ridge, descent = (run_of(tmp_path / kind) for kind in SOLUTIONS)
    assert ridge["samples"] == descent["samples"] == ridge["trainable_parameters"] == 0
    assert ridge["metrics"] == {"test_loss": loss(problems, TASK.ridge_weights(problems))}
    weights = TASK.descent_weights(problems, 2, descent["metrics"]["step_size"])
    assert descent["metrics"]["test_loss"] == loss(problems, weights)
    assert not list(tmp_path.glob("*/model.safetensors"))


def test_plain_linear_attention_learns_the_first_step(tmp_path):
    """At its best, one layer equals one step of gradient descent with the best step size."""
    options = {"num_hidden_layers": 1, "num_attention_heads": 1, "eval_items": 2000, "evaluate_every": 0}
    options |= {"steps": 150, "batch_size": 256, "learning_rate": 0.03, "warmup_steps": 10, "checkpoint_every": 0}
    for kind in ("linear", "gradient_descent"):
        train_ridge.main(flags(tmp_path / kind, kind=kind, schedule="cosine", **options))
    trained, solved = (run_of(tmp_path / kind)["metrics"]["test_loss"] for kind in ("linear", "gradient_descent"))
    assert trained == pytest.approx(solved, rel=0.05)


def test_resumed_run_equals_a_whole_one(tmp_path, monkeypatch):
    train_ridge.main(flags(tmp_path / "whole"))
    original = synthetic.TrainingData.__call__

    def interrupted(self, start, count):
        if start >= 5 * 8:
            raise KeyboardInterrupt
        return original(self, start, count)

    with monkeypatch.context() as patch:
        patch.setattr(synthetic.TrainingData, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_ridge.main(flags(tmp_path / "cut"))
    assert not (tmp_path / "cut" / "results.json").exists()
    train_ridge.main(flags(tmp_path / "cut"))
    whole, cut = (without_times(run_of(tmp_path / name)) for name in ("whole", "cut"))
    assert cut == whole


def test_two_processes_give_the_result_of_one(tmp_path):
    run_distributed(lambda: train_ridge.main(flags(tmp_path / "two")))
    train_ridge.main(flags(tmp_path / "one"))
    one, two = (run_of(tmp_path / name) for name in ("one", "two"))
    assert two["settings"]["num_processes"] == 2
    for name in ("test_loss", "train_loss"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "cubic"}, "kind must be one of extended, .*, gradient_descent, got 'cubic'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"eval_items": 0}, "eval_items must be at least 1, got 0"),
        ({"eval_seed": -1}, "eval_seed must be at least 0, got -1"),
        ({"noise": -1}, "noise must be >= 0 and finite, got -1"),
    ],
)
def test_bad_input_is_found_before_training(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(train_ridge, "train", None)
    with pytest.raises(ValueError, match=message):
        train_ridge.main(flags(tmp_path, **changes))


def parsed(argv: list[str]) -> tuple[RidgeArguments, RidgeRegression, TrainingArguments]:
    return parse([RidgeArguments, RidgeRegression, TrainingArguments], argv, "")


@pytest.mark.parametrize("path", SWEEPS, ids=str)
def test_sweeps(path):
    """Every run parses and gives a model or a known solution, on the same problems."""
    jobs = sweep.make_jobs(sweep.read_sweep(str(path), [], None))
    assert len({job.folder for job in jobs}) == len(jobs)
    arguments, tasks, _ = zip(*(parsed(job.command[1:]) for job in jobs), strict=True)
    assert {entry.kind for entry in arguments} == {*KINDS, *SOLUTIONS}
    assert len(set(tasks)) == 1
    for entry in arguments:
        assert entry.kind in SOLUTIONS or make_model(entry, tasks[0]).num_parameters() > 0


@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in SWEEPS], ids=str)
def test_configs(path):
    arguments, task, _ = parsed(["--config", str(path)])
    assert make_model(arguments, task).num_parameters() > 0


def test_commands_of_the_docstring_parse():
    commands = [line.split() for line in train_ridge.__doc__.splitlines() if line.strip().startswith("python ")]
    assert len(commands) == 2
    for command in commands:
        assert command[1] == "scripts/train_ridge.py"
        parsed(command[2:])
