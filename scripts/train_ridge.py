"""Train attention layers to solve ridge regression in context, or measure the known solutions on the same problems.

    python scripts/train_ridge.py --config scripts/configs/ridge_regression/quick.yaml --kind linear --seed 1
    python scripts/train_ridge.py --kind gradient_descent --num_hidden_layers 2 --output_dir outputs/two_steps

`test_loss` is the mean squared error of the query's value without noise; 1 is the loss of the prior's mean. Started
again after an interruption, training goes on from its newest checkpoint. --output_dir receives results.json and, of a
trained kind, the model (as `save_pretrained` writes it).
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from hf_sparsecoding.models import LinearAttentionConfig, LinearAttentionForRegression
from hf_sparsecoding.models.linear_attention.configuration_linear_attention import KINDS
from hf_sparsecoding.tasks.ridge_regression import RidgeRegression, loss
from hf_sparsecoding.training import TrainingArguments, make_accelerator, train
from hf_sparsecoding.training.command_line import parse
from hf_sparsecoding.training.runs import make_run, write_run
from hf_sparsecoding.training.synthetic import TrainingData, tensors


SOLUTIONS = ("ridge", "gradient_descent")
TUNING_ITEMS = 4096  # training problems on which gradient descent's step size is chosen


@dataclass(frozen=True)
class RidgeArguments:
    """What predicts the query's value, and how it is measured."""

    kind: str = field(
        default="extended", metadata={"help": f"to train: {', '.join(KINDS)}; known solutions: {', '.join(SOLUTIONS)}"}
    )
    num_hidden_layers: int = field(default=1, metadata={"help": "layers, or steps of gradient_descent"})
    num_attention_heads: int = field(default=1, metadata={"help": "heads per layer, summed"})
    residual: bool = field(default=False, metadata={"help": "add each layer's input to its output"})
    eval_items: int = field(default=16384, metadata={"help": "test problems"})
    eval_batch_size: int = field(default=2048, metadata={"help": "problems per forward pass in evaluation"})
    eval_seed: int = field(default=0, metadata={"help": "seed of the test problems, the same for every --seed"})
    method: str = field(default="", metadata={"help": "name in the results; default: the kind"})
    experiment: str = field(default="ridge-regression", metadata={"help": "name of the experiment in the results"})

    def __post_init__(self):
        if self.kind not in KINDS + SOLUTIONS:
            raise ValueError(f"kind must be one of {', '.join(KINDS + SOLUTIONS)}, got {self.kind!r}")
        for name in ("num_hidden_layers", "num_attention_heads", "eval_items", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.eval_seed < 0:
            raise ValueError(f"eval_seed must be at least 0, got {self.eval_seed}")


def make_model(arguments: RidgeArguments, task: RidgeRegression) -> LinearAttentionForRegression:
    """Without embedding or head: the prompts' columns are the layers' columns."""
    config = LinearAttentionConfig(
        kind=arguments.kind,
        hidden_size=task.num_features + 1,
        sequence_length=task.num_examples + 1,
        num_hidden_layers=arguments.num_hidden_layers,
        num_attention_heads=arguments.num_attention_heads,
        residual=arguments.residual,
    )
    return LinearAttentionForRegression(config)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, task: RidgeRegression, arguments: RidgeArguments, accelerator: Accelerator
) -> dict[str, float]:
    """Mean squared error over the test problems."""
    model.eval()
    total = 0.0
    for start in range(0, arguments.eval_items, arguments.eval_batch_size):
        count = min(arguments.eval_batch_size, arguments.eval_items - start)
        batch = tensors(task.examples(start, count, "test", arguments.eval_seed))
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        total += count * model(**batch).loss.item()
    return {"test_loss": total / arguments.eval_items}


def solve(arguments: RidgeArguments, task: RidgeRegression, seed: int) -> dict[str, float]:
    """A known solution's loss on the test problems; gradient descent's step size is tuned on training problems."""
    problems = task.generate(arguments.eval_items, "test", arguments.eval_seed)
    if arguments.kind == "ridge":
        return {"test_loss": loss(problems, task.ridge_weights(problems))}
    steps = arguments.num_hidden_layers
    size = task.tuned_step_size(task.generate(TUNING_ITEMS, "train", seed), steps)
    return {"test_loss": loss(problems, task.descent_weights(problems, steps, size)), "step_size": size}


def make_solution(arguments: RidgeArguments, task: RidgeRegression, seed: int, settings: dict) -> dict:
    """The run of a known solution."""
    return {
        "method": method_name(arguments),
        "seed": seed,
        "trainable_parameters": 0,
        "samples": 0,
        "settings": settings,
        "metrics": solve(arguments, task, seed),
    }


def fit(
    arguments: RidgeArguments,
    task: RidgeRegression,
    training: TrainingArguments,
    settings: dict,
    accelerator: Accelerator,
) -> tuple[dict, LinearAttentionForRegression]:
    """Train and measure a model; (its run, the model)."""
    set_seed(training.seed)
    model = make_model(arguments, task).to(accelerator.device)
    measure = partial(evaluate, task=task, arguments=arguments, accelerator=accelerator)
    history = train(
        model,
        TrainingData(task, training.seed),
        lambda model, batch: model(**batch).loss,
        training,
        accelerator=accelerator,
        # a finished run may be measured again with other evaluations
        settings={name: value for name, value in settings.items() if not name.startswith("eval")},
        evaluate=measure,
    )
    settings = {**settings, **training.identity(), "num_processes": accelerator.num_processes}
    return make_run(method_name(arguments), model, history, training, settings, measure(model)), model


def method_name(arguments: RidgeArguments) -> str:
    return arguments.method or arguments.kind


def run(arguments: RidgeArguments, task: RidgeRegression, training: TrainingArguments) -> dict:
    """Train or solve, and measure; the run as results.json holds it."""
    accelerator = make_accelerator(training)
    settings = {**asdict(task), **asdict(arguments)}
    for name in ("method", "experiment"):
        del settings[name]
    if arguments.kind in SOLUTIONS:
        made, model = make_solution(arguments, task, training.seed, settings), None
    else:
        made, model = fit(arguments, task, training, settings, accelerator)
    if accelerator.is_main_process:
        write_run(made, arguments.experiment, training.output_dir, accelerator.device, model)
    accelerator.end_training()
    return made


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    run(*parse([RidgeArguments, RidgeRegression, TrainingArguments], argv, __doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
