"""Stored prompts and parameters: what comes back, and what is refused."""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.drivers.generation import empty_after_prompt, init_state


def test_parameters_by_orbax(tmp_path, tiny):
    model, params = tiny
    from kvjax.drivers import checkpoint

    checkpoint.save_params(tmp_path / "params", params)
    restored = checkpoint.load_params(tmp_path / "params", model.shapes)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    wrong = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + 1), x.dtype), model.shapes)
    with pytest.raises(ValueError, match=r"parameters of another shape: .*embed_tokens.* there, .* wanted"):
        checkpoint.load_params(tmp_path / "params", wrong)
    with pytest.raises(ValueError, match="exists; choose a new directory"):
        checkpoint.save_params(tmp_path / "params", params)


def scaled(kv, stats, ctx, *, power):
    return (kv.k**power).sum(-1)


def negated(kv, stats, ctx, *, power):
    return -(kv.k**power).sum(-1)


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (lambda power: lambda kv, stats, ctx: (kv.k**power).sum(-1), 2, 3),
        (lambda power: lambda kv, stats, ctx, power=power: (kv.k**power).sum(-1), 2, 3),
        (lambda power: lambda kv, stats, ctx: (kv.k**power).sum(-1), np.ones(2000), np.ones(2000) + np.eye(2000)[1000]),
        (lambda inner: lambda kv, stats, ctx: inner(kv, stats, ctx), *(lambda *a, i=i: a[0].pos * i for i in (2, 3))),
        (lambda inner: functools.partial(inner, power=2), scaled, negated),
    ],
)
def test_a_stored_prompt_of_a_function_that_holds_other_values_is_refused(tmp_path, tiny, make, one, other):
    from kvjax.drivers import checkpoint

    plan = lambda held: kvjax.make_plan(
        tiny[0].config, kvjax.from_fn(make(held), budget=8), prompt_len=20, max_new_tokens=4
    )
    checkpoint.save_state(tmp_path / "state", empty_after_prompt(init_state(plan(one), jnp.asarray([20]))))
    checkpoint.load_state(tmp_path / "state", plan(one))
    with pytest.raises(ValueError, match="was made for another plan"):
        checkpoint.load_state(tmp_path / "state", plan(other))


@pytest.mark.parametrize("name", ["ada", *(pytest.param(n, marks=pytest.mark.slow) for n in ("h2o", "streaming_llm"))])
def test_a_compressed_prompt_is_stored_and_resumed(tmp_path, shallow, name):
    """Restored runs continue bit for bit, and with an equal plan built anew."""
    from kvjax import methods
    from kvjax.drivers import checkpoint

    model, params = shallow
    make = {
        "h2o": lambda: kvjax.when(kvjax.every(3), methods.h2o(8)),
        "streaming_llm": lambda: methods.streaming_llm(8),
        "ada": lambda: kvjax.Evict(methods.h2o(8).score, 8, heads=kvjax.Adaptive(), when=kvjax.every_step()),
    }[name]
    plan = lambda: kvjax.make_plan(model.config, make(), prompt_len=20, max_new_tokens=12)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 20)), jnp.int32)
    sizes = plan().sizes(make(), [20, 20]) if name == "ada" else None
    logits, state = kvjax.prefill(model, params, tokens, plan(), key=jax.random.key(3), sizes=sizes)
    checkpoint.save_state(tmp_path / "prompt", state)
    restored = checkpoint.load_state(tmp_path / "prompt", plan())
    assert jax.tree.structure(restored) == jax.tree.structure(state)

    sampler = kvjax.Sample(temperature=1.5)
    go_on = lambda state: kvjax.generate_from(model, params, logits, state, max_new_tokens=12, sampler=sampler)
    a, b = go_on(state), go_on(restored)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)

    other = kvjax.make_plan(model.config, methods.h2o(9), prompt_len=20, max_new_tokens=12)
    with pytest.raises(ValueError, match="was made for another plan"):
        checkpoint.load_state(tmp_path / "prompt", other)
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.load_state(tmp_path / "nowhere", plan())
    with pytest.raises(ValueError, match="holds state, not params"):
        checkpoint.load_params(tmp_path / "prompt", model.shapes)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, tiny):
    """Parameters and a cache on disk, what they are, and the plan of the cache."""
    from kvjax import methods
    from kvjax.drivers import checkpoint

    path = tmp_path_factory.mktemp("stored")
    model, params = tiny
    plan = kvjax.make_plan(model.config, methods.h2o(8), prompt_len=20, max_new_tokens=12)
    state = kvjax.drivers.generation.empty_after_prompt(kvjax.init_state(plan, jnp.full((2,), 20, jnp.int32)))
    checkpoint.save_params(path / "params", params)
    checkpoint.save_state(path / "state", state)
    return path, plan, state


def _largest(path):
    return max((p for p in (path / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGES = {
    "meta_absent": lambda path: (path / "meta" / "metadata").unlink(),
    "meta_empty": lambda path: (path / "meta" / "metadata").write_text(""),
    "meta_list": lambda path: (path / "meta" / "metadata").write_text("[]"),
    "meta_without_kind": lambda path: (path / "meta" / "metadata").write_text("{}"),
    "arrays_absent": lambda path: shutil.rmtree(path / "arrays"),
    "no_names": lambda path: (path / "arrays" / "_METADATA").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["params", "state"])
def test_a_damaged_store_is_named(tmp_path, stored, tiny, kind, damage):
    from kvjax.drivers import checkpoint

    source, plan, _ = stored
    path = shutil.copytree(source / kind, tmp_path / kind)
    DAMAGES[damage](path)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is (damaged|not a complete)"):
        checkpoint.load_params(path, tiny[0].shapes) if kind == "params" else checkpoint.load_state(path, plan)


def test_a_flipped_bit_is_no_parameter(tmp_path, stored, tiny):
    from kvjax.drivers import checkpoint

    path = shutil.copytree(stored[0] / "params", tmp_path / "params")
    file = _largest(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.load_params(path, tiny[0].shapes)


@pytest.mark.usefixtures("unchecked")
def test_stores_take_what_they_are_for(tmp_path, stored, tiny):
    from kvjax import methods
    from kvjax.drivers import checkpoint

    path, plan, state = stored
    for wrong in (None, methods.h2o(8), {}):
        with pytest.raises(ValueError, match="not a CachePlan such as make_plan returns"):
            checkpoint.load_state(path / "state", wrong)
        with pytest.raises(ValueError, match="not a KVState such as prefill returns"):
            checkpoint.save_state(tmp_path / "new", wrong)
    with pytest.raises(ValueError, match="exists; choose a new directory"):
        checkpoint.save_state(path / "state", state)
    with pytest.raises(ValueError, match=r"every parameter is an array, but \['a'\] is a float"):
        checkpoint.save_params(tmp_path / "new", {"a": 1.0})
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/new could not be written"):
        checkpoint.save_params(tmp_path / "file" / "new", tiny[1])
    for name in (None, 3, ""):
        with pytest.raises(ValueError, match="is not the path of a directory"):
            checkpoint.load_state(name, plan)
    for x, y in zip(
        *map(jax.tree.leaves, (checkpoint.load_state(path / "state", plan).layers, state.layers)), strict=True
    ):
        np.testing.assert_array_equal(x, y)
