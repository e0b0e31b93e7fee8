"""Train a small model on a synthetic task, evaluate it on test and out-of-distribution problems.

    python scripts/train_synthetic.py --config scripts/configs/s_raven/quick.yaml --output_dir outputs/quick
    python scripts/train_synthetic.py --config scripts/configs/raven/center.yaml --output_dir outputs/raven

Started again after an interruption, it goes on from its newest checkpoint. Several processes on one machine:
`accelerate launch`, or `python -m torch.distributed.run --nproc_per_node 2` (on CPU with ACCELERATE_USE_CPU=1), before
`scripts/train_synthetic.py`. --output_dir receives the model (as `save_pretrained` writes it) and results.json.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from accelerate.utils import set_seed

from hf_sparsecoding.evaluation.images import check_measurable
from hf_sparsecoding.models import SparseTransformerConfig
from hf_sparsecoding.training import TrainingArguments, make_accelerator, train
from hf_sparsecoding.training.command_line import near_match, parse
from hf_sparsecoding.training.runs import make_run, write_run
from hf_sparsecoding.training.synthetic import TASKS, TrainingData, evaluate, make_model, make_task


LARGEST_SCORES = 100  # GiB of one layer's scores; training holds more than one such array


@dataclass(frozen=True)
class SyntheticArguments:
    """The task, and what is measured on it."""

    task: str = field(default="s_raven", metadata={"help": f"{', '.join(TASKS)}"})
    task_options: str = field(default="{}", metadata={"help": "options of the task as JSON text"})
    train_items: int = field(default=0, metadata={"help": "problems to train on in epochs; 0: all are fresh"})
    eval_items: int = field(default=10240, metadata={"help": "problems per split to evaluate on"})
    eval_batch_size: int = field(default=256, metadata={"help": "problems per forward pass in evaluation"})
    eval_seed: int = field(default=0, metadata={"help": "seed of the evaluation problems, the same for every --seed"})
    threshold_warmup: int = field(default=0, metadata={"help": "steps over which the threshold grows from 0"})
    method: str = field(default="", metadata={"help": "name in the results; default: mixer and transfer"})
    experiment: str = field(default="synthetic", metadata={"help": "name of the experiment in the results"})

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}{near_match(self.task, list(TASKS))}")
        for name in ("eval_items", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("train_items", "threshold_warmup", "eval_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class ModelArguments:
    """Fields of SparseTransformerConfig, without those that the task decides, norm_epsilon and fused_attention."""

    mixer: str = field(default="softmax", metadata={"help": "softmax, sparse_coding, hyla, linear"})
    transfer: str = field(default="none", metadata={"help": "none, paper, aligned"})
    transfer_stage: str = field(default="coefficients", metadata={"help": "coefficients, or scores"})
    contexts: str = field(default="", metadata={"help": "what a context is: rows or panels (RAVENs), pairs (images)"})
    transfer_per_head: bool = field(default=False, metadata={"help": "one lambda per head and context"})
    transfer_init: float = field(default=0.0, metadata={"help": "initial lambda"})
    threshold: float = field(default=0.3, metadata={"help": "initial xi of sparse_coding"})
    threshold_type: str = field(default="fixed", metadata={"help": "xi is fixed, or learned per layer or head"})
    phi: str = field(default="linear", metadata={"help": "linear or relu encoding dictionary"})
    psi: str = field(default="linear", metadata={"help": "linear or relu decoding dictionary"})
    score_norm: str = field(default="", metadata={"help": "none, heads or keys; default: the mixer's"})
    output_norm: str = field(default="none", metadata={"help": "none, head (RMS per head), length (1 / sqrt N)"})
    patch_size: int = field(default=4, metadata={"help": "side of a token's patch in pixels, for images"})
    hidden_size: int = field(default=128, metadata={"help": "width"})
    intermediate_size: int = field(default=256, metadata={"help": "width of the MLP"})
    num_hidden_layers: int = field(default=4, metadata={"help": "layers"})
    num_attention_heads: int = field(default=16, metadata={"help": "heads"})
    head_dim: int = field(default=4, metadata={"help": "size of queries, keys and values per head"})
    position_bias: str = field(default="past", metadata={"help": "none, past, both: bias per distance"})
    norm: str = field(default="layer", metadata={"help": "layer or rms normalisation"})
    use_bias: bool = field(default=True, metadata={"help": "biases in linear layers and norms"})
    image_loss: str = field(default="mse", metadata={"help": "mse, or log_mse: mean over pictures of log(MSE + 1e-4)"})

    def options(self) -> dict:
        """Fields of the configuration."""
        values = asdict(self)
        del values["contexts"]
        return {**values, "score_norm": self.score_norm or None}


def check_threshold_warmup(
    arguments: SyntheticArguments, model_arguments: ModelArguments, training: TrainingArguments
) -> None:
    if arguments.threshold_warmup and model_arguments.mixer != "sparse_coding":
        raise ValueError(f"threshold_warmup needs mixer=sparse_coding, got {model_arguments.mixer!r}")
    if arguments.threshold_warmup >= training.steps:
        raise ValueError(
            f"threshold_warmup must be below steps ({training.steps}), got {arguments.threshold_warmup}: the model is "
            "evaluated with its whole threshold"
        )


def check_scores(config: SparseTransformerConfig, batch_size: int) -> None:
    """Refuse a model whose scores no machine holds: pictures in small patches are very many tokens."""
    tokens = config.sequence_length
    size = 4 * batch_size * config.num_attention_heads * tokens**2 / 2**30
    if size > LARGEST_SCORES:
        raise ValueError(
            f"{tokens:,} tokens in batches of {batch_size} make {size:,.0f} GiB of scores in every layer; take larger "
            "patches (--patch_size), smaller pictures (--task_options '{\"size\": ...}') or smaller batches"
        )


def mean_loss(model: torch.nn.Module, batch: dict, arguments: SyntheticArguments) -> torch.Tensor:
    scale = min(1.0, batch["step"] / arguments.threshold_warmup) if arguments.threshold_warmup else 1.0
    return model(batch["inputs"], labels=batch["labels"], threshold_scale=scale).loss


def run(arguments: SyntheticArguments, model_arguments: ModelArguments, training: TrainingArguments) -> dict:
    """Train and measure; the run as results.json holds it."""
    kind, task = TASKS[arguments.task], make_task(arguments.task, arguments.task_options)
    if kind.images:
        check_measurable(task.size)
    accelerator = make_accelerator(training)
    set_seed(training.seed)
    model = make_model(kind, task, model_arguments.contexts, model_arguments.options()).to(accelerator.device)
    measure = partial(
        evaluate,
        kind=kind,
        task=task,
        accelerator=accelerator,
        items=arguments.eval_items,
        batch_size=arguments.eval_batch_size,
        seed=arguments.eval_seed,
    )
    check_threshold_warmup(arguments, model_arguments, training)
    check_scores(model.config, training.micro_batch_size(accelerator.num_processes))
    settings = {**asdict(arguments), **asdict(model_arguments), **training.identity()}
    for name in ("method", "experiment"):
        del settings[name]
    # a finished run may be measured again with other evaluations
    identity = {name: value for name, value in settings.items() if not name.startswith("eval")}
    data = TrainingData(task, training.seed, arguments.train_items)
    history = train(
        model,
        lambda start, count: {**data(start, count), "step": start // training.batch_size},
        partial(mean_loss, arguments=arguments),
        training,
        accelerator=accelerator,
        settings=identity,
        evaluate=partial(measure, splits=kind.watched),
    )
    metrics = measure(model)
    stage = " of scores" if model_arguments.transfer_stage == "scores" else ""
    method = arguments.method or f"{model_arguments.mixer}, transfer: {model_arguments.transfer}{stage}"
    settings["num_processes"] = accelerator.num_processes
    made = make_run(method, model, history, training, settings, metrics)
    if accelerator.is_main_process:
        write_run(made, arguments.experiment, training.output_dir, accelerator.device, model)
    accelerator.log(metrics, step=training.steps)
    accelerator.end_training()
    return made


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    run(*parse([SyntheticArguments, ModelArguments, TrainingArguments], argv, __doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
