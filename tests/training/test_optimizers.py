import copy
import json
from functools import partial

import pytest
import torch
from torch import nn

from hf_sparsecoding.training import checkpoints, train
from hf_sparsecoding.training.optimizers import make_optimizer
from tests.training.character_model import run_distributed
from tests.training.toy_regression import SIZE, arguments, batch, distributed_run, equal, make_model, mse, weights


def test_weight_decay_leaves_out_what_is_no_matrix(tmp_path):
    """Without a gradient from the loss, decay alone moves the parameters."""

    def nothing(model, examples):
        return 0 * mse(model, examples)

    for decayed, moved in (("all", {"0.weight", "3.weight", "3.bias"}), ("matrices", {"0.weight", "3.weight"})):
        model = make_model()
        before = weights(model)
        options = {"weight_decay": 0.5, "weight_decay_on": decayed, "checkpoint_every": 0}
        train(model, batch, nothing, arguments(tmp_path, **options))
        assert {name for name, value in weights(model).items() if not torch.equal(value, before[name])} == moved


def test_sgd_is_plain_gradient_descent(tmp_path):
    options = {"optimizer": "sgd", "schedule": "constant", "warmup_steps": 0, "max_grad_norm": 0, "learning_rate": 0.1}
    model, expected = make_model(), make_model()
    train(model, batch, mse, arguments(tmp_path, steps=3, weight_decay=0.01, **options))
    for step in range(3):
        parameters = [p for p in expected.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(mse(expected, batch(8 * step, 8)), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * (gradient + 0.01 * parameter)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"optimizer \(checkpoint: 'sgd', now: 'adamw'\)"):
        train(make_model(), batch, mse, arguments(tmp_path, steps=3, **{**options, "optimizer": "adamw"}))


class Layered(nn.Module):
    """An embedding, a stack of two layers and a head; one weight of the stack is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(SIZE, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.layers[1][2].weight.requires_grad_(False)

    def forward(self, inputs):
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


MUON = {"optimizer": "muon", "learning_rate": 0.02, "weight_decay": 0.1, "weight_decay_on": "matrices"}


def test_muon_takes_the_layers_matrices_and_leaves_the_rest_to_adamw(tmp_path):
    options = {**MUON, "steps": 3, "warmup_steps": 0, "schedule": "constant", "max_grad_norm": 0}
    model, expected = Layered(), Layered()
    train(model, batch, mse, arguments(tmp_path, **options))
    turned = [expected.layers[0][0].weight, expected.layers[0][2].weight, expected.layers[1][0].weight]
    decayed = [expected.embedding.weight, expected.head.weight]
    biases = [parameter for name, parameter in expected.named_parameters() if name.endswith("bias")]
    optimizers = [
        torch.optim.Muon(turned, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decayed, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(biases, lr=0.02, weight_decay=0.0),
    ]
    for step in range(3):
        mse(expected, batch(8 * step, 8)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert equal(weights(model), weights(expected))
    assert torch.equal(model.layers[1][2].weight, Layered().layers[1][2].weight)  # frozen


def test_muon_resumes_exactly_and_learns(tmp_path):
    whole, cut = Layered(), Layered()
    expected = train(whole, batch, mse, arguments(tmp_path / "whole", **MUON))
    assert expected.losses[-1] < 0.5 * expected.losses[0]
    first = train(cut, batch, mse, arguments(tmp_path / "cut", **MUON))
    newest = checkpoints.newest(tmp_path / "cut" / "checkpoints")
    (newest / checkpoints.STATE).unlink()  # the run ended after step 6
    resumed = Layered()
    result = train(resumed, batch, mse, arguments(tmp_path / "cut", **MUON))
    assert result.losses == first.losses == expected.losses
    assert equal(weights(resumed), weights(whole))


def test_muon_can_be_copied():
    model = Layered()
    optimizer = make_optimizer(model, arguments("", **MUON))
    mse(model, batch(0, 8)).backward()
    optimizer.step()
    twin, optimizer = copy.deepcopy((model, optimizer))
    for one in (model, twin):
        one.zero_grad()
        mse(one, batch(8, 8)).backward()
    before = weights(model)
    optimizer.step()
    assert equal(weights(model), before)
    assert not equal(weights(twin), before)


def test_muon_on_two_processes(tmp_path):
    """Within what bfloat16, in which Muon turns a matrix, makes of gradients that were summed in another order."""
    expected = train(Layered(), batch, mse, arguments(tmp_path / "one", **MUON))
    run_distributed(partial(distributed_run, tmp_path, Layered, **MUON))
    for rank in (0, 1):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["losses"] == pytest.approx(expected.losses, rel=1e-2)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert equal(one, other)


@pytest.mark.parametrize("decayed", ["all", "matrices"])
def test_muon_alone(tmp_path, decayed):
    """Nothing is trained but matrices in layers, as in LoRA."""
    model = Layered()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("layers.0") and name.endswith("weight"))
    before = weights(model)
    train(model, batch, mse, arguments(tmp_path, **{**MUON, "weight_decay_on": decayed}))
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert moved == {"layers.0.0.weight", "layers.0.2.weight"}


def test_muon_needs_layers(tmp_path):
    with pytest.raises(ValueError, match="none of those is trainable here; use optimizer='adamw'"):
        train(make_model(), batch, mse, arguments(tmp_path, **MUON))
