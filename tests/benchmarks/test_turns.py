import numpy as np
import pytest

from hf_sparsecoding.benchmarks.turns import Turns, median_ratio, ratio_cell, ratio_metrics, take_turns


def test_every_round_has_every_contender():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = take_turns(contenders, Turns(rounds=5, warmup=1, progress=False), "")
    assert all(len(values) == 5 for values in seconds.values())
    rounds = [calls[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1


def test_ratio_is_taken_within_rounds():
    slow_and_fast = np.array([1.0, 10.0, 1.0, 10.0, 1.0])
    assert median_ratio(1.5 * slow_and_fast, slow_and_fast, seed=0) == (1.5, 1.5, 1.5)


def test_ratio_in_a_table():
    metrics = ratio_metrics("ratio", np.array([1.0, 2.0, 6.0]), np.array([1.0, 1.0, 2.0]), seed=0)
    assert ratio_cell(metrics, "ratio") == "2.000 [1.000, 3.000]"
    assert ratio_cell(metrics, "other") == "-"


@pytest.mark.parametrize("wrong", [{"clock": "x"}, {"rounds": 0}, {"threads": 0}, {"warmup": -1}])
def test_turns_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Turns(**wrong)
