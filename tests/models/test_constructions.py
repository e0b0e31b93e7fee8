"""The constructions compute their formulas, in one or two heads, for every shape of the prompt."""

import numpy as np
import pytest
import torch

from hf_sparsecoding.models.linear_attention import ExtendedLinearAttention, constructions
from hf_sparsecoding.tasks.ridge_regression import RidgeRegression, parameter_prompts, query_prompts
from scripts import verify_constructions
from scripts.verify_constructions import Identity, formulas, ridge_identities


TOLERANCE = 1e-12
SIZES = [(1, 1), (1, 7), (7, 1), (5, 5), (65, 3), (3, 65), (8, 7)]  # m tokens, n columns
STEPS = [("one head", constructions.ridge_step, True), ("two heads", constructions.ridge_step_two_heads, False)]


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_formulas(m, n):
    found = {identity.name: identity.error() for identity in formulas(m, n, seed=3)}
    assert len(found) == 11
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(("examples", "features"), [(1, 1), (1, 4), (7, 2), (20, 3)])
def test_ridge_identities(examples, features):
    found = {identity.name: identity.error() for identity in ridge_identities(examples, features, seed=3)}
    assert len(found) == 5
    assert max(found.values()) <= TOLERANCE, found


def test_errors_are_seen():
    """A wrong matrix is measured as wrong, relative to the expected numbers where these are above 1."""
    H = torch.full((2, 3, 3), 10.0, dtype=torch.float64)
    skip = constructions.skip(3, 3, torch.float64)
    assert Identity("", skip, H, H + 1).error() == pytest.approx(1 / 11)
    assert Identity("", skip, H / 100, H / 100 + 0.5).error() == pytest.approx(0.5)


def test_a_transposed_block_by_hand():
    H = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    E = torch.eye(2, 3)
    assert constructions.transposed(E, E)(H).tolist() == [[1, 4, 0], [2, 5, 0]]
    assert constructions.gram_block(2, 3, [0, 2], [1])(H).tolist() == [[22, 0, 0], [36, 0, 0]]


@pytest.mark.parametrize(("name", "make", "zero_rows"), STEPS)
@pytest.mark.parametrize(("examples", "features"), [(16, 4), (3, 5)])
def test_stacked_layers_are_the_steps_of_the_task(examples, features, name, make, zero_rows):
    """L layers in a row, from w = 0."""
    task = RidgeRegression(features, examples, noise=0.5)
    problems = task.generate(6, "test", seed=0)
    size = 0.5 / (examples + features + task.penalty)
    prompts = torch.from_numpy(parameter_prompts(problems, zero_rows=zero_rows))
    layers = [make(examples, features, size, task.penalty, torch.float64) for _ in range(7)]
    with torch.no_grad():
        out = torch.nn.Sequential(*layers)(prompts).numpy()
    expected = parameter_prompts(problems, task.descent_weights(problems, 7, size), zero_rows)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE)


def test_what_cannot_be_built():
    with pytest.raises(
        ValueError, match=r"must agree in \(hidden_size, sequence_length, bias\), got \[\(3, 2, True\)"
    ):
        constructions.sum_of_heads(constructions.skip(2, 3), constructions.skip(4, 3))
    with pytest.raises(ValueError, match=r"got \[\(4, 3, True\), \(4, 4, False\)\]"):
        constructions.sum_of_heads(constructions.linear_first_step(3, 3, 0.1), constructions.skip(3, 4))
    with pytest.raises(ValueError, match="a token for each column of X, got 3 columns and 2 tokens"):
        constructions.gram_block(2, 4, [0, 1, 2], [3])
    with pytest.raises(ValueError, match=r"key_bias must have shape \(4, 3\), got \(1, 3\)"):
        constructions.left_constant(torch.ones(4, 3), torch.ones(1, 3))


def test_plain_linear_attention_predicts_the_first_step():
    task = RidgeRegression(num_features=3, num_examples=8)
    problems = task.generate(5, "test", seed=0)
    layer = constructions.linear_first_step(8, 3, 0.07, torch.float64)
    assert not layer.has_bias
    predicted = layer(torch.from_numpy(query_prompts(problems)))[:, -1, -1].detach().numpy()
    weights = task.descent_weights(problems, 1, 0.07)
    np.testing.assert_allclose(predicted, (weights * problems.query).sum(-1), rtol=0, atol=TOLERANCE)


def test_modules_have_the_wanted_type_and_can_be_trained():
    module = constructions.ridge_step_two_heads(5, 2, 0.1, 0.3)
    assert isinstance(module, ExtendedLinearAttention)
    assert module.num_heads == 2
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert constructions.constant(torch.ones(2, 2, dtype=torch.bfloat16)).query_bias.dtype == torch.bfloat16


def test_the_command_writes_every_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify_constructions, "SIZES", ((3, 2), (2, 3)))
    monkeypatch.setattr(verify_constructions, "PROBLEMS", ((4, 2),))
    assert verify_constructions.main(["--results", str(tmp_path / "results.json"), "--seed", "5"]) == 0
    runs = verify_constructions.results.load(tmp_path / "results.json")["runs"]
    assert len(runs) == 16
    assert all(0 <= run["metrics"]["max_error"] <= TOLERANCE for run in runs)
    assert (runs[1]["method"], runs[1]["settings"]["tokens_and_columns"]) == ("H", [[3, 2], [2, 3]])
    assert "H A (H B)^T H C" in capsys.readouterr().out


@pytest.mark.parametrize("error", [1e-11, float("nan")])
def test_the_command_fails_where_an_identity_does(monkeypatch, error):
    monkeypatch.setattr(verify_constructions, "PROBLEMS", ())
    monkeypatch.setattr(Identity, "error", lambda self: error)
    assert verify_constructions.main([]) == 1
