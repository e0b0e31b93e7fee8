"""RAVEN: matrices of 3 x 3 panels whose rows follow rules; the ninth panel is to be drawn or chosen.

`attributes <- rules <- choices <- generator <- files <- task`, with `rendering` and `checker` at the side.
"""

from .attributes import CONFIGURATIONS, Entity
from .checker import Solution, solve, violations
from .files import folder_dataset, load, model_arrays, read_folder, save, write_folder
from .generator import SPLITS, Problem
from .rules import Rule
from .task import Raven


__all__ = [
    "CONFIGURATIONS",
    "SPLITS",
    "Entity",
    "Problem",
    "Raven",
    "Rule",
    "Solution",
    "folder_dataset",
    "load",
    "model_arrays",
    "read_folder",
    "save",
    "solve",
    "violations",
    "write_folder",
]
