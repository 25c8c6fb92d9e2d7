"""What meshes of eight devices compute, and what each device holds: `pytest tests/sharded.py` with

    XLA_FLAGS=--xla_force_host_platform_device_count=8

which decides for a whole process, so that the other tests have one device. `tests/test_sharding.py` starts one.
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
from kvjax.cache import mesh
from kvjax.cache.pool import PooledKV
from kvjax.experiments.evaluation import results
from kvjax.models import gemma, gpt2, gpt_neox, mixtral, mpt, phi3
from kvjax.models.embedded import EMBEDDED
from kvjax.pallas_kernels import Columns, Softmax
from kvjax.sharding import on_rows, shard_rows
from tests import methods as table
from tests import runs

if jax.device_count() < 8:
    pytest.exit(__doc__, returncode=4)

B, T, BUDGET, STEPS = 4, 24, 8, 4
TOKENS = np.random.default_rng(1).integers(61, size=(B, T))
LENGTHS = (24, 20, 24, 11)
OPTIONS = {"max_new_tokens": STEPS, "lengths": LENGTHS, "buckets": False, "key": jax.random.key(3)}
ALL_AXES = {"data": 2, "heads": 2, "sequence": 2}
AXES = ({"data": 2}, {"heads": 2}, {"sequence": 4}, ALL_AXES)
in_axes = pytest.mark.parametrize("axes", AXES, ids=lambda axes: "-".join(axes))


@functools.cache
def of(config):
    model = models.LanguageModel(config)
    return model, jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), jax.jit(model.init)(jax.random.key(7)))


@functools.cache
def alone(model, policy, first=0, last=B):
    """What one device makes of the rows from the first to before the last."""
    rows = slice(first, last)
    keys = kvjax.cache.context.row_keys(OPTIONS["key"], B)
    options = OPTIONS | {"lengths": LENGTHS[rows], "key": keys[rows]}
    return kvjax.generate(model, of(model.config)[1], TOKENS[rows], policy=policy, **options)


def check_equal(found, wanted, *, rows=slice(None), exact=False):
    """The same tokens and kept sets; the same keys and values, to the bit or to 1e-5 of the largest.

    Among rows of other lengths a plan may have more slots, which are dead.
    """
    np.testing.assert_array_equal(found.tokens[rows], wanted.tokens)
    np.testing.assert_array_equal(found.lengths[rows], wanted.lengths)
    for here, there in zip(found.state.layers, wanted.state.layers, strict=True):
        here = jax.tree.map(lambda x: x[rows], here)
        ours, theirs = (np.asarray(kv.pos) >= 0 for kv in (here, there))
        np.testing.assert_array_equal(ours.sum(-1), theirs.sum(-1))
        np.testing.assert_array_equal(np.asarray(here.pos)[ours], np.asarray(there.pos)[theirs])
        for name in ("k", "v"):
            x, y = (np.asarray(getattr(kv, name))[live] for kv, live in ((here, ours), (there, theirs)))
            np.testing.assert_allclose(x, y, rtol=0, atol=0 if exact else 1e-5 * np.abs(y).max())


def check_rows(found, model, policy, axes):
    """As all rows on one device; to the bit as a device's own rows on one, where devices share nothing else."""
    check_equal(found, alone(model, policy))
    assert found.state.step == alone(model, policy).state.step
    if axes.keys() == {"data"}:
        for rows in ((0, B // 2), (B // 2, B)):
            check_equal(found, alone(model, policy, *rows), rows=slice(*rows), exact=True)


def check_shares(state, axes):
    """Every device holds its share of every array of a state."""
    data, heads = axes.get("data", 1), axes.get("heads", 1)
    for kv in state.layers:
        share = data if isinstance(kv, PooledKV) else data * heads
        for x in jax.tree.leaves(kv):
            assert {shard.data.nbytes for shard in x.addressable_shards} == {x.nbytes // share}
    for x in (state.length, state.prompt_length):
        assert {shard.data.nbytes for shard in x.addressable_shards} == {x.nbytes // data}


def rows_on_a_mesh(case, config, axes):
    model, params = of(config)
    policy = case.make(BUDGET)
    found = kvjax.generate(model, params, TOKENS, policy=policy, mesh=kvjax.make_mesh(**axes), **OPTIONS)
    check_rows(found, model, policy, axes)
    check_shares(found.state, axes)


@in_axes
@pytest.mark.slow
@table.all_methods
def test_every_method_is_what_it_is_on_one_device(case, axes, small):
    rows_on_a_mesh(case, small[0].config, axes)


def test_a_method_is_what_it_is_on_one_device(shallow):
    (h2o,) = (case for case in table.CASES if case.name == "h2o")
    rows_on_a_mesh(h2o, shallow[0].config, ALL_AXES)


STATISTICS = (
    Columns(7, "above", group_at="before", summed=False),  # of more rows than a device has
    Columns(5, "p", group=None, summed=False),
    Columns(7, "p", group="max"),  # no sum of sums
    Columns(5, "p2", weight=jnp.linspace(0, 1, 2 * T, dtype=jnp.float32).reshape(2, T)),
    Columns(softmax=Softmax(jnp.full((2, 2, T), 0.7), jnp.arange(2, dtype=jnp.uint32), noise="gumbel")),
    Columns(softmax=Softmax(before=jnp.array([9, 24]), causal=False)),
)


@pytest.mark.parametrize(
    "axes",
    [pytest.param({"sequence": 4}, marks=pytest.mark.slow), {"heads": 2, "sequence": 2}],
    ids=["sequence", "both"],
)
def test_statistics_are_those_of_all_rows_and_heads(axes):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, heads, T, 8)) for i, heads in enumerate((4, 2, 2)))
    q_pos = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (2, T))
    rows = q, k, v, q_pos, jnp.broadcast_to(q_pos[:, None], (2, 2, T)), STATISTICS
    attend = lambda _, rows: mesh.attention(*rows[:-1], columns=rows[-1])
    found, wanted = (
        jax.jit(functools.partial(on_rows, on, attend, ()))(rows) for on in (kvjax.make_mesh(**axes), None)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), found, wanted)


