"""The published sweeps and configs of synthetic tasks are valid: every run's arguments parse and give a model."""

from pathlib import Path

import pytest

from hf_sparsecoding.models import SparseTransformerConfig
from hf_sparsecoding.training import TrainingArguments
from hf_sparsecoding.training.command_line import parse
from hf_sparsecoding.training.synthetic import TASKS, make_model, make_task
from scripts import sweep, train_synthetic
from scripts.train_synthetic import ModelArguments, SyntheticArguments


CONFIGS = Path("scripts/configs")
SYNTHETIC = [
    path for folder in ("s_raven", "raven", "compositional_images") for path in (CONFIGS / folder).glob("*.yaml")
]
SWEEPS = [path for path in SYNTHETIC if "experiment:" in path.read_text()]


def model_of(flags: list[str]):
    arguments, model_arguments, _ = parse([SyntheticArguments, ModelArguments, TrainingArguments], flags, "")
    task = make_task(arguments.task, arguments.task_options)
    return make_model(TASKS[arguments.task], task, model_arguments.contexts, model_arguments.options())


@pytest.mark.parametrize("path", SWEEPS, ids=str)
def test_sweeps(path):
    jobs = sweep.make_jobs(sweep.read_sweep(str(path), [], None))
    assert len({job.folder for job in jobs}) == len(jobs)
    sizes = {job.method: sum(p.numel() for p in model_of(job.command[1:]).parameters()) for job in jobs}
    assert max(sizes.values()) <= 1.02 * min(sizes.values()), "methods of one table have equal parameters"


@pytest.mark.parametrize("path", [path for path in SYNTHETIC if path not in SWEEPS], ids=str)
def test_configs(path):
    assert model_of(["--config", str(path)]).num_parameters() > 0


def test_commands_of_the_docstring_parse():
    commands = [line.split() for line in train_synthetic.__doc__.splitlines() if line.strip().startswith("python ")]
    assert len(commands) == 2
    for command in commands:
        assert command[1] == "scripts/train_synthetic.py"
        assert model_of(command[2:]).num_parameters() > 0


def test_defaults_are_the_configurations():
    options = {**ModelArguments().options()}
    assert SparseTransformerConfig(**options).to_dict() == SparseTransformerConfig().to_dict()


def test_the_reference_config_has_the_references_size():
    assert model_of(["--config", "scripts/configs/s_raven/reference.yaml"]).num_parameters() == 402_824
