"""Sparsity of attention coefficients on a text, and the command that measures it."""

import pytest
import torch

from hf_sparsecoding.evaluation.coefficient_sparsity import measure, recorded_sparsity, windows
from hf_sparsecoding.ops.attention_cpu import TILE
from hf_sparsecoding.reports import results
from hf_sparsecoding.training.command_line import to_flags
from scripts import measure_sparsity as script
from tests.evaluation.commonsense_model import save_word_model
from tests.tiny_models import adapted, tiny_model, tokens


def thresholded(xi: float, **options):
    model = tiny_model(attn_implementation="eager", **options)
    return adapted(model, init_weights=True, num_contexts=1, coefficients="thresholded_softmax", threshold=xi)


def test_measures_are_those_of_the_coefficients():
    model, inputs = thresholded(0.02), tokens(3, 20)
    found = measure(model, inputs)
    output = model(input_ids=inputs, labels=inputs, output_attentions=True)
    assert found.loss == pytest.approx(output.loss.item(), rel=1e-5)
    allowed = torch.ones(20, 20, dtype=torch.bool).tril()
    zeros = torch.stack([(alpha[..., allowed] == 0).float().mean((0, 2)) for alpha in output.attentions])
    assert 0.05 < zeros.mean() < 0.95
    torch.testing.assert_close(found.elements, zeros)
    assert found.tiles.shape == (2, 4)
    assert found.tiles.max() == 0  # one tile, on the diagonal


def test_an_empty_tile_counts():
    found = measure(thresholded(0.999), tokens(1, TILE + 5))
    assert found.tiles.max() == pytest.approx(2 / 3)  # the first query sees one key: only its tile holds a coefficient


def test_nothing_is_left_behind():
    model = thresholded(0.0)
    with recorded_sparsity(model) as layers:
        model(input_ids=tokens(1, 6))
        model(input_ids=tokens(1, 6))
    model(input_ids=tokens(1, 6))
    assert len(layers) == 4


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no SparseCoding adapter"):
        measure(tiny_model(), tokens(1, 6))
    fused = adapted(tiny_model(), coefficients="thresholded_softmax")
    with pytest.raises(ValueError, match='attn_implementation="eager"'):
        measure(fused, tokens(1, 6))
    with pytest.raises(ValueError, match="2 windows of 5 tokens need 10 tokens, the text has 9"):
        windows(range(9), 5, 2)


def test_command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the sun is like bread. " * 30)
    flags = {
        "model": save_word_model(tmp_path / "model"),
        "text": str(tmp_path / "text.txt"),
        "thresholds": [0.0, 0.1],
        "length": 24,
        "windows": 2,
        "output_dir": str(tmp_path / "out"),
        "progress": False,
    }
    assert script.main(to_flags(flags)) == 0
    plain, sparse = results.load(tmp_path / "out" / "results.json")["runs"]
    assert plain["method"] == "xi = 0"
    assert plain["metrics"]["perplexity_ratio"] == 1
    assert plain["metrics"]["element_zeros"] == 0
    assert sparse["metrics"]["element_zeros"] > 0.2
    assert sparse["metrics"]["perplexity_ratio"] != 1
    assert "perplexity_ratio" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"thresholds must be between 0 and 1, .* got \[1\.5\]"):
        script.main(to_flags({**flags, "thresholds": [1.5]}))


def test_the_default_text_is_there():
    assert len(script.read_text("")) > 100_000
