"""Train an adapter on a causal language model, with accuracy before and after.

The project's task (number puzzles), with the arguments of a file, some of them changed:

    python scripts/adapt.py --config scripts/configs/demo.yaml --steps 100 --output_dir outputs/try

Your own prompts and completions, a tenth of them held out:

    python scripts/adapt.py --model MODEL --data mine.jsonl \\
        --adapter_config scripts/configs/adapters/lags_per_head.yaml --output_dir outputs/mine

A saved adapter in a fresh process, on the items it was measured on:

    python scripts/adapt.py --adapter outputs/try --evaluate_only

Several processes on one machine: `accelerate launch`, or `python -m torch.distributed.run --nproc_per_node 2` (on CPU
with ACCELERATE_USE_CPU=1), before `scripts/adapt.py`. --output_dir receives the adapter, results.json and pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import PeftModel, get_peft_model

import hf_sparsecoding  # noqa: F401  registers the adapter with peft
from hf_sparsecoding.reports import plots, results, tables
from hf_sparsecoding.tasks.s_raven_text import SRavenText
from hf_sparsecoding.training import (
    ShuffledOrder,
    TrainingArguments,
    checkpoints,
    make_accelerator,
    records,
    train,
)
from hf_sparsecoding.training.accuracy import PREFIXES, Accuracy, Split, evaluate
from hf_sparsecoding.training.command_line import near_match, parse, read_options, to_flags
from hf_sparsecoding.training.completions import collate, completion_loss, encode, pad_token_id
from hf_sparsecoding.training.pretrained import (
    DTYPES,
    adapter_label,
    adapter_values,
    base_model_of,
    load_model,
    load_tokenizer,
    longest_input,
    read_adapter_config,
)
from hf_sparsecoding.training.runs import device_name, make_run


TASKS = {"s_raven_text": SRavenText}
# the settings that decide which items are evaluated, and on what
EVALUATION = ("model", "dtype", "task", "task_options", "data", "eval_data", "held_out_share", "append_eos")
EVALUATION += ("eval_items", "eval_seed")


@dataclass(frozen=True)
class AdaptArguments:
    """What is adapted, on which data."""

    model: str = field(default="", metadata={"help": "base model: a folder or an id of the Hub"})
    dtype: str = field(default="float32", metadata={"help": f"data type of the base model: {', '.join(DTYPES)}"})
    adapter_config: str = field(default="", metadata={"help": "PEFT config: a YAML or JSON file, or JSON text"})
    adapter: str = field(default="", metadata={"help": "a saved adapter, with --evaluate_only"})
    evaluate_only: bool = field(default=False, metadata={"help": "evaluate --adapter, train nothing"})
    method: str = field(default="", metadata={"help": "name in the results; default: the config file's, or the type"})
    experiment: str = field(default="adapt", metadata={"help": "name of the experiment in the results"})
    task: str = field(default="", metadata={"help": f"built-in data: {', '.join(TASKS)}"})
    task_options: str = field(default="{}", metadata={"help": "options of the task as JSON text"})
    data: str = field(default="", metadata={"help": "own data: .json or .jsonl records with prompt and completion"})
    eval_data: str = field(default="", metadata={"help": "own data to evaluate on; default: a share of --data"})
    held_out_share: float = field(default=0.1, metadata={"help": "share of --data held out without --eval_data"})
    append_eos: bool = field(default=False, metadata={"help": "end every completion with the end-of-text token"})
    eval_items: int = field(default=1024, metadata={"help": "items per split to evaluate on, at most"})
    eval_batch_size: int = field(default=64, metadata={"help": "items per forward pass in evaluation"})
    eval_seed: int = field(default=0, metadata={"help": "seed of the evaluation items, the same for every --seed"})
    before: str = field(default="", metadata={"help": "file of the base model's accuracy, shared by several runs"})
    plots: bool = field(default=True, metadata={"help": "draw pictures"})

    def __post_init__(self):
        if self.evaluate_only and not self.adapter:
            raise ValueError("--evaluate_only needs --adapter, the folder of a saved adapter")
        if self.adapter and not self.evaluate_only:
            raise ValueError(f"--adapter {self.adapter} goes with --evaluate_only; training takes --adapter_config")
        if not self.evaluate_only and not self.adapter_config:
            raise ValueError("--adapter_config is missing: a YAML or JSON file, or JSON text, with a peft_type")
        if not self.evaluate_only and not self.model:
            raise ValueError("--model is missing: a folder or an id of the Hub")
        if bool(self.task) == bool(self.data):
            raise ValueError(f"give either --task or --data, got task={self.task!r} and data={self.data!r}")
        if self.task and self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}{near_match(self.task, list(TASKS))}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("eval_items", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def make_task(arguments: AdaptArguments):
    kind = TASKS[arguments.task]
    return kind(**read_options(kind, arguments.task, arguments.task_options))


def read_data(arguments: AdaptArguments, training: TrainingArguments) -> dict[str, list[dict]]:
    """Records by split: "train", "test" and, for tasks, "ood"."""
    if arguments.task:
        task, items = make_task(arguments), arguments.eval_items
        needed = 0 if arguments.evaluate_only else training.steps * training.batch_size
        return {
            "train": task.dataset(needed, "train", training.seed).to_list(),
            "test": task.dataset(items, "test", arguments.eval_seed).to_list(),
            "ood": task.dataset(items, "ood", arguments.eval_seed).to_list(),
        }
    train_records = records.read(arguments.data)
    if arguments.eval_data:
        test_records = records.read(arguments.eval_data)
    else:
        train_records, test_records = records.hold_out(train_records, arguments.held_out_share, arguments.eval_seed)
    return {"train": train_records, "test": test_records[: arguments.eval_items]}


def rule_names(row: dict, arguments: AdaptArguments) -> tuple[str, ...]:
    """Groups that a record counts for; a puzzle of several features counts for each of its rules."""
    rule = str(row.get("rule") or "")
    return tuple(sorted(set(rule.split("+")))) if arguments.task else (rule,) * bool(rule)


def prepare_data(arguments: AdaptArguments, training: TrainingArguments, model: str) -> tuple[dict[str, Split], int]:
    """(encoded splits, padding token); what is wrong with the data is found here, before the model is loaded."""
    data = read_data(arguments, training)
    tokenizer, longest = load_tokenizer(model), longest_input(model)
    splits = {}
    for name, rows in data.items():
        prompts, completions = [row["prompt"] for row in rows], [row["completion"] for row in rows]
        examples = encode(tokenizer, prompts, completions, arguments.append_eos)
        for number, example in enumerate(examples):
            if longest is not None and len(example) > longest:
                raise ValueError(
                    f"{name} example {number} has {len(example)} tokens, {model} takes {longest}; shorten its prompt"
                )
        splits[name] = Split(examples, [rule_names(row, arguments) for row in rows])
    return splits, pad_token_id(tokenizer)


def accuracy_table(accuracy: Accuracy, moments: tuple[str, ...]) -> str:
    """Accuracy with its 95 % interval, over all items and per group."""
    rows = []
    for split, prefix in PREFIXES.items():
        stem = f"{prefix}accuracy_{moments[0]}"
        for metric in sorted(name for name in accuracy.items if name == stem or name.startswith(f"{stem}_")):
            group = metric.removeprefix(stem)
            label = f"{split}: {group[1:].replace('_', ' ') or 'all'}"
            keys = [f"{prefix}accuracy_{moment}{group}" for moment in moments]
            shares = [tables.with_interval(accuracy.metrics[key], accuracy.items[key]) for key in keys]
            rows.append([label, accuracy.items[metric], *shares])
    return tables.table(["accuracy", "items", *moments], rows)


def evaluation_settings(arguments: AdaptArguments, training: TrainingArguments) -> dict:
    """What the accuracy of a given model depends on; own data by its content, as files change."""
    values = {**asdict(arguments), **asdict(training)}
    files = [Path(path) for path in (arguments.data, arguments.eval_data) if path]
    digests = {"data_sha256": [checkpoints.checksum(path) for path in files]} if files else {}
    return {name: values[name] for name in EVALUATION} | digests


def measure_before(
    model: PeftModel,
    measure: Callable[[str], Accuracy],
    accelerator: Accelerator,
    cache: Path,
    wanted: dict,
) -> Accuracy:
    """Accuracy of the base model. It depends on the evaluation alone: runs that share `cache` measure it once."""
    if cache.is_file():
        saved = json.loads(cache.read_text())
        if saved["settings"] == wanted:
            return Accuracy(saved["metrics"], saved["items"])
    with model.disable_adapter():
        accuracy = measure("before")
    accelerator.wait_for_everyone()  # nobody may find the file while others still measure
    if accelerator.is_main_process:
        results.write_text(cache, json.dumps({"settings": wanted, **accuracy._asdict()}))
    return accuracy


def run_settings(arguments: AdaptArguments, training: TrainingArguments, config) -> dict:
    """All that decides the result, as JSON holds it."""
    kept = {**asdict(arguments), **evaluation_settings(arguments, training), **training.identity()}
    for name in ("adapter", "evaluate_only", "method", "experiment", "before", "plots"):
        del kept[name]
    return json.loads(json.dumps({**kept, "adapter_config": adapter_values(config)}))


def adapt(arguments: AdaptArguments, training: TrainingArguments) -> dict:
    """Train and measure; the run as results.json holds it."""
    if arguments.plots:
        plots.require_matplotlib()
    config = read_adapter_config(arguments.adapter_config)
    accelerator = make_accelerator(training)
    splits, pad = prepare_data(arguments, training, arguments.model)
    settings = run_settings(arguments, training, config)
    set_seed(training.seed)
    model = get_peft_model(load_model(arguments.model, arguments.dtype), config).to(accelerator.device)
    measure = partial(evaluate, model, splits, accelerator=accelerator, pad=pad, batch_size=arguments.eval_batch_size)
    cache = Path(arguments.before or Path(training.output_dir) / "before.json")
    before = measure_before(model, measure, accelerator, cache, evaluation_settings(arguments, training))
    accelerator.print(accuracy_table(before, ("before",)))

    examples = splits["train"].examples
    order = ShuffledOrder(len(examples), training.seed)
    history = train(
        model,
        lambda start, count: collate([examples[index] for index in order(start, count)], pad),
        completion_loss,
        training,
        accelerator=accelerator,
        settings=settings,
    )
    after = measure("after")
    accelerator.log(after.metrics, step=training.steps)
    both = Accuracy({**before.metrics, **after.metrics}, {**before.items, **after.items})
    settings = {**settings, "items": both.items, "num_processes": accelerator.num_processes}
    method = arguments.method or adapter_label(arguments.adapter_config)
    run = make_run(method, model, history, training, settings, both.metrics)
    if accelerator.is_main_process:
        print(accuracy_table(both, ("before", "after")))
        save(model, run, arguments, Path(training.output_dir), accelerator.device)
    accelerator.end_training()
    return run


def save(model: PeftModel, run: dict, arguments: AdaptArguments, output: Path, device: torch.device) -> None:
    """The adapter, results.json and the pictures."""
    model.save_pretrained(output)
    results.write(output / results.FILE, results.new(arguments.experiment, [run], device=device_name(device)))
    print(f"wrote the adapter and {output / results.FILE}")
    if arguments.plots:
        print(f"wrote {plots.accuracy_per_rule(run, output / 'accuracy_per_rule.png')}")
        drawn = plots.learned_lambda(output, output / "lambda.png")
        kind = run["settings"]["adapter_config"]["peft_type"]
        print(f"wrote {drawn}" if drawn else f"no picture of lambda: an adapter of type {kind} has none")


def evaluate_saved(arguments: AdaptArguments, training: TrainingArguments) -> bool:
    """Evaluate a saved adapter; whether that agrees with its results.json, as far as they are comparable."""
    accelerator = make_accelerator(training)
    name = arguments.model or base_model_of(arguments.adapter)
    splits, pad = prepare_data(arguments, training, name)
    base = load_model(name, arguments.dtype)
    model = PeftModel.from_pretrained(base, arguments.adapter).to(accelerator.device)
    measured = evaluate(model, splits, "after", accelerator, pad, arguments.eval_batch_size)
    accelerator.print(accuracy_table(measured, ("after",)))
    accelerator.end_training()
    saved = saved_run(arguments.adapter)
    if saved is None:
        accelerator.print(f"{arguments.adapter} has no {results.FILE} to compare with")
        return True
    now = evaluation_settings(arguments, training)
    other = [name for name, value in now.items() if saved["settings"].get(name) != value]
    differing = [key for key, share in measured.metrics.items() if saved["metrics"].get(key) != share]
    if other:
        accelerator.print(f"not compared with the saved results: other {', '.join(other)}")
    elif differing:
        accelerator.print(f"differs from the saved results in {', '.join(differing)}")
    else:
        accelerator.print("equals the saved results")
    return bool(other) or not differing


def saved_run(adapter: str) -> dict | None:
    path = Path(adapter) / results.FILE
    return results.load(path)["runs"][0] if path.is_file() else None


def parse_arguments(argv: list[str]) -> tuple[AdaptArguments, TrainingArguments]:
    """Arguments from flags and --config; with --evaluate_only, those that the adapter was measured with come first."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--adapter", default="")
    first.add_argument("--evaluate_only", "--evaluate-only", action="store_true")
    first.add_argument("--task")
    first.add_argument("--data")
    known, _ = first.parse_known_args(argv)
    saved = saved_run(known.adapter) if known.adapter and known.evaluate_only else None
    if saved is not None:
        other = {"data", "eval_data"} if known.task else {"task", "task_options"} if known.data else set()
        names = [name for name in EVALUATION if name in saved["settings"] and name not in other]
        argv = to_flags({name: saved["settings"][name] for name in names}) + argv
    return parse([AdaptArguments, TrainingArguments], argv, __doc__)


def main(argv: list[str] | None = None) -> int:
    arguments, training = parse_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.evaluate_only:
        return 0 if evaluate_saved(arguments, training) else 1
    adapt(arguments, training)
    return 0


if __name__ == "__main__":
    sys.exit(main())
