import json

import numpy as np
import pytest
import torch

from hf_sparsecoding.evaluation.predictions import Pictures
from hf_sparsecoding.models.induction.nested_logits import nested_logits
from hf_sparsecoding.reports import results
from hf_sparsecoding.training.synthetic import TASKS, make_model
from scripts import plot, train_in_context
from scripts.plot import choose, coefficient_maps, decibels, draw_coefficients, draw_predictions, main, mosaic


SIZES = {
    "mixer": "sparse_coding",
    "transfer": "paper",
    "patch_size": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def saved(folder, name="compositional_images", method="prox", seed=0, **options):
    torch.manual_seed(seed)
    make_model(TASKS[name], TASKS[name].task(**options), "", SIZES).save_pretrained(folder)
    run = {
        "method": method,
        "seed": seed,
        "trainable_parameters": 1,
        "samples": 10,
        "settings": {"task": name, "task_options": json.dumps(options), "threshold": 0.3},
        "metrics": {"ood_accuracy": 0.5, "zero_share_layer_0": 0.25},
    }
    results.write(folder / results.FILE, results.new("toy", [run]))
    return folder


@pytest.fixture
def figures(monkeypatch):
    """Figures as they are when they are saved."""
    kept = []
    monkeypatch.setattr(plot, "save_figure", lambda figure, path: kept.append(figure))
    return kept


def test_choose():
    assert choose("layer", None, 3) == [0, 1, 2]
    assert choose("layer", [2, 0], 3) == [2, 0]
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"--layer must be between 0 and 2 for this model, got {wrong}"):
            choose("layer", [0, wrong], 3)


def test_coefficient_maps():
    alpha = np.arange(2 * 3 * 2 * 4, dtype=np.float32).reshape(2, 3, 2, 4)
    ((mean, head),) = coefficient_maps(alpha, [1], [2])
    assert (mean[0], head[0]) == ("layer 1, mean of 3 heads", "layer 1, head 2")
    np.testing.assert_array_equal(mean[1], alpha[1].mean(0))
    np.testing.assert_array_equal(head[1], alpha[1, 2])


def test_drawn_coefficients(figures):
    alpha = np.random.default_rng(0).normal(size=(2, 3, 6, 18)).astype(np.float32)
    alpha[0, 0, 0, 0] = -9
    draw_coefficients(coefficient_maps(alpha, [0, 1], [0]), context=6, panel=2, title="t", path="")
    axes = figures[0].axes
    images = [axis.images[0] for axis in axes[:4]]
    np.testing.assert_array_equal(images[0].get_array(), alpha[0].mean(0))
    np.testing.assert_array_equal(images[3].get_array(), alpha[1, 0])
    # zero is white, and a layer has one scale
    assert [image.get_clim() for image in images[:2]] == [(-9, 9)] * 2
    assert np.min(images[0].cmap(0.5)) > 0.96
    borders = {line.get_xdata()[0]: line.get_linewidth() for line in axes[0].lines if line.get_xdata()[0] > 1}
    assert list(borders) == list(range(2, 18, 2))
    assert {place for place, width in borders.items() if width > 1} == {6, 12}
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["1", "2", "target"]
    assert axes[0].get_ylim() == (18, 12)


def test_coefficients_that_are_all_zero(figures):
    draw_coefficients([[("m", np.zeros((2, 4)))]], context=2, panel=2, title="t", path="")
    assert figures[0].axes[0].images[0].get_clim() == (-1, 1)


def test_mosaic():
    matrix = np.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    whole = mosaic(matrix)
    assert whole.shape == (4, 6)
    np.testing.assert_array_equal(whole[2:, 4:], matrix[1, 2])
    np.testing.assert_array_equal(whole[:2, 2:4], matrix[0, 1])


def test_drawn_predictions(figures):
    rng = np.random.default_rng(0)
    matrices, truth = rng.random((2, 2, 3, 4, 4)), rng.random((2, 4, 4))
    models = [
        Pictures(matrices, truth, rng.random((2, 4, 4)), np.array([12.34, np.inf])),
        Pictures(matrices, truth, rng.random((2, 4, 4)), np.array([9.0, 8.0])),
    ]
    draw_predictions(models, ["a", "b"], "")
    axes = np.array(figures[0].axes).reshape(2, 4)
    assert [axis.get_title() for axis in axes[0]] == ["problem", "truth", "a", "b"]
    assert [[axis.get_xlabel() for axis in row[2:]] for row in axes] == [["12.3 dB", "9.0 dB"], ["exact", "8.0 dB"]]
    for problem, row in enumerate(axes):
        expected = [mosaic(matrices[problem]), truth[problem], *(model.drawn[problem] for model in models)]
        for axis, picture in zip(row, expected, strict=True):
            (image,) = axis.images
            np.testing.assert_array_equal(image.get_array(), picture)
            assert image.get_clim() == (0, 1)
            assert image.get_interpolation() == "nearest"
            assert image.cmap(1.0)[:3] == (0, 0, 0)  # ink is black


