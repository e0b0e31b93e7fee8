import numpy as np
import pytest
import torch

from hf_sparsecoding.benchmarks import mixers
from hf_sparsecoding.benchmarks.turns import Turns
from hf_sparsecoding.models import SparseTransformerConfig
from hf_sparsecoding.tasks.s_raven import SRaven
from hf_sparsecoding.training.synthetic import tensors


def test_contenders_have_the_reference_sizes():
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "sequence_length")
    reference = SparseTransformerConfig()
    for name in mixers.METHODS:
        config = mixers.make_model(name, seed=0).config
        assert all(getattr(config, size) == getattr(reference, size) for size in sizes)


def test_transfer_is_per_head():
    config = mixers.make_model("sparse_coding_keys_aligned", seed=0).config
    assert (config.mixer, config.score_norm, config.threshold) == ("sparse_coding", "keys", 1.0)
    assert (config.transfer, config.transfer_per_head) == ("aligned", True)
    assert mixers.make_model("sparse_coding", seed=0).config.score_norm == "none"


def test_step_trains_every_parameter():
    model = mixers.make_model("softmax_aligned", seed=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    mixers.training_step(model, tensors(SRaven().examples(0, 2, "train", 0)))()
    # a bias of the keys shifts all scores of a row alike: softmax does not see it, but weight decay is on all
    assert all((old != new).any() or not old.any() for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_baselines_are_always_there():
    assert mixers.with_baselines(["hyla"]) == ["softmax", "hyla"]
    wanted = ["softmax", "sparse_coding_keys", "sparse_coding_keys_paper"]
    assert mixers.with_baselines(["sparse_coding_keys_paper"]) == wanted
    assert mixers.with_baselines(mixers.METHODS) == list(mixers.METHODS)


def test_unknown_method_lists_the_known():
    with pytest.raises(ValueError, match="softmax, linear, hyla.*sparse_coding_keys_aligned, got 'lora_r8'"):
        mixers.with_baselines(["lora_r8"])


def test_metrics():
    slow_and_fast = np.array([1.0, 10.0, 1.0])
    seconds = {"softmax": slow_and_fast, "softmax_paper": 1.5 * slow_and_fast}
    metrics = mixers.step_metrics(seconds, "softmax_paper", batch_size=3, seed=0)
    ends = ("", "_low", "_high")
    names = [f"{name}{end}" for name in ("step_ratio_to_softmax", "step_ratio_to_no_transfer") for end in ends]
    assert metrics == {"step_seconds": 1.5, "samples_per_second": 2.0, **dict.fromkeys(names, 1.5)}
    assert "step_ratio_to_no_transfer" not in mixers.step_metrics(seconds, "softmax", batch_size=3, seed=0)


@pytest.mark.parametrize("wanted", [False, True])
def test_compile_takes_every_contender(monkeypatch, wanted):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    turns = Turns(rounds=1, warmup=0, progress=False)
    runs = mixers.measure(turns, method=["linear"], batch_size=1, compile=wanted)
    assert len(compiled) == (2 if wanted else 0)
    assert all(run["settings"]["compile"] is wanted for run in runs)
