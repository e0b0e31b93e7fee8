"""The training loop: any model, any loss, one process or several, exact resumption.

The data is an endless numbered sequence of examples: `batch(start, count)` returns examples start .. start+count-1,
collated, and is a pure function of its arguments. Step s uses examples s*batch_size .. (s+1)*batch_size-1, however
many processes and accumulation steps share them; so a resumed run sees what an uninterrupted one would have seen.

The loss is a mean over the examples of a batch. All parts of a batch are of one size, so the mean over parts is the
mean over the batch.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, gather_object, send_to_device, set_seed
from tqdm.auto import tqdm
from transformers import get_scheduler

from . import checkpoints
from .arguments import SCHEDULES, TrainingArguments
from .optimizers import make_optimizer


Batch = Mapping[str, Any]
UNTIMED_STEPS = 3  # the first steps allocate memory and warm caches


@dataclass
class TrainingResult:
    """History of a run, across interruptions: one entry of `losses` and `seconds` per step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step without the first ones and without evaluations; None for a run that short."""
        return statistics.median(self.seconds[UNTIMED_STEPS:]) if len(self.seconds) > UNTIMED_STEPS else None


class ShuffledOrder:
    """Indices of n items as an endless sequence: every epoch holds each once, in an order of its own."""

    def __init__(self, n: int, seed: int):
        self.n, self.seed = n, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __call__(self, start: int, count: int) -> list[int]:
        return [self._index(position) for position in range(start, start + count)]

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, self.n)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.n)
        return int(self._order[place])


def check_processes(known: int) -> None:
    """Raise ValueError if more processes were started than the `known` ones: each would do the whole work alone."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != known:
        raise ValueError(
            f"{started} processes were started that do not know of each other; without GPUs set ACCELERATE_USE_CPU=1"
        )


def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    """An Accelerator for the run; rejects lone processes, trackers that are missing, batches that do not divide."""
    name = None if arguments.report_to == "none" else arguments.report_to
    if name is not None and name not in LOGGER_TYPE_TO_CLASS:
        raise ValueError(f"report_to must be none or one of {', '.join(LOGGER_TYPE_TO_CLASS)}, got {name!r}")
    # accelerate passes over a tracker whose package is missing, and the run would be logged nowhere
    built_in = LOGGER_TYPE_TO_CLASS.get(name) if name else None
    if built_in is not None and built_in.__module__ == "accelerate.tracking" and name not in get_available_trackers():
        raise ImportError(f"report_to={name!r} needs its package: pip install {name}, or report_to=none")
    accelerator = Accelerator(
        # there is no data loader here, and one that another part of the program left behind must not end a step early
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=arguments.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        mixed_precision=arguments.mixed_precision,
        dynamo_backend="inductor" if arguments.compile else "no",
        log_with=name,
        project_dir=arguments.output_dir,
    )
    check_processes(accelerator.num_processes)
    arguments.micro_batch_size(accelerator.num_processes)
    return accelerator


