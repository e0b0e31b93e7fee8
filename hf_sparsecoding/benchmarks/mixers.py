"""Suite "mixers": training throughput of the small SparseTransformer on S-RAVEN, mixer by mixer.

The sizes are the reference's (SparseTransformerConfig's defaults). A training step is forward, backward and AdamW's
step on one batch, the same for all. Contenders with transfer have one lambda per context and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from ..models import SparseTransformerConfig, SparseTransformerForTokenClassification
from ..reports import tables
from ..tasks.s_raven import SRaven
from ..training.synthetic import Examples, tensors
from .turns import Turns, draw_ratios, ratio_cell, ratio_metrics, take_turns


SOFTMAX = "softmax"
MIXERS = {
    SOFTMAX: {"mixer": "softmax"},
    "linear": {"mixer": "linear"},
    "hyla": {"mixer": "hyla"},
    "sparse_coding": {"mixer": "sparse_coding", "score_norm": "none", "threshold": 0.01},
    "sparse_coding_heads": {"mixer": "sparse_coding", "score_norm": "heads", "threshold": 0.3},
    "sparse_coding_keys": {"mixer": "sparse_coding", "score_norm": "keys", "output_norm": "length", "threshold": 1.0},
}
# name: (mixer, transfer)
TRANSFERS = {
    f"{mixer}_{transfer}": (mixer, transfer)
    for mixer in (SOFTMAX, "sparse_coding_keys")
    for transfer in ("paper", "aligned")
}
METHODS = (*MIXERS, *TRANSFERS)
TO_SOFTMAX, TO_NO_TRANSFER = "step_ratio_to_softmax", "step_ratio_to_no_transfer"


def defaults() -> dict:
    """The suite's own options."""
    return {"method": list(METHODS), "batch_size": 128, "compile": False}


def measure(turns: Turns, *, method: Iterable[str], batch_size: int, compile: bool) -> list[dict]:
    """Runs as results.json holds them, of the methods and of what they are compared with."""
    batch = tensors(SRaven().examples(0, batch_size, "train", turns.seed))
    models = {name: make_model(name, turns.seed) for name in with_baselines(method)}
    steps = {name: training_step(torch.compile(model) if compile else model, batch) for name, model in models.items()}
    seconds = take_turns(steps, turns, "S-RAVEN")
    return [
        {
            "method": name,
            "seed": turns.seed,
            "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "samples": turns.rounds * batch_size,
            "settings": {
                **describe(model.config),
                "batch": batch_size,
                "dtype": "float32",
                "compile": compile,
                "threads": turns.threads,
                "rounds": turns.rounds,
                "clock": turns.clock,
            },
            "metrics": step_metrics(seconds, name, batch_size, turns.seed),
        }
        for name, model in models.items()
    ]


def with_baselines(names: Iterable[str]) -> list[str]:
    """The contenders in the order of METHODS: softmax always, and every transfer's mixer without transfer."""
    wanted = {SOFTMAX}
    for name in names:
        if name not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
        wanted |= {name, TRANSFERS[name][0]} if name in TRANSFERS else {name}
    return [name for name in METHODS if name in wanted]


def make_model(name: str, seed: int) -> SparseTransformerForTokenClassification:
    mixer, transfer = TRANSFERS.get(name, (name, "none"))
    torch.manual_seed(seed)
    config = SparseTransformerConfig(**MIXERS[mixer], transfer=transfer, transfer_per_head=transfer != "none")
    return SparseTransformerForTokenClassification(config).train()


def describe(config: SparseTransformerConfig) -> dict:
    return {
        "mixer": config.mixer,
        "score_norm": config.score_norm,
        "threshold": config.threshold if config.mixer == "sparse_coding" else None,
        "transfer": config.transfer,
        "transfer_per_head": config.transfer_per_head,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "length": config.sequence_length,
    }


def training_step(model: torch.nn.Module, batch: Examples) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_metrics(seconds: dict[str, np.ndarray], name: str, batch_size: int, seed: int) -> dict[str, float]:
    step_seconds = float(np.median(seconds[name]))
    metrics = {"step_seconds": step_seconds, "samples_per_second": batch_size / step_seconds}
    metrics |= ratio_metrics(TO_SOFTMAX, seconds[name], seconds[SOFTMAX], seed)
    if name in TRANSFERS:
        metrics |= ratio_metrics(TO_NO_TRANSFER, seconds[name], seconds[TRANSFERS[name][0]], seed)
    return metrics


def table(runs: list[dict]) -> str:
    header = ["contender", "trainable", "step, s", "samples/s", "ratio to softmax", "ratio to no transfer"]
    rows = [
        [run["method"], f"{run['trainable_parameters']:,}"]
        + [tables.number(run["metrics"][name]) for name in ("step_seconds", "samples_per_second")]
        + [ratio_cell(run["metrics"], name) for name in (TO_SOFTMAX, TO_NO_TRANSFER)]
        for run in runs
    ]
    return tables.table(header, rows)


def picture(runs: list[dict], path: Path) -> None:
    """Ratio to softmax with its interval."""
    settings = runs[0]["settings"]
    title = f"batch {settings['batch']}, {'compiled' if settings['compile'] else 'eager'}"
    shown = [(run["method"], run["metrics"]) for run in runs if run["method"] != SOFTMAX]
    draw_ratios({title: shown}, TO_SOFTMAX, "step, ratio to softmax", path)
