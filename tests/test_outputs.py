"""What lines tell of long answers."""

import numpy as np
import pytest

from kvjax.experiments.core.outputs import TOLD, told

RNG = np.random.default_rng(0)


def test_what_goes_round_in_circles_is_repeated_and_compresses():
    loop, drawn = [1, 2, 3, 4, 5] * 40, RNG.permutation(200).tolist()
    found = {
        name: told(ids, " ".join(map(str, ids)), False, np.arange(201.0))
        for name, ids in (("loop", loop), ("drawn", drawn))
    }
    assert found["loop"]["repeated"] == pytest.approx(1 - 5 / 197)
    assert found["drawn"]["repeated"] == 0
    assert found["loop"]["compressed"] < 0.1 < found["drawn"]["compressed"] < 1


def test_evictions_are_tokens_after_which_some_head_has_fewer_than_one_more():
    """Two heads: both grow, one loses a token, both lose several, both grow."""
    heads = np.array([[10, 10], [11, 11], [12, 11], [8, 7], [9, 8]])
    found = told([1, 2, 3, 4], "a b c d", True, heads.mean(1))
    assert found["evictions"] == 2
    assert found["mean_live"] == heads[1:].mean()
    assert found["ended"] == 1
    assert (*found,) == TOLD


def test_an_answer_that_ends_at_once_has_nothing_to_tell():
    found = told([], "", True, np.array([7.0]))
    assert found == {"ended": 1, "compressed": 1.0, "repeated": 0.0, "mean_live": 0.0, "evictions": 0}