def test_decibels():
    assert [decibels(value) for value in (31.25, float("inf"))] == ["31.2 dB", "exact"]


def test_pictures_of_models_are_reproducible(tmp_path, capsys):
    images, numbers = saved(tmp_path / "images", pairs=1, cells=2), saved(tmp_path / "numbers", "s_raven", features=1)
    for command in (
        ["coefficients", numbers, "--layer", 1, "--rows", "all", "--problem", 2, "--split", "ood"],
        ["predictions", images, "--problems", 1],
    ):
        written = []
        for name in ("1.png", "2.png"):
            path = tmp_path / "deep" / name
            assert main([*map(str, command), "--output", str(path)]) == 0
            assert f"wrote {path}" in capsys.readouterr().out
            written.append(path.read_bytes())
        assert written[0] == written[1]


@pytest.mark.parametrize(
    ("command", "drawn"),
    [
        (["samples", "{file}", "{file2}", "--method", "b", "a"], [("b", 0.5), ("a", 0.5)]),
        (["sparsity", "{file}"], [(0.3, 0.5)]),
    ],
)
def test_curves_of_files(tmp_path, monkeypatch, command, drawn):
    files = {name: saved(tmp_path / name, "s_raven", features=1, method=name) / "results.json" for name in "ab"}
    calls = []
    for name in ("samples_picture", "sparsity_picture"):
        monkeypatch.setattr(plot.curves, name, lambda *arguments: calls.append(arguments))
    main([*(part.format(file=files["a"], file2=files["b"]) for part in command), "--output", "x.png"])
    ((found, metric, path),) = calls
    if command[0] == "samples":
        assert [(curve.method, curve.markers[0].mean) for curve in found] == drawn
    else:
        assert [(point.x, point.mean) for point in found.metric] == drawn
    assert (metric, path) == ("ood_accuracy", "x.png")


def in_context_run(classes: int, burstiness: int = 1) -> dict:
    settings = {"classes": classes, "burstiness": burstiness}
    metrics = {"ic": 0.5, "iw": 0.25}
    history = [{"step": step, **metrics, "ic2": 0.5, "loss": 1.0, "extra": 2.0} for step in (10, 20)]
    run = {"method": f"K={classes}", "seed": 0, "trainable_parameters": 1, "samples": 10}
    return {**run, "settings": settings, "metrics": metrics, "history": history}


@pytest.mark.parametrize(
    ("command", "drawer", "expected"),
    [
        (["settings", "x.json", "--x", "classes"], "setting_picture", ("classes", ["ic", "iw"])),
        (
            ["settings", "x.json", "--x", "classes", "--y", "burstiness", "--metrics", "iw"],
            "map_picture",
            ("classes", "burstiness", ["iw"]),
        ),
        (["history", "x.json"], "history_picture", (plot.HISTORY,)),
        (
            ["history", "x.json", "--metrics", "ic", "--metrics", "loss", "extra"],
            "history_picture",
            ([["ic"], ["loss", "extra"]],),
        ),
    ],
)
def test_pictures_of_in_context_classification(tmp_path, monkeypatch, command, drawer, expected):
    monkeypatch.chdir(tmp_path)
    runs = [in_context_run(8), in_context_run(16)]
    results.write("x.json", results.new("toy", runs))
    calls = []
    monkeypatch.setattr(plot.in_context, drawer, lambda *arguments: calls.append(arguments))
    main([*command, "--method", "K=16", "--output", "x.png"])
    assert calls == [([runs[1]], *expected, "x.png")]


def test_attention_of_a_training_run(tmp_path, capsys):
    folder = tmp_path / "run"
    sizes = {"classes": 4, "labels": 4, "pairs": 2, "max_pairs": 2, "content_size": 4, "head_dim": 4}
    training = {"steps": 4, "batch_size": 4, "warmup_steps": 0, "checkpoint_every": 2, "eval_items": 4}
    options = {**sizes, **training, "output_dir": folder, "progress": False}
    train_in_context.main([str(part) for name, value in options.items() for part in (f"--{name}", value)])
    for name in ("1.png", "2.png"):
        main(["attention", str(folder), "--step", "2", "4", "--output", str(tmp_path / name)])
        assert f"wrote {tmp_path / name}" in capsys.readouterr().out
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()
    with pytest.raises(SystemExit):
        main(["attention", str(folder), "--step", "3", "--output", str(tmp_path / "3.png")])
    assert "step-00000003 cannot be used" in capsys.readouterr().err


