import json

import pytest

from hf_sparsecoding.reports.curves import (
    read_runs,
    samples_curves,
    samples_picture,
    sparsity_curves,
    sparsity_picture,
)
from tests.reports.example_results import example_results, example_run


METRIC = "ood_accuracy"


def trained(method: str, seed: int, values: dict[int, float], final: float | None = None, **settings) -> dict:
    """A run with a history of `values`, and the last of them as its final metric."""
    history = [{"samples": samples, "step": samples // 10, METRIC: value} for samples, value in values.items()]
    last = list(values.values())[-1] if final is None else final
    run = example_run(method, seed, samples=max(values), metrics={METRIC: last}, settings=settings)
    return {**run, "history": history}


def sparse(threshold: float, seed: int, zeros: tuple[float, ...], accuracy: float, **changes) -> dict:
    metrics = {METRIC: accuracy, **{f"zero_share_layer_{i}": share for i, share in enumerate(zeros)}}
    return example_run(f"prox {threshold}", seed, metrics=metrics, settings={"threshold": threshold}, **changes)


def numbers(points) -> list[tuple]:
    return [(point.x, pytest.approx(point.mean), point.seeds) for point in points]


def test_curves_hold_the_histories_and_the_final_points():
    runs = [
        trained("a", 0, {10: 0.2, 100: 0.4}, final=0.5),
        trained("a", 1, {10: 0.4, 100: 0.7}),
        example_run("b", 0, samples=50, metrics={METRIC: 0.9}),
        example_run("c", 0, metrics={"loss": 1.0}),
    ]
    a, b = samples_curves(runs, METRIC)
    assert (a.method, a.label, a.markers) == ("a", "a (2 seeds)", [])
    assert numbers(a.line) == [(10, 0.3, 2), (100, 0.6, 2)]
    assert a.line[0].spread == pytest.approx(0.2 / 2**0.5)
    assert (b.label, b.line) == ("b", [])
    assert b.markers == [(50, 0.9, None, 1)]


def test_final_point_beyond_the_history_and_points_that_cannot_be_drawn():
    run = trained("a", 0, {0: 0.1, 10: 0.2})
    run["history"].append({"samples": 20, "step": 2, METRIC: None})
    (curve,) = samples_curves([{**run, "samples": 30, "metrics": {METRIC: 0.3}}], METRIC)
    assert numbers(curve.line) == [(10, 0.2, 1), (30, 0.3, 1)]


def test_metric_that_only_the_history_has():
    run = {**trained("a", 0, {10: 0.2, 30: 0.4}), "metrics": {}}
    (curve,) = samples_curves([run], METRIC)
    assert numbers(curve.line) == [(10, 0.2, 1), (30, 0.4, 1)]


def test_runs_of_several_files_by_method(tmp_path):
    for name, runs in {"1": [example_run("a"), example_run("b")], "2": [example_run("a", 1)]}.items():
        (tmp_path / name).write_text(json.dumps(example_results(runs=runs)))
    paths = [tmp_path / "1", tmp_path / "2"]
    assert [(run["method"], run["seed"]) for run in read_runs(paths)] == [("a", 0), ("a", 1), ("b", 0)]
    assert [run["method"] for run in read_runs(paths, ["b", "a"])] == ["b", "a", "a"]
    with pytest.raises(ValueError, match="no method 'z'; known: a, b"):
        read_runs(paths, ["z"])


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([trained("a", 0, {10: 0.1}), example_run("b", metrics={"loss": 1})], "metric 'x'; known: loss, ood_accuracy"),
        ([example_run(metrics={"x": 1}), example_run(metrics={"x": 2})], "method 'few': seed 0 occurs twice at 3,200"),
        ([example_run(history=[{"x": 1}])], "history of 'few' .seed 0. lacks 'samples': {'x': 1}"),
        ([example_run(metrics={"x": 1}, samples=0)], "no run has the metric 'x'"),
    ],
)
def test_samples_errors(runs, message):
    with pytest.raises(ValueError, match=message):
        samples_curves(runs, "x")


