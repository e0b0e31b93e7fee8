"""A regression so small that a test trains it several times, and runs of it in one or two processes."""

import json

import torch
from torch import nn

from hf_sparsecoding.training import ShuffledOrder, TrainingArguments, make_accelerator, train


SIZE, ITEMS = 4, 24


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Dropout(dropout), nn.Linear(SIZE, 1))
    model[0].bias.requires_grad_(False)  # something frozen
    return model


def batch(start: int, count: int) -> dict:
    """Examples start .. start+count-1, in an order of its own in every epoch."""
    inputs = torch.randn(ITEMS, SIZE, generator=torch.Generator().manual_seed(1))
    rows = inputs[ShuffledOrder(ITEMS, seed=3)(start, count)]
    return {"inputs": rows, "targets": rows.sum(-1, keepdim=True)}


def mse(model: nn.Module, examples: dict) -> torch.Tensor:
    return (model(examples["inputs"]) - examples["targets"]).square().mean()


def arguments(folder, **changes) -> TrainingArguments:
    values = {"steps": 9, "batch_size": 8, "warmup_steps": 1, "checkpoint_every": 3, "progress": False}
    return TrainingArguments(output_dir=str(folder), **{**values, **changes})


def weights(model: nn.Module) -> dict:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(one: dict, other: dict) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def distributed_run(folder, make=make_model, **changes):
    chosen = arguments(folder, **changes)
    accelerator = make_accelerator(chosen)
    model, wrappers = make(), set()

    def noting_loss(wrapped, examples):
        wrappers.add(type(wrapped).__name__)
        return mse(wrapped, examples)

    result = train(model, batch, noting_loss, chosen, accelerator=accelerator)
    report = {"processes": accelerator.num_processes, "wrappers": list(wrappers), "losses": result.losses}
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(report))
    torch.save(weights(model), folder / f"{accelerator.process_index}.pt")
