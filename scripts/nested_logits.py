"""Gradient descent on nested logits: how long until an induction head is found, with N pairs and L labels?

    python scripts/nested_logits.py --config scripts/configs/in_context_classification/nested_logits.yaml
    python scripts/nested_logits.py --pairs 4 4 --labels 16 4 --output_dir outputs/nested_logits

--output_dir receives results.json: per setting the steps until the loss is below `share` of its plateau ln N (null: it
never is), and the loss and its three parameters on the way there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hf_sparsecoding.models.induction.nested_logits import descend, steps_to
from hf_sparsecoding.reports import results, tables
from hf_sparsecoding.training.command_line import parse


ENTRIES = 100  # of the history


@dataclass(frozen=True)
class NestedLogitsArguments:
    pairs: list[int] = field(default_factory=lambda: [4, 8, 8, 8], metadata={"help": "N of every setting"})
    labels: list[int] = field(default_factory=lambda: [16, 32, 9, 8], metadata={"help": "L of every setting"})
    steps: int = field(default=10_000, metadata={"help": "steps of gradient descent"})
    learning_rate: float = field(default=0.1, metadata={"help": "step size"})
    init: float = field(default=0.01, metadata={"help": "where xi, b1 and a start"})
    share: float = field(default=0.1, metadata={"help": "share of ln N that the loss has to reach"})
    output_dir: str = field(default="outputs/nested_logits", metadata={"help": "folder for results.json"})
    experiment: str = field(default="nested-logits", metadata={"help": "name of the experiment in the results"})

    def __post_init__(self):
        if self.steps < 1 or self.learning_rate <= 0:
            raise ValueError(f"need steps >= 1 and learning_rate > 0, got {self.steps} and {self.learning_rate}")


def run(arguments: NestedLogitsArguments) -> list[dict]:
    """One run per setting, as results.json holds them."""
    descent = descend(arguments.pairs, arguments.labels, arguments.steps, arguments.learning_rate, arguments.init)
    reached = steps_to(descent, arguments.pairs, arguments.share)
    settings = {name: getattr(arguments, name) for name in ("steps", "learning_rate", "init", "share")}
    runs = []
    for place, (pairs, labels) in enumerate(zip(arguments.pairs, arguments.labels, strict=True)):
        end = min(arguments.steps, 2 * (reached[place] or arguments.steps))
        history = [
            {
                "step": step,
                "loss": float(descent.losses[step, place]),
                **dict(zip(("xi", "b1", "a"), descent.parameters[step, :, place].tolist(), strict=True)),
            }
            for step in np.linspace(0, end, min(end + 1, ENTRIES)).astype(int).tolist()
        ]
        runs.append(
            {
                "method": f"N = {pairs}, L = {labels}",
                "seed": 0,
                "trainable_parameters": 3,
                "samples": 0,
                "settings": {"pairs": pairs, "labels": labels, **settings},
                "metrics": {"steps_to_transition": reached[place], "loss": float(descent.losses[-1, place])},
                "history": history,
            }
        )
    return runs


def main(argv: list[str] | None = None) -> int:
    (arguments,) = parse([NestedLogitsArguments], sys.argv[1:] if argv is None else argv, __doc__)
    runs = run(arguments)
    path = Path(arguments.output_dir) / results.FILE
    results.write(path, results.new(arguments.experiment, runs))
    rows = [[run["method"], *map(tables.number, run["metrics"].values())] for run in runs]
    print(tables.table(["setting", *runs[0]["metrics"]], rows))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
