"""Training on short problems: results, resuming, processes, what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from hf_sparsecoding.reports import results
from hf_sparsecoding.tasks.length_generalization import IGNORED
from hf_sparsecoding.training import TrainingArguments
from hf_sparsecoding.training.command_line import parse
from scripts import sweep, train_lengths
from scripts.train_lengths import POSITIONS, TASKS, LengthArguments, ModelArguments, make_model, make_task, sequences


TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIGS = Path("scripts/configs/length_generalization")
OPTIONS = {"train_lengths": [1, 3], "test_lengths": [4, 6], "max_position": 40}


def flags(output, **changes):
    values = {
        "task_options": json.dumps(OPTIONS),
        **TINY,
        "steps": 6,
        "batch_size": 8,
        "warmup_steps": 1,
        "learning_rate": 1e-2,
        "checkpoint_every": 2,
        "evaluate_every": 3,
        "eval_items": 12,
        "eval_batch_size": 8,
        "progress": False,
        "output_dir": output,
        **changes,
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def run_of(folder) -> dict:
    return results.load(folder / "results.json")["runs"][0]


def test_run_writes_model_and_results(tmp_path):
    assert train_lengths.main(flags(tmp_path, mixer="sparse_coding", threshold=0.5, experiment="tiny", seed=3)) == 0
    written = results.load(tmp_path / "results.json")
    run = written["runs"][0]
    assert (written["experiment"], run["method"]) == ("tiny", "addition, predicted, sparse_coding")
    assert (run["seed"], run["samples"], run["settings"]["threshold"]) == (3, 48, 0.5)
    by_length = ("exact_match", "id_match", "concentration", "zero_coefficients", "zero_tiles")
    names = {f"{name}_{at}" for name in by_length for at in (3, 4, 6, "2x")}
    assert names | {"train_loss", "step_seconds"} == set(run["metrics"])
    assert run["metrics"]["id_match_2x"] == run["metrics"]["id_match_6"]
    assert run["settings"]["items"] == {name: 12 for name in run["metrics"] if "_match_" in name}
    assert [entry["samples"] for entry in run["history"]] == [24, 48]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == run["trainable_parameters"]


def test_resumes_to_the_same_losses(tmp_path):
    train_lengths.main(flags(tmp_path / "whole"))
    train_lengths.main(flags(tmp_path / "part", steps=6))
    for path in (tmp_path / "part" / "checkpoints").glob("*6"):
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink()
        path.rmdir()
    train_lengths.main(flags(tmp_path / "part", steps=6))
    whole, part = run_of(tmp_path / "whole"), run_of(tmp_path / "part")
    assert whole["metrics"]["train_loss"] == part["metrics"]["train_loss"]


@pytest.mark.parametrize("positions", POSITIONS)
def test_all_positions_learn_what_fits(positions, tmp_path):
    arguments = LengthArguments(positions=positions, task_options=json.dumps(OPTIONS))
    task = make_task(arguments)
    assert task.positions == ("absolute" if positions == "absolute" else "coupled")
    torch.manual_seed(0)
    model = make_model(task, arguments, ModelArguments(**TINY))
    assert model.config.predict_positions == (positions == "predicted")
    batch = sequences(task, 0, model.config.positions == "learned", 0, 4)
    assert ("position_ids" in batch) == (positions in ("absolute", "coupled", "predicted"))
    assert model(**batch).loss.isfinite()


@pytest.mark.parametrize("name", TASKS)
def test_every_task(name):
    options = {"max_position": 70, "train_lengths": [4, 6], "test_lengths": [8]}
    arguments = LengthArguments(task=name, task_options=json.dumps(options))
    task = make_task(arguments)
    model = make_model(task, arguments, ModelArguments(**TINY))
    assert model(**sequences(task, 0, True, 0, 4)).loss.isfinite()
    assert train_lengths.tokens_per_problem(task, 0) >= 2  # a token and the end


def test_the_loss_of_a_batch_is_the_mean_of_its_parts():
    """So several processes, whose parts differ in their numbers of tokens, train as one does."""
    arguments = LengthArguments(task_options=json.dumps(OPTIONS))
    task = make_task(arguments)
    torch.manual_seed(0)
    model = make_model(task, arguments, ModelArguments(**TINY, l1_penalty=0.1)).double()
    loss = [
        train_lengths.summed_loss(model, sequences(task, 1, True, start, count), 5.0).item()
        for start, count in ((0, 6), (0, 3), (3, 3))
    ]
    counts = [(task.examples(start, 3, "train", 1)["labels"] != IGNORED).sum() for start in (0, 3)]
    assert counts[0] != counts[1]
    np.testing.assert_allclose(loss[0], (loss[1] + loss[2]) / 2, rtol=1e-6)


def test_learns_to_add_single_digits(tmp_path):
    """Far above chance, which is .01."""
    options = {"train_lengths": [1, 1], "test_lengths": [2], "max_position": 4}
    train_lengths.main(
        flags(
            tmp_path,
            task_options=json.dumps(options),
            positions="coupled",
            steps=150,
            batch_size=64,
            hidden_size=64,
            intermediate_size=128,
            learning_rate=5e-3,
            evaluate_every=0,
            eval_items=100,
        )
    )
    assert run_of(tmp_path)["metrics"]["exact_match_1"] > 0.3


def test_published_configs_give_models():
    sweeps = [
        sweep.read_sweep(str(CONFIGS / name), [], None)
        for name in ("sweep.yaml", "planted.yaml", "addition_sweep.yaml")
    ]
    jobs = [job for one in sweeps for job in sweep.make_jobs(one)]
    commands = [job.command[1:] for job in jobs] + [["--config", str(CONFIGS / "addition.yaml")]]
    sizes = {}
    for command in commands:
        arguments, model_arguments, _ = parse([LengthArguments, ModelArguments, TrainingArguments], command, "")
        model = make_model(make_task(arguments), arguments, model_arguments)
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
        shape = [getattr(model.config, name) for name in names]
        sizes.setdefault((arguments.task, arguments.positions, *shape), set()).add(model.num_parameters())
    assert all(len(found) == 1 for found in sizes.values()), "mixers of one table have equal parameters"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "additon"}, "unknown task 'additon'; did you mean 'addition'"),
        ({"positions": "rotary"}, "unknown positions 'rotary'; known: absolute"),
        ({"eval_items": 0}, "eval_items must be at least 1, got 0"),
        ({"task_options": "{"}, "task_options is not JSON"),
        ({"task_options": '{"positions": "absolute"}'}, "has no option 'positions'"),
        ({"task_options": '{"max_position": 5}'}, "length 10 takes 12 coupled position ids, got max_position=5"),
        ({"mixer": "hyla"}, "mixer must be one of"),
    ],
)
def test_what_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_lengths.main(flags(tmp_path, **changes))
    AcceleratorState._reset_state()
    assert not (tmp_path / "results.json").exists()
