"""Fine-tune a causal language model on commonsense reasoning with any PEFT adapter: the LLM-Adapters protocol.

The mixture of 170,420 records, LoRA of rank 32, in bf16:

    python scripts/finetune_commonsense.py --config scripts/configs/commonsense/llama_7b.yaml

Without the Hub, from a model folder and a folder of data (its files: see hf_sparsecoding/tasks/commonsense.py):

    python scripts/finetune_commonsense.py --model MODEL_FOLDER --data DATA_FOLDER --tasks arc_easy openbookqa \\
        --adapter_config scripts/configs/adapters/lags_per_head.yaml --learning_rate 1e-2 --output_dir outputs/mine

It trains with transformers' Trainer, whose arguments all work (bf16, activation_checkpointing, report_to, ...), on the
responses only. Started again after an interruption, it goes on from the newest whole checkpoint of --output_dir. For
several processes put `accelerate launch --config_file scripts/configs/accelerate/ddp.yaml` before
`scripts/finetune_commonsense.py`; batches are per process. --output_dir receives the adapter and results.json;
scripts/evaluate_commonsense.py measures it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from peft import get_peft_model
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import hf_sparsecoding  # noqa: F401  registers the adapter with peft
from hf_sparsecoding.reports import results
from hf_sparsecoding.tasks import commonsense
from hf_sparsecoding.training import check_processes, checkpoints
from hf_sparsecoding.training.command_line import parse
from hf_sparsecoding.training.completions import pad_token_id, selects_positions
from hf_sparsecoding.training.pretrained import (
    DTYPES,
    adapter_label,
    adapter_values,
    load_model,
    load_tokenizer,
    read_adapter_config,
)
from hf_sparsecoding.training.responses import Collator, encode_records
from hf_sparsecoding.training.runs import device_name


logger = logging.getLogger(__name__)

# what a result depends on, of transformers' arguments; the batch size is told over all processes
DECISIVE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "num_train_epochs")
DECISIVE += ("max_steps", "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
DECISIVE += ("max_grad_norm", "gradient_accumulation_steps", "bf16", "fp16", "seed", "data_seed")
DECISIVE += ("train_sampling_strategy", "label_smoothing_factor", "neftune_noise_alpha", "dataloader_drop_last")
DECISIVE += ("average_tokens_across_devices",)
NOT_DECISIVE = ("method", "experiment", "data", "any_size", "resume")  # of our own


@dataclass(frozen=True)
class FineTuneArguments:
    """What is adapted, on which records."""

    model: str = field(default="", metadata={"help": "base model: a folder or an id of the Hub"})
    dtype: str = field(default="float32", metadata={"help": f"data type of the base model: {', '.join(DTYPES)}"})
    adapter_config: str = field(default="", metadata={"help": "PEFT config: a YAML or JSON file, or JSON text"})
    method: str = field(default="", metadata={"help": "name in the results; default: the config file's, or the type"})
    experiment: str = field(default="commonsense", metadata={"help": "name of the experiment in the results"})
    data: str = field(
        default=commonsense.HUB, metadata={"help": "hub, or a folder with commonsense_170k.json or <task>/train.json"}
    )
    tasks: list[str] = field(
        default_factory=lambda: [commonsense.MIXTURE],
        metadata={"help": f"training sets: {commonsense.MIXTURE}, or some of {', '.join(commonsense.TASKS)}"},
    )
    any_size: bool = field(default=False, metadata={"help": "take a mixture that is not of the published size"})
    records: int | None = field(
        default=None, metadata={"help": "records to train on, drawn by the seed; default: all"}
    )
    max_length: int = field(
        default=256, metadata={"help": "tokens of a prompt with its response; longer prompts are cut from the left"}
    )
    packing: bool = field(
        default=False, metadata={"help": "lay a batch end to end, without padding, documents kept apart"}
    )
    resume: bool = field(default=True, metadata={"help": "go on from the newest whole checkpoint in output_dir"})

    def __post_init__(self):
        for name in ("model", "adapter_config"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing: {type(self).__dataclass_fields__[name].metadata['help']}")
        commonsense.check_tasks(self.tasks, (*commonsense.TASKS, commonsense.MIXTURE))
        if commonsense.MIXTURE in self.tasks and len(self.tasks) > 1:
            raise ValueError(f"{commonsense.MIXTURE} holds all tasks; give it alone, got {self.tasks}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("records", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass
class TrainerArguments(TrainingArguments):
    """transformers' arguments; the defaults here are the protocol's, for one process."""

    output_dir: str = field(default="outputs/finetune_commonsense", metadata={"help": "folder of all that is written"})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "records per forward pass of a process"})
    learning_rate: float = field(default=3e-4, metadata={"help": "highest learning rate, after the warm-up"})
    warmup_steps: float = field(default=100, metadata={"help": "steps over which the learning rate rises from 0"})
    logging_steps: float = field(default=10, metadata={"help": "steps whose mean loss makes an entry of the log"})
    save_total_limit: int | None = field(default=2, metadata={"help": "how many of the newest checkpoints stay"})
    seed: int = field(default=0, metadata={"help": "seed of the adapter, the records' order and dropout"})
    report_to: str = field(default="none", metadata={"help": "tracker (tensorboard, wandb, ...)"})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "hide losses that are not finite"})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "look for adapter parameters without a gradient in every step"}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.save_total_limit == 1:
            raise ValueError("save_total_limit must be at least 2: killed while it writes one, a run needs the other")
        if self.do_eval:  # transformers sets it with eval_strategy
            raise ValueError(
                f"eval_strategy={self.eval_strategy.value!r}: nothing is held out to evaluate on while training; "
                "scripts/evaluate_commonsense.py measures the result"
            )
        if self.resume_from_checkpoint:
            raise ValueError(f"resume_from_checkpoint={self.resume_from_checkpoint!r}: use --resume, the default")
        check_processes(self.world_size)
        if self.n_gpu > 1:
            raise ValueError(
                f"one process sees {self.n_gpu} GPUs; start it with accelerate launch, or set CUDA_VISIBLE_DEVICES=0"
            )

    @property
    def batch_size(self) -> int:
        """Records per optimizer step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size


