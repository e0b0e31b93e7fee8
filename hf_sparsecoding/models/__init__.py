"""Small Hugging Face models, registered with the Auto classes."""

from .induction import (
    InductionConfig,
    InductionForSequenceClassification,
    MinimalInductionConfig,
    MinimalInductionForSequenceClassification,
)
from .linear_attention import LinearAttentionConfig, LinearAttentionForRegression, LinearAttentionModel
from .sparse_decoder import SparseDecoderConfig, SparseDecoderForCausalLM, SparseDecoderModel
from .sparse_transformer import (
    SparseTransformerConfig,
    SparseTransformerForImageRegression,
    SparseTransformerForTokenClassification,
    SparseTransformerModel,
)


__all__ = [
    "InductionConfig",
    "InductionForSequenceClassification",
    "LinearAttentionConfig",
    "LinearAttentionForRegression",
    "LinearAttentionModel",
    "MinimalInductionConfig",
    "MinimalInductionForSequenceClassification",
    "SparseDecoderConfig",
    "SparseDecoderForCausalLM",
    "SparseDecoderModel",
    "SparseTransformerConfig",
    "SparseTransformerForImageRegression",
    "SparseTransformerForTokenClassification",
    "SparseTransformerModel",
]
