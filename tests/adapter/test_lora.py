"""LoRA in the same model: it comes first and sees the lifted outputs; each can be unloaded without the other."""

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.utils.error import NoMatchingPeftModuleError
from transformers import Trainer, TrainingArguments

from hf_sparsecoding import SparseCodingConfig
from hf_sparsecoding.adapter.layer import SparseCodingAttention
from tests.tiny_models import adapted, tiny_model, tokens


TARGETS = [["q_proj", "v_proj"], ["o_proj"], ["q_proj", "o_proj", "up_proj"]]
each_target = pytest.mark.parametrize("targets", TARGETS)


@pytest.fixture(scope="module")
def ids():
    return tokens(2, 11)


def lora_config(targets):
    return LoraConfig(r=2, target_modules=targets, init_lora_weights=False)


def with_lora(targets, seed=3) -> PeftModel:
    model = tiny_model()
    torch.manual_seed(seed)
    return get_peft_model(model, lora_config(targets)).eval()


def with_both(targets, seed=3) -> PeftModel:
    """A LoRA model with a SparseCoding adapter injected."""
    model = with_lora(targets, seed)
    torch.manual_seed(1)
    inject_adapter_in_model(SparseCodingConfig(init_weights=False), model.get_base_model(), "transfer")
    return model.eval()


def count(model, kind) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@each_target
def test_lora_sees_the_lifted_outputs(targets, ids):
    merged_before = adapted(with_lora(targets).merge_and_unload())(ids).logits
    assert_close(with_both(targets)(ids).logits, merged_before)
    base = with_lora(targets).get_base_model()
    torch.manual_seed(1)
    beside = get_peft_model(base, SparseCodingConfig(init_weights=False), adapter_name="transfer").eval()
    assert_close(beside(ids).logits, merged_before)
    assert not torch.allclose(merged_before, adapted(tiny_model())(ids).logits, atol=1e-2)


@each_target
def test_through_transformers(targets, ids):
    model = tiny_model()
    torch.manual_seed(3)
    model.add_adapter(lora_config(targets), "lora")
    torch.manual_seed(1)
    model.add_adapter(SparseCodingConfig(init_weights=False), "transfer")
    model.eval()
    assert torch.equal(model(ids).logits, adapted(tiny_model())(ids).logits)  # the last one added is active
    model.set_adapter(["lora", "transfer"])
    assert_close(model(ids).logits, with_both(targets)(ids).logits)
    model.set_adapter("lora")
    assert torch.equal(model(ids).logits, with_lora(targets)(ids).logits)
    model.disable_adapters()
    assert torch.equal(model(ids).logits, tiny_model()(ids).logits)


@each_target
def test_lora_merged_in_place_keeps_the_transfer(targets, ids):
    model = with_both(targets)
    expected = model(ids).logits
    model.merge_adapter()
    assert_close(model(ids).logits, expected)
    model.unmerge_adapter()
    assert_close(model(ids).logits, expected)


@each_target
def test_lora_merged_and_unloaded_keeps_the_transfer(targets, ids):
    model = with_both(targets)
    expected = model(ids).logits
    merged = model.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert count(merged, SparseCodingAttention) == 2
    assert_close(merged(ids).logits, expected)


@each_target
def test_lora_unloaded_keeps_the_transfer(targets, ids):
    unloaded = with_both(targets).unload()
    assert not any("lora" in name for name, _ in unloaded.named_parameters())
    assert torch.equal(unloaded(ids).logits, adapted(tiny_model())(ids).logits)


@each_target
def test_unloading_the_transfer_keeps_lora(targets, ids):
    model = tiny_model()
    torch.manual_seed(3)
    model.add_adapter(lora_config(targets), "lora")
    both = adapted(model)
    with pytest.raises(NotImplementedError, match="cannot be merged"):
        both.merge_and_unload()
    assert count(both, SparseCodingAttention) == 2
    unloaded = both.unload()
    assert count(unloaded, SparseCodingAttention) == 0
    assert list(unloaded.peft_config) == ["lora"]
    assert torch.equal(unloaded(ids).logits, with_lora(targets)(ids).logits)


def test_both_are_trained(ids):
    model = with_both(["q_proj", "o_proj"]).train()
    model(ids, labels=ids).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {kind for kind in ("lora_A", "lora_B", "sparsecoding_lambda") for name in trained if kind in name} == {
        "lora_A",
        "lora_B",
        "sparsecoding_lambda",
    }
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any()) == parameter.requires_grad, name


def test_both_saved_and_loaded(tmp_path, ids):
    model = tiny_model()
    torch.manual_seed(3)
    model.add_adapter(lora_config(["q_proj", "o_proj"]), "lora")
    both = adapted(model)
    expected = both(ids).logits
    with pytest.warns(UserWarning, match=r"save it after unload\(\) of the SparseCoding model"):
        both.save_pretrained(tmp_path / "transfer", selected_adapters=["default"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*after unload")
        both.unload().save_pretrained(tmp_path / "lora")

    model = tiny_model()
    torch.manual_seed(7)  # other numbers than those that must come from the file
    model.load_adapter(tmp_path / "lora", "lora")
    assert torch.equal(PeftModel.from_pretrained(model, tmp_path / "transfer")(ids).logits, expected)


def test_an_adapter_that_could_not_be_loaded_again_is_refused():
    config, lora = SparseCodingConfig(), with_lora(["q_proj"])
    with pytest.raises(ValueError, match="is a PeftModel already: .* Adapt model.get_base_model"):
        get_peft_model(lora, config)
    with pytest.raises(ValueError, match=r"has an adapter 'default' of another PEFT method \(LORA\)"):
        get_peft_model(lora.get_base_model(), config)
    assert count(lora, SparseCodingAttention) == 0


def test_training_of_both_goes_on_exactly(tmp_path, ids):
    def both(seed):
        model = tiny_model()
        torch.manual_seed(seed)
        model.add_adapter(lora_config(["q_proj", "o_proj"]), "lora")
        return adapted(model, seed=seed, task_type="CAUSAL_LM")

    def train(model, folder, resume=None):
        arguments = TrainingArguments(
            str(tmp_path / folder),
            max_steps=4,
            save_steps=2,
            learning_rate=1e-1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens(8, 9)]
        Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return model.eval()(ids).logits

    expected = train(both(3), "whole")
    resumed = train(both(4), "resumed", str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(resumed, expected)


def test_lora_second_finds_nothing_in_the_attention():
    for add in (get_peft_model, lambda model, config: model.get_base_model().add_adapter(config, "second")):
        with pytest.raises(NoMatchingPeftModuleError, match="Target modules {'q_proj'} not found in the base model"):
            add(adapted(tiny_model()), lora_config(["q_proj"]))
    model = adapted(tiny_model())
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        model.add_adapter("second", lora_config(["q_proj"]))