def test_sparsity_over_seeds():
    runs = [sparse(0.3, 0, (0.4, 0.6), 0.8), sparse(0.3, 1, (0.6, 0.8), 0.6), sparse(0.0, 0, (0.0, 0.1), 0.5)]
    runs.append(example_run("softmax", metrics={METRIC: 1.0}, settings={"threshold": 0.3}))  # no zero shares
    found = sparsity_curves(runs, METRIC)
    assert list(found.layers) == [0, 1]
    assert numbers(found.layers[0]) == [(0.0, 0.0, 1), (0.3, 0.5, 2)]
    assert numbers(found.layers[1]) == [(0.0, 0.1, 1), (0.3, 0.7, 2)]
    assert numbers(found.metric) == [(0.0, 0.5, 1), (0.3, 0.7, 2)]
    assert not found.learned
    runs[0]["settings"]["threshold_type"] = "head"
    assert sparsity_curves(runs, METRIC).learned


@pytest.mark.parametrize(
    ("runs", "metric", "message"),
    [
        (
            [example_run(metrics={"loss": 1})],
            METRIC,
            "'zero_share_layer_0'; known: loss; sparse_coding models have it",
        ),
        ([sparse(0.3, 0, (0.1,), 0.5)], "x", "metric 'x'; known: ood_accuracy, zero_share_layer_0"),
        (
            [sparse(0.3, 0, (0.1,), 0.5), {**sparse(0.3, 0, (0.1,), 0.5), "method": "other"}],
            METRIC,
            "'prox 0.3' .seed 0. and 'other' .seed 0. both have threshold 0.3; choose one with --method",
        ),
        (
            [{**sparse(0.3, 0, (0.1,), 0.5), "settings": {}}],
            METRIC,
            "settings of 'prox 0.3' .seed 0. lack 'threshold'",
        ),
    ],
)
def test_sparsity_errors(runs, metric, message):
    with pytest.raises(ValueError, match=message):
        sparsity_curves(runs, metric)


def drawn(monkeypatch, draw) -> list:
    """The axes of a picture as they are when it is saved."""
    kept = []
    monkeypatch.setattr("hf_sparsecoding.reports.curves.save_figure", lambda figure, path: kept.extend(figure.axes))
    draw()
    return kept


def test_samples_picture_draws_the_collected_numbers(monkeypatch):
    runs = [trained("a", s, {10: 0.2 + s / 10, 100: 0.5}) for s in (0, 1)] + [example_run("b", metrics={METRIC: 0.9})]
    (axis,) = drawn(monkeypatch, lambda: samples_picture(samples_curves(runs, METRIC), METRIC, ""))
    line, marker = axis.lines[0], axis.lines[1]
    assert axis.get_xscale() == "log"
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([10, 100], pytest.approx([0.25, 0.5]))
    assert (list(marker.get_xdata()), list(marker.get_ydata())) == ([3200], [0.9])
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (pytest.approx(0.25 - 0.1 / 2**0.5), 0.5)
    assert axis.get_legend_handles_labels()[1] == ["a (2 seeds)", "b"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("training samples", "ood accuracy")


def test_sparsity_picture_draws_the_collected_numbers(monkeypatch):
    found = sparsity_curves([sparse(0.1, 0, (0.4, 0.6), 0.8), sparse(1.0, 0, (0.8, 0.9), 0.7)], METRIC)
    left, right = drawn(monkeypatch, lambda: sparsity_picture(found, METRIC, ""))
    assert [list(line.get_ydata()) for line in left.lines] == [[0.4, 0.8], [0.6, 0.9]]
    assert [list(line.get_xdata()) for line in (*left.lines, *right.lines)] == [[0.1, 1.0]] * 3
    assert list(right.lines[0].get_ydata()) == [0.8, 0.7]
    assert left.get_xlabel() == "threshold"


def test_pictures_are_reproducible(tmp_path):
    curves = samples_curves([trained("a", 0, {10: 0.2, 100: 0.5})], METRIC)
    found = sparsity_curves([sparse(0.1, 0, (0.4, 0.6), 0.8), sparse(1.0, 0, (0.8, 0.9), 0.7)], METRIC)
    for draw, what in ((samples_picture, curves), (sparsity_picture, found)):
        one, two = (draw(what, METRIC, tmp_path / name).read_bytes() for name in ("1.png", "2.png"))
        assert one == two
        assert one.startswith(b"\x89PNG")
