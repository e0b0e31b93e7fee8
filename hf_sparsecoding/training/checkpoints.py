"""Checkpoints that survive being killed: whole or not there, checked when read, small.

One folder per checkpoint, `step-00000050/`, moved into place when complete:
trainable.safetensors (trainable parameters only), state.pt (optimizer, scheduler, random numbers, history),
checkpoint.json (step, data position, settings, checksums).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .arguments import ASSUMED


logger = logging.getLogger(__name__)

WEIGHTS, STATE, INDEX = "trainable.safetensors", "state.pt", "checkpoint.json"
PARTIAL = ".partial-"  # prefix of a folder that is still being written


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def random_state(device: torch.device) -> dict:
    """State of the generators of python, numpy and torch, also on `device`, in types that torch loads without
    pickle's risks."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict, device: torch.device) -> None:
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type != "cuda":
        return
    if isinstance(state["cuda"], torch.Tensor):
        torch.cuda.set_rng_state(state["cuda"], device)
    else:
        logger.warning("the checkpoint was written without a GPU: the random numbers on %s start afresh", device)


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save(folder: Path, model: torch.nn.Module, state: dict, index: dict, keep: int) -> Path:
    """Write the checkpoint of step `index["step"]` below `folder` and drop all but the newest `keep`."""
    final = folder / f"step-{index['step']:08d}"
    partial = folder / f"{PARTIAL}{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {name: parameter.detach().cpu().contiguous() for name, parameter in trainable(model).items()}
    save_file(weights, partial / WEIGHTS)
    torch.save(state, partial / STATE)
    files = {name: checksum(partial / name) for name in (WEIGHTS, STATE)}
    (partial / INDEX).write_text(json.dumps({**index, "files": files}, indent=2))
    if final.exists():  # a damaged one of the same step: os.replace needs the place empty
        shutil.rmtree(final)
    os.replace(partial, final)
    every = candidates(folder)
    place = every.index(final)  # those before it were found damaged when training went on from an earlier one
    for other in every[:place] + every[place + keep :]:
        shutil.rmtree(other)
    return final


def remove_all(folder: Path) -> None:
    for checkpoint in candidates(folder):
        shutil.rmtree(checkpoint)


def candidates(folder: Path) -> list[Path]:
    """Checkpoints below `folder`, the newest first, whole or not."""
    return sorted(folder.glob("step-*"), reverse=True)


def damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used; None if it is whole."""
    try:
        index = json.loads((checkpoint / INDEX).read_text())
    except (OSError, ValueError) as error:
        return f"{INDEX} cannot be read ({error})"
    if not isinstance(index, dict) or not {"step", "identity", "files"} <= index.keys():
        return f"{INDEX} lacks step, identity or files"
    for name, expected in index["files"].items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if checksum(checkpoint / name) != expected:
            return f"{name} does not match its checksum"
    return None


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; damaged ones are named in a warning and passed over."""
    for checkpoint in candidates(folder):
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("skipping the damaged checkpoint %s: %s", checkpoint, reason)
    return None


def check_identity(checkpoint: Path, saved: dict, current: dict) -> None:
    """Refuse to go on with settings that would give another result than the run that wrote the checkpoint."""
    saved = {name: value for name, value in ASSUMED.items() if name in current} | saved
    differing = [
        f"{name} (checkpoint: {saved.get(name)!r}, now: {current.get(name)!r})"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name)
    ]
    if differing:
        raise ValueError(
            f"cannot resume from {checkpoint}: {'; '.join(differing)}. Use the checkpoint's settings, choose another "
            "output_dir, or start afresh with --no_resume"
        )


def load(checkpoint: Path, model: torch.nn.Module, identity: dict) -> tuple[dict, dict]:
    """Put the parameters into `model`, if the checkpoint is of the same run; return (state, index)."""
    index = json.loads((checkpoint / INDEX).read_text())
    check_identity(checkpoint, index["identity"], identity)
    saved, parameters = load_file(checkpoint / WEIGHTS), trainable(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if shapes != expected:
        name = min(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        raise ValueError(
            f"{checkpoint} does not fit the model: {name} has shape {shapes.get(name)} there and {expected.get(name)} "
            "here; choose another output_dir or start afresh with --no_resume"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
    return state, index
