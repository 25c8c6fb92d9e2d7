"""Functions compare by what they compute: an equal one, written anew, is no other; one that computes otherwise is."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.drivers.requests import check_logits
from kvjax.functions import Function, check_unchanged, definition, meaning
from kvjax.pallas_kernels.values import complete_repr
from tests import helpers


def cell(source, **names):
    """The globals after a notebook's cell, in which `names` stood before."""
    space = {
        "__name__": "__main__",
        "jnp": jnp,
        "np": np,
        "jax": jax,
        "functools": functools,
        "dataclasses": dataclasses,
        **names,
    }
    exec(compile(source, "<cell>", "exec"), space)
    return space


def module(**names):
    made = types.ModuleType("made")
    made.__file__ = "/somewhere/made.py"
    vars(made).update(names)
    return made


SCALED = "def f(x):\n    return x * SCALE"
THROUGH = "def inner(x):\n    return x + STEP\ndef f(x):\n    return (lambda y: inner(y))(x)"
CLOSED = "def make(held):\n    def f(x):\n        return x * held\n    return f\nf = make(HELD)"
METHOD = "class Scaled:\n    by = BY\n    def f(self, x):\n        return x * self.by\nf = lambda x: Scaled().f(x)"
FROZEN = "@dataclasses.dataclass(frozen=True)\nclass Scaled:\n    by: object\nf = Scaled(BY)"
RECURSIVE = "def f(x, n=2):\n    return x if n == 0 else f(x + STEP, n - 1)"


@pytest.mark.parametrize(
    ("source", "one", "same", "other"),
    [
        ("f = lambda x: x + {}", 1, 1, 2),
        ("f = lambda x: x + {}", 1, 1, 1.0),
        ("f = lambda x: x + {}", 0.0, 0.0, -0.0),
        ("f = lambda x: {}", "'a' in {'a', 'b'}", "'a' in {'b', 'a'}", "'a' in {'a', 'c'}"),
        ("f = lambda x: {}(x)", "jnp.exp", "jnp.exp", "jnp.log"),
        ("f = lambda x, y={}: x + y", 1, 1, 2),
        ("f = lambda x, *, y={}: x + y", 1, 1, 2),
        ("f = lambda x: (lambda y: y * {})(x)", 2, 2, 3),
        ("f = jax.jit(lambda x: x * {})", 2, 2, 3),
        ("f = functools.partial(lambda x, y: x * y, y={})", 2, 2, 3),
        ("def f(a, b):\n    return g(b=b, a=a)\ndef g({}):\n    return a - b", "a, b", "a, b", "b, a"),
    ],
)
def test_code_and_constants(source, one, same, other):
    found = [Function(cell(source.replace("{}", str(x), 1))["f"]) for x in (one, same, other)]
    assert found[0] == found[1]
    assert hash(found[0]) == hash(found[1])
    assert repr(found[0]) == repr(found[1])
    assert found[0] != found[2]
    assert repr(found[0]) != repr(found[2])


@pytest.mark.parametrize(
    ("source", "name", "values"),
    [
        (SCALED, "SCALE", (2, 2, 3)),
        (SCALED, "SCALE", (np.ones(3), np.ones(3), np.arange(3.0))),
        (SCALED, "SCALE", (jnp.ones(3), jnp.ones(3), jnp.ones(3, jnp.bfloat16))),
        (SCALED, "SCALE", (jnp.asarray(1.0), jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32))),
        (SCALED, "SCALE", (jax.random.key(0), jax.random.key(0), jax.random.key(1))),
        (THROUGH, "STEP", (2, 2, 3)),
        (CLOSED, "HELD", ([1, {"a": np.ones(2)}], [1, {"a": np.ones(2)}], [1, {"a": np.zeros(2)}])),
        (CLOSED, "HELD", ({1, 2}, {2, 1}, frozenset({1, 2}))),
        (CLOSED, "HELD", (kvjax.methods.h2o(8), kvjax.methods.h2o(8), kvjax.methods.h2o(9))),
        (METHOD, "BY", (2, 2, 3)),
        (FROZEN, "BY", (2, 2, 3)),
        (RECURSIVE, "STEP", (2, 2, 3)),
        ("f = lambda x: x * made.SCALE", "made", (module(SCALE=2), module(SCALE=2, OTHER=1), module(SCALE=3))),
    ],
)
def test_what_a_function_computes_with(source, name, values):
    found = [cell(source, **{name: x})["f"] for x in values]
    for seen in (meaning, definition):
        one, same, other = map(seen, found)
        assert one == same != other


