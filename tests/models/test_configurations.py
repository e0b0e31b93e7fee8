"""Configurations of saved models: what is changed at loading is checked as what is given to a new one."""

import pytest

from hf_sparsecoding.models import (
    InductionConfig,
    InductionForSequenceClassification,
    LinearAttentionConfig,
    LinearAttentionForRegression,
    MinimalInductionConfig,
    MinimalInductionForSequenceClassification,
    SparseDecoderConfig,
    SparseDecoderForCausalLM,
    SparseTransformerConfig,
    SparseTransformerForTokenClassification,
)


@pytest.mark.parametrize(
    ("model", "config", "override", "message"),
    [
        (
            SparseTransformerForTokenClassification,
            SparseTransformerConfig,
            {"mixer": "softmx"},
            "mixer must be one of",
        ),
        (SparseTransformerForTokenClassification, SparseTransformerConfig, {"transfer": "alligned"}, "got 'alligned'"),
        (SparseTransformerForTokenClassification, SparseTransformerConfig, {"threshold": -1.0}, "finite, got -1.0"),
        (SparseDecoderForCausalLM, SparseDecoderConfig, {"mixer": "softmx"}, "mixer must be one of .* got 'softmx'"),
        (InductionForSequenceClassification, InductionConfig, {"mixer": "softmx"}, "mixer must be one of"),
        (MinimalInductionForSequenceClassification, MinimalInductionConfig, {"content_size": 0}, "at least 1, got 0"),
        (LinearAttentionForRegression, LinearAttentionConfig, {"kind": "extendd"}, "kind must be one of"),
    ],
)
def test_overrides_of_a_saved_model_are_checked(tmp_path, model, config, override, message):
    options = {"vocab_size": 11} if config is SparseDecoderConfig else {}
    model(config(**options)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        model.from_pretrained(tmp_path, **override)


def test_labels_of_continuous_inputs(tmp_path):
    config = SparseTransformerConfig(input_type="continuous", num_values=3)
    assert config.num_labels == SparseTransformerForTokenClassification(config).head.out_features == 3
    config.save_pretrained(tmp_path)
    assert SparseTransformerConfig.from_pretrained(tmp_path).num_labels == 3
