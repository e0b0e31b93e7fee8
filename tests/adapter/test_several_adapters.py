"""Several adapters in one model: add, set, delete, several active at once, one per row of a batch."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import GenerationConfig

from hf_sparsecoding import SparseCodingConfig
from tests.tiny_models import adapted, tiny_model, tokens


SEGMENT_ENDS = list(range(3, 20))

# adapters that can share a batch
MIXED = {
    "lags": {},
    "far lags, layer 1": {"lags": [2, 5], "layers_to_transform": [1], "per_head": False},
    "segments": {"contexts": "segments", "num_contexts": 2, "segment_token_ids": SEGMENT_ENDS},
    "thresholds": {"coefficients": "thresholded_softmax", "threshold": 0.05, "train_threshold": True},
    "rescaling": {"num_contexts": 0, "target_coefficient": True},
}


def add(model: PeftModel, name: str, **fields) -> None:
    model.add_adapter(name, SparseCodingConfig(init_weights=False, **fields))


def with_adapters(**configs: dict) -> PeftModel:
    first, *others = configs
    config = SparseCodingConfig(init_weights=False, **configs[first])
    torch.manual_seed(1)
    model = get_peft_model(tiny_model(), config, adapter_name=first).eval()
    for name in others:
        add(model, name, **configs[name])
    return model


def trainable_adapters(model: PeftModel) -> set[str]:
    return {name.split(".")[-2] for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture(scope="module")
def ids():
    return tokens(2, 11)


def test_adding_setting_and_deleting(ids):
    model = adapted(tiny_model())
    first = model(ids).logits
    add(model, "second", lags=[2])
    assert torch.equal(model(ids).logits, first)
    assert trainable_adapters(model) == {"default"}  # adding neither freezes the first nor trains the second

    model.set_adapter("second")
    second = model(ids).logits
    assert not torch.allclose(second, first)
    assert trainable_adapters(model) == {"second"}

    model.set_adapter("default")
    assert torch.equal(model(ids).logits, first)
    model.delete_adapter("second")
    assert torch.equal(model(ids).logits, first)
    assert not any("second" in name for name, _ in model.named_parameters())
    assert list(model.peft_config) == ["default"]
    assert list(model.get_base_model().model.layers[0].self_attn.context_hook.specs) == ["default"]


def test_an_added_adapter_is_not_active_on_layers_of_its_own(ids):
    model = adapted(tiny_model(), layers_to_transform=[0])
    first = model(ids).logits
    add(model, "second", layers_to_transform=[1])
    assert torch.equal(model(ids).logits, first)
    assert trainable_adapters(model) == {"default"}


def test_numbers_of_a_model_in_half_precision_stay_in_float32(ids):
    """Through peft and through transformers, which casts the parameters of other methods."""
    model = tiny_model().to(torch.bfloat16)
    model.add_adapter(SparseCodingConfig(init_weights=False), "one")
    through_peft = adapted(tiny_model().to(torch.bfloat16))
    for made in (model, through_peft):
        numbers = [value for name, value in made.named_parameters() if "sparsecoding_" in name]
        assert {value.dtype for value in numbers} == {torch.float32}
        assert made(ids).logits.dtype == torch.bfloat16


def test_numbers_take_the_type_of_the_model_where_that_is_asked_for(ids, tmp_path):
    config = SparseCodingConfig(init_weights=False, **MIXED["thresholds"])
    model = get_peft_model(tiny_model().to(torch.bfloat16), config, autocast_adapter_dtype=False)
    model.add_adapter("added", config, autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    model.load_adapter(tmp_path, "loaded", autocast_adapter_dtype=False)
    model.load_adapter(tmp_path, "upcast")
    dtypes = {
        name: {value.dtype for key, value in model.named_parameters() if "sparsecoding_" in key and f".{name}." in key}
        for name in ("default", "added", "loaded", "upcast")
    }
    half = {torch.bfloat16}
    assert dtypes == {"default": half, "added": half, "loaded": half, "upcast": {torch.float32}}
    assert model(ids).logits.dtype == torch.bfloat16


def test_numbers_are_not_put_into_a_type_for_storage():
    model = tiny_model().to(torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.o_proj.requires_grad_(False).to(torch.float8_e4m3fn)
    model = get_peft_model(model, SparseCodingConfig(), autocast_adapter_dtype=False)
    assert {value.dtype for value in model.parameters() if value.requires_grad} == {torch.float32}


def test_through_transformers(ids):
    model = tiny_model()
    base = model(ids).logits
    model.add_adapter(SparseCodingConfig(init_weights=False), "one")
    first = model(ids).logits
    model.add_adapter(SparseCodingConfig(init_weights=False, lags=[4]), "two")
    assert not torch.allclose(model(ids).logits, first)  # transformers activates what was added last
    model.set_adapter("one")
    assert torch.equal(model(ids).logits, first)
    model.disable_adapters()
    assert torch.equal(model(ids).logits, base)
    model.enable_adapters()
    assert torch.equal(model(ids).logits, first)
    model.delete_adapter("two")
    assert torch.equal(model(ids).logits, first)
    model.delete_adapter("one")
    assert torch.equal(model(ids).logits, base)


def test_deleting_the_active_adapter_falls_back(ids):
    model = adapted(tiny_model())
    first = model(ids).logits
    add(model, "second", contexts="segments")  # which needs segment_ids
    model.set_adapter("second")
    with pytest.warns(UserWarning, match="Adapter second was active which is now deleted"):
        model.delete_adapter("second")
    assert torch.equal(model(ids).logits, first)
    model.delete_adapter("default")
    assert torch.equal(model.base_model.model(ids).logits, tiny_model()(ids).logits)


def test_a_name_can_be_used_again(ids):
    model = adapted(tiny_model())
    add(model, "second", num_contexts=2, coefficients="soft_threshold", threshold=0.1)
    model.delete_adapter("second")
    add(model, "second", lags=[5])
    model.set_adapter("second")
    assert torch.isfinite(model(ids).logits).all()
    assert {p.shape[-1] for n, p in model.named_parameters() if "second" in n} == {1}


def test_two_active_adapters_of_lags_are_one_with_the_sum_of_their_numbers(ids):
    model = with_adapters(one={"lags": [1, 2], "target_coefficient": True}, two={"lags": [4, 2], "per_head": False})
    add(model, "sum", lags=[1, 2, 4], target_coefficient=True)
    for layer in model.get_base_model().model.layers:
        numbers = layer.self_attn.sparsecoding_lambda
        one, two = numbers["one"].weight.data, numbers["two"].weight.data.expand(4, 2)
        numbers["sum"].weight.data = torch.stack([one[:, 0], one[:, 1] + two[:, 1], two[:, 0]], -1)
        layer.self_attn.sparsecoding_target["sum"].weight.data = layer.self_attn.sparsecoding_target["one"].weight.data
    model.set_adapter("sum")
    expected = model(ids).logits
    model.base_model.set_adapter(["one", "two"])
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert trainable_adapters(model) == {"one", "two"}


def test_active_lags_and_segments_add_up(ids):
    model = with_adapters(one={"lags": [1]}, two={"contexts": "segments", "segment_token_ids": SEGMENT_ENDS})
    lifted = []
    projection = model.get_base_model().model.layers[0].self_attn.o_proj
    projection.register_forward_hook(lambda module, args, output: lifted.append(args[0]))
    with model.disable_adapter():
        model(ids)
    for active in (["one"], ["two"], ["one", "two"]):
        model.base_model.set_adapter(active)
        model(ids)
    base, one, two, both = lifted
    assert not torch.allclose(one, base)
    assert not torch.allclose(two, base)
    torch.testing.assert_close(both - base, (one - base) + (two - base), rtol=1e-4, atol=1e-5)


def test_adapters_on_different_layers(ids):
    model = with_adapters(one={"layers_to_transform": [0]}, two={"layers_to_transform": [1], "lags": [2]})
    logits = [tiny_model()(ids).logits]
    for active in (["one"], ["two"], ["one", "two"]):
        model.base_model.set_adapter(active)
        assert trainable_adapters(model) == set(active)
        logits.append(model(ids).logits)
        assert not any(torch.allclose(logits[-1], other) for other in logits[:-1])


def test_thresholds_of_several_active_adapters_are_refused(ids):
    thresholds = {"coefficients": "thresholded_softmax", "threshold": 0.1}
    model = with_adapters(one=thresholds, two=thresholds, lags={})
    model.base_model.set_adapter(["one", "two"])
    with pytest.raises(ValueError, match="only one active adapter may threshold the coefficients, got one, two"):
        model(ids)
    model.base_model.set_adapter(["one", "lags"])
    assert torch.isfinite(model(ids).logits).all()


@pytest.fixture(scope="module")
def mixed():
    return with_adapters(**MIXED)


ROWS = [*MIXED, "__base__"]


def alone(model: PeftModel, name: str, run):
    """`run(model)` with the one adapter, or none."""
    if name == "__base__":
        with model.disable_adapter():
            return run(model)
    model.set_adapter(name)
    return run(model)


def test_one_adapter_per_row(mixed):
    ids = tokens(len(ROWS), 11)
    logits = mixed(ids, adapter_names=ROWS).logits
    for row, name in enumerate(ROWS):
        expected = alone(mixed, name, lambda model, row=row: model(ids[row : row + 1]).logits[0])
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[0], mixed(ids, adapter_names=["__base__"] * len(ROWS)).logits[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"generation_config": GenerationConfig(num_beams=2, num_return_sequences=2)}],
    ids=["greedy", "beams", "beams in the generation config"],
)
def test_one_adapter_per_row_in_generation(mixed, options):
    ids = tokens(len(ROWS), 11)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **options}
    generated = mixed.generate(input_ids=ids, adapter_names=ROWS, **options)
    for name, sequences in zip(ROWS, generated.split(len(generated) // len(ROWS)), strict=True):
        row = ROWS.index(name)
        expected = alone(mixed, name, lambda model, row=row: model.generate(input_ids=ids[row : row + 1], **options))
        assert sequences.tolist() == expected.tolist(), name


def test_modules_to_save_go_with_their_rows(ids):
    model = with_adapters(one={"modules_to_save": ["lm_head"]}, two={"modules_to_save": ["lm_head"]})
    model.base_model.model.lm_head.modules_to_save["one"].weight.data.neg_()
    names = ["one", "__base__"]
    logits = model(ids, adapter_names=names).logits
    for row, name in enumerate(names):
        torch.testing.assert_close(logits[row], alone(model, name, lambda model: model(ids).logits)[row])


def test_rows_with_soft_thresholds_are_refused_beside_others(ids):
    model = with_adapters(soft={"coefficients": "soft_threshold", "threshold": 0.1}, lags={})
    with pytest.raises(
        ValueError, match=r"\['soft_threshold'\] cannot be mixed with others in one call \(soft, lags\)"
    ):
        model(ids, adapter_names=["soft", "lags"])
    expected = alone(model, "soft", lambda model: model(ids).logits)
    assert torch.equal(model(ids, adapter_names=["soft", "soft"]).logits, expected)


def test_segments_given_by_hand_reach_only_their_rows(ids):
    model = with_adapters(hand={"contexts": "segments", "num_contexts": 1}, lags={})
    segment_ids = (torch.arange(11) // 3).expand(2, 11)
    logits = model(ids, adapter_names=["hand", "lags"], segment_ids=segment_ids).logits
    for row, name in enumerate(["hand", "lags"]):
        expected = alone(model, name, lambda model: model(ids, segment_ids=segment_ids).logits)
        torch.testing.assert_close(logits[row], expected[row], rtol=1e-4, atol=1e-5)
