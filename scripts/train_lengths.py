"""Train a small decoder on short problems and evaluate it on long ones.

    python scripts/train_lengths.py --config scripts/configs/length_generalization/addition.yaml \\
        --output_dir outputs/addition
    python scripts/train_lengths.py --task planted --task_options '{"k": 4}' --positions none \\
        --output_dir outputs/parity

--positions says what the decoder knows about places:

    none        nothing
    rope, relative, alibi       distances, counted in tokens
    absolute    embeddings of s, s + 1, ... with a random start s
    coupled     embeddings of the task's coupled ids, which are given for the response too (an oracle)
    predicted   the same, but the ids of the response are predicted by a second head (predictive position coupling)

Started again after an interruption, it goes on from its newest checkpoint. Several processes: `accelerate launch`.
--output_dir receives the model (as `save_pretrained` writes it) and results.json.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from hf_sparsecoding.evaluation.lengths import evaluate_length
from hf_sparsecoding.models import SparseDecoderConfig, SparseDecoderForCausalLM
from hf_sparsecoding.tasks import length_generalization as tasks
from hf_sparsecoding.training import TrainingArguments, make_accelerator, train
from hf_sparsecoding.training.command_line import near_match, parse, read_options
from hf_sparsecoding.training.runs import make_run, write_run


TASKS = {
    "addition": tasks.Addition,
    "multiplication": tasks.Multiplication,
    "reversal": tasks.Reversal,
    "copy": tasks.Copy,
    "pattern_matching": tasks.PatternMatching,
    "parity": tasks.ScratchpadParity,
    "planted": tasks.PlantedCorrelations,
}
# name -> (positions of the decoder, ids of the task)
POSITIONS = {
    **{name: (name, "coupled") for name in ("none", "rope", "relative", "alibi")},
    "absolute": ("learned", "absolute"),
    "coupled": ("learned", "coupled"),
    "predicted": ("learned", "coupled"),
}
MULTIPLES = (2, 3, 4, 8, 16)  # of the longest training length that get a metric of their own


@dataclass(frozen=True)
class LengthArguments:
    """The task, and what is measured on it."""

    task: str = field(default="addition", metadata={"help": ", ".join(TASKS)})
    task_options: str = field(default="{}", metadata={"help": "options of the task as JSON text"})
    positions: str = field(default="predicted", metadata={"help": ", ".join(POSITIONS)})
    eval_items: int = field(default=1024, metadata={"help": "problems per length to evaluate on"})
    eval_batch_size: int = field(default=256, metadata={"help": "problems that are decoded together"})
    eval_seed: int = field(default=0, metadata={"help": "seed of the evaluation problems, the same for every --seed"})
    method: str = field(default="", metadata={"help": "name in the results; default: task, positions and mixer"})
    experiment: str = field(default="length-generalization", metadata={"help": "name of the experiment"})

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}{near_match(self.task, list(TASKS))}")
        if self.positions not in POSITIONS:
            raise ValueError(f"unknown positions {self.positions!r}{near_match(self.positions, list(POSITIONS))}")
        for name in ("eval_items", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.eval_seed < 0:
            raise ValueError(f"eval_seed must be at least 0, got {self.eval_seed}")


@dataclass(frozen=True)
class ModelArguments:
    """Fields of SparseDecoderConfig; those that the task and --positions decide are left out."""

    mixer: str = field(default="softmax", metadata={"help": "softmax, sparse_coding, top_k"})
    threshold: float = field(
        default=1.0, metadata={"help": "initial xi of sparse_coding; below 1 with score_norm=row"}
    )
    train_threshold: bool = field(default=False, metadata={"help": "learn xi, one per head"})
    kept_keys: int = field(default=4, metadata={"help": "keys that top_k keeps"})
    score_norm: str = field(default="keys", metadata={"help": "of sparse_coding: keys, row, none"})
    output_norm: str = field(
        default="", metadata={"help": "none, length, head; default: length after score_norm=keys, else none"}
    )
    l1_penalty: float = field(default=0.0, metadata={"help": "weight of the coefficients' absolute sum in the loss"})
    hidden_size: int = field(default=128, metadata={"help": "width"})
    intermediate_size: int = field(default=256, metadata={"help": "width of the MLP"})
    num_hidden_layers: int = field(default=1, metadata={"help": "layers"})
    num_attention_heads: int = field(default=4, metadata={"help": "heads"})
    head_dim: int = field(default=0, metadata={"help": "size of a head's queries; 0: hidden_size / heads"})
    initializer_range: float = field(default=0.02, metadata={"help": "initial standard deviation of the embeddings"})


def make_task(arguments: LengthArguments) -> tasks.SequenceTask:
    kind = TASKS[arguments.task]
    options = read_options(kind, arguments.task, arguments.task_options, leave_out=("positions",))
    return kind(**options, positions=POSITIONS[arguments.positions][1])


def make_model(
    task: tasks.SequenceTask, arguments: LengthArguments, model_arguments: ModelArguments
) -> SparseDecoderForCausalLM:
    chosen_by_the_model = {name: getattr(model_arguments, name) or None for name in ("head_dim", "output_norm")}
    config = SparseDecoderConfig(
        **{**asdict(model_arguments), **chosen_by_the_model},
        vocab_size=len(task.vocabulary),
        max_position=task.max_position,
        cyclic_positions=task.cyclic,
        positions=POSITIONS[arguments.positions][0],
        predict_positions=arguments.positions == "predicted",
        bos_token_id=tasks.BOS,
        eos_token_id=tasks.EOS,
        pad_token_id=tasks.PAD,
    )
    return SparseDecoderForCausalLM(config)


def sequences(task: tasks.SequenceTask, seed: int, learned: bool, start: int, count: int) -> dict[str, torch.Tensor]:
    """Examples start .. start + count - 1 of training, as the model takes them."""
    arrays = task.examples(start, count, "train", seed)
    names = {"inputs": "input_ids", "labels": "labels", "position_labels": "position_labels"}
    names |= {"position_ids": "position_ids"} if learned else {}
    return {names[name]: torch.from_numpy(array) for name, array in arrays.items() if name in names}


def summed_loss(model: torch.nn.Module, batch: dict, expected: float) -> torch.Tensor:
    """Sum over the tokens of a problem, mean over problems, in units of a problem of expected size.

    The mean over tokens, whose number differs from batch to batch, would not be the same for several processes.
    """
    tokens = (batch["labels"] != tasks.IGNORED).sum()
    return model(**batch).loss * tokens / (len(batch["labels"]) * expected)


def tokens_per_problem(task: tasks.SequenceTask, seed: int) -> float:
    """Mean number of tokens with a label, over the first problems of training."""
    return float((task.examples(0, 1024, "train", seed)["labels"] != tasks.IGNORED).sum(1).mean())


def evaluate(
    model: SparseDecoderForCausalLM,
    task: tasks.SequenceTask,
    arguments: LengthArguments,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Metrics by length: of the longest in training and of `test_lengths`; those at 2 x the longest are also `_2x`."""
    metrics, longest = {}, task.train_lengths[1]
    for length in sorted({longest, *task.test_lengths}):
        measured = evaluate_length(
            model,
            task,
            length,
            accelerator,
            items=arguments.eval_items,
            batch_size=arguments.eval_batch_size,
            seed=arguments.eval_seed,
            oracle=arguments.positions == "coupled",
        )
        metrics |= {f"{name}_{length}": value for name, value in measured.items()}
        if length % longest == 0 and length // longest in MULTIPLES:
            metrics |= {f"{name}_{length // longest}x": value for name, value in measured.items()}
    return metrics


