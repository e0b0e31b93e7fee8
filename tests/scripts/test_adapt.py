import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_sparsecoding.reports import plots, results
from scripts import adapt
from tests.training.character_model import run_distributed, save_character_model


ROOT = Path(__file__).parents[2]
LAGS = '{"peft_type": "SPARSECODING", "num_contexts": 2}'
SEGMENTS = '{"peft_type": "SPARSECODING", "contexts": "segments", "num_contexts": 2, "segment_token_ids": [14]}'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_character_model(tmp_path_factory.mktemp("model"))


def flags(model, output, config=LAGS, on_task=True, **changes):
    values = {
        "model": model,
        "adapter_config": config,
        "output_dir": output,
        "steps": 12,
        "batch_size": 8,
        "warmup_steps": 1,
        "learning_rate": 0.05,
        "checkpoint_every": 5,
        "eval_items": 24,
        "progress": False,
        "plots": False,
        **({"task": "s_raven_text"} if on_task else {}),
        **changes,
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def run_of(folder) -> dict:
    return results.load(folder / "results.json")["runs"][0]


def test_run_writes_adapter_results_and_pictures(model, tmp_path, capsys):
    assert adapt.main(flags(model, tmp_path, plots=True, experiment="tiny", method="lags")) == 0
    written = results.load(tmp_path / "results.json")
    run = written["runs"][0]
    assert (written["experiment"], run["method"], run["seed"], run["samples"]) == ("tiny", "lags", 0, 96)
    assert run["trainable_parameters"] == 2 * 4 * 2
    metrics, items = run["metrics"], run["settings"]["items"]
    for prefix in ("", "ood_"):
        assert items[f"{prefix}accuracy_after"] == 24
        groups = [name for name in items if name.startswith(f"{prefix}accuracy_after_")]
        right = sum(metrics[name] * items[name] for name in groups)
        assert right == pytest.approx(24 * metrics[f"{prefix}accuracy_after"])
    assert metrics["step_seconds"] > 0
    assert run["settings"]["adapter_config"]["num_contexts"] == 2
    assert {"lambda.png", "accuracy_per_rule.png"} <= {path.name for path in tmp_path.iterdir()}
    assert re.search(r"\| test: all +\| +24 \| +\d\.\d{3} \[", capsys.readouterr().out)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2
    assert any(value.abs().max() > 0 for value in tensors.values())
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path)


def test_saved_adapter_has_the_saved_accuracy(model, tmp_path, capsys):
    adapt.main(flags(model, tmp_path, config=SEGMENTS, task_options='{"features": 2}', eval_seed=5))
    assert adapt.main(["--adapter", str(tmp_path), "--evaluate_only"]) == 0
    assert "equals the saved results" in capsys.readouterr().out
    assert adapt.main(["--adapter", str(tmp_path), "--evaluate_only", "--eval_items", "5"]) == 0
    assert "not compared with the saved results: other eval_items" in capsys.readouterr().out
    # a saved result that is not what the adapter does
    changed = results.load(tmp_path / "results.json")
    changed["runs"][0]["metrics"]["accuracy_after"] += 1 / 24
    results.write(tmp_path / "results.json", changed)
    assert adapt.main(["--adapter", str(tmp_path), "--evaluate_only"]) == 1
    assert "differs from the saved results in accuracy_after" in capsys.readouterr().out
    (tmp_path / "results.json").unlink()
    assert adapt.main(["--adapter", str(tmp_path), "--evaluate_only", "--task", "s_raven_text"]) == 0
    assert "has no results.json to compare with" in capsys.readouterr().out


def test_other_methods_have_no_picture_of_lambda(model, tmp_path, capsys):
    lora = '{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}'
    adapt.main(flags(model, tmp_path, config=lora, plots=True, steps=3, task_options='{"features": 2}'))
    assert "no picture of lambda: an adapter of type LORA has none" in capsys.readouterr().out
    assert (tmp_path / "accuracy_per_rule.png").exists()
    run = run_of(tmp_path)
    assert run["method"] == "lora"
    # a puzzle of two features counts for both of its rules
    assert "accuracy_after_addition" in run["metrics"]
    assert sum(n for name, n in run["settings"]["items"].items() if name.startswith("accuracy_after_")) > 24


def test_own_data(model, tmp_path, capsys):
    rows = [{"prompt": f"{i % 10} ", "completion": "ab", "rule": f"r{i % 2}"} for i in range(40)]
    data = tmp_path / "mine.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    adapt.main(flags(model, tmp_path / "a", on_task=False, data=data, held_out_share=0.25, append_eos=True, steps=60))
    metrics, items = run_of(tmp_path / "a")["metrics"], run_of(tmp_path / "a")["settings"]["items"]
    assert items["accuracy_after"] == 10
    assert set(metrics) >= {"accuracy_before_r0", "accuracy_after_r1"}
    assert not any(name.startswith("ood") for name in metrics)
    assert adapt.main(["--adapter", str(tmp_path / "a"), "--evaluate_only"]) == 0
    data.write_text(data.read_text().replace("ab", "ba"))
    assert adapt.main(["--adapter", str(tmp_path / "a"), "--evaluate_only"]) == 0
    assert "other data_sha256" in capsys.readouterr().out
    adapt.main(flags(model, tmp_path / "b", on_task=False, data=data, eval_data=data, eval_items=7, steps=2))
    assert run_of(tmp_path / "b")["settings"]["items"]["accuracy_after"] == 7
    # an adapter of another script's data, on the task
    assert adapt.main(["--adapter", str(tmp_path / "b"), "--evaluate_only", "--task", "s_raven_text"]) == 0


