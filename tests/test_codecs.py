"""Fewer bits: encoders against numpy's, distortion against the papers', and layers that hold codes, over the table."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.codecs import Codec, Float8, Int8, TurboQuant, Uniform
from kvjax.compose.across import Preference
from kvjax.contract import Layout
from kvjax.pallas_kernels import Columns, Logits
from kvjax.storage import codes, to_pool
from tests import one_call, table, tensors
from tests.marks import slow_but
from tests.one_call import LENGTHS, unturned
from tests.tensors import live_positions

CODECS = [
    Float8(),
    Int8(),
    Uniform(4, 8),
    Uniform(2, 16),
    TurboQuant(4),
    TurboQuant(3),
    TurboQuant(2),
    TurboQuant(4, seed=3),
]
BOTH = Codec(Int8(), TurboQuant(4), centre=True)
SOME_EXACT = Codec(TurboQuant(4), Int8(), centre=True, exact=(2, 3))
every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def drawn(*shape):
    """Rows of very different sizes, one of them 0, one with an outlier."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal(shape) * np.exp(3 * draw.standard_normal((*shape[:-1], 1)))
    x[0] = 0
    x[1, 2] = 400
    return x.astype(np.float32)


def by_numpy(codec, x):
    """(numbers in the codec's space, scales of 16 bits) of float32 rows, by numpy alone; in float64 where turned."""
    if isinstance(codec, Float8):
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), None
    if isinstance(codec, Int8):
        scale = (np.abs(x).max(-1) / np.float32(127)).astype(ml_dtypes.bfloat16)
        wide = scale.astype(np.float32)[..., None]
        return np.clip(np.round(x / np.where(wide > 0, wide, 1)), -127, 127), scale
    if isinstance(codec, Uniform):
        groups = x.reshape(*x.shape[:-1], -1, codec.group)
        least, most = groups.min(-1), groups.max(-1)
        step = ((most - least) / np.float32(2**codec.bits - 1)).astype(ml_dtypes.bfloat16).astype(np.float32)
        least = least.astype(ml_dtypes.bfloat16).astype(np.float32)[..., None]
        wide = np.where(step > 0, step, 1)[..., None]
        steps = np.clip(np.round((groups - least) / wide), 0, 2**codec.bits - 1)
        return (least + steps * step[..., None]).reshape(x.shape), None
    H, c = x.shape[-1], centroids(codec).astype(np.float64)
    signs = np.random.RandomState(codec.seed).choice([-1.0, 1.0], H)
    walsh = np.array([[(-1) ** (i & j).bit_count() for j in range(H)] for i in range(H)])
    turned = (x.astype(np.float64) * signs) @ walsh / math.sqrt(H)
    size = np.sqrt(np.square(turned).mean(-1))
    turned = turned / np.where(size > 0, size, 1)[..., None]
    near = c[np.abs(turned[..., None] - c).argmin(-1)]
    best = (turned * near).sum(-1) / np.square(near).sum(-1)
    return near.astype(np.float32), (size * best).astype(np.float32).astype(ml_dtypes.bfloat16)


def centroids(codec):
    """Those that a codec has, ascending."""
    codes = codec.encode(jax.random.normal(jax.random.key(0), (400, 64)))
    return np.unique(codec.numbers(codes)[0])


@pytest.mark.parametrize(
    ("bits", "published"),
    [
        (2, [0.4528, 1.510]),
        (3, [0.2451, 0.7560, 1.344, 2.152]),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
    ],
)
def test_centroids_are_those_of_max(bits, published):
    """IRE Transactions 6 (1960), table I."""
    np.testing.assert_allclose(centroids(TurboQuant(bits))[2 ** (bits - 1) :], published, atol=6e-4)