def collectives(text):
    """(operation, bytes of its results) of every collective of a compiled program."""
    found = re.findall(r"= (\(?[^=]*?) (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)\(", text)
    size = lambda shape: 4 * int(np.prod([int(n) for n in shape.split(",") if n]))
    return [(name, sum(map(size, re.findall(r"[fsu]32\[([\d,]*)\]", shapes)))) for shapes, name in found]


PROJECTED = [("all-reduce", B * 32 * 4)] * 2  # o_proj and down_proj of a step's rows
SCORES = ("all-gather", B * 2 * (BUDGET + 1) * 4)


@pytest.mark.parametrize(
    ("make", "axes", "wanted"),
    [
        (methods.h2o, {"data": 4}, []),
        (methods.h2o, {"heads": 2}, PROJECTED),
        # What the last row read, and where.
        pytest.param(methods.tova, {"heads": 2}, [*PROJECTED, SCORES, SCORES], marks=pytest.mark.slow),
    ],
    ids=["h2o-data", "h2o-heads", "tova-heads"],
)
def test_a_decode_step_sends_no_more_than_it_must(make, axes, wanted, shallow):
    model, params = of(shallow[0].config)
    on = kvjax.make_mesh(**axes)
    plan = kvjax.make_plan(model.config, make(BUDGET), prompt_len=T, max_new_tokens=STEPS)
    params = kvjax.shard_params(model, params, on)
    logits, state = kvjax.prefill(model, params, TOKENS, plan, lengths=LENGTHS, mesh=on)
    step = jax.jit(lambda params, token, state: kvjax.decode_step(model, params, token, state, mesh=on))
    token = shard_rows(np.asarray(logits.argmax(-1), np.int32), on)
    assert sorted(collectives(step.lower(params, token, state).compile().as_text())) == sorted(wanted)


