"""A training run as results.json holds it, and what a training command leaves in its output folder."""

from __future__ import annotations

from pathlib import Path

import torch

from ..reports import results, tables
from .arguments import TrainingArguments
from .loop import TrainingResult


LAST = 100  # steps whose mean is the training loss of a run


def device_name(device: torch.device) -> str:
    """What results.json calls a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def make_run(
    method: str,
    model: torch.nn.Module,
    history: TrainingResult,
    training: TrainingArguments,
    settings: dict,
    metrics: dict,
) -> dict:
    """The run of a model, of whose parameters those that require gradients were trained."""
    last = history.losses[-LAST:]
    return {
        "method": method,
        "seed": training.seed,
        "trainable_parameters": sum(value.numel() for value in model.parameters() if value.requires_grad),
        "samples": training.steps * training.batch_size,
        "settings": settings,
        "metrics": {**metrics, "train_loss": sum(last) / len(last), "step_seconds": history.step_seconds},
        "history": [{"samples": entry["step"] * training.batch_size, **entry} for entry in history.evaluations],
    }


def write_run(
    run: dict, experiment: str, output: str | Path, device: torch.device, model: torch.nn.Module | None = None
) -> None:
    """Write results.json and the model, if there is one, and print the metrics."""
    output = Path(output)
    if model is not None:
        model.save_pretrained(output)
    results.write(output / results.FILE, results.new(experiment, [run], device=device_name(device)))
    rows = [[name, tables.number(value)] for name, value in run["metrics"].items()]
    print(tables.table(["metric", run["method"]], rows))
    print(f"wrote {'the model and ' if model is not None else ''}{output / results.FILE}")
