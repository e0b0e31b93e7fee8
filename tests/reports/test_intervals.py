import math

import pytest

from hf_sparsecoding.reports.intervals import difference, mean_and_spread, t95, wilson


def test_wilson_against_published_values():
    # Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29 (score method without continuity correction)
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert wilson(successes / n, n) == pytest.approx((low, high), abs=1e-4)
    assert wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)


def test_wilson_rejects_what_is_no_share():
    with pytest.raises(ValueError, match=r"got 1\.2 of 10"):
        wilson(1.2, 10)
    with pytest.raises(ValueError, match="at least 1 trial"):
        wilson(0.5, 0)


def test_spread():
    assert mean_and_spread([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_and_spread([2.0]) == (2.0, None)


def test_t_quantiles():
    assert t95(2) == t95(2.9) == 4.303
    assert t95(0.5) == 12.706
    assert t95(15) == 2.131
    assert t95(math.inf) == pytest.approx(1.96, abs=1e-3)


def test_difference_over_seeds_is_welch():
    # equal variances 1, n = 3: standard error sqrt(2/3), 4 degrees of freedom
    found = difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0])
    assert found.value == 4.0
    assert found.high - found.value == pytest.approx(2.776 * math.sqrt(2 / 3))
    assert found.significant


def test_a_single_value_gets_the_spread_of_the_others():
    """2 degrees of freedom, variance 4 e-4 of the mean of three and of the single value alike."""
    found = difference([0.50, 0.52, 0.48], [0.56])
    assert found.high - found.value == pytest.approx(4.303 * math.sqrt(4e-4 / 3 + 4e-4))
    assert not found.significant
    assert difference([0.56], [0.50, 0.52, 0.48]).low == pytest.approx(-found.high)


def test_difference_of_shares_of_one_seed_is_two_proportions():
    found = difference([0.76], [0.70], items=256)
    half = 1.959964 * math.sqrt((0.76 * 0.24 + 0.70 * 0.30) / 256)
    assert (found.low, found.high) == pytest.approx((0.06 - half, 0.06 + half))
    assert not found.significant
    assert difference([0.76], [0.70], items=4096).significant


def test_more_seeds_do_not_shrink_the_items_share():
    one = difference([0.7], [0.6], items=100)
    many = difference([0.7] * 50, [0.6] * 50, items=100)
    assert many.high == pytest.approx(one.high)


def test_difference_without_any_measure_of_error():
    assert difference([1.0], [2.0]) is None
    assert not difference([1.0, 1.0], [1.0, 1.0]).significant
