"""What drivers are asked for; what they refuse is tested with them."""

import functools

import jax
import numpy as np
import pytest

from kvjax.core.drivers.checks import check_prompts
from kvjax.core.drivers.generation import generate


@pytest.mark.parametrize("traced", [False, True])
def test_a_mask_says_where_the_tokens_are(shallow, traced):
    """On the left, on the right or with holes: they are moved together, as transformers counts their positions."""
    ids, masks = (
        np.array([[9, 1, 2, 9], [3, 9, 9, 9], [4, 9, 5, 6]]),
        np.array([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 1, 1]]),
    )
    check = lambda ids, masks: check_prompts(shallow[0], ids, attention_mask=masks)
    tokens, lengths = (jax.jit(check) if traced else check)(ids, masks)
    assert lengths.tolist() == [2, 1, 3]
    assert [row[4 - n :] for row, n in zip(tokens.tolist(), lengths, strict=True)] == [[1, 2], [3], [4, 5, 6]]


def test_prompts_padded_on_the_right_are_those_padded_on_the_left(shallow):
    model, params = shallow
    left, right = np.array([[1, 2, 3], [0, 4, 5]]), np.array([[1, 2, 3], [4, 5, 60]])
    run = functools.partial(generate, model, params, max_new_tokens=3, eos_ids=())
    expected = run(left, lengths=[3, 2]).tokens
    np.testing.assert_array_equal(run(right, attention_mask=[[1, 1, 1], [1, 1, 0]]).tokens, expected)


@pytest.mark.parametrize(
    ("ids", "lengths", "told"),
    [
        ([[1, 2, 3, 0, 0]], [3], True),
        ([[1, 0, 0, 0, 0]], [1], True),
        ([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [1, 2, 3, 0, 0]], [5, 4, 3], True),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]], [5, 4], False),  # one column of padding may be any id
        ([[0, 0, 1, 2, 2]], [3], False),
        ([[99, 98, 1, 2, 3]], [3], False),
        ([[8, 9, 1, 2, 2], [7, 8, 1, 2, 3]], [3, 3], False),  # where all are padded on one side, it is the left one
        ([[1, 2, 3, 0, 0]], None, False),
    ],
)
def test_lengths_are_those_of_prompts_padded_on_the_left(shallow, ids, lengths, told):
    """On the right they are refused, where that can be told from ids that happen to be alike."""
    ids = np.array(ids)
    if told:
        with pytest.raises(ValueError, match=r"as if it were padded on the right.*pad on the left \(models.pad_left\)"):
            check_prompts(shallow[0], ids, lengths)
        given = np.arange(5)[None] < np.array(lengths)[:, None]
        assert check_prompts(shallow[0], ids, attention_mask=given)[1].tolist() == lengths
    else:
        assert (check_prompts(shallow[0], ids, lengths)[0] == ids).all()
