"""Intervals and differences for shares and means over seeds."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple


Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution
# two-sided 95 % quantiles of Student's t by degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Difference(NamedTuple):
    """A difference of means with its 95 % interval; `significant` if the interval leaves out 0."""

    value: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        return self.low > 0 or self.high < 0


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share seen in n trials. Source: Wilson 1927."""
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(f"need a share between 0 and 1 of at least 1 trial, got {share} of {n}")
    spread = Z95**2 / n
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_and_spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard deviation over seeds; None for a single seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def t95(degrees: float) -> float:
    """Student's quantile, of the next lower whole number of degrees of freedom; the normal one above the table."""
    return T95[max(1, math.floor(degrees)) - 1] if degrees < len(T95) + 1 else Z95


def difference(values: list[float], baseline: list[float], items: int | None = None) -> Difference | None:
    """mean(values) - mean(baseline) with a 95 % interval; None where nothing tells how uncertain it is.

    Two sources of error are added up: the spread over seeds (Welch's unpaired interval), and for shares the choice of
    the `items` test items. All seeds answer the same items, so more seeds do not shrink the second. Both methods
    answer the same items too; that pairing is left out, so the interval is rather too wide than too narrow. A single
    value beside several gets their spread.
    """
    value = statistics.fmean(values) - statistics.fmean(baseline)
    repeated = [sample for sample in (values, baseline) if len(sample) > 1]
    # (variance of the mean, degrees of freedom)
    terms = [(statistics.variance(sample) / len(sample), len(sample) - 1) for sample in repeated]
    if len(terms) == 1:
        terms = [(terms[0][0] + statistics.variance(repeated[0]), terms[0][1])]
    if items:
        for share in (statistics.fmean(values), statistics.fmean(baseline)):
            terms.append((share * (1 - share) / items, math.inf))
    if not terms:
        return None
    variance = sum(term for term, _ in terms)
    # Welch-Satterthwaite
    shrink = sum(term**2 / degrees for term, degrees in terms)
    half = t95(variance**2 / shrink if shrink else math.inf) * math.sqrt(variance)
    return Difference(value, value - half, value + half)
