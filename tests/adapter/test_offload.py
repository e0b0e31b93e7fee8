"""Weights that lie elsewhere until a module is called: accelerate's cpu_offload, disk_offload and device maps."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from peft import PeftModel

from tests.tiny_models import adapted, tiny_model, tokens


KINDS = {
    "lags": {"target_coefficient": True},
    "segments": {"contexts": "segments", "segment_token_ids": list(range(3, 20))},
    "trained threshold": {"coefficients": "thresholded_softmax", "threshold": 0.05, "train_threshold": True},
    "fixed threshold": {"coefficients": "soft_threshold", "threshold": 0.1},
}
each_kind = pytest.mark.parametrize("kind", KINDS)

DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(scope="module")
def ids():
    return tokens(2, 11)


def on_meta(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.device.type == "meta"}


@torch.no_grad()
def run(model, ids):
    generated = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    by_row = model(ids, adapter_names=["default"] * len(ids)).logits
    return SimpleNamespace(logits=model(ids).logits, by_row=by_row, generated=generated)


def assert_runs_as(model, expected, ids):
    actual = run(model, ids)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.by_row, expected.by_row)
    assert torch.equal(actual.generated, expected.generated)


@pytest.fixture
def expected(ids, kind):
    return run(adapted(tiny_model(), **KINDS[kind]), ids)


@each_kind
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloading_an_adapted_model(tmp_path, kind, offload, ids, expected):
    model = adapted(tiny_model(), **KINDS[kind])
    if offload == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert len(on_meta(model)) == len(list(model.parameters()))
    assert_runs_as(model, expected, ids)


@each_kind
def test_loading_an_adapter_on_a_dispatched_model(tmp_path, kind, ids, expected):
    adapted(tiny_model(), **KINDS[kind]).save_pretrained(tmp_path / "adapter")
    base = dispatch_model(tiny_model(), DEVICE_MAP, main_device="cpu", offload_dir=tmp_path / "weights")
    assert any("layers.0" in name for name in on_meta(base))
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert not any("sparsecoding" in name for name in on_meta(model))
    assert_runs_as(model, expected, ids)
