"""Properties of every method over sizes, budgets, groups, paddings and ties: a right answer, or an error that says why.

The default run draws few examples of few shapes; `-m slow` draws many of more.
"""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.eviction import Evict
from kvjax.scoring.select import TopK
from kvjax.sizes.budget import as_count
from tests import helpers
from tests.methods import FEW, OF_ONE_LAYER

B, K, H, T, STEPS, LAYERS = 2, 2, 8, 16, 5, 3
CONTENTS = ("random", "equal keys", "equal tokens", "sharp")

budgets = st.one_of(st.integers(1, T + 3), st.sampled_from([0.05, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0]))
lengths_of_prompts = st.tuples(st.integers(1, T), st.integers(1, T))


def settings(examples):
    return hypothesis.settings(max_examples=examples, deadline=None, derandomize=examples < 20)


def layer_of(content, G, seed, width):
    q, k, v = helpers.qkv(seed, B=B, N=K * G, K=K, T=width, H=H)
    if content == "equal keys":
        k = jnp.broadcast_to(k[:, :, :1], k.shape)
    elif content == "equal tokens":
        q, k, v = (jnp.broadcast_to(x[:, :, :1], x.shape) for x in (q, k, v))
    return (q * (40.0 if content == "sharp" else 1.0)), k, v


def refused(error):
    """A refusal names the two numbers that disagree, or the two things."""
    text = str(error)
    assert len(re.findall(r"\d+(?:\.\d+)?", text)) >= 2, text


def evict_layer(policy, tensors, lengths, layer, seed):
    q, k, v = tensors
    return kvjax.evict_layer(
        policy,
        q,
        k,
        v,
        lengths=np.array(lengths),
        key=jax.random.split(jax.random.key(seed), B),
        tokens=helpers.token_ids(B, q.shape[2], seed),
        out_proj=jnp.ones((q.shape[1], H, H)),
        layer=layer,
        num_layers=LAYERS,
    )


def average(budget, n):
    """Tokens of a budget for a prompt."""
    return max(int(as_count(budget, "budget").table(np.array([n]), np.array([0]))[0]), 1)


def protected(case, budget, n):
    """Positions that must live, as the table of methods has them."""
    b = average(budget, n)
    return {*range(min(case.sinks, b, n)), *range(max(n - case.recent(b), 0), n)}


def check_counts(case, live, limit, n):
    """Live tokens "K" of a row that has read `n` and may keep `limit` a head, on average."""
    if case.together:
        assert live.sum() <= limit * len(live)
    elif not case.fills:
        assert live.max() <= limit
    elif case.exact:
        assert live.tolist() == [min(n, limit)] * len(live)
    elif case.total:
        assert live.sum() == min(n, limit) * len(live)
    else:
        assert live.max() <= limit + case.slack
        assert live.min() >= min(n, limit, 1)


def check_best(policy, keep, score, n, width):
    """What was kept beats what was not, and of equals the newer stays."""
    if not isinstance(policy, Evict) or policy.select != TopK() or policy.scope is not None:
        return
    lengths = np.arange(width + 1)
    budgets_of = np.array([average(policy.budget, m) for m in lengths])
    sinks, recent = (int(x[n]) for x in helpers.protected_counts(policy.protect, lengths, budgets_of))
    rank = [(s, i) for i, s in enumerate(score)]
    others = [i for i in range(n) if sinks <= i < n - recent]
    worst = min((rank[i] for i in others if keep[i]), default=None)
    best = max((rank[i] for i in others if not keep[i]), default=None)
    assert worst is None or best is None or worst > best


def check_same(found, expected, score, content):
    """Two runs kept the same. Equal keys have scores that are equal on paper and differ by the order of additions.

    Of these, what one run keeps and the other does not has the same score; `check_best` sees to exact ties.
    """
    if content not in ("equal keys", "equal tokens"):
        np.testing.assert_array_equal(found, expected)
        return
    differ = found != expected
    np.testing.assert_array_equal(found.sum(-1), expected.sum(-1))
    for apart, scores in zip(differ.reshape(-1, differ.shape[-1]), score.reshape(-1, score.shape[-1]), strict=True):
        if apart.any():
            assert np.ptp(scores[apart]) <= 1e-6 * np.abs(scores[apart]).max()


