import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_sparsecoding.reports import in_context
from hf_sparsecoding.reports.in_context import (
    against_setting,
    attention_picture,
    history_of_metric,
    history_picture,
    landscape_picture,
    map_picture,
    setting_picture,
    settings_map,
    token_names,
)
from tests.reports.example_results import example_run


def cell(classes: float, burstiness: int, seed: int, ic: float | None, method: str = "") -> dict:
    settings = {"classes": classes, "burstiness": burstiness, "mixer": "softmax"}
    return example_run(method or f"{classes} {burstiness}", seed, settings=settings, metrics={"ic": ic, "iw": 0.5})


GRID = [
    cell(64, 1, 0, 0.2),
    cell(64, 1, 1, 0.4),
    cell(64, 2, 0, 0.9),
    cell(8, 2, 0, 0.1),
]


def trained(method: str, seed: int, values: dict[int, float]) -> dict:
    history = [{"step": step, "samples": step, "ic": value, "loss": 2 * value} for step, value in values.items()]
    return {**example_run(method, seed), "history": history}


@pytest.fixture
def figures(monkeypatch):
    """Figures as they are when they are saved."""
    kept: list[Figure] = []
    monkeypatch.setattr(in_context, "save_figure", lambda figure, path: kept.append(figure))
    return kept


def test_means_of_a_setting():
    points = against_setting([run for run in GRID if run["settings"]["burstiness"] == 1], "classes", "ic")
    ((x, mean, spread, seeds),) = points
    assert (x, seeds) == (64, 2)
    assert mean == pytest.approx(0.3)
    assert spread == pytest.approx(0.2 / 2**0.5)


def test_maps_are_blank_where_nothing_was_measured():
    columns, rows, means = settings_map(GRID, "classes", "burstiness", "ic")
    assert (columns, rows) == ([8, 64], [1, 2])
    np.testing.assert_allclose(means, [[np.nan, 0.3], [0.1, 0.9]])
    _, rows, means = settings_map([*GRID, cell(8, 4, 0, None)], "classes", "burstiness", "ic")
    assert rows == [1, 2, 4]
    np.testing.assert_allclose(means, [[np.nan, 0.3], [0.1, 0.9], [np.nan, np.nan]])


def test_drawn_maps(figures):
    map_picture(GRID, "classes", "burstiness", ["ic", "iw"], "")
    ic, iw = figures[0].axes[:2]
    assert [axis.get_title() for axis in (ic, iw)] == ["ic", "iw"]
    np.testing.assert_allclose(np.ma.filled(ic.images[0].get_array(), np.nan), [[np.nan, 0.3], [0.1, 0.9]])
    assert ic.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in ic.texts] == ["0.30", "0.10", "0.90"]
    assert [label.get_text() for label in ic.get_xticklabels()] == ["8", "64"]
    assert [label.get_text() for label in ic.get_yticklabels()] == ["1", "2"]


def test_drawn_lines_of_a_setting(figures):
    setting_picture(GRID[2:], "classes", ["ic", "iw"], "")
    (axis,) = figures[0].axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines}
    assert drawn == {"ic": ([8, 64], [0.1, 0.9]), "iw": ([8, 64], [0.5, 0.5])}
    assert axis.get_xlabel() == "classes"


@pytest.mark.parametrize(
    ("runs", "arguments", "message"),
    [
        (GRID, ("classes", "burstiness", "accuracy"), "no run has the metric 'accuracy'; known: ic, iw"),
        (GRID, ("mixer", "burstiness", "ic"), "of '64 1' .* hold no number 'mixer', got 'softmax'"),
        (GRID, ("classes", "width", "ic"), "hold no number 'width', got None"),
        ([*GRID, cell(64, 1, 0, 0.5, "again")], ("classes", "burstiness", "ic"), "seed 0 occurs twice at 64"),
        ([cell(8, 1, 0, None)], ("classes", "burstiness", "ic"), "no run has the metric 'ic'"),
    ],
)
def test_runs_that_have_no_place_in_a_map(runs, arguments, message):
    with pytest.raises(ValueError, match=message):
        settings_map(runs, *arguments)