def test_nested_logits(monkeypatch):
    calls = []
    monkeypatch.setattr(plot.in_context, "landscape_picture", lambda *arguments: calls.append(arguments))
    main(["nested_logits", "--pairs", "8", "--labels", "32", "--steps", "50", "--output", "x.png"])
    ((losses, parameters, (b1, a, heights), title, path),) = calls
    assert losses.shape == (51,)
    assert losses[0] == pytest.approx(np.log(32), abs=0.01)
    assert title == "nested logits, 8 pairs and 32 labels"
    assert path == "x.png"
    # the plane is that of the last xi
    expected, _ = nested_logits(np.array([parameters[-1, 0], b1[5], a[90]]), 8, 32)
    assert heights[90, 5] == pytest.approx(expected)
    assert b1[0] < parameters[:, 1].min() < parameters[:, 1].max() < b1[-1]
    assert a[0] < parameters[:, 2].min() < parameters[:, 2].max() < a[-1]


@pytest.mark.parametrize(
    ("command", "run"),
    [
        ("lengths", {"settings": {"train_lengths": [1, 6]}, "metrics": {"exact_match_6": 1.0, "exact_match_12": 0.5}}),
        ("losses", {"settings": {}, "metrics": {"test_loss": 0.5}}),
    ],
)
def test_pictures_of_lengths_and_losses(tmp_path, command, run):
    run = {"method": "prox", "seed": 0, "trainable_parameters": 1, "samples": 10, **run}
    results.write(tmp_path / results.FILE, results.new("toy", [run]))
    assert main([command, str(tmp_path / results.FILE), "--output", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_methods_that_occur_twice_are_told_apart_by_seed(tmp_path, monkeypatch):
    folders = [saved(tmp_path / str(seed), seed=seed, pairs=1, cells=2) for seed in (0, 1)]
    folders.append(saved(tmp_path / "other", method="softmax", pairs=1, cells=2))
    seen = []
    monkeypatch.setattr(plot, "draw_predictions", lambda drawn, names, path: seen.append(names))
    main(["predictions", *map(str, folders), "--problems", "1", "--output", "x.png"])
    assert seen == [["prox, seed 0", "prox, seed 1", "softmax"]]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["samples", "none.json", "--output", "x.png"], "no such file: none.json"),
        (["samples", "{folder}/results.json", "--output", "x.pdf"], "--output must end in .png, got x.pdf"),
        (
            ["samples", "{folder}/results.json", "--metric", "f1", "--output", "x.png"],
            "no run has the metric 'f1'; known: ood_accuracy, zero_share_layer_0",
        ),
        (["samples", "{folder}/results.json", "--method", "z", "--output", "x.png"], "no method 'z'; known: prox"),
        (["coefficients", "{folder}", "--layer", "2", "--output", "x.png"], "--layer must be between 0 and 1"),
        (["coefficients", "{folder}", "--head", "7", "--output", "x.png"], "--head must be between 0 and 1"),
        (["predictions", "{folder}", "--output", "x.png"], "task s_raven has no pictures"),
        (["predictions", "{folder}/no", "--output", "x.png"], "no results.json in"),
        (["history", "{folder}/results.json", "--output", "x.png"], "no run has the metric 'iw'"),
        (["settings", "{folder}/results.json", "--x", "width", "--output", "x.png"], "hold no number 'width'"),
        (["attention", "{folder}", "--step", "1", "--output", "x.png"], "holds no run of in-context classification"),
        (["nested_logits", "--steps", "0", "--output", "x.png"], "--steps must be at least 1, got 0"),
        (["nested_logits", "--pairs", "8", "--labels", "4", "--output", "x.png"], "labels >= pairs, got [8] and [4]"),
        (["samples", "{folder}/results.json"], "required: --output"),
    ],
)
def test_errors_end_the_command_with_a_sentence(tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model", "s_raven", features=1)
    with pytest.raises(SystemExit) as end:
        main([part.format(folder="model") for part in command])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f" {command[0]}: error: " in error
    assert message in error
    assert not (tmp_path / "x.png").exists()
