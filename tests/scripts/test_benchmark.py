import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparsecoding.reports import results
from scripts import benchmark
from scripts.benchmark import BASE, BenchmarkArguments, adapted, main, median_ratio, take_turns


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
    monkeypatch.setitem(benchmark.RANDOM_MODELS, "tiny", SIZES)

    def arguments(**changes):
        values = {"model": ["tiny"], "length": 36, "rounds": 2, "warmup": 1, "progress": False}
        return BenchmarkArguments(**{**values, "output_dir": str(tmp_path), **changes})

    return arguments


def test_run_writes_every_contender(small, tmp_path, capsys):
    main(small(dtype=["float32", "bfloat16"], batch_size=2))
    written, printed = results.load(tmp_path / results.FILE), capsys.readouterr().out
    assert written["experiment"] == "adapter-overhead"
    assert [run["settings"]["adapter"] for run in written["runs"]] == [BASE, *benchmark.METHODS] * 2
    counts = {run["settings"]["adapter"]: run["trainable_parameters"] for run in written["runs"]}
    assert (counts[BASE], counts["lags_per_head"], counts["lags_per_layer"]) == (0, 2 * 2 * 3, 2 * 3)
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
    base, other = main(small(method=[config]))["runs"]
    assert (other["settings"]["adapter"], other["trainable_parameters"]) == ("ia3", 2 * 16)
    assert "step_ratio_to_lora" not in base["metrics"]


def test_contenders_share_weights_and_train_their_own():
    base = LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False)
    config = benchmark.adapter_configs(["lags_per_head"])["lags_per_head"]
    frozen, first, second = adapted(base, None), adapted(base, config), adapted(base, config)
    pointers = {tensor.data_ptr() for tensor in base.parameters()}
    for model in (frozen, first, second):
        assert pointers == {p.data_ptr() for p in model.parameters() if not p.requires_grad}
    tokens = benchmark.random_rows(BenchmarkArguments(length=20), SIZES["vocab_size"])
    before = [tensor.clone() for tensor in base.parameters()]
    for model in (frozen, first):
        benchmark.training_step(model, tokens)()
    assert all((old == new).all() for old, new in zip(before, base.parameters(), strict=True))
    assert all(p.any() for p in first.parameters() if p.requires_grad)
    assert not any(p.any() for p in second.parameters() if p.requires_grad)


def test_base_step_reaches_the_embeddings():
    model = adapted(LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False), None)
    reached = []

    def watch(module, args, output):
        output.register_hook(reached.append)

    model.get_input_embeddings().register_forward_hook(watch)
    benchmark.training_step(model, benchmark.random_rows(BenchmarkArguments(length=20), SIZES["vocab_size"]))()
    assert len(reached) == 1


def test_every_round_has_every_contender(small):
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = take_turns(contenders, small(rounds=5, warmup=1), "")
    assert all(len(values) == 5 for values in seconds.values())
    rounds = [calls[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1


def test_ratio_is_taken_within_rounds():
    slow_and_fast = np.array([1.0, 10.0, 1.0, 10.0, 1.0])
    assert median_ratio(1.5 * slow_and_fast, slow_and_fast, seed=0) == (1.5, 1.5, 1.5)


def test_model_that_was_not_fetched(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_SPARSECODING_CACHE", str(tmp_path))
    assert list(benchmark.available_models(["tiny", benchmark.FETCHED])) == ["tiny"]
    assert "scripts/fetch_assets.py" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"scripts/fetch_assets\.py"):
        benchmark.available_models([benchmark.FETCHED])
    (tmp_path / benchmark.FETCHED).mkdir()
    assert benchmark.available_models([benchmark.FETCHED]) == {benchmark.FETCHED: str(tmp_path / benchmark.FETCHED)}


@pytest.mark.parametrize("wrong", [{"suite": "x"}, {"clock": "x"}, {"rounds": 0}, {"length": 0}, {"warmup": -1}])
def test_arguments_are_checked(small, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        small(**wrong)
