import json

import pytest

from hf_sparsecoding.reports import results
from tests.reports.example_results import example_results, example_run


def test_round_trip_leaves_one_file(tmp_path):
    path = tmp_path / "new" / "results.json"
    results.write(path, example_results())
    results.write(path, example_results(date="2026-02-02"))
    assert results.load(path) == example_results(date="2026-02-02")
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_new_says_where_it_was_measured(monkeypatch):
    monkeypatch.setattr("sys.argv", ["scripts/toy.py", "--name", "two words"])
    made = results.new("toy", [example_run()], device="NVIDIA H200")
    results.validate(made, "made")
    assert made["command"] == "python scripts/toy.py --name 'two words'"
    assert {"python", "torch", "peft"} <= made["versions"].keys()
    assert made["machine"].endswith("cores, NVIDIA H200")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": []}, "x: runs is empty"),
        ({"machine": None}, "x: 'machine' must be str, got None"),
        ({"runs": [{"method": "a"}]}, r"x: runs\[0\] lacks 'seed'; it has method"),
        ({"runs": [example_run(), example_run(seed="1")]}, r"x: runs\[1\]: 'seed' must be int, got '1'"),
        ({"runs": [example_run(metrics={"score": "high"})]}, "metric 'score' must be a number or null, got 'high'"),
        ({"runs": [example_run(metrics={"score": True})]}, "metric 'score' must be a number or null, got True"),
    ],
)
def test_validate_names_the_place(changes, message):
    with pytest.raises(ValueError, match=message):
        results.validate(example_results(**changes), "x")


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        results.load(tmp_path / "results.json")
    (tmp_path / "results.json").write_text('{\n"experiment": ')
    with pytest.raises(ValueError, match=r"results\.json:2: not JSON"):
        results.load(tmp_path / "results.json")
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match="must be an object, got list"):
        results.load(tmp_path / "results.json")


def test_invalid_results_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="runs is empty"):
        results.write(tmp_path / "results.json", example_results(runs=[]))
    assert not list(tmp_path.iterdir())


def test_merge_keeps_each_run_with_its_command():
    one = example_results(command="one", runs=[example_run("a")])
    two = example_results(command="two", date="2026-03-03", runs=[example_run("b", command="own")])
    merged = results.merge("both", [one, two], "python all.py")
    assert (merged["experiment"], merged["command"], merged["date"]) == ("both", "python all.py", "2026-03-03")
    assert [(run["method"], run["command"]) for run in merged["runs"]] == [("a", "one"), ("b", "own")]
    results.validate(json.loads(json.dumps(merged)), "merged")
    assert list(results.by_method(merged)) == ["a", "b"]


def test_merge_refuses_other_versions_and_nothing():
    other = example_results(command="older", date="2025-01-01", versions={"python": "3.11", "torch": "1.0"})
    with pytest.raises(ValueError, match=r"older ran with other versions \(torch\)"):
        results.merge("both", [example_results(), other], "")
    with pytest.raises(ValueError, match="nothing to merge"):
        results.merge("none", [], "")
