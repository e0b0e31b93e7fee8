"""Evaluating a base model with adapters: results, resuming after kill -9, processes, what is refused."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_sparsecoding.evaluation import commonsense as protocols
from hf_sparsecoding.reports import results
from hf_sparsecoding.training.command_line import to_flags
from scripts import evaluate_commonsense as script
from tests.evaluation.commonsense_model import save_word_model, write_data
from tests.tiny_models import adapted
from tests.training.character_model import forked, run_distributed


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commonsense")
    model = save_word_model(folder / "model")
    base = AutoModelForCausalLM.from_pretrained
    adapted(base(model)).save_pretrained(folder / "lags")
    run = {"method": "lags", "seed": 3, "trainable_parameters": 24, "samples": 48, "settings": {"records": 48}}
    results.write(folder / "lags" / "results.json", results.new("x", [{**run, "metrics": {"train_loss": 1.5}}]))
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(base(model), lora).save_pretrained(folder / "lora")
    return {
        "model": model,
        "data": write_data(folder / "data", tasks=("boolq", "piqa", "winogrande", "arc_easy"), train=1),
        "adapters": [str(folder / "lags"), str(folder / "lora")],
    }


CONSTANT = script.CONSTANT


def flags(folders, output, **changes):
    values = {
        **folders,
        "output_dir": str(output),
        "tasks": ["boolq", "arc_easy"],
        "protocols": ["generation"],
        "any_size": True,
        "beams": 2,
        "max_new_tokens": 4,
        "progress": False,
        "plots": False,
        **changes,
    }
    return to_flags({name: value for name, value in values.items() if value != []})


def runs_of(folder: Path) -> dict[str, dict]:
    return {run["method"]: run for run in results.load(folder / "results.json")["runs"]}


def test_all_forms_and_protocols(folders, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    pytest.importorskip("matplotlib")
    tasks = ["boolq", "piqa", "winogrande", "arc_easy"]
    options = {"tasks": tasks, "protocols": list(protocols.PROTOCOLS), "limit": 3}
    assert script.main(flags(folders, tmp_path, plots=True, experiment="tiny", **options)) == 0
    printed = capsys.readouterr().out
    assert results.load(tmp_path / "results.json")["experiment"] == "tiny"
    runs = runs_of(tmp_path)
    assert list(runs) == [CONSTANT, "base", "lags", "lora"]
    stems = [*protocols.PROTOCOLS, "plain_likelihood", "generation_unanswered"]
    names = {f"{stem}_{task}" for stem in stems for task in (*tasks, "mean")}
    assert runs["base"]["metrics"].keys() == names
    assert runs["lags"]["metrics"].keys() == names | {"train_loss"}
    # method, seed and counts of the adapter's own results, or of its file
    lags, lora = runs["lags"], runs["lora"]
    assert (lags["seed"], lags["trainable_parameters"], lags["samples"]) == (3, 24, 48)
    assert lags["settings"]["training"] == {"records": 48}
    assert lora["trainable_parameters"] == 2 * 2 * (32 + 32)
    assert lora["settings"]["adapter_config"]["target_modules"] == ["q_proj"]
    assert "3 of 6 questions of boolq; 6 questions of boolq instead of 3270" in lora["settings"]["note"]
    # the numbers are those of the answers
    answers = json.loads((tmp_path / "lags-seed-3" / "piqa-label_likelihood.json").read_text())["answers"]
    assert lags["metrics"]["label_likelihood_piqa"] == sum(answer["right"] for answer in answers) / 3
    for protocol in protocols.PROTOCOLS:
        assert (tmp_path / f"{protocol}.png").stat().st_size > 5000
        assert f"| {protocol.replace('_', ' ')} " in printed
    labels = [answer["label"] for answer in answers]
    assert runs[CONSTANT]["metrics"]["label_likelihood_piqa"] == max(labels.count(label) for label in labels) / 3
    assert runs[CONSTANT]["metrics"].keys() == names
    compared = lora["against_base"]
    assert 0 < compared["likelihood_boolq"]["p"] <= 1
    assert compared["likelihood_mean"]["low"] <= compared["likelihood_mean"]["high"]


def test_answers_are_kept(folders, tmp_path, monkeypatch, capsys):
    script.main(flags(folders, tmp_path, adapters=[]))
    assert list(runs_of(tmp_path)) == [CONSTANT, "base"]
    asked = []
    monkeypatch.setattr(script, "load", lambda *a, _load=script.load: asked.append(a[1].name) or _load(*a))
    script.main(flags(folders, tmp_path))
    assert asked == ["lags-seed-3", "lora-seed-0"]
    assert "6 evaluations, 2 of them done before" in capsys.readouterr().out
    script.main(flags(folders, tmp_path, tasks=["boolq"]))
    assert len(asked) == 2
    for changes, message in (
        ({"limit": 3}, r"base/boolq-generation.json was made with another questions \(6, now 3\); delete the file or"),
        ({"beams": 1}, r"another beams \(2, now 1\)"),
        ({"dtype": "bfloat16"}, r"another dtype \('float32', now 'bfloat16'\)"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(flags(folders, tmp_path, **changes))
    changed = tmp_path / "changed"
    shutil.copytree(folders["adapters"][0], changed)
    adapted(AutoModelForCausalLM.from_pretrained(folders["model"]), seed=9).save_pretrained(changed)
    with pytest.raises(ValueError, match="lags-seed-3/boolq-generation.json was made with another adapter_sha256"):
        script.main(flags(folders, tmp_path, adapters=[str(changed)]))


def test_limit_draws_by_the_seed(folders, tmp_path):
    options = {"adapters": [], "tasks": ["boolq"], "limit": 2}
    for seed in (0, 1):
        script.main(flags(folders, tmp_path / str(seed), seed=seed, **options))
        run = runs_of(tmp_path / str(seed))["base"]
        assert run["settings"]["items"]["generation_boolq"] == 2
        assert "2 of 6 questions of boolq" in run["settings"]["note"]
    saved = [json.loads((tmp_path / f"{seed}/base/boolq-generation.json").read_text()) for seed in (0, 1)]
    digests = [part["settings"]["questions_sha256"] for part in saved]
    assert digests[0] != digests[1]
    assert all(len(part["answers"]) == 2 for part in saved)


def test_killed_evaluation_goes_on(folders, tmp_path, monkeypatch):
    def killed():
        def die_at_third(*arguments, asked=[], _ask=script.ask):  # noqa: B006  counts its calls
            asked.append(arguments)
            if len(asked) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return _ask(*arguments)

        script.ask = die_at_third
        script.main(flags(folders, tmp_path))

    process = forked(killed)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "base").iterdir()}
    assert sorted(kept) == ["arc_easy-generation.json", "boolq-generation.json"]
    script.main(flags(folders, tmp_path))
    assert kept == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "base").iterdir()}
    assert list(runs_of(tmp_path)) == [CONSTANT, "base", "lags", "lora"]


def test_two_processes_give_the_answers_of_one(folders, tmp_path):
    options = {"adapters": folders["adapters"][:1], "tasks": ["arc_easy"], "batch_size": 2}
    if protocols.importlib.util.find_spec("lm_eval"):
        options["protocols"] = ["generation", "label_likelihood"]
    script.main(flags(folders, tmp_path / "one", **options))
    run_distributed(lambda: script.main(flags(folders, tmp_path / "two", **options)))
    one, two = (runs_of(tmp_path / name)["lags"] for name in ("one", "two"))
    assert two["metrics"] == one["metrics"]
    one, two = (
        json.loads((tmp_path / name / "lags-seed-3" / "arc_easy-generation.json").read_text())["answers"]
        for name in ("one", "two")
    )
    assert two == one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "", "adapters": []}, "--model is missing"),
        ({"tasks": ["boolqq"]}, "unknown task 'boolqq'; did you mean 'boolq'"),
        ({"protocols": ["generations"]}, "unknown protocol 'generations'; did you mean 'generation'"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"beams": 0}, "beams must be at least 1, got 0"),
        ({"dtype": "x"}, "dtype must be one of auto"),
        ({"data": "nowhere"}, "no such folder: nowhere"),
        ({"any_size": False}, "boolq has 6 test records .*, published are 3,270"),
        ({"adapters": ["nowhere"]}, "no adapter_model.safetensors in nowhere; give a folder"),
    ],
)
def test_bad_input_is_found_before_the_model_is_loaded(folders, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(script, "load_model", lambda *arguments: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        script.main(flags(folders, tmp_path, **changes))


def test_adapters_of_another_base(folders, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folders["model"], other)
    options = {"model": str(other), "tasks": ["boolq"], "adapters": folders["adapters"][:1]}
    with pytest.raises(
        ValueError, match=r"lags is an adapter of .*, not of .*other; give that --model, or --other_base"
    ):
        script.main(flags(folders, tmp_path / "out", **options))
    script.main(flags(folders, tmp_path / "out", other_base=True, **options))
    assert runs_of(tmp_path / "out")["lags"]["settings"]["base_model"] == str(other)
    with pytest.raises(
        ValueError,
        match=r"lags and .*lags are both lags-seed-3; evaluate them one by one, or train them with --method",
    ):
        script.main(flags(folders, tmp_path / "out", adapters=folders["adapters"][:1] * 2))


def test_missing_packages_are_found_first(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install hf-sparsecoding\[eval\]"):
        script.main(flags(folders, tmp_path, protocols=["likelihood"]))
    with pytest.raises(ImportError, match=r"pip install hf-sparsecoding\[plots\]"):
        script.main(flags(folders, tmp_path, plots=True))
