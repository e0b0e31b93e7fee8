"""Training on in-context classification: what is learned when, results, resuming, configs; nested logits."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_sparsecoding.evaluation.progress_measures import InContextEvaluation
from hf_sparsecoding.reports import results
from hf_sparsecoding.tasks.in_context_classification import InContextClassification
from hf_sparsecoding.training import TrainingArguments
from hf_sparsecoding.training.command_line import parse
from scripts import nested_logits, sweep, train_in_context
from scripts.train_in_context import EvaluationArguments, ModelArguments, TrainingSequences, make_model
from tests.training.character_model import run_distributed


CONFIGS = Path("scripts/configs/in_context_classification")
SCALED = CONFIGS / "scaled.yaml"
SWEEPS = [path for path in CONFIGS.glob("*.yaml") if "experiment:" in path.read_text()]
TYPES = [InContextClassification, ModelArguments, EvaluationArguments, TrainingArguments]


def flags(output, **changes):
    values = {
        "classes": 8,
        "labels": 8,
        "pairs": 2,
        "max_pairs": 2,
        "content_size": 16,
        "head_dim": 16,
        "intermediate_size": 64,
        "steps": 6,
        "batch_size": 128,
        "optimizer": "sgd",
        "learning_rate": 0.3,
        "warmup_steps": 0,
        "schedule": "constant",
        "max_grad_norm": 0,
        "evaluate_every": 100,
        "checkpoint_every": 0,
        "eval_items": 512,
        "progress": False,
        "output_dir": output,
        **changes,
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def trained(output, **changes) -> dict:
    """The run that the command writes."""
    assert train_in_context.main(flags(output, **changes)) == 0
    return results.load(output / "results.json")["runs"][0]


def test_few_classes_are_learned_by_heart(tmp_path):
    metrics = trained(tmp_path, steps=150)["metrics"]
    assert metrics["iw"] > 0.9
    assert metrics["ic"] < 0.4
    assert metrics["ic2"] < 0.2


def test_novel_classes_are_read_from_the_context(tmp_path):
    """First any label of the context is answered; then attention finds the right one, in both layers at once."""
    run = trained(tmp_path, novel_share=1.0, optimizer="adamw", learning_rate=0.01, steps=450)
    early, final = run["history"][0], run["metrics"]
    assert early["cla"] > 0.9
    assert early["ic"] < 0.65
    assert max(early["ila1"], early["tila2"] / early["tla2"]) < 0.6
    assert min(final["ic"], final["ic2"], final["cla"]) > 0.95
    assert min(final["ila1"], final["tila2"]) > 0.6
    assert final["iw"] < 0.5
    assert final["loss"] < 0.3 < 0.6 < early["loss"]


@pytest.mark.parametrize("label_bias", [False, True])
def test_the_minimal_model_forms_its_head(tmp_path, label_bias):
    options = {"model": "minimal", "novel_share": 1.0, "learning_rate": 1.0, "label_bias": label_bias}
    metrics = trained(tmp_path, steps=150, **options)["metrics"]
    assert min(metrics["ic"], metrics["ic2"]) > 0.95
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert model.beta1 > 2
    assert model.alpha > 2


def test_without_absent_labels_nothing_is_learned(tmp_path):
    """L = N: the minimal model that needs 150 steps with 8 labels is still at chance after 300 with 2."""
    options = {"classes": 2, "labels": 2, "model": "minimal", "novel_share": 1.0, "learning_rate": 1.0}
    metrics = trained(tmp_path, steps=300, **options)["metrics"]
    assert metrics["ic"] < 0.6
    assert metrics["loss"] == pytest.approx(math.log(2), abs=0.02)


def scaled(output, **changes) -> dict:
    arguments = {"config": SCALED, "checkpoint_every": 0, "progress": False, "output_dir": output, **changes}
    assert train_in_context.main([str(part) for k, v in arguments.items() for part in (f"--{k}", v)]) == 0
    return results.load(output / "results.json")["runs"][0]


def at(run: dict, metric: str, step: int) -> float:
    return next(entry[metric] for entry in run["history"] if entry["step"] == step)


@pytest.mark.slow
def test_scaled_in_weights(tmp_path):
    metrics = scaled(tmp_path, classes=32, steps=4000)["metrics"]
    assert metrics["iw"] > 0.9
    assert metrics["ic"] < 0.3


@pytest.mark.slow
def test_scaled_in_context(tmp_path):
    run = scaled(tmp_path)
    assert min(run["metrics"]["ic"], run["metrics"]["ic2"]) > 0.95
    assert run["metrics"]["iw"] < 0.15
    assert at(run, "ic", 1500) < 0.6  # one of the two labels of the context


@pytest.mark.slow
def test_scaled_novel_classes(tmp_path):
    run = scaled(tmp_path, novel_share=1, burstiness=1)
    assert at(run, "ic", 2000) < 0.35
    assert run["metrics"]["ic"] > 0.95
    # "cla" has done half of its way long before "ila1", "tila2" and "ic" have, which do so together

    def half_way(metric):
        values = {entry["step"]: entry[metric] for entry in run["history"]}
        middle = (min(values.values()) + max(values.values())) / 2
        return max(step for step, value in values.items() if value < middle)

    assert half_way("cla") + 1000 < half_way("ic")
    for metric in ("ila1", "tila2"):
        assert abs(half_way(metric) - half_way("ic")) <= 400


@pytest.mark.slow
def test_scaled_without_absent_labels(tmp_path):
    run = scaled(tmp_path, novel_share=1, burstiness=1, labels=4, steps=8000)
    assert run["metrics"]["loss"] == pytest.approx(math.log(4), abs=0.02)
    assert all(entry["ic"] < 0.31 for entry in run["history"])


@pytest.mark.slow
def test_scaled_two_parameter_model(tmp_path):
    run = scaled(tmp_path, novel_share=1, burstiness=1, model="minimal", steps=4000)
    assert at(run, "ic", 2000) < 0.2
    assert at(run, "ic", 3000) < 0.9
    assert run["metrics"]["ic"] > 0.99


def test_results_and_model(tmp_path):
    options = {"mixer": "sparse_coding", "score_norm": "keys", "output_norm": "length", "transfer": "aligned"}
    run = trained(tmp_path, steps=5, evaluate_every=2, seed=3, experiment="toy", **options)
    assert results.load(tmp_path / "results.json")["experiment"] == "toy"
    assert (run["method"], run["seed"], run["samples"]) == ("induction, sparse_coding", 3, 640)
    assert {"classes": 8, "optimizer": "sgd", "mixer": "sparse_coding", "eval_items": 512}.items() <= run[
        "settings"
    ].items()
    assert [(entry["step"], entry["samples"]) for entry in run["history"]] == [(2, 256), (4, 512)]
    names = {"iw", "iw_unseen", "ic", "ic2", "ila1", "tila2", "tla2", "cla", "loss"}
    assert run["metrics"].keys() == names | {"step_seconds"}
    assert all(names < entry.keys() for entry in run["history"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert run["trainable_parameters"] == model.num_parameters()
    task = InContextClassification(classes=8, labels=8, pairs=2, max_pairs=2, content_size=16)
    measured = InContextEvaluation(task, 512, seed=3)(model)
    assert {name: run["metrics"][name] for name in measured} == pytest.approx(measured, rel=1e-5)


def test_loss_is_the_mean_since_the_last_evaluation(tmp_path, monkeypatch):
    losses = iter([5.0, 3.0, 2.0, 1.0])

    def falling(model, batch):
        return 0 * model(**batch).loss + next(losses)

    monkeypatch.setattr(train_in_context, "mean_loss", falling)
    run = trained(tmp_path, steps=4, evaluate_every=2)
    assert [entry["loss"] for entry in run["history"]] == [4.0, 1.5]
    assert run["metrics"]["loss"] == 1.5


def test_batches_are_those_of_the_stream():
    task = InContextClassification(classes=8, labels=8, pairs=2, max_pairs=2, content_size=16)
    data = TrainingSequences(task, seed=1)
    for start in (0, 1000, 1020, 1024, 1100, 0, 5000):
        batch, expected = data(start, 30), task.examples(start, 30, "train", 1)
        assert batch.keys() == {"inputs", "labels"}
        for name, tensor in batch.items():
            torch.testing.assert_close(tensor, torch.from_numpy(expected[name]), rtol=0, atol=0)


def test_resumed_run_equals_a_whole_one(tmp_path, monkeypatch):
    options = {"steps": 20, "evaluate_every": 5, "checkpoint_every": 4, "novel_share": 0.5, "batch_size": 100}
    whole = trained(tmp_path / "whole", **options)
    original = TrainingSequences.__call__

    def interrupted(self, start, count):
        if start >= 11 * 100:
            raise KeyboardInterrupt
        return original(self, start, count)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingSequences, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "cut", **options)
    cut = trained(tmp_path / "cut", **options)
    for run in (whole, cut):
        del run["metrics"]["step_seconds"]
    assert cut == whole
    with pytest.raises(ValueError, match=r"classes \(checkpoint: 8, now: 16\)"):
        trained(tmp_path / "cut", **options, classes=16)


def test_two_processes_give_the_result_of_one(tmp_path):
    options = {"steps": 12, "evaluate_every": 6, "novel_share": 0.5}
    run_distributed(lambda: train_in_context.main(flags(tmp_path / "two", **options)))
    one = trained(tmp_path / "one", **options)
    two = results.load(tmp_path / "two" / "results.json")["runs"][0]
    assert two["settings"]["num_processes"] == 2
    for name, value in one["metrics"].items():
        if name != "step_seconds":
            assert two["metrics"][name] == pytest.approx(value, rel=1e-3), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "large"}, "model must be one of induction, minimal, got 'large'"),
        ({"mixer": "hyla"}, "mixer must be one of softmax, sparse_coding, got 'hyla'"),
        ({"classes": 9}, r"classes must be a multiple of labels \(8\), got 9"),
        ({"eval_items": 0}, "eval_items must be at least 1, got 0"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw, sgd, muon, got 'lion'"),
        ({"model": "minimal", "transfer": "paper"}, "has no mixer='softmax' with transfer='paper'"),
        ({"label_bias": True}, "label_bias=True needs model='minimal'"),
    ],
)
def test_bad_input_is_found_before_training(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(train_in_context, "train", None)
    with pytest.raises(ValueError, match=message):
        train_in_context.main(flags(tmp_path, **changes))


def model_of(flags: list[str]):
    task, model_arguments, _, _ = parse(TYPES, flags, "")
    return make_model(task, model_arguments)


@pytest.mark.parametrize("path", SWEEPS, ids=str)
def test_sweeps(path):
    jobs = sweep.make_jobs(sweep.read_sweep(str(path), [], None))
    assert len({job.folder for job in jobs}) == len(jobs)
    assert all(model_of(job.command[1:]).num_parameters() > 0 for job in jobs if job.seed == 0)


def test_configs():
    assert model_of(["--config", str(SCALED)]).config.token_size == 41
    published = model_of(["--config", str(CONFIGS / "published.yaml")])
    defaults = model_of([])
    assert published.config.to_dict() == defaults.config.to_dict()
    assert published.config.token_size == 128


def test_commands_of_the_docstrings_parse():
    for script, types in ((train_in_context, TYPES), (nested_logits, [nested_logits.NestedLogitsArguments])):
        lines = script.__doc__.replace("\\\n", " ").splitlines()
        commands = [line.split() for line in lines if line.strip().startswith("python ")]
        assert len(commands) == 2
        for command in commands:
            assert command[1] == f"scripts/{script.__name__.split('.')[-1]}.py"
            assert len(parse(types, command[2:], "")) == len(types)


def test_nested_logits(tmp_path, capsys):
    config = CONFIGS / "nested_logits.yaml"
    assert nested_logits.main(["--config", str(config), "--output_dir", str(tmp_path), "--steps", "1700"]) == 0
    runs = results.load(tmp_path / "results.json")["runs"]
    assert [run["method"] for run in runs] == ["N = 4, L = 16", "N = 8, L = 32", "N = 8, L = 9", "N = 8, L = 8"]
    assert [run["metrics"]["steps_to_transition"] for run in runs] == [314, 670, 1627, None]
    assert runs[3]["metrics"]["loss"] == pytest.approx(math.log(8), abs=0.2)
    history = runs[0]["history"]
    assert history[0] == {"step": 0, "loss": pytest.approx(2.77, abs=0.01), "xi": 0.01, "b1": 0.01, "a": 0.01}
    assert (history[-1]["step"], len(history)) == (628, 100)
    assert history[-1]["loss"] < 0.1 * math.log(4)
    assert "| N = 8, L = 9  |               1,627 |" in capsys.readouterr().out


def test_nested_logits_refuse(tmp_path):
    with pytest.raises(ValueError, match="need steps >= 1 and learning_rate > 0, got 0 and 0.1"):
        nested_logits.main(["--steps", "0", "--output_dir", str(tmp_path)])
