import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparsecoding.benchmarks import adapter
from scripts.benchmark import CONFIGS


SIZES = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def frozen_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False)


def test_contenders_share_weights_and_train_their_own():
    base = frozen_llama()
    config = adapter.adapter_configs(["lags_per_head"], CONFIGS)["lags_per_head"]
    frozen, first, second = (adapter.adapted(base, c) for c in (None, config, config))
    pointers = {tensor.data_ptr() for tensor in base.parameters()}
    for model in (frozen, first, second):
        assert pointers == {p.data_ptr() for p in model.parameters() if not p.requires_grad}
    tokens = adapter.random_rows((1, 20), SIZES["vocab_size"], seed=0)
    before = [tensor.clone() for tensor in base.parameters()]
    for model in (frozen, first):
        adapter.training_step(model, tokens)()
    assert all((old == new).all() for old, new in zip(before, base.parameters(), strict=True))
    assert all(p.any() for p in first.parameters() if p.requires_grad)
    assert not any(p.any() for p in second.parameters() if p.requires_grad)


def test_base_step_reaches_the_embeddings():
    model = adapter.adapted(frozen_llama(), None)
    reached = []

    def watch(module, args, output):
        output.register_hook(reached.append)

    model.get_input_embeddings().register_forward_hook(watch)
    adapter.training_step(model, adapter.random_rows((1, 20), SIZES["vocab_size"], seed=0))()
    assert len(reached) == 1


def test_model_that_was_not_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_SPARSECODING_CACHE", str(tmp_path))
    assert list(adapter.available_models(["tiny", adapter.FETCHED])) == ["tiny"]
    assert "scripts/fetch_assets.py" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"scripts/fetch_assets\.py"):
        adapter.available_models([adapter.FETCHED])
    (tmp_path / adapter.FETCHED).mkdir()
    assert adapter.available_models([adapter.FETCHED]) == {adapter.FETCHED: str(tmp_path / adapter.FETCHED)}


def test_default_methods_have_a_config():
    assert all((CONFIGS / f"{name}.yaml").is_file() for name in adapter.METHODS)