def train(
    model: torch.nn.Module,
    batch: Callable[[int, int], Batch],
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    arguments: TrainingArguments,
    *,
    accelerator: Accelerator | None = None,
    settings: dict | None = None,
    evaluate: Callable[[torch.nn.Module], dict[str, float]] | None = None,
) -> TrainingResult:
    """Train the parameters of `model` that require gradients, in place; afterwards it computes in float32 again.

    A caller that brings its `accelerator` ends it with `accelerator.end_training()`, which closes the trackers.

    Args:
        batch: `batch(start, count)`, examples start .. start+count-1 of the training sequence, collated (see above).
        loss: `loss(model, batch)`, the mean over the examples of the batch; `model` may be a wrapper around `model`.
        settings: Whatever else decides the result (model, data, ...); a checkpoint with others is refused.
        evaluate: Metrics of the unwrapped model, called on every process each `evaluate_every` steps.
    """
    owned, accelerator = accelerator is None, accelerator or make_accelerator(arguments)
    run = _Run(model, arguments, accelerator, settings or {})
    run.restore()
    if arguments.report_to != "none":
        accelerator.init_trackers("hf_sparsecoding", config=_flat(run.identity))
    steps = range(len(run.result.losses), arguments.steps)
    bar = tqdm(
        steps,
        initial=steps.start,
        total=arguments.steps,
        disable=not (arguments.progress and accelerator.is_main_process),
        desc="training",
    )
    for step in bar:
        value = run.step(step, batch, loss)
        bar.set_postfix(loss=f"{value:.4f}", refresh=False)
        done, metrics = step + 1, {}
        if evaluate is not None and arguments.evaluate_every and done % arguments.evaluate_every == 0:
            metrics = run.evaluate(evaluate, done)
        if metrics or done % arguments.logging_every == 0:
            accelerator.log({"loss": value, "learning_rate": run.learning_rate, **metrics}, step=done)
        if arguments.checkpoint_every and (done % arguments.checkpoint_every == 0 or done == arguments.steps):
            run.save()
    result = run.result
    # the saved model is float32, so that is what the caller measures: this takes the autocast of training off it
    accelerator.unwrap_model(run.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    # the wrapper of several processes must be gone before the process group: if its reducer holds the last reference
    # to gloo's group at the end of the program, torch 2.13 waits there for a thread that waits for it
    del run
    accelerator.free_memory()
    if owned:
        accelerator.end_training()
    return result


def _flat(values: dict) -> dict:
    """Settings as trackers take them: plain values, everything else as text."""
    return {k: v if isinstance(v, (int, float, str, bool)) else json.dumps(v) for k, v in values.items()}


def _make_scheduler(optimizer: torch.optim.Optimizer, arguments: TrainingArguments):
    if arguments.final_learning_rate_share:
        name, options = "cosine_with_min_lr", {"min_lr_rate": arguments.final_learning_rate_share}
    else:
        name, options = SCHEDULES[arguments.schedule], {}
    return get_scheduler(name, optimizer, arguments.warmup_steps, arguments.steps, scheduler_specific_kwargs=options)


class _Run:
    """Model, optimizer and history of one run."""

    def __init__(self, model: torch.nn.Module, arguments: TrainingArguments, accelerator: Accelerator, settings: dict):
        parameters = list(checkpoints.trainable(model).values())
        if not parameters:
            raise ValueError("the model has no trainable parameter; add an adapter or unfreeze parameters first")
        self.arguments, self.accelerator = arguments, accelerator
        self.micro_batch_size = arguments.micro_batch_size(accelerator.num_processes)
        self.folder = Path(arguments.output_dir) / "checkpoints"
        # through JSON, as the checkpoint keeps it: a tuple and a list are then the same
        identity = {**settings, **arguments.identity(), "num_processes": accelerator.num_processes}
        self.identity = json.loads(json.dumps(identity))
        self.parameters = parameters
        optimizer = make_optimizer(model, arguments)
        # not handed to accelerate, which would step it once per process
        self.scheduler = _make_scheduler(optimizer, arguments)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.result = TrainingResult()
        set_seed(arguments.seed, device_specific=True)

    @property
    def bare_model(self) -> torch.nn.Module:
        """Without the wrappers of several processes and of the compiler, whose names a checkpoint should not have."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def learning_rate(self) -> float:
        return self.scheduler.get_last_lr()[0]

    def step(self, step: int, batch: Callable, loss: Callable) -> float:
        began = time.perf_counter()
        self.model.train()
        accelerator, size = self.accelerator, self.micro_batch_size
        total = torch.zeros((), device=accelerator.device)
        for part in range(self.arguments.gradient_accumulation_steps):
            place = part * accelerator.num_processes + accelerator.process_index
            examples = batch(step * self.arguments.batch_size + place * size, size)
            with accelerator.accumulate(self.model):
                value = loss(self.model, send_to_device(examples, accelerator.device))
                accelerator.backward(value)
                total += value.detach()
                if accelerator.sync_gradients and self.arguments.max_grad_norm:
                    accelerator.clip_grad_norm_(self.parameters, self.arguments.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        mean = accelerator.reduce(total / self.arguments.gradient_accumulation_steps, "mean").item()
        if not math.isfinite(mean):  # the same on every process, so all of them stop
            raise FloatingPointError(
                f"the loss is {mean} at step {step + 1}; lower learning_rate ({self.arguments.learning_rate}), raise "
                f"warmup_steps ({self.arguments.warmup_steps}) or use mixed_precision=no"
            )
        self.scheduler.step()
        self.result.losses.append(mean)
        self.result.seconds.append(time.perf_counter() - began)
        return mean

    def evaluate(self, evaluate: Callable, done: int) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            metrics = evaluate(self.bare_model)
        self.result.evaluations.append({"step": done, **metrics})
        return metrics

    def save(self) -> None:
        generators = gather_object([checkpoints.random_state(self.accelerator.device)])
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": scaler.state_dict() if scaler is not None else None,
                "generators": generators,
                "result": asdict(self.result),
            }
            step = len(self.result.losses)
            index = {"step": step, "examples": step * self.arguments.batch_size, "identity": self.identity}
            checkpoints.save(self.folder, self.bare_model, state, index, self.arguments.checkpoints_kept)
        self.accelerator.wait_for_everyone()

    def restore(self) -> None:
        """Go on from the newest whole checkpoint, if there is one and `resume` allows it."""
        if not self.arguments.resume:
            if self.accelerator.is_main_process:
                checkpoints.remove_all(self.folder)
            self.accelerator.wait_for_everyone()
            return
        newest = checkpoints.newest(self.folder)
        if newest is None:
            return
        state, index = checkpoints.load(newest, self.bare_model, self.identity)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        checkpoints.set_random_state(state["generators"][self.accelerator.process_index], self.accelerator.device)
        self.result = TrainingResult(**state["result"])
        self.accelerator.print(f"resuming from {newest}: {index['step']} of {self.arguments.steps} steps done")
