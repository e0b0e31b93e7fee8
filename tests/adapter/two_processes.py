"""What each of two processes runs under `torch.distributed.run`: three steps on its half of each batch."""

import sys

import torch
from accelerate import Accelerator

from tests.tiny_models import adapted, tiny_model, tokens


def build():
    config = {"target_coefficient": True, "coefficients": "thresholded_softmax", "train_threshold": True}
    return adapted(tiny_model(), threshold=0.05, **config)


def batches():
    return [tokens(4, 9, seed=step) for step in range(3)]


def train(model, data, backward=torch.Tensor.backward):
    """The adapter's numbers after one SGD step per batch. `model` may be wrapped."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for ids in data:
        optimizer.zero_grad()
        backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
    return {n.removeprefix("module."): p.detach() for n, p in model.named_parameters() if p.requires_grad}


def main(folder: str) -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    model = accelerator.prepare(build())
    state = train(model, [ids[2 * rank : 2 * rank + 2] for ids in batches()], accelerator.backward)
    record = {"wrapper": type(model).__name__, "num_processes": accelerator.num_processes, "state": state}
    torch.save(record, f"{folder}/rank{rank}.pt")
    # DDP's reducer must not hold the last reference to the process group: it would join gloo's threads while it holds
    # the GIL, which one of them may be waiting for
    del model
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