def test_a_prompt_is_read_by_rows_with_one_gathering_of_its_keys_and_values(shallow):
    model, params = of(shallow[0].config)
    on = kvjax.make_mesh(sequence=4)
    plan = kvjax.make_plan(model.config, methods.h2o(BUDGET), prompt_len=T, max_new_tokens=STEPS)
    params = kvjax.shard_params(model, params, on)
    read = jax.jit(lambda tokens: kvjax.prefill(model, params, tokens, plan, mesh=on))
    found = collectives(read.lower(shard_rows(jnp.asarray(TOKENS, jnp.int32), on)).compile().as_text())
    keys, sums = B * 2 * T * 8 * 4, B * 2 * T * 4
    assert sorted(size for name, size in found if name == "all-gather") == [sums, keys, keys]  # positions are as large
    assert max(size for name, size in found if name != "all-gather") <= sums + B * 61 * 4  # with the logits


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        dataclasses.replace(methods.h2o(BUDGET), granularity="query_head"),
        kvjax.shared_layers(methods.keyformer(BUDGET, recent=3)),
        kvjax.soften(methods.h2o(BUDGET), 0.5),
        kvjax.partition_heads({"all": methods.full(), "few": methods.h2o(BUDGET)}, [["all", "few"]] * 3),
        kvjax.from_fn(
            lambda kv, stats, ctx: (kv.k + kv.k.sum(1, keepdims=True)).sum(-1), budget=BUDGET
        ),  # of all heads
    ],
    ids=["query_head", "shared_layers", "relaxed", "partition_heads", "function"],
)
@pytest.mark.parametrize("axes", [{"data": 2}, ALL_AXES], ids=["data", "all"])
def test_compositions_are_what_they_are_on_one_device(policy, axes, tiny):
    model, params = of(tiny[0].config)
    found = kvjax.generate(model, params, TOKENS, policy=policy, mesh=kvjax.make_mesh(**axes), **OPTIONS)
    check_rows(found, model, policy, axes)
    check_shares(found.state, axes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"block": 8},
        {"within": methods.h2o(2 * BUDGET)},
        {"eos_ids": tuple(range(0, 61, 2))},
        {"sampler": kvjax.Sample(temperature=0.9, repetition_penalty=1.2)},
        {"buckets": True, "max_new_tokens": 5},
        {"lengths": None, "attention_mask": np.arange(T)[None] >= T - np.array(LENGTHS)[:, None]},
    ],
    ids=["block", "within", "ends", "sampler", "buckets", "mask"],
)
def test_options_do_what_they_do_on_one_device(options, shallow):
    model, params = of(shallow[0].config)
    generate = functools.partial(kvjax.generate, model, params, TOKENS, policy=methods.h2o(BUDGET))
    options = OPTIONS | options
    check_equal(generate(mesh=kvjax.make_mesh(**ALL_AXES), **options), generate(**options))


SIZES = {"vocab_size": 61, "embed_dim": 32, "mlp_dim": 48, "num_layers": 2, "num_query_heads": 4, "head_dim": 8}
OTHER_MODELS = (
    gpt2.GPT2Config(**SIZES, num_kv_heads=4, max_position=64, activation="gelu_new"),
    gpt_neox.GPTNeoXConfig(**SIZES, num_kv_heads=4, activation="gelu"),
    mpt.MPTConfig(**SIZES, num_kv_heads=4, activation="gelu"),  # slopes in place of rotation
    phi3.Phi3Config(**SIZES, num_kv_heads=2),
    gemma.GemmaConfig(**SIZES, num_kv_heads=2, activation="gelu_new"),
    mixtral.MixtralConfig(**SIZES, num_kv_heads=2, num_experts=3, experts_per_token=2, expert_dim=8),
)


@pytest.mark.slow
@pytest.mark.parametrize("config", OTHER_MODELS, ids=lambda config: type(config).__name__)
def test_models_are_what_they_are_on_one_device(config):
    model, params = of(config)
    policy = methods.h2o(BUDGET)
    found = kvjax.generate(model, params, TOKENS, policy=policy, mesh=kvjax.make_mesh(**ALL_AXES), **OPTIONS)
    check_equal(found, alone(model, policy))


