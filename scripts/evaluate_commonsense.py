"""Evaluate a base model and adapters on it side by side on commonsense reasoning, by generation and by likelihood.

All eight benchmarks from the Hub, the base model and two adapters:

    python scripts/evaluate_commonsense.py --model HuggingFaceTB/SmolLM2-135M-Instruct \\
        --adapters outputs/lags_per_head/seed-0 outputs/lora_r8/seed-0 --output_dir outputs/commonsense

From local files, without the Hub, 200 questions of each of two tasks (see hf_sparsecoding/tasks/commonsense.py for the
files, hf_sparsecoding/evaluation/commonsense.py for the protocols):

    python scripts/evaluate_commonsense.py --model MODEL_FOLDER --data DATA_FOLDER --tasks arc_easy boolq --limit 200

Every protocol of every task is written to --output_dir as soon as it is done and not computed again: a run that was
interrupted goes on there, and later commands reuse the base model's answers. Several processes share the questions:
`accelerate launch`, or `python -m torch.distributed.run --nproc_per_node 2` (on CPU with ACCELERATE_USE_CPU=1), before
`scripts/evaluate_commonsense.py`. Method, seed and settings of an adapter come from the results.json beside it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftConfig, PeftModel
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

import hf_sparsecoding  # noqa: F401  registers the adapter with peft
from hf_sparsecoding.evaluation import commonsense as protocols
from hf_sparsecoding.evaluation.commonsense_statistics import (
    accuracies,
    against_base,
    most_frequent_label,
)
from hf_sparsecoding.reports import plots, results
from hf_sparsecoding.reports.accuracy_bars import accuracy_bars
from hf_sparsecoding.reports.tables import accuracy_table
from hf_sparsecoding.tasks import commonsense as tasks
from hf_sparsecoding.training import check_processes, checkpoints
from hf_sparsecoding.training.command_line import near_match, parse
from hf_sparsecoding.training.pretrained import DTYPES, adapter_values, base_model_of, load_model, load_tokenizer
from hf_sparsecoding.training.runs import device_name


BASE = "base"
CONSTANT = "most frequent label"  # a row for comparison: what knowing nothing but the labels' frequencies gives
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class EvaluateArguments:
    """What is evaluated, on which questions, how."""

    model: str = field(default="", metadata={"help": "base model: a folder or Hub id; default: the first adapter's"})
    adapters: list[str] = field(default_factory=list, metadata={"help": "folders of saved adapters"})
    dtype: str = field(default="float32", metadata={"help": f"data type of the base model: {', '.join(DTYPES)}"})
    other_base: bool = field(default=False, metadata={"help": "take adapters that name another base model"})
    data: str = field(default=tasks.HUB, metadata={"help": "hub, or a folder with <task>/test.json"})
    tasks: list[str] = field(default_factory=lambda: list(tasks.TASKS), metadata={"help": "benchmarks"})
    any_size: bool = field(default=False, metadata={"help": "take test sets that are not of the published size"})
    limit: int | None = field(default=None, metadata={"help": "questions per task, drawn with --seed; default: all"})
    seed: int = field(default=0, metadata={"help": "seed of the questions that --limit draws"})
    protocols: list[str] = field(
        default_factory=lambda: list(protocols.PROTOCOLS), metadata={"help": ", ".join(protocols.PROTOCOLS)}
    )
    beams: int = field(default=4, metadata={"help": "beams of the generation; 1 is greedy"})
    max_new_tokens: int = field(default=32, metadata={"help": "tokens that the generation may write"})
    batch_size: int = field(default=16, metadata={"help": "questions (or their options) per forward pass"})
    experiment: str = field(default="commonsense", metadata={"help": "name of the experiment in the results"})
    output_dir: str = field(default="outputs/commonsense", metadata={"help": "folder of the answers"})
    results: str = field(default="", metadata={"help": "where results.json goes; default: in output_dir"})
    plots: bool = field(default=True, metadata={"help": "draw a picture per protocol"})
    progress: bool = field(default=True, metadata={"help": "show progress bars"})

    def __post_init__(self):
        if not self.model and not self.adapters:
            raise ValueError("--model is missing: a folder or an id of the Hub")
        tasks.check_tasks(self.tasks)
        for name in self.protocols:
            if name not in protocols.PROTOCOLS:
                raise ValueError(f"unknown protocol {name!r}{near_match(name, list(protocols.PROTOCOLS))}")
        if not self.protocols:
            raise ValueError(f"--protocols needs at least one of {', '.join(protocols.PROTOCOLS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("limit", "beams", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class Candidate(NamedTuple):
    """A model to evaluate: the base, or an adapter in `folder` on it, with the run that trained it."""

    name: str
    folder: Path | None
    run: dict


class Questions(NamedTuple):
    """The records of a task that are asked, out of `available` ones; `digest` tells them from others."""

    records: list[dict]
    available: int
    digest: str


def find_candidates(arguments: EvaluateArguments, model: str) -> list[Candidate]:
    """The base model and all adapters; what is wrong with their folders is found here."""
    found = {BASE: untrained(BASE)}
    for folder in map(Path, arguments.adapters):
        for file in (WEIGHTS, CONFIG):
            if not (folder / file).is_file():
                raise ValueError(f"no {file} in {folder}; give a folder that save_pretrained of an adapter wrote")
        named = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path or "an unnamed model"
        if not arguments.other_base and not same_model(named, model):
            raise ValueError(
                f"{folder} is an adapter of {named}, not of {model}; give that --model, or --other_base if it is the "
                "same under another name"
            )
        run = training_run(folder)
        name = f"{run['method']}-seed-{run['seed']}"
        if name in found:
            raise ValueError(
                f"{folder} and {found[name].folder} are both {name}; evaluate them one by one, or train "
                "them with --method names of their own"
            )
        found[name] = Candidate(name, folder, run)
    return list(found.values())


def untrained(name: str) -> Candidate:
    run = {"method": name, "seed": 0, "trainable_parameters": 0, "samples": 0, "settings": {}}
    return Candidate(name, None, run)


def same_model(one: str, other: str) -> bool:
    return one == other or Path(one).resolve() == Path(other).resolve()


def training_run(folder: Path) -> dict:
    """The run in the results.json beside an adapter; without one, the folder's name is the method."""
    if (folder / results.FILE).is_file():
        return results.load(folder / results.FILE)["runs"][0]
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        numbers = sum(np.prod(file.get_slice(name).get_shape(), dtype=int) for name in file.keys())  # noqa: SIM118
    return {
        "method": folder.resolve().name,
        "seed": 0,
        "trainable_parameters": int(numbers),
        "samples": 0,
        "settings": {"note": "trained elsewhere"},
    }


