"""EasyKV's modes: the sizes of blocks, and what short prompts and prompts in blocks are left with."""

import itertools

import numpy as np
import pytest

import kvjax
from kvjax.contract import LayerInfo
from kvjax.methods.released import easykv
from kvjax.methods.released.easykv import BlockSizes, block_sizes
from tests import tensors
from tests.tensors import live_positions


def sizes(policy, n):
    """(budget, sinks, recent) of a prompt of n tokens."""
    found = policy.sizes(LayerInfo(0, 1, 4, 2, 8, n, 600), np.array([n])).hparams
    return tuple(int(getattr(found, name)[0]) for name in ("budget", "sinks", "recent"))


@pytest.mark.parametrize("mode", ["encoding", "ppl"])
def test_block_sizes_are_positive_and_make_up_the_prompt(mode):
    """All small combinations, and one in which the released code's dense prefix is negative."""
    assert block_sizes(346, 21, 80, "encoding") == BlockSizes(21, 101, 26, 26)
    for n, budget, stride in itertools.product(range(1, 25), range(26), range(1, 8)):
        if budget < 1:
            with pytest.raises(ValueError, match="at least 1"):
                block_sizes(n, budget, stride, mode)
            continue
        final = max(c for c in range(1, budget + stride + 1) if (n - c) % stride == 0)
        if final > n:
            with pytest.raises(ValueError, match="read it whole"):
                block_sizes(n, budget, stride, mode)
            continue
        found = block_sizes(n, budget, stride, mode)
        assert (found.final, found.padded) == (final, budget + stride)
        assert found.dense_prefix in range(1, final + 1)
        assert (n - found.dense_prefix) % stride == 0


@pytest.mark.parametrize("importance", ["roco", "mas"])
def test_a_prompt_that_is_too_short_to_evict_from_stays_whole_while_decoding(importance):
    """A share of half does not hold the 4 sinks and the 10 last tokens of 24, though those 10 alone."""
    policy = easykv.easykv_encoding_decoding(importance, 0.5)
    assert [sizes(member, 24) for member in policy.members] == [(24, 4, 10), (24, 0, 10)]
    assert [sizes(member, 28) for member in policy.members] == [(14, 4, 10), (14, 0, 10)]


def test_the_mode_of_its_own_choice():
    auto = lambda budget: easykv.easykv("mas", budget, prompt_length=100)
    assert auto(120) == easykv.easykv_decoding("mas", 20)
    assert auto(100) == easykv.easykv_encoding_decoding("mas", 100)


def test_a_prompt_read_in_blocks_ends_at_the_size_of_the_code(shallow):
    """E12's rounding end to end; sinks stay while the prompt is read, and need not afterwards."""
    n, nominal, stride = 41, 20, 6
    tokens, final = np.asarray(tensors.token_ids(2, n)), block_sizes(n, nominal, stride, "encoding").final
    assert final == 23
    policy = easykv.easykv_encoding_decoding("recency", nominal, stride=stride, exact=False)
    _, state = kvjax.prefill(*shallow, tokens, policy=policy, max_new_tokens=25, block=stride)
    assert live_positions(state.layers[0]) == [[[0, 1, 2, 3, *range(n + 4 - final, n)]] * 2] * 2
    _, after = kvjax.feed(*shallow, tokens[:, :25], state)
    assert live_positions(after.layers[0]) == [[list(range(n + 25 - final, n + 25))] * 2] * 2
