import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from hf_sparsecoding.reports import results
from scripts import sweep
from tests.training.character_model import forked


# stands in for a training script; imports nothing, so that the sweep is what is tested
SCRIPT = """
import json, os, pathlib, sys, time
words = [part for word in sys.argv[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
arguments = dict(zip(words[::2], words[1::2]))
folder = pathlib.Path(arguments["--output_dir"])
(folder / "starts").open("a").write("x")
(folder / "threads").write_text(os.environ["OMP_NUM_THREADS"])
if arguments.get("--fail") == arguments["--seed"]:
    print("working", "\\r", "half way")
    sys.exit("this seed cannot work")
if "--sleep" in arguments:
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(float(arguments["--sleep"]))
run = {"method": arguments["--method"], "seed": int(arguments["--seed"]), "trainable_parameters": 3, "samples": 5,
       "settings": {"plain": False, "rate": 0.001, "options": '{"k": 2}', "value": float(arguments["--value"])},
       "metrics": {"score": float(arguments["--value"]) + int(arguments["--seed"]), "score_detail": 1}}
results = {"experiment": "x", "command": "python " + " ".join(sys.argv), "date": "2026-01-01", "machine": "m",
           "versions": {"torch": "1"}, "runs": [run]}
(folder / "results.json").write_text(json.dumps(results))
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes the sweep's file; the tests run in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "versions", lambda: {"torch": "1"})  # as in SCRIPT
    (tmp_path / "script.py").write_text(SCRIPT)

    def write(**changes):
        values = {
            "experiment": "toy",
            "command": "script.py",
            "output_dir": "out",
            "common": {"value": 1},
            "methods": {"a b": {}, "c": {"value": 2}},
            "seeds": [0, 1],
            **changes,
        }
        (tmp_path / "sweep.yaml").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        return "sweep.yaml"

    return write


def test_all_runs_are_gathered(config, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/sweep.py", "sweep.yaml", "--jobs", "2"])
    assert sweep.main([config(), "--jobs", "2", "--set", "value=5", "--results", "cards/toy/results.json"]) == 0
    gathered = results.load("cards/toy/results.json")
    found = [(run["method"], run["seed"], run["metrics"]["score"]) for run in gathered["runs"]]
    assert found == [("a b", 0, 5.0), ("a b", 1, 6.0), ("c", 0, 2.0), ("c", 1, 3.0)]
    assert gathered["experiment"] == "toy"
    assert gathered["command"] == "python scripts/sweep.py sweep.yaml --jobs 2"
    assert "--seed 1" in gathered["runs"][1]["command"]
    assert Path("out/a_b/seed-0/threads").read_text() == "1"
    printed = capsys.readouterr().out
    assert "[4/4]" in printed
    assert "| a b    |         3 |     2 | 5.500 ± 0.707 |" in printed
    assert "score_detail" not in printed


def test_a_grid_makes_a_method_of_every_cell(config):
    grid = {"value": [1, 2.5], "fail": [7]}
    assert sweep.main([config(methods=None, grid=grid, seeds=[0]), "--results", "cells.json"]) == 0
    found = [(run["method"], run["metrics"]["score"]) for run in results.load("cells.json")["runs"]]
    assert found == [("value=1, fail=7", 1.0), ("value=2.5, fail=7", 2.5)]
    assert Path("out/value_2.5__fail_7/seed-0/results.json").is_file()
    read = sweep.read_sweep(config(methods={"a": {"x": 3}, "b": {"value": 9}}, grid={"value": [1, 2]}), [], None)
    assert read.methods == {
        "a, value=1": {"x": 3, "value": 1},
        "a, value=2": {"x": 3, "value": 2},
        "b, value=1": {"value": 1},
        "b, value=2": {"value": 2},
    }


def test_a_grid_value_brings_its_own_arguments(config):
    grid = {"kind": {"plain": None, "top": {"kept": 8, "x": 4}}, "size": [1]}
    read = sweep.read_sweep(config(methods={"a": {"x": 3}}, grid=grid), [], None)
    assert read.methods == {
        "a, kind=plain, size=1": {"x": 3, "kind": "plain", "size": 1},
        "a, kind=top, size=1": {"x": 4, "kind": "top", "size": 1, "kept": 8},
    }


def test_runs_of_an_earlier_file_are_kept(config, tmp_path):
    card = tmp_path / "card.json"
    assert sweep.main([config(seeds=[0]), "--results", str(card)]) == 0
    shutil.rmtree("out")
    assert sweep.main([config(seeds=[0, 1]), "--results", str(card)]) == 0
    assert not Path("out/c/seed-0").exists()
    assert [(run["method"], run["seed"]) for run in results.load(card)["runs"]] == [
        ("a b", 0),
        ("a b", 1),
        ("c", 0),
        ("c", 1),
    ]


def test_runs_from_before_the_config_changed_are_not_kept(config, capsys):
    """The command names the --config file, not what is in it."""
    sheet = Path("rates.yaml")
    # value is a flag: overridden
    sheet.write_text("rate: 1e-3\noptions: {k: 2}\nplain: no\nvalue: 7\nnot_in_settings: 1\n")
    argv = [config(common={"value": 1, "config": "rates.yaml"}), "--results", "gathered.json"]
    assert sweep.main(argv) == 0
    assert sweep.main(argv) == 0
    assert "4 runs, 4 of them finished before" in capsys.readouterr().out
    sheet.write_text(sheet.read_text().replace("options: {k: 2}\n", ""))  # a default applies now
    with pytest.raises(ValueError, match=r"results from before options changed in the --config file; delete"):
        sweep.main(argv)
    sheet.write_text("rate: 2e-3\noptions: {k: 3}\nplain: yes\nvalue: 7\nnot_in_settings: 1\n")
    with pytest.raises(ValueError, match=r"from before rate, options, plain changed in the --config file; delete"):
        sweep.main(argv)
    shutil.rmtree("out")
    assert sweep.main(argv) == 0
    assert "4 runs, 0 of them finished before" in capsys.readouterr().out


def test_negative_values_of_a_method_override_the_config_file(config, capsys):
    Path("rates.yaml").write_text("value: 7\n")
    argv = [config(common={"value": -1, "config": "rates.yaml"}), "--results", "gathered.json"]
    assert sweep.main(argv) == 0
    assert sweep.main(argv) == 0
    assert "4 runs, 4 of them finished before" in capsys.readouterr().out


def test_fields_that_came_later_are_compared_with_what_runs_did_before(config):
    """Runs from before there was a choice of optimizers do not name theirs."""
    sheet = Path("rates.yaml")
    sheet.write_text("rate: 1e-3\noptimizer: adamw\nvalue:\n")
    argv = [config(common={"value": 1, "config": "rates.yaml"}), "--results", "gathered.json"]
    assert sweep.main(argv) == 0
    assert sweep.main(argv) == 0
    sheet.write_text("rate: fast\noptimizer: muon\n")
    with pytest.raises(ValueError, match="results from before rate, optimizer changed in the --config file"):
        sweep.main(argv)


def test_other_versions_are_found_before_more_is_run(config, monkeypatch):
    assert sweep.main([config(seeds=[0]), "--results", "card.json"]) == 0
    monkeypatch.setattr(results, "versions", lambda: {"torch": "2"})
    more = config(seeds=[0, 1])
    with pytest.raises(
        ValueError, match="out/a_b/seed-0 was measured with other versions of torch than are installed"
    ):
        sweep.main([more])
    shutil.rmtree("out")
    with pytest.raises(ValueError, match=r"card\.json was measured with other versions of torch"):
        sweep.main([more, "--results", "card.json"])
    assert not Path("out").exists()
    assert sweep.main([more, "--results", "card.json", "--gather_only"]) == 0


def test_a_method_that_lacks_seeds_says_so(config):
    assert sweep.main([config(methods={"a": {"fail": 1}, "b": {}}), "--results", "card.json"]) == 1
    notes = {(run["method"], run["settings"].get("note")) for run in results.load("card.json")["runs"]}
    assert notes == {("a", "1 of the 2 seeds so far"), ("b", None)}


def test_gathering_without_a_run(config, capsys, monkeypatch):
    argv = [config(seeds=[0]), "--gather_only", "--results", "toy.json"]
    assert sweep.main(argv) == 0
    assert "no run is finished, toy.json is not written" in capsys.readouterr().out
    assert sweep.main([config(seeds=[0], methods={"a b": {}})]) == 0
    monkeypatch.setattr(sys, "argv", ["scripts/sweep.py", *argv])
    assert sweep.main(argv) == 0
    gathered = results.load("toy.json")
    assert [run["method"] for run in gathered["runs"]] == ["a b"]
    assert gathered["command"] == "python scripts/sweep.py sweep.yaml --results toy.json"
    assert not Path("out/c").exists()


def test_failures_are_listed_and_tried_again(config, capsys):
    failing = config(methods={"a": {"fail": 1}, "c": {}})
    assert sweep.main([failing, "--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert "a seed 1: FAILED (exit status 1)" in printed
    assert "this seed cannot work" in printed
    assert "half way" in printed
    assert len(results.load("out/results.json")["runs"]) == 3
    assert sweep.main([failing]) == 1
    assert "4 runs, 3 of them finished before" in capsys.readouterr().out
    assert len(Path("out/a/seed-1/starts").read_text()) == 2
    assert len(Path("out/c/seed-1/starts").read_text()) == 1


def test_results_of_other_arguments_are_not_mixed_in(config):
    sweep.main([config()])
    with pytest.raises(ValueError, match=r"holds results of another command .*delete the folder or choose another"):
        sweep.main([config(common={"value": 9})])
    assert sweep.main([config(common={"value": 9}), "--output_dir", "other"]) == 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_children(config, sign):
    path = config(common={"value": 1, "sleep": 120})
    process = forked(lambda: sys.exit(sweep.main([path, "--jobs", "2"])))
    files = [Path(f"out/{method}/seed-0/pid") for method in ("a_b", "c")]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = [int(file.read_text()) for file in files]
    assert all(map(alive, children))
    os.kill(process.pid, sign)
    process.join(60)
    assert process.exitcode == 128 + sign
    assert not any(map(alive, children))
    # nothing half-done counts as finished
    assert not list(Path("out").glob("*/*/results.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {}}, "unknown key 'method'; did you mean 'methods'"),
        ({"seeds": None}, r"sweep\.yaml lacks seeds"),
        ({"seeds": 3}, "seeds must be a list, got 3"),
        ({"methods": {}}, "need at least one method and one seed"),
        ({"methods": None}, r"sweep\.yaml lacks methods"),
        ({"methods": {"a": "softmax"}}, "methods must map names to mappings of arguments, got 'a': 'softmax'"),
        ({"methods": {"a 1": {}, "a/1": {}}}, "'a 1' and 'a/1' would share the folder out/a_1/seed-0; rename"),
        ({"seeds": [0, "one"]}, r"seeds must be whole numbers, each once, got \[0, 'one'\]"),
        ({"seeds": [0, 0]}, r"each once, got \[0, 0\]"),
        ({"grid": [1]}, r"grid must be a dict, got \[1\]"),
        ({"grid": {"value": 3}}, "grid must give a list or mapping of values for value, got 3"),
        ({"grid": {"value": [0.1, "0.1"]}}, r"grid gives a value of value twice: \[0.1, '0.1'\]"),
        ({"grid": {"kind": {"top": 8}}}, "the further arguments of kind=top as a mapping, got 8"),
        (
            {"grid": {"size": [1], "kind": {"top": {"size": 2}}}},
            "kind=top of the grid sets size, which the grid varies",
        ),
        ({"command": "none.py"}, r"command 'none\.py' is no file"),
    ],
)
def test_bad_files(config, changes, message):
    with pytest.raises(ValueError, match=message):
        sweep.main([config(**changes)])


def test_overrides_are_read_as_the_file_is(config):
    read = sweep.read_sweep(config(), ["mixed_precision=no", "steps=3"], None)
    assert read.common == {"value": 1, "mixed_precision": "no", "steps": 3}


def test_overrides_may_be_given_one_by_one(config, monkeypatch):
    seen = []
    monkeypatch.setattr(sweep, "read_sweep", lambda path, overrides, output: seen.append(overrides) or sys.exit())
    with pytest.raises(SystemExit):
        sweep.main([config(), "--set", "a=1", "b=2", "--set", "c=3"])
    assert seen == [["a=1", "b=2", "c=3"]]


def test_results_of_a_method_that_was_not_asked_for(config):
    argv = [config(seeds=[0])]
    script = Path("script.py")
    script.write_text(script.read_text().replace('"method": arguments["--method"]', '"method": "mine"'))
    with pytest.raises(ValueError, match=r"script\.py wrote results of the method 'mine', which --method did not"):
        sweep.main(argv)


def test_bad_override(config):
    with pytest.raises(ValueError, match="--set takes NAME=VALUE, got 'steps'"):
        sweep.main([config(), "--set", "steps"])


def test_published_sweep_is_valid(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    read = sweep.read_sweep("scripts/configs/smollm2_s_raven_text.yaml", [], None)
    jobs = sweep.make_jobs(read)
    assert len(jobs) == 27
    assert all(Path(own["adapter_config"]).is_file() for own in read.methods.values())


def test_a_metric_per_feature_is_shown():
    names = ["accuracy", "accuracy_per_feature", "accuracy_addition", "zero_share", "zero_share_layer_0"]
    assert [name for name in names if sweep.is_detail(name, names)] == ["accuracy_addition", "zero_share_layer_0"]
