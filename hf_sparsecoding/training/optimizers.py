"""The optimizers of the training loop, and which parameters get what of them."""

from __future__ import annotations

import torch
from torch.optim import SGD, AdamW, Muon, Optimizer

from . import checkpoints
from .arguments import TrainingArguments


class MuonWithAdamW(Optimizer):
    """Muon for some matrices and AdamW for all other parameters, as one optimizer.

    Muon's steps are scaled to the size of AdamW's (`match_rms_adamw`), so both take the same learning rate.

    Args:
        matrices: Parameters of two dimensions for Muon.
        others: Parameter groups for AdamW.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], others: list[dict], lr: float, weight_decay: float):
        self.muon = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW(others, lr=lr)
        super().__init__(self.muon.param_groups + self.adamw.param_groups, {})

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "muon": self.muon, "adamw": self.adamw}

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # groups and state are this optimizer's: loading a state and schedulers put new ones in their place
        for part, groups in ((self.muon, self.param_groups[:1]), (self.adamw, self.param_groups[1:])):
            part.param_groups, part.state = groups, self.state
            part.step()
        return loss


def make_optimizer(model: torch.nn.Module, arguments: TrainingArguments) -> Optimizer:
    """The optimizer of `arguments` for the trainable parameters of `model`.

    Raises:
        ValueError: Muon finds nothing that it is for.
    """
    groups, options = parameter_groups(model, arguments), {"lr": arguments.learning_rate}
    if arguments.optimizer == "sgd":
        return SGD(groups, **options)
    if arguments.optimizer == "adamw":
        return AdamW(groups, **options)
    matrices = hidden_matrices(model)
    if not matrices:
        raise ValueError(
            "optimizer='muon' is for the matrices of linear layers in a model's stack of layers, and none of those is "
            "trainable here; use optimizer='adamw'"
        )
    chosen = {id(p) for p in matrices}
    others = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
    return MuonWithAdamW(matrices, others, weight_decay=arguments.weight_decay, **options)


def parameter_groups(model: torch.nn.Module, arguments: TrainingArguments) -> list[dict]:
    """Trainable parameters with their weight decay."""
    parameters = list(checkpoints.trainable(model).values())
    if arguments.weight_decay_on == "all":
        return [{"params": parameters, "weight_decay": arguments.weight_decay}]
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)}
    groups = {arguments.weight_decay: [p for p in parameters if id(p) in matrices]}
    groups.setdefault(0.0, []).extend(p for p in parameters if id(p) not in matrices)
    return [{"params": group, "weight_decay": decay} for decay, group in groups.items() if group]


def hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Trainable weights of the linear layers in stacks of layers (`ModuleList`): no embedding and no head."""
    stacks = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    layers = (layer for stack in stacks for layer in stack.modules() if isinstance(layer, torch.nn.Linear))
    weights = {id(layer.weight): layer.weight for layer in layers if layer.weight.requires_grad}
    return list(weights.values())
