"""The Sparse Coding Transformer (arXiv 2511.20194) and its baselines, as one Hugging Face model."""

from transformers import AutoConfig, AutoModel, AutoModelForImageToImage, AutoModelForTokenClassification

from .configuration_sparse_transformer import SparseTransformerConfig
from .modeling_sparse_transformer import (
    SparseTransformerForImageRegression,
    SparseTransformerForTokenClassification,
    SparseTransformerModel,
)


AutoConfig.register("sparse_transformer", SparseTransformerConfig, exist_ok=True)
AutoModel.register(SparseTransformerConfig, SparseTransformerModel, exist_ok=True)
AutoModelForTokenClassification.register(
    SparseTransformerConfig, SparseTransformerForTokenClassification, exist_ok=True
)
AutoModelForImageToImage.register(SparseTransformerConfig, SparseTransformerForImageRegression, exist_ok=True)

__all__ = [
    "SparseTransformerConfig",
    "SparseTransformerForImageRegression",
    "SparseTransformerForTokenClassification",
    "SparseTransformerModel",
]
