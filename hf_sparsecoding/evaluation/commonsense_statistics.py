"""Accuracies of the commonsense protocols with 95 % intervals, and paired comparisons with the base model.

Answers are {protocol: {task: [answer per item]}}, as `evaluation.commonsense` gives them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..reports.intervals import Z95, Difference, wilson


Answers = Mapping[str, Mapping[str, Sequence[Mapping]]]


class Accuracies(NamedTuple):
    """By metric name: the share of items, its 95 % interval, and the number of items behind it."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    items: dict[str, int]


def outcomes(answers: Answers) -> dict[str, dict[str, list[bool]]]:
    """{stem of the metrics' names: {task: [per item, whether it counts]}}."""
    found = {protocol: _counted(tasks, "right") for protocol, tasks in answers.items()}
    if "generation" in answers:
        found["generation_unanswered"] = {
            task: [answer["chosen"] is None for answer in its_answers]
            for task, its_answers in answers["generation"].items()
        }
    if "likelihood" in answers:
        found["plain_likelihood"] = _counted(answers["likelihood"], "plain_right")
    return found


def _counted(tasks: Mapping[str, Sequence[Mapping]], key: str) -> dict[str, list[bool]]:
    return {task: [answer[key] for answer in its_answers] for task, its_answers in tasks.items()}


def accuracies(answers: Answers) -> Accuracies:
    """`<stem>_<task>` and `<stem>_mean`, the mean over tasks, each of the same weight.

    Intervals: Wilson's. The items behind a mean are the number of trials of equal weight that would be as uncertain.
    """
    found = Accuracies({}, {}, {})
    for stem, tasks in outcomes(answers).items():
        shares = {task: statistics.fmean(counted) for task, counted in tasks.items()}
        items = {task: len(counted) for task, counted in tasks.items()}
        shares["mean"] = statistics.fmean(shares.values())
        items["mean"] = round(len(tasks) ** 2 / sum(1 / count for count in items.values()))
        for task, share in shares.items():
            found.metrics[f"{stem}_{task}"] = share
            found.intervals[f"{stem}_{task}"] = wilson(share, items[task])
            found.items[f"{stem}_{task}"] = items[task]
    return found


def most_frequent_label(answers: Answers) -> Answers:
    """Answers of who always gives the label that is right most often among a task's items, for comparison."""
    constant = {}
    for protocol, tasks in answers.items():
        constant[protocol] = {}
        for task, items in tasks.items():
            label, _ = Counter(item["label"] for item in items).most_common(1)[0]
            rights = [item["label"] == label for item in items]
            constant[protocol][task] = [{"chosen": label, "right": right, "plain_right": right} for right in rights]
    return constant


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p for `gained` items turned right and `lost` turned wrong. Source: McNemar 1947, binomial."""
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


def mean_difference(pairs: Sequence[tuple[Sequence[bool], Sequence[bool]]]) -> Difference:
    """Difference of two models' means over tasks, with the normal 95 % interval of the paired items.

    `pairs` holds per task the outcomes of (model, base) on the same items.
    """
    value = variance = 0.0
    for own, base in pairs:
        changes = [int(a) - int(b) for a, b in zip(own, base, strict=True)]
        value += statistics.fmean(changes) / len(pairs)
        variance += statistics.pvariance(changes) / len(changes) / len(pairs) ** 2
    half = Z95 * math.sqrt(variance)
    return Difference(value, value - half, value + half)


def against_base(answers: Answers, base: Answers) -> dict[str, dict[str, float]]:
    """By metric, per task {"difference", "p" (McNemar)}, for means {"difference", "low", "high"}."""
    found = {}
    reference = outcomes(base)
    for stem, tasks in outcomes(answers).items():
        pairs = [(counted, reference[stem][task]) for task, counted in tasks.items()]
        for task, (own, other) in zip(tasks, pairs, strict=True):
            gained = sum(a and not b for a, b in zip(own, other, strict=True))
            lost = sum(b and not a for a, b in zip(own, other, strict=True))
            found[f"{stem}_{task}"] = {"difference": (gained - lost) / len(own), "p": mcnemar(gained, lost)}
        difference = mean_difference(pairs)
        found[f"{stem}_mean"] = dict(zip(("difference", "low", "high"), difference, strict=True))
    return found
