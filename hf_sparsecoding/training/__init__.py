"""One Accelerate loop for adapters and small models; knows losses and batches, not architectures."""

from .arguments import TrainingArguments
from .loop import ShuffledOrder, TrainingResult, check_processes, make_accelerator, train


__all__ = ["ShuffledOrder", "TrainingArguments", "TrainingResult", "check_processes", "make_accelerator", "train"]
