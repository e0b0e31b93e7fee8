"""Attention is sparse coding: adapters and models that transfer the coefficients of in-context examples to the target.

Importing the package registers the PEFT method SPARSECODING and the small models' Auto classes.
"""

from importlib.metadata import version

from .adapter import SparseCodingConfig, SparseCodingModel
from .models import (
    SparseTransformerConfig,
    SparseTransformerForImageRegression,
    SparseTransformerForTokenClassification,
    SparseTransformerModel,
)


__version__ = version("hf-sparsecoding")

__all__ = [
    "SparseCodingConfig",
    "SparseCodingModel",
    "SparseTransformerConfig",
    "SparseTransformerForImageRegression",
    "SparseTransformerForTokenClassification",
    "SparseTransformerModel",
    "__version__",
]
