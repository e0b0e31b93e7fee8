"""Attention is sparse coding: adapters and models that transfer the coefficients of in-context examples to the target.

Importing the package registers the PEFT method SPARSECODING and the small models' Auto classes.
"""

from importlib.metadata import version

from .adapter import SparseCodingConfig, SparseCodingModel
from .models import (
    InductionConfig,
    InductionForSequenceClassification,
    LinearAttentionConfig,
    LinearAttentionForRegression,
    LinearAttentionModel,
    MinimalInductionConfig,
    MinimalInductionForSequenceClassification,
    SparseDecoderConfig,
    SparseDecoderForCausalLM,
    SparseDecoderModel,
    SparseTransformerConfig,
    SparseTransformerForImageRegression,
    SparseTransformerForTokenClassification,
    SparseTransformerModel,
)


__version__ = version("hf-sparsecoding")

__all__ = [
    "InductionConfig",
    "InductionForSequenceClassification",
    "LinearAttentionConfig",
    "LinearAttentionForRegression",
    "LinearAttentionModel",
    "MinimalInductionConfig",
    "MinimalInductionForSequenceClassification",
    "SparseCodingConfig",
    "SparseCodingModel",
    "SparseDecoderConfig",
    "SparseDecoderForCausalLM",
    "SparseDecoderModel",
    "SparseTransformerConfig",
    "SparseTransformerForImageRegression",
    "SparseTransformerForTokenClassification",
    "SparseTransformerModel",
    "__version__",
]
