"""One policy on one layer's raw tensors: what stays, and what is refused in the words of who gave it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import Policy, methods
from kvjax.contract import PerHead, PerSlot, Rewrite, Score, Select
from kvjax.observe import Rows
from kvjax.scores.attention import Function, Votes
from tests import tensors
from tests.marks import slow_but

T = 12
Q, K, V = tensors.qkv(T=T)


def of_token(kv, stats, ctx):
    """Whether a slot holds token 5, for slots that are the prompt's columns."""
    return jnp.broadcast_to((ctx.tokens == 5)[:, None].astype(jnp.float32), kv.pos.shape)


TOKENS = np.array([[5] * 6 + [1] * 6, [1] * 6 + [5] * 6])
OF_TOKEN = kvjax.from_fn(of_token, 6)


def test_what_stays_is_live():
    """In the slots of the prompt, none of which moves."""
    layer = kvjax.evict_layer(OF_TOKEN, Q, K, V, tokens=TOKENS)
    np.testing.assert_array_equal(layer.live.sum(-1), np.full((2, 2), 6))
    np.testing.assert_array_equal(layer.live[:, 0], TOKENS == 5)
    np.testing.assert_array_equal(layer.pos[1, 0, 6:], np.arange(6, T))
    with pytest.raises(ValueError, match=r"reads token ids, but none are known here; give evict_layer\(tokens=\)"):
        kvjax.evict_layer(OF_TOKEN, Q, K, V)


OBSERVING = [methods.expected_attention(6, sinks=1), methods.capkv(6, sinks=1), methods.tova(6)]


@pytest.mark.parametrize("policy", slow_but(OBSERVING, OBSERVING[-1]))
def test_padding_may_hold_what_is_no_number(policy):
    gone = (np.arange(T) < 4)[None, None, :, None] & (np.arange(2) == 1)[:, None, None, None]
    sick = (jnp.where(gone, jnp.nan, x) for x in (Q, K, V))
    found, expected = (kvjax.evict_layer(policy, *x, lengths=[T, 8]).live for x in (sick, (Q, K, V)))
    np.testing.assert_array_equal(found, expected)


class Writes(Policy):
    """Returns what its `writes` does not list."""

    what: str = "v"

    def update(self, kv, stats, ctx):
        return kv.replace(v=2 * kv.v) if self.what == "v" else None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Writes(), "changes v, but its `writes` is ..; list 'v' there"),
        (kvjax.chain(methods.tova(6), Writes()), "changes v, but its `writes` is"),
        (Writes("nothing"), "gives a NoneType, not a layer; return kv.keep"),
    ],
)
def test_a_policy_changes_what_it_lists(policy, message):
    with pytest.raises(ValueError, match=message):
        kvjax.evict_layer(policy, Q, K, V)


class Odd(Score):
    """Scores or memory of shapes that do not fit."""

    what: str = ""

    def memory(self, info):
        return {"slot": PerSlot((3,)), "head": PerHead(), "array": np.zeros(3)}.get(self.what, ())

    def update(self, slots):
        return slots.memory[..., 0] if self.what in ("slot", "head") else slots.memory

    def __call__(self, slots):
        return slots.kv.pos[:, 0].astype(jnp.float32) if self.what == "score" else slots.kv.pos.astype(jnp.float32)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "score",
            r"Odd gives scores of shape \(2, 12\) and type float32, but the layer has slots of shape \(2, 2, 12\)",
        ),
        (
            "slot",
            r"Odd updates its memory to arrays of shapes \[\(2, 2, 12\)\], but it listed \[\(2, 2, 12, 3\)\]: PerS",
        ),
        (
            "head",
            r"Odd updates its memory to arrays of shapes \[\(2,\)\], but it listed \[\(2, 2\)\].* PerHead for one",
        ),
        ("array", "memory is a tree of PerSlot and PerHead, but has a ndarray"),
    ],
)
def test_a_scores_shapes_are_those_of_slots(what, message):
    with pytest.raises((ValueError, TypeError), match=message):
        kvjax.evict_layer(kvjax.Evict(Odd(what), 6), Q, K, V)


