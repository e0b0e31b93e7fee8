"""Small Hugging Face models, registered with the Auto classes."""

from .sparse_transformer import (
    SparseTransformerConfig,
    SparseTransformerForImageRegression,
    SparseTransformerForTokenClassification,
    SparseTransformerModel,
)


__all__ = [
    "SparseTransformerConfig",
    "SparseTransformerForImageRegression",
    "SparseTransformerForTokenClassification",
    "SparseTransformerModel",
]
