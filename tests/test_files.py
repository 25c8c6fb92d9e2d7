"""Stored prompts: what comes back, and what is refused."""

import dataclasses
import functools
import os

import jax
import numpy as np
import pytest

from kvjax import compose, methods, models
from kvjax.contract import LAST
from kvjax.generation import generate as generating
from kvjax.generation import sampling
from kvjax.observe import Reread
from kvjax.run import plan, steps
from kvjax.text import files
from tests.marks import slow_but

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 12))


@pytest.fixture(scope="module")
def compressed(shallow):
    """Logits and state of a compressed prompt."""
    return lambda policy, **how: steps.prefill(
        *shallow, TOKENS, policy=policy, max_new_tokens=8, key=jax.random.key(3), **how
    )


KINDS = {
    "h2o": lambda: methods.h2o(8),
    "pool": lambda: methods.ada_snapkv(4, window=2),
    "rank": lambda: methods.streaming_llm(8),
    "rereads": lambda: methods.kvzip(8, Reread((1, 2))),
    "channels": lambda: methods.think(0.5),
}


@pytest.mark.parametrize("kind", slow_but(KINDS, "pool"))
def test_a_compressed_prompt_goes_on_bit_for_bit(compressed, shallow, tmp_path, kind):
    """Under an equal policy, rebuilt; also where heads are yet to come back to their budgets."""
    logits, state = compressed(KINDS[kind]())
    state = dataclasses.replace(state, steady=kind != "pool")
    files.save_state(tmp_path / "state", *shallow, state, policy=KINDS[kind]())
    restored = files.load_state(tmp_path / "state", *shallow, policy=KINDS[kind]())
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    sampler = sampling.Sample(temperature=1.5)
    found = [
        generating.generate_from(*shallow, logits, x, max_new_tokens=8, sampler=sampler) for x in (state, restored)
    ]
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(files._plain(x), files._plain(y))


def test_learned_parameters_and_the_slots_of_a_larger_plan_come_back(compressed, shallow, tmp_path):
    larger = plan.make_plan(shallow[0].config, methods.h2o(10), [12, 12], 12, 8)
    _, state = compressed(methods.h2o(8), plan=larger)
    files.save_state(tmp_path / "state", *shallow, state, policy=methods.h2o(8))
    restored = files.load_state(tmp_path / "state", *shallow, policy=methods.h2o(8))
    assert restored.plan == larger


@pytest.mark.parametrize("marked", [False, True])
def test_a_file_from_before_layers_had_faults(compressed, shallow, tmp_path, monkeypatch, marked):
    """It has none, but where positions said so: those of what stayed were later than any token's."""
    _, state = compressed(methods.h2o(8))
    layers = tuple(kv.replace(pos=kv.pos.at[0, 0, 0].set(LAST - 1)) if marked else kv for kv in state.layers)
    write = files._write
    old = lambda arrays: {name: x for name, x in arrays.items() if name.isdigit()}
    monkeypatch.setattr(files, "_write", lambda path, arrays, words: write(path, old(arrays), words))
    state = dataclasses.replace(state, layers=layers)
    files.save_state(tmp_path / "state", *shallow, state, policy=methods.h2o(8))
    found = files.load_state(tmp_path / "state", *shallow, policy=methods.h2o(8))
    np.testing.assert_array_equal(found.layers[0].fault, [[marked, False], [False, False]])
    np.testing.assert_array_equal(found.layers[0].k, state.layers[0].k)


def scaled(kv, stats, ctx, *, power=2):
    return (kv.k**power).sum(-1)


def negated(kv, stats, ctx, *, power=2):
    return -(kv.k**power).sum(-1)


def local(power):
    @functools.wraps(scaled)
    def wrapped(kv, stats, ctx):
        return scaled(kv, stats, ctx, power=power)

    return wrapped


class Held:
    def __call__(self, kv, stats, ctx):
        return kv.pos

    def positions(self, kv, stats, ctx):
        return kv.pos


@jax.jit
def compiled(kv, stats, ctx):
    return kv.pos


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (lambda fn: fn, scaled, negated),
        (lambda power: functools.partial(scaled, power=power), 2, 3),
        (lambda power: functools.partial(scaled, power=power), np.ones(2000), np.ones(2000) + np.eye(2000)[1000]),
        (lambda fn: functools.partial(fn, power=2), scaled, negated),
        (lambda fn: jax.jit(functools.partial(fn, power=2)), scaled, negated),
        (lambda fn: fn, compiled, scaled),
    ],
)
def test_functions_are_told_apart_by_their_modules_and_names(make, one, other):
    """And not those that are made anew."""
    words = lambda held: files.described(compose.from_fn(make(held), budget=8))
    assert words(one) == words(one) != words(other)
    assert f"of module {__name__}" in words(one)
    assert files.described(methods.h2o(8)) != files.described(methods.h2o(9))


