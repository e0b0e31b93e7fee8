import pytest
from PIL import Image

from hf_sparsecoding.reports import lengths as module
from hf_sparsecoding.reports.lengths import length_curves, length_picture


def run(method, seed, **metrics):
    return {"method": method, "seed": seed, "settings": {"train_lengths": [1, 6]}, "metrics": metrics}


RUNS = [
    run("coupled", 0, exact_match_6=1.0, exact_match_12=0.8, exact_match_2x=0.8, concentration_6=3.0),
    run("coupled", 1, exact_match_6=0.8, exact_match_12=0.6, exact_match_2x=0.6, concentration_6=5.0),
    run("none", 0, exact_match_6=0.5, exact_match_12=0.0, exact_match_2x=0.0),
]


def test_curves_over_lengths_and_seeds():
    curves = length_curves(RUNS, "exact_match")
    assert list(curves) == ["coupled", "none"]
    assert [(p.x, p.seeds) for p in curves["coupled"]] == [(6, 2), (12, 2)]
    assert [p.mean for p in curves["coupled"]] == pytest.approx([0.9, 0.7])
    assert curves["coupled"][0].spread == pytest.approx(0.02**0.5)
    assert list(length_curves(RUNS, "concentration")) == ["coupled"]


def test_picture(tmp_path):
    path = length_picture(RUNS, "exact_match", tmp_path / "lengths.png")
    assert Image.open(path).size[0] > 500
    first = path.read_bytes()
    assert length_picture(RUNS, "exact_match", path).read_bytes() == first
    assert length_picture(RUNS[:2], "exact_match", path).read_bytes() != first


@pytest.mark.parametrize("method", ["short", "pattern_matching, sparse coding with a long name of forty-four"])
def test_the_legend_is_inside(tmp_path, monkeypatch, method):
    figures = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(figure))
    runs = [run(f"{method} {number}", seed, exact_match_6=0.5) for number in range(5) for seed in (0, 1)]
    length_picture(runs, "exact_match", tmp_path / "a.png")
    figures[0].canvas.draw()
    box = figures[0].legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figures[0].bbox.width


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run has 'accuracy' by length; known: concentration, exact_match"):
        length_curves(RUNS, "accuracy")
    other = {**RUNS[2], "settings": {"train_lengths": [1, 9]}}
    with pytest.raises(ValueError, match=r"same train_lengths, got \[\(1, 6\), \(1, 9\)\]"):
        length_picture([*RUNS[:2], other], "exact_match", tmp_path / "lengths.png")
    with pytest.raises(ValueError, match="seed 0 occurs twice"):
        length_curves([RUNS[0], RUNS[0]], "exact_match")