def read_questions(arguments: EvaluateArguments) -> dict[str, Questions]:
    questions = {}
    for task in arguments.tasks:
        records = tasks.load(arguments.data, task, "test", arguments.any_size)
        available = len(records)
        if arguments.limit is not None and arguments.limit < available:
            chosen = np.random.default_rng(arguments.seed).permutation(available)[: arguments.limit]
            records = [records[number] for number in sorted(chosen)]
        digest = hashlib.sha256(json.dumps(records).encode()).hexdigest()
        questions[task] = Questions(records, available, digest)
    return questions


def answer_settings(arguments: EvaluateArguments, model: str, candidate: Candidate, protocol: str) -> dict:
    """What the answers of a model to given questions depend on."""
    settings = {"base_model": model, "dtype": arguments.dtype, "adapter_sha256": None}
    if candidate.folder is not None:
        settings["adapter_sha256"] = [checkpoints.checksum(candidate.folder / name) for name in (WEIGHTS, CONFIG)]
    if protocol == "generation":
        settings |= {"beams": arguments.beams, "max_new_tokens": arguments.max_new_tokens}
    return settings


def read_answers(path: Path, settings: dict) -> list[dict] | None:
    """Answers of an earlier command; None if there are none. Those made with other settings are refused."""
    if not path.is_file():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    for name in settings:
        if saved["settings"].get(name) != settings[name]:
            raise ValueError(
                f"{path} was made with another {name} ({saved['settings'].get(name)!r}, now {settings[name]!r}); "
                "delete the file or choose another output_dir"
            )
    return saved["answers"]


def load(model: str, candidate: Candidate, dtype: str, device: torch.device) -> torch.nn.Module:
    loaded = load_model(model, dtype)
    if candidate.folder is not None:
        loaded = PeftModel.from_pretrained(loaded, candidate.folder)
    return loaded.to(device).eval()


def ask(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    records: list[dict],
    protocol: str,
    arguments: EvaluateArguments,
    accelerator: Accelerator,
) -> list[dict]:
    """Answers to all records, shared out to the processes, in order."""
    options = {"batch_size": arguments.batch_size, "progress": arguments.progress and accelerator.is_main_process}
    if protocol == "generation":
        options |= {"beams": arguments.beams, "max_new_tokens": arguments.max_new_tokens}
    mine = range(accelerator.process_index, len(records), accelerator.num_processes)
    answers = getattr(protocols, protocol)(model, tokenizer, [records[number] for number in mine], **options)
    gathered = dict(gather_object(list(zip(mine, answers, strict=True))))
    return [gathered[number] for number in range(len(records))]