def read_records(arguments: FineTuneArguments, seed: int) -> list[dict]:
    records = [
        record
        for task in arguments.tasks
        for record in commonsense.load(arguments.data, task, "train", arguments.any_size)
    ]
    if arguments.records is None:
        return records
    if arguments.records > len(records):
        raise ValueError(f"records must be at most {len(records):,}, as many as there are, got {arguments.records:,}")
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))
    return [records[number] for number in order[: arguments.records].tolist()]


def count_duplicates(arguments: FineTuneArguments, records: list[dict]) -> dict[str, int]:
    """Test items by task that are among the records; tasks without a test set here are left out."""
    counts = {}
    for task in commonsense.TASKS if arguments.tasks == [commonsense.MIXTURE] else arguments.tasks:
        try:
            test = commonsense.load(arguments.data, task, "test", any_size=True)
        except ValueError as error:
            logger.warning("duplicates between training and test of %s not counted: %s", task, error)
        else:
            counts |= commonsense.train_test_duplicates(records, test)
    return counts


class Bookkeeping(TrainerCallback):
    """Marks checkpoints that are whole, logs before each and at the end, and stops at a loss that is not finite.

    A log before every checkpoint makes a resumed run log the same means as one that was not interrupted.
    """

    def __init__(self, identity: dict):
        self.identity = identity
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.began)
        control.should_log |= control.should_save or state.global_step >= state.max_steps

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_log |= control.should_save

    def on_log(self, args, state, control, **kwargs):
        entry = state.log_history[-1]
        if "loss" not in entry:
            return
        entry["step_seconds"], self.seconds = statistics.median(self.seconds), []
        if not math.isfinite(entry["loss"]):
            raise FloatingPointError(
                f"the loss is {entry['loss']} at step {state.global_step}; lower learning_rate "
                f"({args.learning_rate}), raise warmup_steps ({args.warmup_steps}) or leave out fp16"
            )

    def on_save(self, args, state, control, **kwargs):
        PartialState().wait_for_everyone()  # each process writes files of its own
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / checkpoints.INDEX).unlink(missing_ok=True)
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            files = {str(path.relative_to(folder)): checkpoints.checksum(path) for path in paths}
            index = {"step": state.global_step, "identity": self.identity, "files": files}
            results.write_text(folder / checkpoints.INDEX, json.dumps(index, indent=2))


def check_folder(output: Path, save_total_limit: int | None) -> None:
    """Trainer deletes the oldest of the folders whose names begin with checkpoint-, whatever follows."""
    own = {path for path in output.glob("checkpoint-*") if path.is_dir()} - set(saved_checkpoints(output))
    if own and save_total_limit is not None:
        raise ValueError(
            f"{min(own)} is no checkpoint of this script, and Trainer would delete it as an old one: rename it or "
            "choose another output_dir"
        )