@every_codec
def test_codes_are_those_of_numpy(codec):
    """And decoded they are the scaled codes, turned back."""
    x = drawn(40, 16)
    numbers, scale = by_numpy(codec, x)
    parts = codec.encode(jnp.asarray(x))
    found, factor = codec.numbers(parts)
    np.testing.assert_array_equal(found, numbers)
    if scale is not None:
        np.testing.assert_array_equal(factor, scale.astype(np.float32))
        numbers = numbers * scale.astype(np.float32)[..., None]
    np.testing.assert_allclose(codec.into(codec.decode(parts)), numbers, rtol=1e-5, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize(("bits", "stored"), [(2, 18), (3, 26), (4, 34)])
def test_a_row_takes_its_bits_and_a_scale(bits, stored):
    parts = TurboQuant(bits).encode(jnp.zeros((5, 64)))
    assert sum(p.nbytes for p in parts) == 5 * stored
    assert sum(p.nbytes for p in Uniform().encode(jnp.zeros((5, 64)))) == 5 * 40
    assert sum(p.nbytes for p in Int8().encode(jnp.zeros((5, 64)))) == 5 * 66
    assert sum(p.nbytes for p in Float8().encode(jnp.zeros((5, 64)))) == 5 * 64


@pytest.mark.parametrize("codec", [TurboQuant(2), TurboQuant(3), TurboQuant(4)], ids=repr)
def test_the_error_of_a_row_is_within_the_bound(codec):
    """Theorem 1 of arXiv 2504.19874; of Gaussian rows, and of rows that are as far from such as can be."""
    one = np.eye(64, dtype=np.float32)
    for x in (jax.random.normal(jax.random.key(1), (400, 64)), jnp.asarray(one), jnp.asarray(one - 0.9)):
        error = jnp.square(codec.decode(codec.encode(x)) - x).sum(-1) / jnp.square(x).sum(-1)
        assert float(error.mean()) <= math.sqrt(3) * math.pi / 2 * 4.0**-codec.bits


# ------------------------------------------------------------------------------------------------ layers


def small(kv, policy, ctx, codec):
    """A layer of decided rows, as it is stored after a prompt."""
    how = dataclasses.replace(kv.how, codec=codec)
    pool, capacity = policy.layout.pool, 2 * one_call.T if policy.layout.pool else one_call.T
    kv = kv.replace(how=how)
    return to_pool(kv, capacity, policy.reserve(kv, ctx)) if pool else kv.compact(capacity)


@table.rows(
    table.QUICK, smoke={"h2o", "streaming_llm", "ada_snapkv", "finch_chunks"}, without={"think", "kvpress_think"}
)
def test_a_row_reads_codes_as_it_reads_what_they_stand_for(case, monkeypatch):
    """Outputs and statistics, by three tiles that overlap; what lives is the same, and moved codes are as they were."""
    monkeypatch.setattr(codes, "TILE", 16)
    here, _, _, ctx = one_call.read(case.policy)
    rows = np.array([0, 1])
    masked, ctx = one_call.of_rows(rows, one_call.decided(case.policy)[1], (), ctx)[::2]
    if masked.channels is not None:
        pytest.skip("it drops key channels")
    plain = small(masked, here, ctx, None)
    for codec in (BOTH, SOME_EXACT):
        reads_codes(small(masked, here, ctx, codec), plain, here, ctx, codec)


def reads_codes(coded, plain, here, ctx, codec):
    """Whether rows read codes as what they stand for, and codes move as they are."""
    assert live_positions(coded.view()) == live_positions(plain.view())
    q, pos = jnp.asarray(one_call.tensors()[0][0][:, :, :1]), jnp.asarray(LENGTHS)[:, None] - 1
    own = (coded.owner,) if here.layout.pool else ()
    decoded = coded.replace(k=coded.k.rows(*own), v=coded.v.rows(*own))
    statistics = (Columns(), Columns(rows=1, group="max", summed=False))
    for logits in (Logits(), Logits(softcap=2.0, window=9, nothing=jnp.linspace(-1, 1, one_call.N))):
        how = {"rotate": unturned, "logits": logits}
        found, expected = (x.attend(q, pos, statistics, **how) for x in (coded, decoded))
        for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-6)
    before = {name: of_tokens(coded, name) for name in ("k", "v")}
    again = small(coded.view(), here, ctx, codec)
    assert all(of_tokens(again, name) == each for name, each in before.items())


def of_tokens(kv, name):
    """The bytes of each live token's row, by sequence, head and position."""
    kv = kv.view()
    parts = [np.asarray(x) for x in getattr(kv, name).parts]
    where = np.argwhere(np.asarray(kv.live))
    return {(b, h, int(kv.pos[b, h, s])): tuple(x[b, h, s].tobytes() for x in parts) for b, h, s in where.tolist()}


def of_run(budget, window):
    """Policies of every storage: slots and pools, each kind of positions, rows that are written later, all layers."""
    snapkv = methods.snapkv(budget, window=window, kernel=3)
    return {
        "h2o": methods.h2o(budget),
        "streaming_llm": methods.streaming_llm(budget, sinks=2),
        "rank": dataclasses.replace(snapkv, layout=Layout("rank")),
        "ada_snapkv": methods.ada_snapkv(budget, window=window),
        "quest": methods.quest(budget, size=4),
        "merging": methods.merging(snapkv),
        "across_layers": kvjax.across_layers(methods.knorm(budget), Preference(3, 1.6, 0.6)),
    }


every_run = pytest.mark.parametrize("name", slow_but(of_run(12, 4), "h2o", "ada_snapkv"))


@every_run
def test_a_run_under_a_codec(name, tiny, tmp_path):
    """It keeps of a prompt what it keeps without, has the planned bytes, and writes each row once."""
    (model, params), tokens, plain = tiny, tensors.token_ids(2, 24), of_run(12, 4)[name]
    policy, how = kvjax.coded(plain, SOME_EXACT), {"max_new_tokens": 8, "lengths": np.array([24, 19])}
    logits, state = kvjax.prefill(model, params, tokens, policy=policy, **how)
    expected, uncoded = kvjax.prefill(model, params, tokens, policy=plain, **how)
    np.testing.assert_array_equal(logits, expected)
    for kv, own in zip(state.layers, uncoded.layers, strict=True):
        assert live_positions(kv.view()) == live_positions(own.view())
    planned = kvjax.plan_memory(model.config, policy, batch=2, prompt_len=24, max_new_tokens=8)
    assert state.nbytes == planned.keys_values + planned.positions + planned.remembered + planned.weights

    kvjax.save_state(tmp_path / "state", model, params, state, policy=policy)
    loaded = kvjax.load_state(tmp_path / "state", model, params, policy=policy)
    for token in range(4):
        before = state
        logits, state = kvjax.feed(model, params, jnp.full((2, 1), token), state)
        again, loaded = kvjax.feed(model, params, jnp.full((2, 1), token), loaded)
        alone, _ = kvjax.feed(model, params, jnp.full((1, 1), token), before[[1]])
        np.testing.assert_array_equal(logits, again)
        np.testing.assert_allclose(logits[1], alone[0], atol=5e-4)
        for kv, old in zip(state.layers, before.layers, strict=True):
            for part in ("k", "v"):
                new, was = of_tokens(kv, part), of_tokens(old, part)
                assert all(new[where] == was[where] for where in new.keys() & was.keys())


