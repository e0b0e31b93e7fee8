"""Loss curves with known solutions."""

import pytest
from PIL import Image

from hf_sparsecoding.reports.ridge import loss_picture, reference_losses
from tests.reports.example_results import example_run


def runs() -> list[dict]:
    history = [{"samples": 10, "test_loss": 0.9}, {"samples": 100, "test_loss": 0.3}]
    trained = [
        {**example_run("extended", seed, samples=100, metrics={"test_loss": 0.3 + seed / 10}), "history": history}
        for seed in range(2)
    ]
    solved = [
        example_run("ridge", seed, samples=0, metrics={"test_loss": value}) for seed, value in enumerate((0.1, 0.2))
    ]
    return [*trained, *solved, example_run("other", 0, samples=0, metrics={"max_error": 0.0})]


def test_known_solutions_are_those_without_samples():
    assert reference_losses(runs(), "test_loss") == {"ridge": pytest.approx(0.15)}


def test_the_same_results_give_the_same_picture(tmp_path):
    first, again = (loss_picture(runs(), "test_loss", tmp_path / name / "loss.png") for name in "ab")
    assert first.read_bytes() == again.read_bytes()
    assert Image.open(first).size > (800, 600)


def test_trained_runs_must_have_the_metric(tmp_path):
    with pytest.raises(ValueError, match="no run has the metric 'accuracy'; known: test_loss"):
        loss_picture(runs(), "accuracy", tmp_path / "loss.png")