def evaluate(arguments: EvaluateArguments) -> dict:
    """The results, as results.json holds them."""
    if arguments.plots:
        plots.require_matplotlib()
    if set(arguments.protocols) != {"generation"}:
        protocols.require_lm_eval()
    model = arguments.model or base_model_of(arguments.adapters[0])
    candidates = find_candidates(arguments, model)
    questions = read_questions(arguments)
    tokenizer = load_tokenizer(model)
    accelerator = Accelerator()
    check_processes(accelerator.num_processes)
    answers = {candidate.name: {name: {} for name in arguments.protocols} for candidate in candidates}
    waiting = []
    for candidate in candidates:
        for protocol in arguments.protocols:
            settings = answer_settings(arguments, model, candidate, protocol)
            for task in arguments.tasks:
                path = Path(arguments.output_dir) / candidate.name / f"{task}-{protocol}.json"
                asked = questions[task]
                file_settings = {**settings, "questions": len(asked.records), "questions_sha256": asked.digest}
                answers[candidate.name][protocol][task] = found = read_answers(path, file_settings)
                if found is None:
                    waiting.append((candidate, protocol, task, path, file_settings))
    accelerator.wait_for_everyone()  # nobody may find a file that another process has written since
    total = len(candidates) * len(arguments.protocols) * len(arguments.tasks)
    accelerator.print(f"{total} evaluations, {total - len(waiting)} of them done before")
    loaded, its_candidate = None, None
    for candidate, protocol, task, path, settings in waiting:
        if candidate is not its_candidate:
            loaded, its_candidate = None, candidate  # free the old model before the new one comes
            loaded = load(model, candidate, arguments.dtype, accelerator.device)
        accelerator.print(f"{candidate.name}: {task} by {protocol.replace('_', ' ')}")
        found = ask(loaded, tokenizer, questions[task].records, protocol, arguments, accelerator)
        answers[candidate.name][protocol][task] = found
        if accelerator.is_main_process:
            results.write_text(path, json.dumps({"settings": settings, "answers": found}, indent=1))
    answers[CONSTANT] = most_frequent_label(answers[BASE])
    rows = [untrained(CONSTANT), *candidates]
    runs = [make_run(arguments, model, candidate, answers, questions) for candidate in rows]
    device = accelerator.device
    found = results.new(arguments.experiment, runs, device=device_name(device))
    if accelerator.is_main_process:
        report(found, arguments)
    accelerator.end_training()
    return found


def make_run(
    arguments: EvaluateArguments,
    model: str,
    candidate: Candidate,
    answers: dict[str, dict],
    questions: dict[str, Questions],
) -> dict:
    own = accuracies(answers[candidate.name])
    kept = ("data", "tasks", "limit", "seed", "protocols", "beams", "max_new_tokens", "dtype")
    notes = [candidate.run["settings"].get("note")]
    for task, asked in questions.items():
        if len(asked.records) < asked.available:
            notes.append(f"{len(asked.records)} of {asked.available} questions of {task}")
        if asked.available != tasks.BENCHMARKS[task].test_items:
            notes.append(f"{asked.available} questions of {task} instead of {tasks.BENCHMARKS[task].test_items}")
    settings = {
        "base_model": model,
        "adapter": candidate.folder and str(candidate.folder),
        "evaluation": {name: value for name, value in asdict(arguments).items() if name in kept},
        "items": own.items,
    }
    if candidate.folder is not None:
        config = PeftConfig.from_pretrained(str(candidate.folder))
        settings |= {"adapter_config": adapter_values(config), "training": candidate.run["settings"]}
    if any(notes):
        settings["note"] = "; ".join(filter(None, notes))
    trained = {k: v for k, v in candidate.run.get("metrics", {}).items() if k in ("train_loss", "step_seconds")}
    run = {
        **{name: candidate.run[name] for name in ("method", "seed", "trainable_parameters", "samples")},
        "settings": json.loads(json.dumps(settings)),
        "metrics": {**trained, **own.metrics},
        "intervals": own.intervals,
    }
    if candidate.folder is not None:
        run["against_base"] = against_base(answers[candidate.name], answers[BASE])
    return run


def report(found: dict, arguments: EvaluateArguments) -> None:
    """Tables on the screen, results.json and the pictures."""
    path = Path(arguments.results or Path(arguments.output_dir) / results.FILE)
    results.write(path, found)
    for protocol in arguments.protocols:
        print(f"\n{accuracy_table(found['runs'], protocol, arguments.tasks)}")
    print(
        "\n[95 % interval], of every accuracy in results.json; * differs from base (McNemar, p < 0.05); n.s.: does not"
    )
    print(f"wrote {path}")
    for protocol in arguments.protocols if arguments.plots else ():
        print(f"wrote {accuracy_bars(found, protocol, arguments.tasks, path.with_name(f'{protocol}.png'))}")


def main(argv: list[str] | None = None) -> int:
    (arguments,) = parse([EvaluateArguments], sys.argv[1:] if argv is None else argv, __doc__)
    evaluate(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