@every_run
def test_where_every_row_is_exact_a_run_is_that_without_a_codec(name, tiny):
    """And where first and last rows are, and nothing else stays."""
    (model, params), tokens, plain = tiny, tensors.token_ids(2, 24), of_run(12, 4)[name]
    exact = (2, 10) if name == "streaming_llm" else (0, 32)
    codec = Codec(TurboQuant(2), TurboQuant(2), exact=exact)
    states = []
    for policy in (plain, kvjax.coded(plain, codec)):
        logits, state = kvjax.prefill(
            model, params, tokens, policy=policy, max_new_tokens=8, lengths=np.array([24, 19])
        )
        found = [logits]
        for token in range(6):
            active = np.array([True, token != 3])
            logits, state = kvjax.decode_step(model, params, jnp.full(2, token), state, active=active)
            found.append(jnp.where(active[:, None], logits, 0))
        states.append(found)
    np.testing.assert_allclose(*map(jnp.stack, states), atol=5e-4)


def test_a_full_cache_of_8_bits_reads_nearly_what_it_stands_for(tiny):
    """Of several tokens at once, and one by one."""
    (model, params), tokens = tiny, tensors.token_ids(2, 24)
    how = {"max_new_tokens": 8}
    for codec in (Int8(), TurboQuant(4)):
        _, state = kvjax.prefill(model, params, tokens[:, :16], policy=kvjax.coded(kvjax.Policy(), codec), **how)
        together, _ = kvjax.feed(model, params, tokens[:, 16:], state)
        for i in range(16, 24):
            logits, state = kvjax.feed(model, params, tokens[:, i : i + 1], state)
        np.testing.assert_allclose(logits[:, -1], together[:, -1], atol=1e-4 * float(jnp.abs(together).max()))
        if codec == Int8():
            _, exact = kvjax.prefill(model, params, tokens[:, :16], **how)
            expected, _ = kvjax.feed(model, params, tokens[:, 16:], exact)
            assert 0 < float(jnp.linalg.norm(together - expected) / jnp.linalg.norm(expected)) < 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.coded(kvjax.Policy(), 4), "codec=4 must be a RowCodec, or a Codec"),
        (lambda: kvjax.coded(kvjax.coded(kvjax.Policy(), Int8()), Int8()), "has a codec already; give one codec"),
        (
            lambda: planned(kvjax.chain(kvjax.coded(methods.h2o(4), Int8()), methods.think()), head_dim=8),
            "drops key channels, but Int8",
        ),
        (
            lambda: planned(kvjax.coded(methods.think(), Int8()), head_dim=8),
            "drops key channels, but Int8.* give Codec\\(None, values\\)",
        ),
        (
            lambda: planned(kvjax.coded(kvjax.Policy(), Uniform()), head_dim=16),
            "groups of 32 channels of 4 bits, but the model's heads have 16; give a group that divides them",
        ),
        (lambda: TurboQuant(5), "bits=5 must be one of 2, 3, 4"),
        (lambda: planned(kvjax.coded(kvjax.Policy(), TurboQuant()), head_dim=12), "heads have 12 numbers; give Int8"),
    ],
)
def test_impossible_codecs(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def planned(policy, **shape):
    """Memory of a small model."""
    sizes = {"vocab_size": 61, "embed_dim": 32, "mlp_dim": 48, "num_layers": 1, "num_query_heads": 2}
    config = kvjax.models.ModelConfig(**(sizes | {"num_kv_heads": 2} | shape))
    return kvjax.plan_memory(config, policy, prompt_len=8, max_new_tokens=2)


def test_values_alone_are_coded_where_key_channels_go(tiny):
    (model, params), tokens = tiny, tensors.token_ids(2, 24)
    policy = kvjax.coded(methods.think(0.5), Codec(None, Int8()))
    _, state = kvjax.prefill(model, params, tokens, policy=policy, max_new_tokens=4)
    logits, _ = kvjax.feed(model, params, tokens[:, :1], state)
    _, exact = kvjax.prefill(model, params, tokens, policy=methods.think(0.5), max_new_tokens=4)
    expected, _ = kvjax.feed(model, params, tokens[:, :1], exact)
    np.testing.assert_allclose(logits, expected, atol=0.03 * float(jnp.abs(expected).max()))
