"""Train the two-layer network, or the minimal model of its induction head, on in-context classification.

    python scripts/train_in_context.py --config scripts/configs/in_context_classification/scaled.yaml \\
        --output_dir outputs/scaled
    python scripts/train_in_context.py --config scripts/configs/in_context_classification/published.yaml \\
        --output_dir outputs/published

Started again after an interruption, it goes on from its newest checkpoint. --output_dir receives the model (as
`save_pretrained` writes it) and results.json: the accuracies iw, ic and ic2, the progress measures and the loss, at
the end and every --evaluate_every steps on the way. --seed decides classes, sequences and initial weights.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field

import torch
from accelerate.utils import set_seed

from hf_sparsecoding.evaluation.progress_measures import InContextEvaluation
from hf_sparsecoding.models import (
    InductionConfig,
    InductionForSequenceClassification,
    MinimalInductionConfig,
    MinimalInductionForSequenceClassification,
)
from hf_sparsecoding.tasks.in_context_classification import InContextClassification
from hf_sparsecoding.tasks.streams import CHUNK
from hf_sparsecoding.training import TrainingArguments, TrainingResult, make_accelerator, train
from hf_sparsecoding.training.command_line import parse
from hf_sparsecoding.training.runs import LAST, make_run, write_run


AHEAD = 4 * CHUNK  # sequences that are drawn at once
MODELS = ("induction", "minimal")


@dataclass(frozen=True)
class ModelArguments:
    """Fields of the models' configurations; the sizes that the task decides are left out."""

    model: str = field(default="induction", metadata={"help": "induction: the two-layer network; minimal"})
    mixer: str = field(default="softmax", metadata={"help": "of induction: softmax, sparse_coding"})
    transfer: str = field(default="none", metadata={"help": "of induction: none, paper, aligned"})
    transfer_init: float = field(default=0.0, metadata={"help": "of induction: initial lambda"})
    threshold: float = field(default=0.3, metadata={"help": "of induction: xi of sparse_coding"})
    score_norm: str = field(default="none", metadata={"help": "of induction: none, keys"})
    output_norm: str = field(default="none", metadata={"help": "of induction: none, length"})
    head_dim: int = field(default=128, metadata={"help": "of induction: size of queries and keys"})
    intermediate_size: int = field(default=128, metadata={"help": "width of the classifier"})
    label_bias: bool = field(default=False, metadata={"help": "of minimal: learn beta2 as well"})

    def __post_init__(self):
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        if self.model == "minimal" and (self.mixer, self.transfer) != ("softmax", "none"):
            raise ValueError(
                f"the minimal model has no mixer={self.mixer!r} with transfer={self.transfer!r}; use model=induction"
            )
        if self.model == "induction" and self.label_bias:
            raise ValueError("label_bias=True needs model='minimal', got 'induction'")


@dataclass(frozen=True)
class EvaluationArguments:
    """What is measured, and under which name it is kept."""

    eval_items: int = field(default=1024, metadata={"help": "sequences per test set"})
    method: str = field(default="", metadata={"help": "name in the results; default: the model and its mixer"})
    experiment: str = field(default="in-context-classification", metadata={"help": "name of the experiment"})

    def __post_init__(self):
        if self.eval_items < 1:
            raise ValueError(f"eval_items must be at least 1, got {self.eval_items}")


class TrainingSequences:
    """`batch(start, count)` for the training loop; many batches are drawn at once, which is faster."""

    def __init__(self, task: InContextClassification, seed: int):
        self.task, self.seed = task, seed
        self.start, self.drawn = 0, {"labels": torch.empty(0)}

    def __call__(self, start: int, count: int) -> dict[str, torch.Tensor]:
        if not self.start <= start <= start + count <= self.start + len(self.drawn["labels"]):
            arrays = self.task.examples(start, max(AHEAD, count), "train", self.seed)
            self.start, self.drawn = start, {name: torch.from_numpy(array) for name, array in arrays.items()}
        first = start - self.start
        return {name: self.drawn[name][first : first + count] for name in ("inputs", "labels")}


def make_model(task: InContextClassification, arguments: ModelArguments) -> torch.nn.Module:
    """A new model for the task."""
    options = asdict(arguments)
    label_bias, kind = options.pop("label_bias"), options.pop("model")
    sizes = {"content_size": task.content_size, "num_outputs": task.labels}
    if kind == "minimal":
        sizes["intermediate_size"] = arguments.intermediate_size
        return MinimalInductionForSequenceClassification(MinimalInductionConfig(label_bias=label_bias, **sizes))
    sizes |= {"position_size": task.positions, "num_pairs": task.pairs}
    return InductionForSequenceClassification(InductionConfig(**options, **sizes))


def mean_loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    return model(**batch).loss


def run(
    task: InContextClassification,
    model_arguments: ModelArguments,
    arguments: EvaluationArguments,
    training: TrainingArguments,
) -> dict:
    """Train and measure; the run as results.json holds it."""
    accelerator = make_accelerator(training)
    set_seed(training.seed)
    model = make_model(task, model_arguments).to(accelerator.device)
    settings = {**asdict(task), **asdict(model_arguments), **training.identity()}
    evaluate = InContextEvaluation(task, arguments.eval_items, training.seed)
    history = train(
        model,
        TrainingSequences(task, training.seed),
        mean_loss,
        training,
        accelerator=accelerator,
        settings=settings,
        evaluate=evaluate,
    )
    metrics = evaluate(model)
    kept = {**settings, "eval_items": arguments.eval_items, "num_processes": accelerator.num_processes}
    method = arguments.method or f"{model_arguments.model}, {model_arguments.mixer}"
    made = with_losses(make_run(method, model, history, training, kept, metrics), history, training)
    if accelerator.is_main_process:
        write_run(made, arguments.experiment, training.output_dir, accelerator.device, model)
    accelerator.log(metrics, step=training.steps)
    accelerator.end_training()
    return made


def with_losses(made: dict, history: TrainingResult, training: TrainingArguments) -> dict:
    """The run with the mean training loss since the last evaluation in every entry, as "loss"."""

    def loss_before(step: int) -> float:
        losses = history.losses[max(0, step - (training.evaluate_every or LAST)) : step]
        return sum(losses) / len(losses)

    metrics = {name: value for name, value in made["metrics"].items() if name != "train_loss"}
    entries = [{**entry, "loss": loss_before(entry["step"])} for entry in made["history"]]
    return {**made, "metrics": {**metrics, "loss": loss_before(training.steps)}, "history": entries}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    run(*parse([InContextClassification, ModelArguments, EvaluationArguments, TrainingArguments], argv, __doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
