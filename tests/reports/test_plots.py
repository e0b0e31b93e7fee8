import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hf_sparsecoding.reports.plots import accuracy_per_rule, learned_lambda, read_lambda
from tests.reports.example_results import example_run
from tests.tiny_models import adapted, tiny_model


def saved(folder, **config):
    adapted(tiny_model(), **config).save_pretrained(folder)
    return folder


def test_lambda_of_a_saved_adapter(tmp_path):
    model = adapted(tiny_model(), lags=[1, 4], target_coefficient=True)
    model.save_pretrained(tmp_path)
    numbers, names = read_lambda(tmp_path)
    assert numbers.shape == (2, 4, 3)  # layers, heads, contexts and target
    assert names == ["lag 1", "lag 4", "target"]
    learned = {name: value.detach().numpy() for name, value in model.named_parameters() if value.requires_grad}
    for layer in range(2):
        first = next(v for k, v in learned.items() if f".{layer}." in k and "sparsecoding_lambda" in k)
        target = next(v for k, v in learned.items() if f".{layer}." in k and "sparsecoding_target" in k)
        np.testing.assert_array_equal(numbers[layer, :, :2], first)
        np.testing.assert_array_equal(numbers[layer, :, 2], target)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_contexts": 3, "per_head": False}, (2, 1, 3)),
        ({"num_contexts": 0, "target_coefficient": True}, (2, 4, 1)),
        ({"contexts": "segments", "num_contexts": 2, "segment_token_ids": [5]}, (2, 4, 2)),
        ({"layers_to_transform": [1], "num_contexts": 1}, (2, 4, 1)),
    ],
)
def test_pictures_of_all_kinds(tmp_path, config, shape):
    folder = saved(tmp_path, **config)
    numbers, names = read_lambda(folder)
    assert numbers.shape == shape
    assert len(names) == shape[-1]
    assert np.isnan(numbers[0]).all() == ("layers_to_transform" in config)
    assert learned_lambda(folder, tmp_path / "deep" / "lambda.png").stat().st_size > 1000


def test_untrained_adapter_can_be_drawn(tmp_path):
    assert learned_lambda(saved(tmp_path, init_weights=True), tmp_path / "lambda.png").exists()


def test_other_methods_have_no_lambda(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"a.0.b": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert learned_lambda(tmp_path, tmp_path / "lambda.png") is None
    assert not (tmp_path / "lambda.png").exists()


def test_accuracy_picture_is_reproducible(tmp_path):
    run = example_run()
    one, two = (accuracy_per_rule(run, tmp_path / name).read_bytes() for name in ("1.png", "2.png"))
    assert one == two
    both = {**run["metrics"], **{f"ood_{name}": value for name, value in run["metrics"].items()}}
    items = {**run["settings"]["items"], **{f"ood_{name}": n for name, n in run["settings"]["items"].items()}}
    wide = accuracy_per_rule({**run, "metrics": both, "settings": {"items": items}}, tmp_path / "3.png")
    assert wide.read_bytes() != one