def test_resumed_run_equals_a_whole_one(model, tmp_path, monkeypatch):
    adapt.main(flags(model, tmp_path / "whole"))
    adapt.main(flags(model, tmp_path / "cut"))
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000012")
    (tmp_path / "cut" / "results.json").unlink()
    moments = []
    monkeypatch.setattr(
        adapt, "evaluate", lambda *a, _evaluate=adapt.evaluate, **k: moments.append(a) or _evaluate(*a, **k)
    )
    adapt.main(flags(model, tmp_path / "cut"))
    assert [arguments[2] for arguments in moments] == ["after"]
    whole, cut = (run_of(tmp_path / name)["metrics"] for name in ("whole", "cut"))
    assert {**whole, "step_seconds": 0} == {**cut, "step_seconds": 0}
    tensors = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "cut")]
    assert all(bool((value == tensors[1][name]).all()) for name, value in tensors[0].items())
    with pytest.raises(ValueError, match=r"cannot resume .* adapter_config .*start afresh with --no_resume"):
        adapt.main(flags(model, tmp_path / "cut", config=SEGMENTS))


def test_two_processes_give_the_result_of_one(model, tmp_path):
    adapt.main(flags(model, tmp_path / "one", eval_items=25))
    run_distributed(lambda: adapt.main(flags(model, tmp_path / "two", eval_items=25)))
    one, two = run_of(tmp_path / "one"), run_of(tmp_path / "two")
    assert (one["settings"]["num_processes"], two["settings"]["num_processes"]) == (1, 2)
    assert one["settings"]["items"] == two["settings"]["items"]
    assert two["metrics"]["train_loss"] == pytest.approx(one["metrics"]["train_loss"], rel=1e-4)
    for name, value in one["metrics"].items():
        if name.startswith(("accuracy_before", "ood_accuracy_before")):
            assert two["metrics"][name] == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "s_raven_txt"}, "unknown task 's_raven_txt'; did you mean 's_raven_text'"),
        ({"task_options": '{"feature": 2}'}, "has no option 'feature'; did you mean 'features'"),
        ({"task_options": "{"}, "task_options is not JSON"),
        ({"task_options": '{"rules": 3}'}, "rules must be distinct names out of .*, got 3"),
        ({"data": "x.jsonl"}, "give either --task or --data"),
        ({"adapter": "x"}, "goes with --evaluate_only"),
        ({"adapter_config": ""}, "--adapter_config is missing"),
        ({"adapter_config": '{"peft_type": "LORRA"}'}, "got 'LORRA'; did you mean 'LORA'"),
        ({"adapter_config": '{"peft_type": "LORA", "rank": 2}'}, "LORA has no field 'rank'"),
        ({"adapter_config": "nowhere.yaml"}, "no such file: nowhere.yaml"),
        ({"model": ""}, "--model is missing"),
        ({"dtype": "float64x"}, "dtype must be one of auto, float32"),
        ({"eval_items": 0}, "eval_items must be at least 1, got 0"),
    ],
)
def test_bad_input_is_found_before_the_model_is_loaded(model, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(adapt, "load_model", lambda *arguments: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        adapt.main(flags(**{"model": model, "output": tmp_path, **changes}))


def test_long_examples_are_refused(model, tmp_path):
    data = tmp_path / "long.jsonl"
    data.write_text("\n".join([json.dumps({"prompt": "1 " * 200, "completion": "a"})] * 2))
    with pytest.raises(ValueError, match=r"has 401 tokens, .* takes 256; shorten its prompt"):
        adapt.main(flags(model, tmp_path, on_task=False, data=data))


def test_missing_matplotlib_is_found_first(model, tmp_path, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install hf-sparsecoding\[plots\].*--no_plots"):
        adapt.main(flags(model, tmp_path, plots=True))


def test_the_config_of_a_saved_adapter_can_be_trained(tmp_path):
    """`save_pretrained` says inference_mode=True there."""
    saved = adapt.read_adapter_config('{"peft_type": "SPARSECODING", "inference_mode": true}')
    assert not saved.inference_mode


def test_numbers_in_a_config_may_have_exponents(tmp_path):
    path = tmp_path / "adapter.yaml"
    path.write_text("peft_type: SPARSECODING\ncoefficients: soft_threshold\nthreshold: 1e-3\n")
    assert adapt.read_adapter_config(str(path)).threshold == 0.001


def test_configs_are_valid():
    configs = ROOT / "scripts" / "configs"
    names = set()
    for path in sorted((configs / "adapters").glob("*.yaml")):
        adapt.read_adapter_config(str(path))
        names.add(path.stem)
    assert {"lags_per_head", "head_rescaling", "segments_target", "lora_r8", "ia3"} <= names
    arguments, training = adapt.parse_arguments(["--config", str(configs / "demo.yaml"), "--seed", "3"])
    assert (training.steps, training.batch_size, training.learning_rate, training.seed) == (150, 16, 1e-2, 3)
    assert (arguments.eval_items, json.loads(arguments.task_options)) == (1024, {"features": 1, "panel_separator": ""})


@pytest.mark.slow
def test_launched_in_two_processes(model, tmp_path):
    """The command of the docstring, in processes of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / "scripts" / "adapt.py"), *flags(model, tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=280)
    assert run_of(tmp_path)["settings"]["num_processes"] == 2
