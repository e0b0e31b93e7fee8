"""The config: bad values are refused where they enter, with a message that shows them; good ones survive JSON."""

import json

import numpy as np
import pytest
from peft import PeftConfig

from hf_sparsecoding import SparseCodingConfig


def refused(match: str, **fields):
    with pytest.raises(ValueError, match=match):
        SparseCodingConfig(**fields)


@pytest.mark.parametrize("num_contexts", [0, -1, 2.0, "3", True])
def test_num_contexts_is_a_positive_whole_number(num_contexts):
    refused(
        rf"num_contexts must be >= 1 and whole \(0 only with target_coefficient=True\), got {num_contexts!r}",
        num_contexts=num_contexts,
    )


def test_no_contexts_only_with_the_target_coefficient():
    assert SparseCodingConfig(num_contexts=0, target_coefficient=True).lags == []
    refused("num_contexts must be >= 0 and whole, got -1", num_contexts=-1, target_coefficient=True)


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
def test_threshold_is_finite_and_not_negative(threshold):
    refused(f"threshold must be finite and >= 0, got {threshold}", coefficients="soft_threshold", threshold=threshold)


@pytest.mark.parametrize("threshold", ["0.1", True, None])
def test_threshold_is_a_number(threshold):
    refused(f"threshold must be a number, got {threshold!r}", coefficients="soft_threshold", threshold=threshold)


def test_thresholded_softmax_needs_a_threshold_below_its_largest_coefficient():
    for threshold in (1.0, 5):
        refused("leaves nothing of a softmax", coefficients="thresholded_softmax", threshold=threshold)
    assert SparseCodingConfig(coefficients="soft_threshold", threshold=5).threshold == 5.0


@pytest.mark.parametrize("name", ["per_head", "target_coefficient", "train_threshold", "init_weights"])
@pytest.mark.parametrize("value", ["no", "true", 1, None])
def test_switches_are_true_or_false(name, value):
    refused(f"{name} must be True or False .*, got {value!r}", **{name: value})


@pytest.mark.parametrize("layers", ["0", ["0"], True, [0.0], -1, [2, -1]])
def test_layers_to_transform_are_whole_numbers(layers):
    refused("layers_to_transform must be >= 0 and whole, got", layers_to_transform=layers)


@pytest.mark.parametrize(
    ("fields", "shown"), [({"threshold": 0.5}, "threshold=0.5"), ({"train_threshold": True}, "train_threshold=True")]
)
def test_threshold_needs_coefficients_that_use_it(fields, shown):
    refused(f'{shown} has no use with coefficients="base"; set coefficients=', **fields)


@pytest.mark.parametrize("lag", [0, -2, 1.0, "1", True])
def test_lags_are_positive_whole_numbers(lag):
    refused(f"lags must be >= 1 and whole, got {lag!r}", lags=[4, lag])


def test_numbers_of_numpy_are_numbers(tmp_path):
    config = SparseCodingConfig(
        lags=list(np.arange(1, 4)),
        num_contexts=np.int64(3),
        coefficients="thresholded_softmax",
        threshold=np.float32(0.25),
        layers_to_transform=list(np.arange(2)),
    )
    config.save_pretrained(tmp_path)
    loaded = SparseCodingConfig.from_pretrained(tmp_path)
    assert (loaded.lags, loaded.threshold, loaded.layers_to_transform) == ([1, 2, 3], 0.25, [0, 1])


def test_lags_are_a_list_of_distinct_numbers_as_many_as_contexts():
    refused(r"lags must be a list of whole numbers, got 3 \(int\)", lags=3)
    refused(r"lags must be distinct, got \[1, 2, 1\]", lags=[1, 2, 1])
    refused("num_contexts=3 does not match the 2 lags .* drop num_contexts", lags=[1, 2], num_contexts=3)


def test_fields_of_the_other_kind_of_contexts_are_refused():
    refused(r"lags=\[1\] have no use with contexts='segments'; drop one of them", contexts="segments", lags=[1])
    refused(
        r"segment_token_ids=\[5\] have no use with contexts='lags'; set contexts=\"segments\"", segment_token_ids=[5]
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"segment_token_ids must name at least one token id, got \[\]"),
        ([3, -1], "segment_token_ids must be >= 0 and whole, got -1"),
        (["\n"], r"segment_token_ids must be >= 0 and whole, got '\\n'"),
        (13, "segment_token_ids must be a list of whole numbers, got 13"),
    ],
)
def test_segment_token_ids_are_token_ids(ids, message):
    refused(message, contexts="segments", segment_token_ids=ids)


def test_unknown_names_are_refused_with_the_known_ones():
    refused("contexts must be one of lags, segments; got 'lag'", contexts="lag")
    refused(
        "coefficients must be one of base, thresholded_softmax, soft_threshold; got 'softmax'", coefficients="softmax"
    )


def test_targets_that_cannot_be_meant_are_refused():
    refused("all-linear.*adapts attention modules such as .self_attn.", target_modules="all-linear")
    refused("layers_pattern has no use without layers_to_transform; give both", layers_pattern="layers")
    refused(
        "layers_to_transform has no use when target_modules is a regex",
        target_modules=r".*\.self_attn",
        layers_to_transform=[0],
    )


def test_lags_and_num_contexts_complete_each_other():
    assert SparseCodingConfig().lags == [1, 2, 3]
    assert SparseCodingConfig(num_contexts=2).lags == [1, 2]
    assert SparseCodingConfig(lags=[2, 7]).num_contexts == 2
    assert SparseCodingConfig(contexts="segments").lags is None


CONFIGS = {
    "default": {},
    "lags": {"lags": [1, 5], "per_head": False, "target_coefficient": True, "init_weights": False},
    "segments": {"contexts": "segments", "num_contexts": 2, "segment_token_ids": [3, 4]},
    "thresholds": {"coefficients": "thresholded_softmax", "threshold": 0.01, "train_threshold": True},
    "rescaling": {"num_contexts": 0, "target_coefficient": True},
    "targets": {
        "target_modules": ["self_attn", "attention"],
        "exclude_modules": ["vision_tower.self_attn", "audio_tower.self_attn"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
        "modules_to_save": ["lm_head"],
    },
    "regex": {"target_modules": r"model\.layers\.\d+\.self_attn", "exclude_modules": r".*\.1\.self_attn"},
}


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("cls", [SparseCodingConfig, PeftConfig])
def test_json_round_trip_keeps_every_field(tmp_path, cls, fields):
    config = SparseCodingConfig(**fields)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["peft_type"] == "SPARSECODING"
    loaded = cls.from_pretrained(tmp_path)
    assert type(loaded) is SparseCodingConfig
    assert loaded.to_dict() == config.to_dict()


def test_unknown_keys_of_a_newer_version_are_dropped_with_a_warning(tmp_path):
    SparseCodingConfig(lags=[4]).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "from_the_future": 1}))
    with pytest.warns(UserWarning, match="from_the_future.*SparseCodingConfig, these are ignored"):
        assert SparseCodingConfig.from_pretrained(tmp_path).lags == [4]


def test_bad_values_in_json_are_refused(tmp_path):
    SparseCodingConfig().save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "contexts": "neighbours"}))
    with pytest.raises(ValueError, match="contexts must be one of lags, segments; got 'neighbours'"):
        PeftConfig.from_pretrained(tmp_path)
