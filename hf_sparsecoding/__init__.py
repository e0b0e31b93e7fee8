"""Attention is sparse coding: adapters and models that transfer the coefficients of in-context examples to the target.

Importing the package registers the PEFT method SPARSECODING.
"""

from importlib.metadata import version

from .adapter import SparseCodingConfig, SparseCodingModel


__version__ = version("hf-sparsecoding")

__all__ = ["SparseCodingConfig", "SparseCodingModel", "__version__"]
