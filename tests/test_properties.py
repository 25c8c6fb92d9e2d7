"""Properties of every method over sizes, budgets, groups, paddings and ties: a right answer, or an error that says why.

The default run draws few examples of few shapes; `-m exhaustive` draws many of more.
"""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.contract import LayerInfo
from tests import table, tensors
from tests.cases import Sizes

pytestmark = pytest.mark.usefixtures("as_users_run_it")

B, K, H, T, STEPS, LAYERS = 2, 2, 8, 16, 5, 3
CONTENTS = ("random", "equal keys", "equal tokens", "sharp")

budgets = st.one_of(st.integers(1, T + 3), st.sampled_from([0.05, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0]))
lengths_of_prompts = st.tuples(st.integers(1, T), st.integers(1, T))


def settings(examples):
    return hypothesis.settings(max_examples=examples, deadline=None, derandomize=examples < 20)


def layer_of(content, G, seed, width):
    q, k, v = tensors.qkv(seed, B=B, N=K * G, K=K, T=width, H=H)
    if content == "equal keys":
        k = jnp.broadcast_to(k[:, :, :1], k.shape)
    elif content == "equal tokens":
        q, k, v = (jnp.broadcast_to(x[:, :, :1], x.shape) for x in (q, k, v))
    return (q * (40.0 if content == "sharp" else 1.0)), k, v


def refused(error):
    """A refusal names the two numbers that disagree."""
    assert len(re.findall(r"\d+(?:\.\d+)?", str(error))) >= 2, str(error)


def kept(policy, arrays, lengths, layer, seed):
    q, k, v = arrays
    ids = np.random.default_rng(seed).integers(0, 61, (B, T))[:, T - q.shape[2] :]
    how = {"key": jax.random.split(jax.random.key(seed), B), "tokens": ids, "layer": layer, "num_layers": LAYERS}
    draw = jax.random.normal(jax.random.key(seed), (B, T, H))[:, T - q.shape[2] :]
    more = {"out_proj": jnp.ones((q.shape[1], H, H)), "hidden": draw}
    return np.asarray(kvjax.evict_layer(policy, q, k, v, lengths=np.array(lengths), **how, **more).live)


def check_same(found, wanted, tied):
    """Two runs kept the same, or as many where scores are equal but for the order of additions."""
    if tied:
        np.testing.assert_array_equal(found.sum(-1), wanted.sum(-1))
    else:
        np.testing.assert_array_equal(found, wanted)


def prompt_property(case, data, groups, widths):
    budget, lengths = data.draw(budgets, "budget"), data.draw(lengths_of_prompts, "lengths")
    G, content = data.draw(st.sampled_from(groups), "group size"), data.draw(st.sampled_from(CONTENTS), "content")
    layer, seed = data.draw(st.integers(0, LAYERS - 1), "layer"), data.draw(st.integers(0, 3), "seed")
    arrays = layer_of(content, G, seed, T)
    try:
        policy = table.MAKE[case.name](budget, Sizes(LAYERS, K * G, K, H, H))
        live = kept(policy, arrays, lengths, layer, seed)
    except ValueError as error:
        refused(error)
        return
    here = policy.at(layer, LAYERS)
    info = LayerInfo(layer, LAYERS, K * G, K * G if here.layout.by_query_head else K, H, T, 0, H)
    for row, n in enumerate(lengths):
        assert not live[row, :, : T - n].any(), "padding is never kept"
        mine = [np.flatnonzero(head) for head in live[row, :, T - n :]]
        table.owed(here, info, n, case.name not in table.FEWER).check(mine)

    # What stands in padding, and in other rows, does not matter.
    of_two = ("keydiff" in case.name or case.name == "kvpress_decoding") and min(lengths) <= 2  # as near to their mean
    tied = of_two or content in ("equal keys", "equal tokens")
    if case.name in table.OF_A_BATCH:
        return
    real = jnp.asarray(np.arange(T)[None] >= T - np.array(lengths)[:, None])[:, None, :, None]
    other = [jnp.where(real, x, 1e4) for x in arrays]
    other = [x.at[1].set(x[0] * 0.5) for x in other]
    try:
        again = kept(policy, other, (lengths[0], T), layer, seed)
    except ValueError as error:  # the other row's new length may be one that this budget cannot serve
        refused(error)
        return
    check_same(again[0], live[0], tied)
    for width in widths:
        if max(lengths) <= width:
            cut = kept(policy, [x[:, :, T - width :] for x in arrays], lengths, layer, seed)
            check_same(cut, live[:, :, T - width :], tied)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "ada_snapkv", "chunkkv", "criticalkv", "h2o_pooled"])
@settings(6)
@hypothesis.given(data=st.data())
def test_prompts(name, data):
    prompt_property(table.Case(name), data, groups=(2,), widths=())


@pytest.mark.exhaustive
@table.rows(())
@settings(20)
@hypothesis.given(data=st.data())
def test_prompts_of_many_shapes(case, data):
    prompt_property(case, data, groups=(1, 2, 3), widths=(11,))


@pytest.mark.exhaustive
@table.rows(())
@settings(8)
@hypothesis.given(data=st.data())
def test_decoding(case, data):
    budget = data.draw(st.sampled_from((1, 2, 5, 6, 9, 40, 0.1, 0.5)), "budget")
    lengths, G = data.draw(lengths_of_prompts, "lengths"), data.draw(st.sampled_from((1, 2)), "group size")
    content, seed = data.draw(st.sampled_from(CONTENTS), "content"), data.draw(st.integers(0, 3), "seed")
    block = data.draw(st.sampled_from((None, 1, 3, 7)), "block")
    q, k, v = layer_of(content, G, seed, T + STEPS)
    params = {"q": q, "k": k, "v": v, "out_proj": jnp.ones((K * G, H, H))}
    params["hidden"] = jax.random.normal(jax.random.key(seed), (B, T + STEPS, H))
    try:
        policy = table.MAKE[case.name](budget, Sizes(1, K * G, K, H, H))
        block = None if policy.at(0, 1).layout.prompt != "any" else block
        seen = tensors.replay(policy, [params], T, lengths=np.array(lengths), block=block)
    except ValueError as error:
        refused(error)
        return
    here = policy.at(0, 1)
    info = LayerInfo(0, 1, K * G, K * G if here.layout.by_query_head else K, H, T, STEPS, H)
    sizes = here.sizes(info, np.array(lengths))
    for row in range(B):
        for step, now in enumerate(seen.live):
            counts = [len(tokens) for tokens in now[row]]
            assert max(counts) <= sizes.per_head[row]
            assert sum(counts) <= sizes.total[row]
            if step:
                new, before = lengths[row] + step - 1, seen.live[step - 1][row]
                assert all({*a} <= {*b, new} for a, b in zip(now[row], before, strict=True)), "nothing comes back"
