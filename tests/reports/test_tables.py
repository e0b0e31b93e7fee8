import pytest

from hf_sparsecoding.reports.tables import method_table, notes, number, table, with_interval, with_spread
from tests.reports.example_results import example_results, example_run


def test_table_is_padded_markdown():
    lines = table(["name", "n"], [["a|b", 1], ["c", 200]]).split("\n")
    assert lines == ["| name |   n |", "| ---- | --: |", "| a\\|b |   1 |", "| c    | 200 |"]


def test_numbers():
    assert [number(value) for value in (None, 0.0, 0.12345, 12.3456, 1e-5, 12345.6)] == [
        "-",
        "0.000",
        "0.123",
        "12.346",
        "1e-05",
        "1.23e+04",
    ]
    assert number(12345) == "12,345"
    assert with_spread([12345]) == "12,345"
    assert with_spread([0.5]) == "0.500"
    assert with_spread([]) == "-"
    assert with_interval(0.5, 100) == "0.500 [0.404, 0.596]"


def test_method_table_compares_the_metric_in_which_methods_differ():
    lines = method_table(example_results(), ["accuracy_before", "accuracy_after"], "control").split("\n")
    assert lines[0].split("|")[-2].strip() == "accuracy_after vs control"
    few = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert few[:5] == ["few", "1,234", "3", "0.400 ± 0.000", "0.720 ± 0.020"]
    assert few[5].startswith("+0.310 [+0.2")
    assert "n.s." not in few[5]
    assert lines[3].rstrip("| ").endswith("-")


def test_a_method_with_fewer_seeds_does_not_differ_by_that():
    runs = [*example_results()["runs"], example_run("single", 0, 0.5)]
    header = method_table(example_results(runs=runs), ["accuracy_before", "accuracy_after"], "control").split("\n")[0]
    assert header.split("|")[-2].strip() == "accuracy_after vs control"


def test_no_significance_is_marked():
    runs = [example_run("a", seed, 0.71 + seed / 1000) for seed in (0, 1)] + [example_run("b", 0, 0.70)]
    assert "n.s." in method_table(example_results(runs=runs), ["accuracy_after"], "b")


def test_single_seeds_are_not_compared():
    """How much seeds differ is then unknown, with or without a count of test items."""
    runs = [example_run("a", 0, 0.9), example_run("b", 0, 0.1)]
    for made in (runs, [{**run, "settings": {}} for run in runs]):
        table_ = method_table(example_results(runs=made), ["accuracy_after"], "b")
        assert table_.split("\n")[2].rstrip("| ").endswith("-")


def test_metric_that_only_some_methods_have():
    runs = [example_run("a"), example_run("b", metrics={"other": 1.0})]
    assert method_table(example_results(runs=runs), ["other"]).split("\n")[2].rstrip("| ").endswith("-")


def test_unknown_names():
    with pytest.raises(ValueError, match="no run of toy has the metric 'accuracy'; known: accuracy_after"):
        method_table(example_results(), ["accuracy"])
    with pytest.raises(ValueError, match="no method 'base' in toy; known: few, control"):
        method_table(example_results(), ["accuracy_after"], "base")


def test_notes_are_named_once():
    cut = {"note": "stopped after 50 of 200 steps"}
    runs = [example_run("a", 0, settings=cut), example_run("a", 1, settings=cut), example_run("b", 0, settings=cut)]
    assert notes(example_results(runs=runs)) == ["a, b: stopped after 50 of 200 steps"]
    assert notes(example_results()) == []
    runs += [example_run(f"m{n}", settings={"note": "1 of 3 seeds so far"}) for n in range(16)]
    assert notes(example_results(runs=runs))[1] == "16 of 18 methods: 1 of 3 seeds so far"