def test_parameters_are_shared_by_heads_and_channels(shallow):
    model, params = of(shallow[0].config)
    placed = kvjax.shard_params(model, params, kvjax.make_mesh(data=2, heads=2))
    share = {jax.tree_util.keystr(p): x.addressable_shards[0].data.nbytes / x.nbytes for p, x in _named(placed)}
    halves = [name for name, of_all in share.items() if of_all == 0.5]
    projections = [name for name in share if "_proj" in name]
    assert halves == projections
    assert len(halves) == 7
    again = kvjax.shard_params(model, placed, kvjax.make_mesh(data=2, heads=2))
    assert all(x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(placed), strict=True))


def _named(params):
    return jax.tree_util.tree_leaves_with_path(params)


@pytest.mark.slow
def test_rows_that_lie_on_devices_stay_there(shallow):
    model, params = of(shallow[0].config)
    on = kvjax.make_mesh(data=2)
    tokens = shard_rows(jnp.asarray(TOKENS, jnp.int32), on)
    found = kvjax.generate(model, params, tokens, policy=methods.h2o(BUDGET), **OPTIONS)
    check_rows(found, model, methods.h2o(BUDGET), {"data": 2})
    check_shares(found.state, {"data": 2})


@pytest.mark.slow
def test_the_main_job_on_a_mesh_scores_what_it_scores_without(tmp_path):
    options = ["--config", "h2o.py", *runs.small(budget=["0.25"], batch_size=["4"]), "--baselines", "random"]
    for name, own in (("one", []), ("mesh", ["--mesh", "data=2,heads=2"])):
        runs.run.main([*options, *own, "--output", str(tmp_path / name)])
    one, other = (
        sorted(runs.without_times(runs.samples(tmp_path / name)), key=results.sample_key) for name in ("one", "mesh")
    )
    assert len(one) == len(other) > 0
    for here, there in zip(one, other, strict=True):
        for line in (here, there):
            line["nll"] = np.round(line.get("nll", 0), 3)
            line["answers"] = [{k: v for k, v in answer.items() if k != "nll"} for answer in line["answers"]]
        assert here == there


@pytest.mark.slow
def test_beams_and_sessions_take_parameters_on_a_mesh():
    model, params = models.load(runs.one_layer())
    tokenizer = models.load_tokenizer(EMBEDDED)
    placed = kvjax.shard_params(model, params, kvjax.make_mesh(heads=2))
    found = []
    for p in (params, placed):
        beams = kvjax.generate_beams(model, p, TOKENS, num_beams=2, max_new_tokens=3).tokens
        session = kvjax.Session(model, p, tokenizer, policy=methods.h2o(24), max_new_tokens=4, max_question_tokens=24)
        session.compress("the quiet goat crossed the meadow . cora has the number 4 1 7 2 . a bell feared the lake .")
        found.append((beams, session.ask(" question : what number has cora ? answer : cora has the number")))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("axes", "options", "error"),
    [
        ({"data": 3}, {}, "3 devices of the axis 'data' do not divide a batch of 4 rows"),
        ({"heads": 4}, {}, "4 devices of the axis 'heads' do not divide 2 kv heads"),
        ({"sequence": 5}, {}, "5 devices of the axis 'sequence' do not divide prompts read 24 tokens at once"),
        ({"sequence": 2}, {"block": 3}, "2 devices of the axis 'sequence' do not divide prompts read 3 tokens at once"),
    ],
)
def test_what_an_axis_does_not_divide_is_refused(axes, options, error, shallow):
    model, params = of(shallow[0].config)
    with pytest.raises(ValueError, match=re.escape(error)):
        kvjax.generate(model, params, TOKENS, mesh=kvjax.make_mesh(**axes), **OPTIONS | options)


def test_what_is_no_mesh_of_these_axes_is_refused(shallow):
    model, params = of(shallow[0].config)
    for on, error in (
        (jax.make_mesh((2,), ("batch",)), "mesh has an axis 'batch'"),
        (jax.devices(), "mesh is a list"),
    ):
        with pytest.raises(ValueError, match=error):
            kvjax.generate(model, params, TOKENS, mesh=on, **OPTIONS)
    with pytest.raises(ValueError, match=r"data=4 x heads=2 x sequence=2 are 16 devices, but there are 8"):
        kvjax.make_mesh(data=4, heads=2, sequence=2)
