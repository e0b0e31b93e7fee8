import pytest
import torch
from transformers import HfArgumentParser

from hf_sparsecoding.benchmarks import adapter, mixers
from hf_sparsecoding.reports import results
from scripts.benchmark import BenchmarkArguments, main


SIZES = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Arguments for a tiny random model that is known by name."""
    monkeypatch.setitem(adapter.RANDOM_MODELS, "tiny", SIZES)

    def arguments(**changes):
        values = {"model": ["tiny"], "length": [36], "rounds": 2, "warmup": 1, "progress": False}
        return BenchmarkArguments(**{**values, "output_dir": str(tmp_path), **changes})

    return arguments


@pytest.fixture
def small_mixers(tmp_path):
    def arguments(**changes):
        values = {"suite": "mixers", "batch_size": 2, "rounds": 2, "warmup": 1, "progress": False}
        return BenchmarkArguments(**{**values, "output_dir": str(tmp_path), **changes})

    return arguments


def test_adapter_run_writes_every_contender(small, tmp_path, capsys):
    main(small(dtype=["float32", "bfloat16"], batch_size=2))
    written, printed = results.load(tmp_path / results.FILE), capsys.readouterr().out
    assert written["experiment"] == "adapter-overhead"
    assert [run["settings"]["adapter"] for run in written["runs"]] == [adapter.BASE, *adapter.METHODS] * 2
    counts = {run["settings"]["adapter"]: run["trainable_parameters"] for run in written["runs"]}
    assert (counts[adapter.BASE], counts["lags_per_head"], counts["lags_per_layer"]) == (0, 2 * 2 * 3, 2 * 3)
    for run in written["runs"]:
        metrics = run["metrics"]
        for name in ("step_ratio_to_base", "step_ratio_to_lora"):
            assert 0 < metrics[f"{name}_low"] <= metrics[name] <= metrics[f"{name}_high"]
        assert run["settings"]["model"] == "tiny"
        assert run["method"] in printed
    assert written["runs"][0]["metrics"]["step_ratio_to_base"] == 1
    assert (tmp_path / "step_ratio.png").is_file()


def test_any_peft_config_without_lora(small):
    config = '{"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}'
    base, other = main(small(method=[config], dtype=["float32"]))["runs"]
    assert (other["settings"]["adapter"], other["trainable_parameters"]) == ("ia3", 2 * 16)
    assert "step_ratio_to_lora" not in base["metrics"]


def test_mixers_run_writes_every_contender(small_mixers, tmp_path, capsys):
    main(small_mixers())
    written, printed = results.load(tmp_path / results.FILE), capsys.readouterr().out
    assert written["experiment"] == "sparse-transformer-throughput"
    runs = {run["method"]: run for run in written["runs"]}
    assert tuple(runs) == mixers.METHODS
    for name, run in runs.items():
        metrics = run["metrics"]
        ratios = ["step_ratio_to_softmax"] + ["step_ratio_to_no_transfer"] * (run["settings"]["transfer"] != "none")
        for ratio in ratios:
            assert 0 < metrics[f"{ratio}_low"] <= metrics[ratio] <= metrics[f"{ratio}_high"]
        assert metrics["samples_per_second"] == pytest.approx(2 / metrics["step_seconds"])
        assert len(metrics) == 2 + 3 * len(ratios)
        assert (run["samples"], run["settings"]["batch"], name in printed) == (4, 2, True)
    assert runs["softmax"]["trainable_parameters"] == 402_824
    assert runs["softmax_aligned"]["trainable_parameters"] == 402_824 + 4 * 16 * 2
    assert runs["softmax"]["metrics"]["step_ratio_to_softmax"] == 1
    assert (tmp_path / "step_ratio.png").is_file()


def test_options_are_the_suites_own():
    assert BenchmarkArguments(length=[36]).options() == {**adapter.defaults(), "length": [36]}
    assert BenchmarkArguments(suite="mixers").options() == {
        "method": list(mixers.METHODS),
        "batch_size": 128,
        "compile": False,
    }


def test_options_on_the_command_line():
    (parsed,) = HfArgumentParser(BenchmarkArguments).parse_args_into_dataclasses(
        ["--suite", "mixers", "--method", "softmax", "hyla", "--batch_size", "16", "--compile", "--clock", "cpu"]
    )
    assert parsed.options() == {"method": ["softmax", "hyla"], "batch_size": 16, "compile": True}
    assert (parsed.clock, parsed.rounds) == ("cpu", 20)
    (parsed,) = HfArgumentParser(BenchmarkArguments).parse_args_into_dataclasses([])
    assert parsed.options() == adapter.defaults()


def test_what_runs_on_the_cpu_is_not_said_to_run_on_a_gpu(small_mixers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "a GPU")
    assert "a GPU" not in main(small_mixers(method=["softmax"]))["machine"]


def test_sizes_of_heads_are_checked():
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        BenchmarkArguments(suite="attention", head_dim=[64, 0])


@pytest.mark.parametrize("foreign", [{"length": [36]}, {"model": ["tiny"]}, {"dtype": ["float32"]}])
def test_options_of_another_suite_are_refused(small_mixers, foreign):
    with pytest.raises(ValueError, match=f"{next(iter(foreign))} does not apply to suite 'mixers'"):
        small_mixers(**foreign)


def test_compile_is_not_for_adapters(small):
    with pytest.raises(ValueError, match="compile does not apply to suite 'adapter'"):
        small(compile=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"suite": "x"},
        {"clock": "x"},
        {"rounds": 0},
        {"length": [0]},
        {"length": [8, 16]},
        {"warmup": -1},
        {"batch_size": 0},
        {"threads": 0},
        {"dtype": ["bf16"]},
    ],
)
def test_arguments_are_checked(small, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        small(**wrong)
