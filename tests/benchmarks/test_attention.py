import math

import pytest
import torch
from PIL import Image

from hf_sparsecoding.benchmarks import attention
from hf_sparsecoding.benchmarks.turns import Turns
from hf_sparsecoding.ops import sparse_attention
from hf_sparsecoding.ops.attention_cpu import TILE
from hf_sparsecoding.reports.tables import cross_table


TURNS = Turns(rounds=2, warmup=0, progress=False)


def test_runs_hold_ratios_and_memory():
    methods = ["soft_threshold", "explicit softmax"]
    runs = attention.measure(TURNS, method=methods, dtype=["float32"], length=[130, 260], density=[1.0, 0.5])
    contenders = [(r["settings"]["contender"], r["settings"]["length"], r["settings"]["density"]) for r in runs]
    dense, tiled = ["sdpa", *methods], ["sdpa", "soft_threshold"]
    assert contenders == [
        *(
            (name, length, share)
            for length in (130, 260)
            for share, names in ((1.0, dense), (0.5, tiled))
            for name in names
        )
    ]
    assert len({run["method"] for run in runs}) == len(runs)
    for run in runs:
        metrics = run["metrics"]
        assert metrics["ratio_to_sdpa_forward_low"] <= metrics["ratio_to_sdpa_forward"]
        assert metrics["training_seconds"] > 0
        if run["settings"]["contender"] == "sdpa":
            assert metrics["ratio_to_sdpa_training"] == 1
    assert "float32 D 64, soft_threshold at density 0.5, 260 tokens" in attention.table(runs)
    across = cross_table({"experiment": "attention", "runs": runs}, "float32 D 64", "ratio_to_sdpa_training")
    assert across.count("\n") == 1 + 5 and "| soft_threshold at density 0.5 " in across


def test_picture(tmp_path):
    runs = attention.measure(
        TURNS, method=["soft_threshold"], dtype=["float32", "bfloat16"], length=[70, 130], density=[1.0, 0.5]
    )
    attention.picture(runs, tmp_path / "ratios.png")
    with Image.open(tmp_path / "ratios.png") as image:
        assert image.width > 1.5 * image.height  # two panels


def test_memory_of_an_explicit_matrix_grows_with_the_square_and_ours_does_not():
    memory = {}
    for length in (512, 2048):
        runs = attention.measure(
            TURNS, method=["soft_threshold", "explicit softmax"], dtype=["float32"], length=[length], density=[1.0]
        )
        memory[length] = {run["settings"]["contender"]: run["metrics"]["peak_memory_bytes"] for run in runs}
    growth = {name: memory[2048][name] / memory[512][name] for name in memory[512]}
    assert growth["explicit softmax"] > 12
    assert growth["soft_threshold"] < 5


@pytest.mark.parametrize("density", [0.1, 0.5])
def test_density_is_what_soft_thresholding_sees(density):
    length = 12 * TILE
    query, key, value = attention.make_operands(length, density, torch.float32, 0, "cpu")
    _, found = sparse_attention(
        query, key, value, coefficients="soft_threshold", threshold=1.0, causal=True, return_sparsity=True
    )
    alive = 1 - found.tiles.mean().item()
    # all tiles on the diagonal, and this share of those below it
    expected = (12 + density * 66) / 78
    assert alive == pytest.approx(expected, abs=4 * math.sqrt(0.25 / (4 * 66)))


def test_all_contenders_attend(monkeypatch):
    operands = attention.make_operands(20, 1.0, torch.float32, 0, "cpu")
    softmax = attention.CONTENDERS["sdpa"](*operands)
    for name in attention.defaults()["method"]:
        out = attention.CONTENDERS[name](*operands)
        assert out.shape == softmax.shape and out.isfinite().all()
    torch.testing.assert_close(attention.CONTENDERS["explicit softmax"](*operands), softmax)
    for kind in attention.XI:
        torch.testing.assert_close(
            attention.CONTENDERS[kind](*operands), attention.CONTENDERS[f"explicit {kind}"](*operands)
        )


def test_what_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="method must be one of sdpa, .*, got 'flash'"):
        attention.check(["flash"], [1.0])
    with pytest.raises(ValueError, match="density must be above 0 and at most 1, got 0"):
        attention.check(["sdpa"], [0])
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="entmax15 needs its package: pip install entmax"):
        attention.check(["entmax15"], [1.0])
    assert "sparsemax" not in attention.defaults()["method"]
