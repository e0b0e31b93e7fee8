"""The PEFT method SPARSECODING: importing this package registers it."""

from .config import SparseCodingConfig
from .model import SparseCodingModel
from .registration import register


register(SparseCodingConfig, SparseCodingModel)

__all__ = ["SparseCodingConfig", "SparseCodingModel"]