class Gives(Select):
    """A selection that gives anything."""

    give: Callable[..., Any]

    def __call__(self, score, budgets, slots):
        return self.give(score, budgets, slots)


class Written(Rewrite):
    """A rewrite that gives anything."""

    give: Callable[..., Any]
    writes = ("v",)

    def __call__(self, decision, slots):
        return self.give(decision, slots)


class Nothing(Score, Select, Rewrite):
    """A part that is not written yet."""


SHAPES = r"but the layer has slots of shape \(2, 2, 12\); give bool of shape \(B, K, S\)"
first = lambda score, budgets, slots: slots.kv.pos < budgets[..., None]
every = lambda score, budgets, slots: slots.kv.live
with_v = lambda make: Written(lambda decision, slots: dataclasses.replace(decision, v=make(slots.kv.v)))


@pytest.mark.parametrize(
    ("field", "part", "message"),
    [
        ("select", Gives(lambda *x: first(*x).astype(int)), rf"Gives gives masks of shape .* and type int32, {SHAPES}"),
        ("select", Gives(lambda *x: first(*x).astype(float)), rf"and type float32, {SHAPES}"),
        ("select", Gives(lambda *x: first(*x)[:, 0]), rf"Gives gives masks of shape \(2, 12\) and type bool, {SHAPES}"),
        ("select", Gives(lambda *x: [True]), f"Gives gives masks as a list, {SHAPES}"),
        ("select", Gives(every), "the selection Gives keeps 12 tokens or more in a head"),
        (
            "select",
            Gives(first),
            "keeps 8 tokens or more in a head of layer 0, whose budget is 6; keep at most `budgets`",
        ),
        (
            "rewrite",
            with_v(lambda v: v[:, :1]),
            r"gives v of shape \(2, 1, 12, 8\), but the layer has v of shape \(2, 2",
        ),
        ("rewrite", with_v(lambda v: [1.0]), r"a decision gives v as a list, but the layer has v of shape"),
        ("rewrite", with_v(lambda v: v * jnp.nan), r"Written gives v that is not a number \(NaN in layer 0\) in slots"),
        ("rewrite", Written(lambda decision, slots: slots.kv.v), r"gives float32\[2, 2, 12, 8\], not a Decision; give"),
        ("score", Nothing(), "Nothing has neither `__call__` nor `memory`"),
        ("score", Function(lambda kv, stats, ctx: stats[Rows()]), r"Rows\(.* was not observed; list it in `observe`"),
        ("score", Function(lambda kv, stats, ctx: stats["p"], (Rows(2),)), r"'p' was .* There is stats\[Rows\(last=2"),
        ("score", Function(lambda kv, stats, ctx: stats.attn), "stats has no attn. There is nothing: attention is sta"),
        (
            "score",
            Function(lambda kv, stats, ctx: kv.keys.sum()),
            r"test_evict_layer.py:\d+\): 'function'.* There are kv.k",
        ),
    ],
)
def test_what_a_part_gives_is_an_array_for_the_slots(field, part, message):
    with pytest.raises(ValueError, match=message):
        kvjax.evict_layer(kvjax.Evict(**{"score": Votes(4), "budget": 6, "recent": 2, field: part}), Q, K, V)


def test_what_is_protected_stays_whatever_a_selection_says():
    oldest = Gives(lambda score, budgets, slots: slots.kv.pos < (budgets[..., None] - 2))
    layer = kvjax.evict_layer(kvjax.Evict(Votes(4), 6, recent=2, select=oldest), Q, K, V)
    np.testing.assert_array_equal(layer.live[0, 1].nonzero()[0], [0, 1, 2, 3, 10, 11])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[:, :3]}, "query heads must be a multiple of kv heads; here these are 3 and 2"),
        ({"tokens": TOKENS[:1]}, r"tokens must be integers, one a token, of shape \(2, 12\)"),
        ({"layer": 1}, "layer=1 must be a whole number from 0 to 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kvjax.evict_layer(**{"policy": methods.h2o(6), "q": Q, "k": K, "v": V} | change)
