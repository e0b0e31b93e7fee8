"""Measure how exactly extended linear self-attention computes what its constructions stand for, in float64.

    python scripts/verify_constructions.py --results model_cards/extended-linear-attention-constructions/results.json

For every construction: the largest error over all sizes, relative to the largest number of the expected matrix where
that is above 1. The exit status is 1 if one is above 1e-12.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_sparsecoding.models.linear_attention import ExtendedLinearAttention, constructions
from hf_sparsecoding.reports import results, tables
from hf_sparsecoding.tasks.ridge_regression import RidgeRegression, dot, parameter_prompts, query_prompts


SIZES = ((7, 4), (4, 7), (5, 5), (1, 3), (3, 1), (1, 1), (65, 9), (9, 65))  # m tokens, n columns
PROBLEMS = ((16, 4), (3, 5), (1, 1), (33, 8))  # N examples, d features: m >= n and m < n
TOLERANCE = 1e-12
BATCH = 5
STEPS = 6  # stacked layers


class Identity(NamedTuple):
    """`layers` times the module on the prompts, and what should come out."""

    name: str
    module: ExtendedLinearAttention
    prompts: Tensor
    expected: Tensor
    layers: int = 1

    def error(self) -> float:
        with torch.no_grad():
            out = self.prompts
            for _ in range(self.layers):
                out = self.module(out)
        scale = max(1.0, self.expected.abs().max().item())
        return (out - self.expected).abs().max().item() / scale


def formulas(m: int, n: int, seed: int) -> Iterator[Identity]:
    """The constructions for prompts of m tokens and n columns."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    H, U, V, A, B, C = draw(BATCH, m, n), draw(m, n), draw(m, n), draw(n, n), draw(n, n), draw(n, n)
    E = torch.eye(m, n, dtype=torch.float64)
    left, right = range(0, n, 2)[:m], range(n - 1, -1, -2)
    block = torch.zeros_like(H)
    block[:, : len(left), : len(right)] = H[..., left].mT @ H[..., right]
    skip, gram = (make(m, n, torch.float64) for make in (constructions.skip, constructions.gram))
    yield Identity("C", constructions.constant(U), H, U.expand_as(H))
    yield Identity("H", skip, H, H)
    yield Identity("H A + C", constructions.affine(A, U), H, H @ A + U)
    yield Identity("E H^T H", gram, H, E @ (H.mT @ H))
    yield Identity("X^T Y", constructions.gram_block(m, n, left, right, torch.float64), H, block)
    yield Identity("H H^T B", constructions.right_constant(U), H, H @ H.mT @ U)
    yield Identity("H B^T H", constructions.middle_constant(U), H, H @ U.mT @ H)
    yield Identity("U V^T H", constructions.left_constant(U, V), H, U @ V.mT @ H)
    yield Identity("U H^T V", constructions.transposed(U, V), H, U @ H.mT @ V)
    yield Identity("H A (H B)^T H C", constructions.three_factors(m, A, B, C), H, H @ A @ B.mT @ H.mT @ H @ C)
    yield Identity("H + E H^T H, two heads", constructions.sum_of_heads(skip, gram), H, H + E @ (H.mT @ H))


def ridge_identities(examples: int, features: int, seed: int) -> Iterator[Identity]:
    """Gradient descent of ridge regression: steps from random weights, and the end of many steps."""
    task = RidgeRegression(features, examples, penalty=1.5)
    problems = task.generate(BATCH, "test", seed)
    size = 1 / (np.linalg.norm(problems.inputs, 2, axis=(1, 2)).max() ** 2 + task.penalty)  # no direction overshoots
    enough = math.ceil(math.log(1e16) / (size * task.penalty))  # a step shrinks every error by 1 - eta lambda at least
    start = weights = task.generate(BATCH, "train", seed).weights
    for _ in range(STEPS):
        gradient = dot(problems.inputs.swapaxes(1, 2), dot(problems.inputs, weights) - problems.targets)
        weights = weights - size * (gradient + task.penalty * weights)
    solution = task.ridge_weights(problems)
    for name, make, zero_rows in (
        ("one head", constructions.ridge_step, True),
        ("two heads", constructions.ridge_step_two_heads, False),
    ):
        step = make(examples, features, size, task.penalty, torch.float64)
        begin, stepped, end = (
            torch.from_numpy(parameter_prompts(problems, w, zero_rows)) for w in (start, weights, solution)
        )
        yield Identity(f"{STEPS} steps of gradient descent, {name}", step, begin, stepped, STEPS)
        yield Identity(f"(X^T X + lambda I)^-1 X^T y, {name}", step, begin, end, enough)
    prompts = torch.from_numpy(query_prompts(problems))
    moment = torch.from_numpy(dot(problems.inputs.swapaxes(1, 2), problems.targets))
    expected = torch.zeros_like(prompts)
    expected[..., -1] = size * torch.from_numpy(dot(prompts[..., :-1].numpy(), moment.numpy()))
    first = constructions.linear_first_step(examples, features, size, torch.float64)
    yield Identity("eta x^T X^T y, plain linear attention", first, prompts, expected)


def measure(seed: int) -> list[dict]:
    """A run as results.json holds it for every construction."""
    found: dict[str, list[Identity]] = {}
    for check, sizes in ((formulas, SIZES), (ridge_identities, PROBLEMS)):
        for size in sizes:
            for identity in check(*size, seed):
                found.setdefault(identity.name, []).append(identity)
    return [
        {
            "method": name,
            "seed": seed,
            "trainable_parameters": 0,  # nothing is trained
            "samples": 0,
            "settings": {
                "dtype": "float64",
                "prompts_per_size": BATCH,
                "tokens_and_columns": [list(identity.prompts.shape[1:]) for identity in identities],
                "layers": [identity.layers for identity in identities],
            },
            "metrics": {"max_error": max(identity.error() for identity in identities)},
        }
        for name, identities in found.items()
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", help="write the errors to this results.json")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and constants; default: 0")
    arguments = parser.parse_args(argv)
    runs = measure(arguments.seed)
    rows = [[run["method"], tables.number(run["metrics"]["max_error"])] for run in runs]
    print(tables.table(["construction", "largest error"], rows))
    if arguments.results:
        results.write(arguments.results, results.new("extended-linear-attention-constructions", runs))
        print(f"wrote {arguments.results}")
    return int(not all(run["metrics"]["max_error"] <= TOLERANCE for run in runs))


if __name__ == "__main__":
    sys.exit(main())