def run(arguments: LengthArguments, model_arguments: ModelArguments, training: TrainingArguments) -> dict:
    """Train and measure; the run as results.json holds it."""
    task = make_task(arguments)
    accelerator = make_accelerator(training)
    set_seed(training.seed)
    model = make_model(task, arguments, model_arguments).to(accelerator.device)
    measure = partial(evaluate, task=task, arguments=arguments, accelerator=accelerator)
    settings = {**asdict(arguments), **asdict(model_arguments), **training.identity()}
    for name in ("method", "experiment"):
        del settings[name]
    # a finished run may be measured again with other evaluations
    identity = {name: value for name, value in settings.items() if not name.startswith("eval")}
    history = train(
        model,
        partial(sequences, task, training.seed, model.config.positions == "learned"),
        partial(summed_loss, expected=tokens_per_problem(task, training.seed)),
        training,
        accelerator=accelerator,
        settings=identity,
        evaluate=measure,
    )
    metrics = measure(model)
    settings |= {"num_processes": accelerator.num_processes, "train_lengths": list(task.train_lengths)}
    settings["items"] = {name: arguments.eval_items for name in metrics if "match" in name}  # those that are shares
    method = arguments.method or f"{arguments.task}, {arguments.positions}, {model_arguments.mixer}"
    made = make_run(method, model, history, training, settings, metrics)
    if accelerator.is_main_process:
        write_run(made, arguments.experiment, training.output_dir, accelerator.device, model)
    accelerator.log(metrics, step=training.steps)
    accelerator.end_training()
    return made


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    run(*parse([LengthArguments, ModelArguments, TrainingArguments], argv, __doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