def test_history_over_seeds():
    runs = [trained("a", 0, {10: 0.1, 20: 0.5}), trained("a", 1, {10: 0.3, 20: 0.7}), example_run("a", 2)]
    points = history_of_metric(runs, "ic")
    assert [(point.x, pytest.approx(point.mean), point.seeds) for point in points] == [(10, 0.2, 2), (20, 0.6, 2)]


def test_drawn_histories(figures):
    runs = [trained("a", 0, {10: 0.1, 20: 0.5}), trained("b", 0, {10: 0.2, 30: 0.6})]
    history_picture(runs, [["ic"], ["loss"]], "")
    axes = np.array(figures[0].axes).reshape(2, 2)
    assert [axis.get_title(loc="left") for axis in axes[:, 0]] == ["a", "b"]
    lines = [[(list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines] for axis in axes[1]]
    assert lines == [[([10, 30], [0.2, 0.6])], [([10, 30], [0.4, 1.2])]]
    # shares have the whole scale, losses their own
    assert axes[0, 0].get_ylim() == (-0.03, 1.03)
    assert axes[1, 1].get_ylim()[1] > 1.2
    with pytest.raises(ValueError, match="method 'a': no run has the metric 'cla'; known: .*ic, loss"):
        history_picture(runs, [["cla"]], "")
    runs[0]["history"][1].pop("step")
    with pytest.raises(ValueError, match=r"an entry of the history of 'a' \(seed 0\) has no step: {'samples': 20"):
        history_picture(runs, [["ic"]], "")


def test_token_names():
    assert token_names("11:5 3:3 3:[3]") == ["11", "[5]", "3", "[3]", "3"]


def test_drawn_attention(figures):
    rng = np.random.default_rng(0)
    snapshots = [(step, rng.random((2, 5, 5)), -2 * rng.random((2, 1, 5))) for step in (100, 2000)]
    attention_picture(snapshots, ["1:5 3:3 3:[3]", "a:2 b:0 a:[2]"], "")
    axes = np.array(figures[0].axes[:8]).reshape(4, 2)
    assert [axis.get_title() for axis in axes[0]] == ["step 100", "step 2,000"]
    for sequence in (0, 1):
        for column, (_, first, second) in enumerate(snapshots):
            top, bottom = (axes[2 * sequence + row, column].images[0] for row in (0, 1))
            np.testing.assert_array_equal(top.get_array(), first[sequence])
            np.testing.assert_array_equal(bottom.get_array(), second[sequence])
            # one scale for all, zero in white
            limit = max(np.abs(layer).max() for _, *layers in snapshots for layer in layers)
            assert top.get_clim() == bottom.get_clim() == (-limit, limit)
    assert [label.get_text() for label in axes[3, 0].get_xticklabels()] == ["a", "[2]", "b", "[0]", "a"]


def test_drawn_landscape(figures):
    losses, parameters = np.array([3.0, 2.0, 1.0]), np.arange(9.0).reshape(3, 3)
    b1, a = np.array([0.0, 1.0]), np.array([2.0, 3.0, 4.0])
    landscape_picture(losses, parameters, (b1, a, np.arange(6.0).reshape(3, 2)), "t", "")
    left, right = figures[0].axes[:2]
    drawn = {line.get_label(): list(line.get_ydata()) for line in left.lines}
    assert drawn == {"loss": [3, 2, 1], "xi": [0, 3, 6], "b1": [1, 4, 7], "a": [2, 5, 8]}
    path = right.lines[0]
    assert (list(path.get_xdata()), list(path.get_ydata())) == ([1, 4, 7], [2, 5, 8])
    np.testing.assert_array_equal(right.collections[0].get_array().reshape(3, 2), np.arange(6.0).reshape(3, 2))


def test_pictures_are_reproducible(tmp_path):
    for draw in (
        lambda path: map_picture(GRID, "classes", "burstiness", ["ic"], path),
        lambda path: history_picture([trained("a", 0, {10: 0.1, 20: 0.5})], [["ic"]], path),
    ):
        files = [draw(tmp_path / "deep" / f"{number}.png").read_bytes() for number in (1, 2)]
        assert files[0] == files[1]
        assert files[0][:4] == b"\x89PNG"
