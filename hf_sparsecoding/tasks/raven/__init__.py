"""RAVEN: matrices of 3 x 3 panels whose rows follow rules; the ninth panel is to be drawn or chosen.

`attributes <- rules <- choices <- generator <- files <- task`, with `rendering` and `checker` at the side.
"""

from hf_sparsecoding.tasks.raven.attributes import CONFIGURATIONS, Entity
from hf_sparsecoding.tasks.raven.checker import Solution, solve, violations
from hf_sparsecoding.tasks.raven.files import folder_dataset, load, model_arrays, read_folder, save, write_folder
from hf_sparsecoding.tasks.raven.generator import SPLITS, Problem
from hf_sparsecoding.tasks.raven.rules import Rule
from hf_sparsecoding.tasks.raven.task import Raven


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