REFUSED = {
    "a lambda": (lambda kv, stats, ctx: kv.pos, "test_files.py:.* has no name by which another process finds it"),
    "another function's name": (local(3), "scaled .*has no name by which another process finds it"),
    "within a partial": (functools.partial(lambda kv, stats, ctx: kv.pos), "give a function that a module has under"),
    "compiled": (jax.jit(lambda kv, stats, ctx: kv.pos), "functools.partial of one, or a frozen dataclass with"),
    "an object": (Held(), "is like any other Held in another process; make it a frozen dataclass"),
    "a method": (Held().positions, "is like any other Held in another process; make it a frozen dataclass"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_nothing_tells_apart_is_refused_before_anything_is_written(stored, shallow, what):
    held, message = REFUSED[what]
    policy, path = compose.from_fn(held, budget=8), stored[0]
    before = path.read_bytes()
    for call in (
        lambda: files.save_state(path, *shallow, stored[1], policy=policy),
        lambda: files.load_state(path, *shallow, policy=policy),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert path.read_bytes() == before


def test_files_that_have_the_code_of_functions_load(compressed, shallow, tmp_path, monkeypatch):
    """As they were written before functions were known by their modules."""
    policy, path = compose.from_fn(scaled, budget=8), tmp_path / "state"
    code = " of code 63905b29b1b41498(('k', 'sum'), (None, (':)', -1)))(None, {'power': 2}, ())"
    before = files.described(policy).replace(f" of module {__name__}", code)
    assert before != files.described(policy)
    state = compressed(policy)[1]
    with monkeypatch.context() as then:
        then.setattr(files, "described", lambda x: before)
        files.save_state(path, *shallow, state, policy=policy)
    assert files.load_state(path, *shallow, policy=policy).plan == state.plan
    for other in (compose.from_fn(negated, budget=8), compose.from_fn(scaled, budget=9)):
        with pytest.raises(ValueError, match="was made under another policy"):
            files.load_state(path, *shallow, policy=other)


@pytest.fixture(scope="module")
def stored(compressed, shallow, tmp_path_factory):
    path, state = tmp_path_factory.mktemp("stored") / "state", compressed(methods.h2o(8))[1]
    files.save_state(path, *shallow, state, policy=methods.h2o(8))
    return path, state


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-4],
    "a bit of an array": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "a word": lambda data: data.replace(b"capacities", b"capacitieS"),
    "another file": lambda data: b"a text",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(stored, shallow, tmp_path, damage):
    path = tmp_path / "state"
    path.write_bytes(DAMAGES[damage](stored[0].read_bytes()))
    with pytest.raises(ValueError, match=f"{path} is damaged, or no file of kvjax"):
        files.load_state(path, *shallow, policy=methods.h2o(8))


def test_a_file_is_replaced_in_one_step(stored, shallow, tmp_path, monkeypatch):
    """Where it cannot be written, what was there stays, and nothing beside it."""
    _, state = stored
    save = lambda path: files.save_state(path, *shallow, state, policy=methods.h2o(8))
    mine = tmp_path / "mine"
    save(mine)
    before = mine.read_bytes()
    save(mine)
    assert mine.read_bytes() == before

    def full(arrays, path, metadata):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match=r"mine could not be written: .*No space left"):
        save(mine)
    with pytest.raises(OSError, match=r"mine/new could not be written"):
        save(mine / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert mine.read_bytes() == before
    other = tmp_path / "thesis.tex"
    other.write_text("years")
    with pytest.raises(ValueError, match=r"thesis.tex exists, and is no file that kvjax wrote; choose another path"):
        save(other)
    assert other.read_text() == "years"


@pytest.mark.usefixtures("unchecked")
def test_files_take_what_they_are_for(stored, shallow, tiny, tmp_path):
    path, state = stored
    load = lambda path=path, model=shallow, policy=methods.h2o(8): files.load_state(path, *model, policy=policy)
    other = models.ModelConfig(61, 32, 48, 1, 4, 4, 8)
    other = models.LanguageModel(other), models.LanguageModel(other).init(jax.random.key(0))
    flipped = {**shallow[1], "lm_head": jax.tree.map(lambda x: x.at[4, 3].add(1.0), shallow[1]["lm_head"])}
    for given, message in (
        ({"path": ""}, "is not the path of a file"),
        ({"path": tmp_path / "nowhere"}, "there is no file .*nowhere"),
        ({"model": tiny}, "holds a state of 1 layers, but the model has 3; give the model that read"),
        ({"model": other}, "holds the state of another model or version: of its"),
        ({"model": (shallow[0], flipped)}, "holds the state of another model; give the model and parameters that read"),
        ({"policy": methods.h2o(9)}, "was made under another policy, with budget=8 and not budget=9; give the same"),
    ):
        with pytest.raises(ValueError, match=message):
            load(**given)
    with pytest.raises(ValueError, match=r"the state was read under another policy than this .*; give that"):
        files.save_state(tmp_path / "new", *shallow, state, policy=methods.tova(8))
    empty = steps.start(shallow[0], policy=methods.h2o(8), lengths=[12, 12], max_new_tokens=8)
    with pytest.raises(ValueError, match="holds no prompt that was read to its end"):
        files.save_state(tmp_path / "new", *shallow, empty, policy=methods.h2o(8))
