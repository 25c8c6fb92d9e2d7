"""What meshes of eight devices compute, and what each device holds: `pytest tests/sharded.py` with

    XLA_FLAGS=--xla_force_host_platform_device_count=8

which decides for a whole process, so that the other tests have one device. `tests/test_mesh.py` starts one.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.codecs import Codec, Int8, TurboQuant
from kvjax.experiments import run
from kvjax.experiments.core import records
from kvjax.models.families import from_hugging_face
from kvjax.storage import Pool
from tests import runs
from tests.marks import slow_but

if jax.device_count() < 8:
    pytest.exit(__doc__, returncode=4)

B, T, BUDGET, STEPS = 4, 24, 8, 4
TOKENS = np.random.default_rng(1).integers(61, size=(B, T))
LENGTHS = np.array([24, 20, 24, 11], np.int32)
OPTIONS = {"max_new_tokens": STEPS, "lengths": LENGTHS, "buckets": False, "key": jax.random.key(3)}
BOTH = {"data": 4, "heads": 2}


@functools.cache
def of(**fields):
    sizes = {"vocab_size": 61, "embed_dim": 32, "mlp_dim": 48, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    model = models.LanguageModel(models.ModelConfig(**sizes, num_layers=1, **fields))
    return model, jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(7)))


def check_equal(found, wanted):
    """The same tokens and kept sets; the same keys and values to 1e-5 of the largest."""
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    for here, there in zip(found.state.layers, wanted.state.layers, strict=True):
        np.testing.assert_array_equal(here.pos, there.pos)
        live = np.asarray(here.pos) >= 0
        for x, y in ((here.k, there.k), (here.v, there.v)):
            x, y = np.asarray(x)[live], np.asarray(y)[live]
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())


def check_shares(state, data=1, heads=1):
    """Every device holds its share of every array of a state."""
    for kv in state.layers:
        share = data if isinstance(kv, Pool) else data * heads
        for x in jax.tree.leaves(kv):
            assert {shard.data.nbytes for shard in x.addressable_shards} == {x.nbytes // share}
    for x in (state.length, state.prompt_length, *jax.tree.leaves(state.hparams)):
        assert {shard.data.nbytes for shard in x.addressable_shards} == {x.nbytes // data}


POLICIES = {
    "full": kvjax.Policy(),
    "h2o": methods.h2o(BUDGET),
    "snapkv": methods.snapkv(BUDGET, window=4, kernel=3),
    "ada_snapkv": methods.ada_snapkv(BUDGET, window=4, kernel=3),  # a pool
    "tova": methods.tova(BUDGET),
    "keyformer": methods.keyformer(BUDGET, recent=3),  # noise by the number of a head
    "streaming_llm": methods.streaming_llm(BUDGET, sinks=2),  # positions in the cache
}


@pytest.mark.parametrize("name", slow_but(POLICIES, "h2o", "ada_snapkv"))
def test_a_method_is_what_it_is_on_one_device(name):
    model, params = of()
    generate = functools.partial(kvjax.generate, model, params, TOKENS, policy=POLICIES[name], **OPTIONS)
    found = generate(mesh=kvjax.make_mesh(**BOTH))
    check_equal(found, generate())
    check_shares(found.state, **BOTH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"sliding_window": (9,)}, {}),
        ({}, {"block": 8}),
        ({}, {"eos_ids": tuple(range(0, 61, 2))}),
        ({}, {"sampler": kvjax.Sample(temperature=0.9, repetition_penalty=1.2)}),
        ({}, {"buckets": True, "max_new_tokens": 5}),
    ],
    ids=["window", "block", "ends", "sampler", "buckets"],
)
def test_models_and_options_do_what_they_do_on_one_device(fields, options):
    model, params = of(**fields)
    generate = functools.partial(kvjax.generate, model, params, TOKENS, policy=POLICIES["h2o"], **OPTIONS | options)
    check_equal(generate(mesh=kvjax.make_mesh(**BOTH)), generate())


FAMILIES = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 4,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
    },
}
SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "ada_snapkv"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_logit_for_nothing_and_layers_without_keys_are_what_they_are_on_one_device(family, policy):
    model = models.LanguageModel(from_hugging_face({**SMALL, "model_type": family, **FAMILIES[family]}))
    # Of many keys, rounding Qwen3.5's parameters moves what it holds by more than the bound; of this one by half of it.
    params = jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(3)))
    generate = functools.partial(kvjax.generate, model, params, TOKENS, policy=POLICIES[policy], **OPTIONS)
    found, wanted = generate(mesh=kvjax.make_mesh(**BOTH)), generate()
    check_equal(found, wanted)
    for x, y in zip(jax.tree.leaves(found.state.others), jax.tree.leaves(wanted.state.others), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())
        assert max(shard.data.nbytes for shard in x.addressable_shards) <= x.nbytes // BOTH["data"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", slow_but((methods.h2o(BUDGET), methods.ada_snapkv(BUDGET, window=4)), methods.h2o(BUDGET))
)
def test_codes_are_what_they_are_on_one_device(policy):
    """Centred, with first and last rows as they are."""
    (model, params), codec = of(), Codec(Int8(), TurboQuant(4), centre=True, exact=(2, 3))
    how = OPTIONS | {"policy": kvjax.coded(policy, codec)}
    wanted = kvjax.generate(model, params, TOKENS, **how)
    found = kvjax.generate(model, params, TOKENS, **how, mesh=kvjax.make_mesh(**BOTH))
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    for here, there in zip(found.state.layers, wanted.state.layers, strict=True):
        np.testing.assert_array_equal(here.pos, there.pos)
        np.testing.assert_allclose(here.view().keys(lambda x, _: x), there.view().keys(lambda x, _: x), atol=1e-4)
    check_shares(found.state, **BOTH)


def test_beams_are_what_they_are_on_one_device():
    model, params = of()
    how = {"policy": POLICIES["tova"], "num_beams": 2, "max_new_tokens": 3, "eos_ids": (), "lengths": LENGTHS}
    beams = functools.partial(kvjax.generate_beams, model, params, TOKENS, **how)
    np.testing.assert_array_equal(beams(mesh=kvjax.make_mesh(**BOTH)).tokens, beams().tokens)


@pytest.mark.slow
def test_the_users_door_decides_on_a_mesh_what_it_decides_on_one_device():
    model, params = of()
    mesh, found = kvjax.make_mesh(**BOTH), []
    for on, own in ((None, params), (mesh, kvjax.shard_params(model, params, mesh))):
        state = kvjax.start(model, policy=kvjax.Policy(), lengths=LENGTHS, max_new_tokens=STEPS, mesh=on)
        policy = POLICIES["snapkv"]
        _, state, stats = kvjax.forward(model, own, TOKENS, state, valid=LENGTHS, observe=(policy,))
        found.append(policy(state, stats))
    np.testing.assert_array_equal(found[0].layers[0].pos, found[1].layers[0].pos)
    check_shares(dataclasses.replace(found[1], hparams=()), **BOTH)


def collectives(text):
    """(operation, bytes of its results) of every collective of a compiled program; booleans, one a row, are 0 bytes."""
    found = re.findall(r"= (\(?[^=]*?) (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)\(", text)
    size = lambda shape: 4 * int(np.prod([int(n) for n in shape.split(",") if n]))
    return [(name, sum(map(size, re.findall(r"[fsu]32\[([\d,]*)\]", shapes)))) for name, shapes in map(reversed, found)]


LOST = ("all-reduce", 0)  # whether a head of a row has lost a token
PROJECTED = [LOST, *[("all-reduce", B * 32 * 4)] * 2]  # o_proj and down_proj of a step's rows
SCORES = ("all-gather", B * 2 * -(-(BUDGET + 1) // 8) * 8 * 4)  # what the last row read, and where: a number a slot


@pytest.mark.parametrize(
    ("name", "axes", "wanted"),
    [
        ("h2o", {"data": 4}, []),
        ("h2o", {"heads": 2}, PROJECTED),
        pytest.param("tova", {"data": 4}, [], marks=pytest.mark.slow),
        ("tova", {"heads": 2}, [*PROJECTED, SCORES, SCORES]),
    ],
)
def test_a_decode_step_sends_no_more_than_it_must(name, axes, wanted):
    model, params = of()
    mesh = kvjax.make_mesh(**axes)
    params = kvjax.shard_params(model, params, mesh)
    how = {"policy": POLICIES[name], "max_new_tokens": STEPS, "lengths": LENGTHS, "mesh": mesh}
    logits, state = kvjax.prefill(model, params, TOKENS, **how)
    step = jax.jit(functools.partial(kvjax.decode_step, model))
    program = step.lower(params, logits.argmax(-1).astype(jnp.int32), state).compile()
    assert sorted(collectives(program.as_text())) == sorted(wanted)


def test_parameters_are_shared_by_heads_and_channels():
    model, params = of()
    mesh = kvjax.make_mesh(data=2, heads=2)
    placed = kvjax.shard_params(model, params, mesh)
    leaves = jax.tree_util.tree_leaves_with_path(placed)
    share = {jax.tree_util.keystr(p): x.addressable_shards[0].data.nbytes / x.nbytes for p, x in leaves}
    halves = [name for name, of_all in share.items() if of_all == 0.5]
    assert halves == [name for name in share if "_proj" in name]
    assert len(halves) == 4
    again = kvjax.shard_params(model, placed, mesh)
    assert all(x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(placed), strict=True))


@pytest.mark.parametrize(
    ("axes", "error"),
    [
        ({"data": 3}, "3 devices of the axis 'data' do not divide a batch of 4 rows; use a divisor of the batch"),
        ({"heads": 4}, "4 devices of the axis 'heads' do not divide 2 kv heads; use a divisor of the number of kv"),
    ],
)
def test_what_an_axis_does_not_divide_is_refused(axes, error):
    model, params = of()
    mesh = kvjax.make_mesh(**axes)
    how = {"policy": kvjax.Policy(), "lengths": LENGTHS, "max_new_tokens": 1, "mesh": mesh}
    for call in (
        lambda: kvjax.generate(model, params, TOKENS, **how),
        lambda: kvjax.prefill(model, params, TOKENS, **how),
        lambda: kvjax.generate_beams(model, params, TOKENS, **how),
        lambda: kvjax.start(model, **how),
    ):
        with pytest.raises(ValueError, match=re.escape(error)):
            call()


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"data=8 x heads=2 are 16 devices, but there are 8; use fewer"):
        kvjax.make_mesh(data=8, heads=2)


@pytest.mark.slow
def test_the_main_job_on_a_mesh_scores_what_it_scores_without(tmp_path):
    options = ["--config", "h2o.py", *runs.small(budget=["0.25"], batch_size=["4"]), "--baselines", "random"]
    for name, own in (("one", []), ("mesh", ["--mesh", "data=2,heads=2"])):
        run.main([*options, *own, "--output", str(tmp_path / name)])
    one, other = (
        sorted(runs.without_times(runs.samples(tmp_path / name)), key=records.key) for name in ("one", "mesh")
    )
    assert len(one) == len(other) > 0
    for here, there in zip(one, other, strict=True):
        for line in (here, there):
            line["nll"] = np.round(line.get("nll", 0), 3)
            line["prefill_peak_bytes"] = line["decode_peak_bytes"] = None  # of one device
        assert here == there