def saved_checkpoints(output: Path) -> list[Path]:
    """The folders that Trainer named by their steps, the newest first; what else begins alike is the user's."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: -int(steps[path]))


def newest_checkpoint(output: Path, identity: dict) -> Path | None:
    """The newest whole checkpoint; half-written ones are passed over, one of another run is refused."""
    for path in saved_checkpoints(output):
        reason = checkpoints.damage(path)
        if reason is None:
            saved = json.loads((path / checkpoints.INDEX).read_text())
            checkpoints.check_identity(path, saved["identity"], identity)
            return path
        logger.warning("skipping the damaged checkpoint %s: %s", path, reason)
    return None


def remove_checkpoints(output: Path) -> None:
    if PartialState().is_main_process:
        for path in saved_checkpoints(output):
            shutil.rmtree(path)
    PartialState().wait_for_everyone()


def run_identity(arguments: FineTuneArguments, training: TrainerArguments, config, records: list[dict]) -> dict:
    """All that decides the result, as JSON holds it; the records by their content, as files change."""
    own = {k: v for k, v in asdict(arguments).items() if k not in NOT_DECISIVE}
    known = training.to_dict()
    identity = {
        **own,
        **{name: known[name] for name in DECISIVE},
        "batch_size": training.batch_size,
        "num_processes": training.world_size,
        "adapter_config": adapter_values(config),
        "records_sha256": hashlib.sha256(json.dumps(records).encode()).hexdigest(),
    }
    return json.loads(json.dumps(identity))


def finetune(arguments: FineTuneArguments, training: TrainerArguments) -> dict:
    """Train; the run as results.json holds it."""
    config = read_adapter_config(arguments.adapter_config)
    records = read_records(arguments, training.seed)
    duplicates = count_duplicates(arguments, records)
    main = PartialState().is_main_process
    tokenizer = load_tokenizer(arguments.model)
    dataset, longer = encode_records(tokenizer, records, arguments.max_length, main and not training.disable_tqdm)
    if main:
        print(f"{len(records):,} records; of {longer:,} longer than {arguments.max_length} tokens the prompt was cut")
        print(f"test questions that are also trained on: {duplicates or 'no test set here'}")
    identity = run_identity(arguments, training, config, records)
    output = Path(training.output_dir)
    check_folder(output, training.save_total_limit)
    if not arguments.resume:
        remove_checkpoints(output)
    checkpoint = newest_checkpoint(output, identity)
    if checkpoint is not None and main:
        print(f"resuming from {checkpoint}")
    set_seed(training.seed)
    model = get_peft_model(load_model(arguments.model, arguments.dtype), config)
    trainable = sum(value.numel() for value in model.parameters() if value.requires_grad)
    select = selects_positions(model) and not training.label_smoothing_factor  # which smooths over all positions
    trainer = Trainer(
        model,
        training,
        train_dataset=dataset,
        data_collator=Collator(pad_token_id(tokenizer), arguments.packing, select),
        callbacks=[Bookkeeping(identity)],
    )
    if not trainer.is_fsdp_enabled and (training.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"):
        raise ValueError(
            f"FSDP was asked for, but accelerate does not shard on {trainer.accelerator.distributed_type} (a CPU or a "
            "single process): use scripts/configs/accelerate/ddp.yaml"
        )
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    counts = {"records": len(records), "longer_records": longer, "test_duplicates": duplicates}
    run = make_run(arguments, trainer, trainable, {**identity, "data": arguments.data, **counts})
    if main:
        device = training.device
        results.write(output / results.FILE, results.new(arguments.experiment, [run], device=device_name(device)))
        print(f"wrote the adapter and {output / results.FILE}")
    return run


def make_run(arguments: FineTuneArguments, trainer: Trainer, trainable: int, settings: dict) -> dict:
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "method": arguments.method or adapter_label(arguments.adapter_config),
        "seed": settings["seed"],
        "trainable_parameters": trainable,
        "samples": round(trainer.state.epoch * settings["records"]),
        "settings": {**settings, "steps": trainer.state.global_step},
        "metrics": {
            "train_loss": log[-1]["loss"],
            "step_seconds": statistics.median(entry["step_seconds"] for entry in log),
        },
        "history": [{name: entry[name] for name in ("step", "loss", "learning_rate")} for entry in log],
    }


def main(argv: list[str] | None = None) -> int:
    arguments, training = parse([FineTuneArguments, TrainerArguments], sys.argv[1:] if argv is None else argv, __doc__)
    finetune(arguments, training)
    return 0


if __name__ == "__main__":
    sys.exit(main())
