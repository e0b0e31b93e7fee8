"""Tasks to train on short sequences and evaluate on long ones, with coupled position ids."""

from .arithmetic import Addition, Multiplication
from .coupling import BOS, EOS, IGNORED, PAD, SequenceTask
from .planted import PlantedCorrelations
from .strings import Copy, PatternMatching, Reversal, ScratchpadParity


__all__ = [
    "BOS",
    "EOS",
    "IGNORED",
    "PAD",
    "Addition",
    "Copy",
    "Multiplication",
    "PatternMatching",
    "PlantedCorrelations",
    "Reversal",
    "ScratchpadParity",
    "SequenceTask",
]
