"""What a training run needs to know, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}  # -> transformers' names
PRECISIONS = ("no", "bf16", "fp16")
OPTIMIZERS = ("adamw", "sgd", "muon")
DECAYED = ("all", "matrices")
# fields that decide where and how a run is watched, not what it computes
BOOKKEEPING = {
    "output_dir",
    "checkpoint_every",
    "checkpoints_kept",
    "resume",
    "report_to",
    "logging_every",
    "evaluate_every",
    "progress",
}
# fields that came later, with what runs did before: earlier checkpoints and results do not name them
ASSUMED = {"optimizer": "adamw", "image_loss": "mse"}


@dataclass(frozen=True)
class TrainingArguments:
    """Arguments of the training loop; every error names the value and the cure."""

    output_dir: str = field(default="outputs", metadata={"help": "folder for checkpoints and results"})
    steps: int = field(default=200, metadata={"help": "optimizer steps in all"})
    batch_size: int = field(default=16, metadata={"help": "examples per optimizer step, over all processes"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "forward passes per optimizer step"})
    optimizer: str = field(
        default="adamw",
        metadata={
            "help": "adamw, sgd without momentum, or muon for linear layers in stacks (ModuleList), adamw for the rest"
        },
    )
    learning_rate: float = field(default=1e-2, metadata={"help": "highest learning rate, after the warm-up"})
    warmup_steps: int = field(default=10, metadata={"help": "steps over which the learning rate rises from 0"})
    schedule: str = field(default="linear", metadata={"help": "after the warm-up: linear or cosine (to 0), constant"})
    final_learning_rate_share: float = field(
        default=0.0, metadata={"help": "cosine ends at this share of learning_rate instead of 0"}
    )
    weight_decay: float = field(
        default=0.0, metadata={"help": "decoupled weight decay of adamw and muon; of sgd the factor of an L2 penalty"}
    )
    weight_decay_on: str = field(
        default="all", metadata={"help": "all parameters, or matrices: the weights of linear layers and embeddings"}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "largest gradient norm; 0 turns clipping off"})
    mixed_precision: str = field(
        default="no", metadata={"help": "autocast in training and its evaluations, not in the last: no, bf16, fp16"}
    )
    compile: bool = field(default=False, metadata={"help": "torch.compile the model"})
    seed: int = field(default=0, metadata={"help": "seed of the weights, the data order and dropout"})
    checkpoint_every: int = field(default=100, metadata={"help": "steps between checkpoints; 0 writes none"})
    checkpoints_kept: int = field(default=2, metadata={"help": "how many of the newest checkpoints stay"})
    resume: bool = field(default=True, metadata={"help": "go on from the newest checkpoint in output_dir"})
    report_to: str = field(default="none", metadata={"help": "tracker of accelerate (tensorboard, wandb, ...)"})
    logging_every: int = field(default=10, metadata={"help": "steps between entries of the tracker"})
    evaluate_every: int = field(default=0, metadata={"help": "steps between evaluations in training; 0: none"})
    progress: bool = field(default=True, metadata={"help": "show a progress bar"})

    def __post_init__(self):
        for name in ("steps", "batch_size", "gradient_accumulation_steps", "checkpoints_kept", "logging_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup_steps", "weight_decay", "max_grad_norm", "checkpoint_every", "evaluate_every", "seed"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("learning_rate", self.learning_rate > 0, "above 0")
        self._require("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        self._require("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._require("weight_decay_on", self.weight_decay_on in DECAYED, f"one of {', '.join(DECAYED)}")
        self._require("final_learning_rate_share", 0 <= self.final_learning_rate_share < 1, "from 0 to below 1")
        if self.final_learning_rate_share and self.schedule != "cosine":
            raise ValueError(
                f"final_learning_rate_share={self.final_learning_rate_share} needs schedule='cosine', got "
                f"{self.schedule!r}"
            )
        self._require("mixed_precision", self.mixed_precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps must be below steps ({self.steps}), got {self.warmup_steps}; lower warmup_steps"
            )
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size must be a multiple of gradient_accumulation_steps, got {self.batch_size} and "
                f"{self.gradient_accumulation_steps}; equal parts make their mean the batch's mean"
            )

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    def micro_batch_size(self, num_processes: int) -> int:
        """Examples in one forward pass of one process."""
        parts = num_processes * self.gradient_accumulation_steps
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size must be a multiple of processes x gradient_accumulation_steps = {num_processes} x "
                f"{self.gradient_accumulation_steps}, got {self.batch_size}; make batch_size a multiple of {parts}"
            )
        return self.batch_size // parts

    def identity(self) -> dict:
        """The fields that the result depends on: a checkpoint may only be resumed where these agree."""
        return {name: value for name, value in asdict(self).items() if name not in BOOKKEEPING}
