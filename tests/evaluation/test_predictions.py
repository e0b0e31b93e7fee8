import json

import numpy as np
import pytest
import torch

from hf_sparsecoding.evaluation.predictions import check_same_task, coefficients, load_trained, pictures
from hf_sparsecoding.reports import results
from hf_sparsecoding.training.synthetic import TASKS, make_model, tensors


SIZES = {
    "mixer": "sparse_coding",
    "transfer": "paper",
    "transfer_init": 0.5,
    "patch_size": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
OPTIONS = {
    "s_raven": {"features": 2},
    "compositional_images": {"pairs": 2, "cells": 2},
    "raven": {"configuration": "center", "size": 16},
}


def saved(folder, name, options=None, **changes):
    """A folder as the training script writes it, with an untrained model."""
    torch.manual_seed(0)
    options = {**OPTIONS[name], **(options or {})}
    make_model(TASKS[name], TASKS[name].task(**options), "", SIZES).save_pretrained(folder)
    settings = {"task": name, "task_options": json.dumps(options)}
    run = {"method": "prox", "seed": 3, "trainable_parameters": 1, "samples": 1, "settings": settings, "metrics": {}}
    results.write(folder / results.FILE, results.new("toy", [{**run, **changes}]))
    return folder


def test_model_and_task_of_a_folder(tmp_path):
    trained = load_trained(saved(tmp_path, "s_raven"))
    assert (trained.method, trained.seed) == ("prox", 3)
    assert trained.task == TASKS["s_raven"].task(features=2)
    assert not trained.model.training
    assert trained.model.config.mixer == "sparse_coding"


def test_coefficients_are_those_of_the_problem(tmp_path):
    trained = load_trained(saved(tmp_path, "s_raven"))
    inputs = tensors(trained.task.examples(0, 4, "ood", 7))["inputs"]
    with torch.no_grad():
        layers = trained.model(inputs, output_attentions=True).attentions
    whole = coefficients(trained, 3, "ood", 7, queries=18)
    assert whole.shape == (2, 2, 18, 18)
    np.testing.assert_allclose(whole, torch.stack([alpha[3] for alpha in layers]).numpy(), atol=1e-5)
    target = coefficients(trained, 3, "ood", 7, queries=6)
    np.testing.assert_array_equal(target, whole[:, :, -6:])
    assert not np.array_equal(coefficients(trained, 2, "ood", 7, queries=18), whole)


def test_coefficients_are_after_transfer(tmp_path):
    trained = load_trained(saved(tmp_path, "s_raven"))
    after = coefficients(trained, 0, "test", 0, queries=18)[0]
    torch.nn.init.zeros_(trained.model.model.layers[0].attention.transfer_weight)
    before = coefficients(trained, 0, "test", 0, queries=18)[0]
    expected = before[:, 12:] + 0.5 * before[:, :6] + 0.5 * before[:, 6:12]
    np.testing.assert_allclose(after[:, 12:], expected, atol=1e-5)


def test_pictures_of_pairs(tmp_path):
    trained = load_trained(saved(tmp_path, "compositional_images"))
    found = pictures(trained, 3, "test", 5)
    examples = trained.task.examples(0, 3, "test", 5)
    assert found.matrices.shape == (3, 2, 3, 8, 8)  # inputs above outputs
    np.testing.assert_array_equal(found.matrices[:, 0, 1], examples["inputs"][:, 2])
    np.testing.assert_array_equal(found.matrices[:, 1, 1], examples["inputs"][:, 3])
    assert not found.matrices[:, -1, -1].any()
    np.testing.assert_array_equal(found.truth, examples["labels"][:, 0])
    with torch.no_grad():
        logits = trained.model(torch.from_numpy(examples["inputs"])).logits[:, 0].numpy()
    assert logits.min() < 0
    np.testing.assert_allclose(found.drawn, logits.clip(0, 1), atol=1e-6)
    errors = ((found.drawn - found.truth).astype(float) ** 2).mean(axis=(1, 2))
    np.testing.assert_allclose(found.psnr, -10 * np.log10(errors), rtol=1e-4)


def test_pictures_of_panels(tmp_path):
    trained = load_trained(saved(tmp_path, "raven"))
    found = pictures(trained, 2, "test", 0)
    inputs = trained.task.examples(0, 2, "test", 0)["inputs"]
    assert found.matrices.shape == (2, 3, 3, 16, 16)
    np.testing.assert_array_equal(found.matrices[:, 1, 2], inputs[:, 5])
    assert not found.matrices[:, -1, -1].any()


def test_exact_pictures_have_an_infinite_psnr(tmp_path):
    trained = load_trained(saved(tmp_path, "compositional_images"))
    truth = torch.from_numpy(trained.task.examples(0, 1, "test", 0)["labels"])
    trained.model.read = lambda logits: truth
    assert pictures(trained, 1, "test", 0).psnr.tolist() == [float("inf")]


def test_requests_that_cannot_be_met(tmp_path):
    trained = load_trained(saved(tmp_path, "s_raven"))
    with pytest.raises(ValueError, match="task s_raven has no pictures; tasks that have: raven, compositional_images"):
        pictures(trained, 1, "test", 0)
    with pytest.raises(ValueError, match="problem must be at least 0, got -1"):
        coefficients(trained, -1, "test", 0, queries=1)
    with pytest.raises(ValueError, match="split must be one of"):
        coefficients(trained, 0, "nosuch", 0, queries=1)
    images = load_trained(saved(tmp_path / "images", "compositional_images"))
    with pytest.raises(ValueError, match="problems must be at least 1, got 0"):
        pictures(images, 0, "test", 0)


def test_models_of_different_tasks(tmp_path):
    a = load_trained(saved(tmp_path / "a", "compositional_images"))
    b = load_trained(saved(tmp_path / "b", "compositional_images", {"pairs": 3}))
    other = load_trained(saved(tmp_path / "c", "raven"))
    check_same_task([a])
    check_same_task([a, a])
    with pytest.raises(ValueError, match=r"a was trained with pairs=2, \S*b with 3"):
        check_same_task([a, a, b])
    with pytest.raises(ValueError, match=r"a was trained with task='compositional_images', \S*c with 'raven'"):
        check_same_task([a, other])


def test_folders_that_are_no_trained_models(tmp_path):
    with pytest.raises(ValueError, match=r"no results.json in .*; give an --output_dir of scripts/train_synthetic.py"):
        load_trained(tmp_path)
    folder = saved(tmp_path / "model", "s_raven")
    (folder / "config.json").rename(folder / "other.json")
    with pytest.raises(ValueError, match=r"no config.json in "):
        load_trained(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "sums"}, "unknown task 'sums'; known: compositional_images, raven, s_raven"),
        ({}, "unknown task ''"),
        ({"task": "s_raven", "task_options": "{"}, "task_options is not JSON .*: {"),
        ({"task": "s_raven", "task_options": '{"colour": 1}'}, "task s_raven has no option 'colour'"),
    ],
)
def test_settings_without_a_known_task(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        load_trained(saved(tmp_path, "s_raven", settings=settings))


def test_results_of_several_runs(tmp_path):
    folder = saved(tmp_path, "s_raven")
    both = results.load(folder / results.FILE)
    results.write(folder / results.FILE, {**both, "runs": both["runs"] * 2})
    with pytest.raises(ValueError, match="holds 2 runs; the model's own is needed alone"):
        load_trained(folder)