@pytest.mark.parametrize("source", [SCALED, CLOSED])
def test_objects_without_an_equality_count_as_themselves(source):
    """A traced array, too: it has no contents yet."""
    name = "SCALE" if source == SCALED else "HELD"
    of = lambda x: Function(cell(source, **{name: x})["f"])
    held = object()
    assert of(held) == of(held) != of(object())

    def gradient(w):
        assert of(w) == of(w) != of(w + 1)
        return of(w)(3.0)

    assert jax.grad(gradient)(2.0) == 3.0


def test_what_a_function_does_not_read_does_not_matter():
    """Nor do attributes of the same name as a global, lines, and names of its variables."""
    one, same = "def f(x):\n    y = x.k\n    return y", "\n\ndef f(x):\n    z = x.k\n    return z"
    assert meaning(cell(one, k=1)["f"]) == meaning(cell(same, k=2)["f"])


def test_later_changes_of_what_a_function_holds_make_another():
    held = np.ones(3)
    space = cell(CLOSED, HELD=held)
    before = Function(space["f"])
    held[0] = 2
    assert before != Function(space["f"])
    assert before == before


def test_an_equal_function_written_anew_compiles_nothing_anew():
    policy = lambda power: kvjax.from_fn(lambda kv, stats, ctx: -(kv.k**power).sum(-1), budget=4)
    assert policy(2) == policy(2) != policy(3)
    traced = []

    @functools.partial(jax.jit, static_argnames="policy")
    def keep(policy, q, k, v):
        traced.append(policy)
        return kvjax.evict_layer(policy, q, k, v).keep

    found = [keep(policy(power), *helpers.qkv(1, T=8, B=1)) for power in (2, 2, 3)]
    assert traced == [policy(2), policy(3)]
    assert (found[0] == found[1]).all()
    assert not (found[0] == found[2]).all()


def test_policies_print_without_addresses():
    assert definition(kvjax.methods.h2o(8)) == complete_repr(kvjax.methods.h2o(8))
    made = kvjax.from_fn(lambda kv, stats, ctx: kv.k.sum(-1), budget=4)
    assert "fn=<lambda>:" in repr(made)
    assert " at 0x" not in repr(made)
    assert definition(made).startswith(f"{complete_repr(made)} of code ")


@pytest.mark.parametrize(
    ("source", "name", "read", "change"),
    [
        (SCALED, "SCALE", "`SCALE`", lambda space: space.update(SCALE=3)),
        (CLOSED, "HELD", "`held`", lambda space: space["HELD"].append(3)),
        (THROUGH, "STEP", "`inner`", lambda space: space.update(STEP=3)),
        ("f = lambda x: x * made.SCALE", "made", "`made.SCALE`", lambda space: vars(space["made"]).update(SCALE=3)),
        ("f = functools.partial(lambda x, y: x * y, y=HELD)", "HELD", "something", lambda space: space["HELD"].clear()),
    ],
)
def test_a_function_that_has_changed_is_refused(source, name, read, change):
    """A program that was compiled before would still compute what it was."""
    space = cell(source, **{name: {"made": module(SCALE=2), "HELD": [2]}.get(name, 2)})
    policy = kvjax.chain(kvjax.methods.h2o(8), kvjax.from_fn(space["f"], budget=4))
    check_unchanged(policy)
    change(space)
    with pytest.raises(ValueError, match=f"reads {read}, which has changed since the policy was made; make the policy"):
        check_unchanged(policy)


def test_a_table_that_an_object_makes_once_changes_nothing():
    made = "class Scaled:\n    @functools.cached_property\n    def by(self):\n        return 2\nf = lambda x: x * s.by"
    space = cell(f"{made}\ns = Scaled()")
    held = Function(space["f"])
    assert held(3) == 6
    check_unchanged(held)


def test_a_key_that_is_known_has_contents_where_others_are_traced():
    held = Function(cell(SCALED, SCALE=jax.random.key(0))["f"])
    jax.eval_shape(lambda x: check_unchanged(held), 0.0)


def test_no_plan_is_made_with_a_function_that_has_changed(shallow):
    space = cell("f = lambda kv, stats, ctx: SIGN * kv.pos", SIGN=1)
    policy = kvjax.from_fn(space["f"], budget=4)
    plan = lambda: kvjax.make_plan(shallow[0].config, policy, prompt_len=8, max_new_tokens=2)
    logits, state = np.zeros((1, 61)), kvjax.init_state(plan(), [8])
    check_logits(shallow[0], logits, state)
    space["SIGN"] = -1
    with pytest.raises(ValueError, match="reads `SIGN`, which has changed"):
        plan()
    with pytest.raises(ValueError, match="reads `SIGN`, which has changed"):
        check_logits(shallow[0], logits, state)