def prompt_property(case, data, groups, widths):
    budget, lengths = data.draw(budgets, "budget"), data.draw(lengths_of_prompts, "lengths")
    G, content = data.draw(st.sampled_from(groups), "group size"), data.draw(st.sampled_from(CONTENTS), "content")
    layer, seed = data.draw(st.integers(0, LAYERS - 1), "layer"), data.draw(st.integers(0, 3), "seed")
    tensors = layer_of(content, G, seed, T)
    try:
        policy = case.make(budget)
        selection = evict_layer(policy, tensors, lengths, layer, seed)
    except ValueError as error:
        refused(error)
        return
    keep, score = np.asarray(selection.keep), np.asarray(selection.score)
    site = helpers.site(T=T, layer=layer, num_layers=LAYERS, N=K * G, K=K, H=H, max_new_tokens=0)
    for row, n in enumerate(lengths):
        assert not keep[row, :, : T - n].any(), "padding is never kept"
        mine = keep[row, :, T - n :]
        check_counts(case, mine.sum(-1), policy.at(site).spec.target[n], n)
        assert all(protected(case, budget, n) <= set(np.nonzero(head)[0]) for head in mine)
        for head in range(K):
            check_best(policy, mine[head], score[row, head, T - n :], n, T)

    # What stands in padding, and in other rows, does not matter.
    column = np.arange(T)[None] - (T - np.array(lengths))[:, None]
    dirty = [jnp.where(jnp.asarray(column >= 0)[:, None, :, None], x, 1e4) for x in tensors]
    other = [x.at[1].set(x[0] * 0.5) for x in dirty]
    lengths_of_other = (lengths[0], T)
    try:
        again = evict_layer(policy, other, lengths_of_other, layer, seed)
    except ValueError as error:  # the other row's new length may be one that this budget cannot serve
        refused(error)
        return
    check_same(np.asarray(again.keep[0]), keep[0], score[0], content)
    for width in widths:
        if max(lengths) <= width:
            cut = evict_layer(policy, [x[:, :, T - width :] for x in tensors], lengths, layer, seed)
            # Ids are drawn by width: methods that look at them get the same ones.
            if not case.name.startswith("fastgen"):
                check_same(np.asarray(cut.keep), keep[:, :, T - width :], score[:, :, T - width :], content)

    if content == "random" and not (case.random or case.by_head):
        swap = lambda x: x.reshape(B, K, -1, T, x.shape[-1])[:, ::-1].reshape(x.shape)
        swapped = evict_layer(policy, [swap(x) for x in tensors], lengths, layer, seed)
        np.testing.assert_array_equal(np.asarray(swapped.keep)[:, ::-1], keep)


def _cases(quick):
    return pytest.mark.parametrize("case", [c for c in OF_ONE_LAYER if not quick or c.name in quick], ids=repr)


@_cases(FEW | {"chunkkv", "criticalkv", "h2o_pooled"})
@settings(6)
@hypothesis.given(data=st.data())
def test_prompts(case, data):
    prompt_property(case, data, groups=(2,), widths=())


@pytest.mark.slow
@_cases(())
@settings(60)
@hypothesis.given(data=st.data())
def test_prompts_of_many_shapes(case, data):
    prompt_property(case, data, groups=(1, 2, 3), widths=(11,))


def decoding_property(case, data, budgets, groups, blocks):
    budget, lengths = data.draw(st.sampled_from(budgets), "budget"), data.draw(lengths_of_prompts, "lengths")
    G, content = data.draw(st.sampled_from(groups), "group size"), data.draw(st.sampled_from(CONTENTS), "content")
    seed, block = data.draw(st.integers(0, 3), "seed"), data.draw(st.sampled_from(blocks), "block")
    tensors = layer_of(content, G, seed, T + STEPS)
    try:
        policy = case.make(budget)
        block = None if policy.at(helpers.site()).spec.reads == "whole" else block
        ids = helpers.token_ids(B, T + STEPS, seed)
        seen = helpers.replay(policy, *tensors, T, lengths=lengths, ids=ids, block=block)
    except ValueError as error:
        refused(error)
        return
    assert np.isfinite(np.asarray(seen.kv.v)).all(), "values become NaN where a cache is driven past its plan"
    site = helpers.site(T=T, num_layers=1, N=K * G, K=K, H=H, max_new_tokens=STEPS)
    for row, n in enumerate(lengths):
        limit = policy.at(site).spec.target[n]
        for step, now in enumerate(seen.live):
            heads, count = now[row], np.array([len(tokens) for tokens in now[row]])
            grown = 0 if case.decodes else step
            if step:
                before = seen.live[step - 1][row]
                assert all(set(a) <= {*b, n + step - 1} for a, b in zip(heads, before, strict=True)), (
                    "nothing comes back"
                )
            if step and (case.slack or case.dips):
                assert count.max() <= limit + case.slack + grown
            else:
                read = n + (0 if grown else step)
                check_counts(case, count - grown, limit, read)
            must = protected(case, average(budget, n), n + step if case.decodes else n)
            assert all(must <= set(tokens) for tokens in heads)


@pytest.mark.slow
@_cases(FEW | {"nacl_decoding", "scissorhands", "chunkkv"})
@settings(3)
@hypothesis.given(data=st.data())
def test_decoding(case, data):
    decoding_property(case, data, budgets=(6,), groups=(2,), blocks=(None,))


@pytest.mark.slow
@_cases(())
@settings(30)
@hypothesis.given(data=st.data())
def test_decoding_with_many_budgets(case, data):
    decoding_property(case, data, budgets=(1, 2, 5, 9, 40, 0.1, 0.5), groups=(1, 2), blocks=(None, 1, 3, 7))
