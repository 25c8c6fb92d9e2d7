"""Every method beside layouts, padding, sliding windows, caps, ALiBi, scales, stretching rotations and float16.

Of a model, methods see what they observe, and the layer. So each observation of the table is held against a formula in
float64, and each method against itself where other tensors give the same logits.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import kvjax
from kvjax.contract import EMPTY, AttentionInputs, Layout, Policy
from kvjax.decide import select
from kvjax.decide.rewrite import Reference, shares
from kvjax.methods.profile import Kinds, WholeQueries
from kvjax.models.rope import Rope
from kvjax.observe import Rows
from kvjax.pallas_kernels import Logits
from kvjax.run.layers import step
from kvjax.storage import empty
from kvjax.storage.pool import to_pool
from tests import table, tensors
from tests.references.attention import attention

B, N, K, G, H, D, T = 2, 4, 2, 2, 8, 12, 24
LENGTHS, SCALE, WINDOW, CAP = np.array([T, 17]), 0.4, 20, 4.0
SLOPES, NOTHING = (0.5, 0.25, 0.125, 0.0625), (1.5, -1.0, 0.5, 3.0)
TOLERANCE = {"float32": 2e-4, "float16": 1e-2}
POS = np.maximum(np.arange(T) - (T - LENGTHS)[:, None], EMPTY)
LIVE = np.broadcast_to((POS >= 0)[:, None], (B, K, T))


@dataclasses.dataclass(frozen=True)
class Turn:
    """Turns pairs of channels by quarters, which rounds nothing, and stretches them, as YaRN does."""

    stretch: int = 1

    def __call__(self, x, pos):
        turn = (pos[..., None] * jnp.arange(1, H // 2 + 1).reshape(*(1,) * pos.ndim, -1)) % 4
        cos, sin = (jnp.asarray(y, x.dtype)[turn] * self.stretch for y in ([1, 0, -1, 0], [0, 1, 0, -1]))
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


YARN = Rope("yarn", theta=100.0, factor=4.0, original_max=16, attention_factor=1.25)


class Stored(Policy):
    """The full cache in a layout."""

    layout: Layout = Layout()


@dataclasses.dataclass(frozen=True)
class Setting:
    """How one layer reads its prompts: the same logits, whatever stretches queries and keys."""

    stretch: int = 1
    larger: float = 1  # what queries are multiplied by
    positions: str = "original"
    width: int = T
    dtype: str = "float32"
    rope: Rope | None = None

    @property
    def scale(self):
        return SCALE / self.larger / self.stretch**2

    @functools.cached_property
    def model(self):
        rotate = self.rope or Turn(self.stretch)
        how = {"rotate": rotate, "scale": self.scale, "softcap": CAP, "slopes": SLOPES, "window": WINDOW}
        how["nothing"] = NOTHING
        return tensors.model_of(self.params, **how)

    @functools.cached_property
    def params(self):
        arrays = raw() | {"q": raw()["q"] * np.float32(self.larger)}
        return [{n: jnp.asarray(x, "float32" if n == "hidden" else self.dtype) for n, x in arrays.items()}]

    def start(self, policy):
        return kvjax.start(self.model, policy=policy, lengths=LENGTHS, max_new_tokens=0, width=self.width)

    @functools.cache  # noqa: B019 - a setting is a value, and there are few
    def read(self, by_query_head=False):
        """(the layer, what the table observes of it, the context)."""
        ids = np.maximum(np.arange(self.width, dtype=np.int32) - (self.width - T), 0)
        state = self.start(Stored(Layout(self.positions, 2, by_query_head=by_query_head)))
        policies = (p for p in map(policy, table.MAKE) if p.layout.by_query_head == by_query_head)
        how = {"observe": tuple(policies), "evict": False, "gives": True}
        tokens = np.broadcast_to(ids, (B, self.width))
        _, state, stats = step(self.model, self.params, tokens, state, LENGTHS, **how)
        return state.layers[0], stats, state.context(0, "prefill", stats.tokens)

    def decided(self, policy):
        """The layer after a policy's decision, of its last T columns."""
        (full, stats, _), state = self.read(policy.layout.by_query_head), self.start(policy)
        here, info = state.plan.layers[0], state.plan.infos[0]
        kv = empty(info, here, B, self.dtype, self.width)
        how = dataclasses.replace(kv.how, positions=full.how.positions, sinks=full.how.sinks)
        keys = full.told(self.rope or Turn(self.stretch)).k
        kv = kv.replace(k=keys, v=full.v, pos=full.pos, how=how)
        ctx = dataclasses.replace(state, length=state.prompt_length).context(0, "prefill", stats.tokens)
        decides = state.plan.policy if policy.joint else here
        (kv,) = decides.update_layers((kv,), (stats.of(0),), (ctx,))
        cut = lambda x: None if x is None else x[:, :, self.width - T :]
        return kv.replace(**{n: cut(getattr(kv, n)) for n in ("k", "v", "pos", "log_weight")}, memory=())


@functools.cache
def raw():
    """Numbers that float16 holds; values are so large that sums of their projections are not."""
    draw = np.random.default_rng(1)
    normal = lambda *shape, size=1: (np.round(draw.standard_normal(shape) * 64) / 64 * size).astype(np.float32)
    qkv = {"q": normal(B, N, T, H, size=2), "k": normal(B, K, T, H), "v": normal(B, K, T, H, size=128)}
    return qkv | {"out_proj": normal(N, H, D, size=8), "hidden": normal(B, T, D)}


@functools.cache
def policy(name):
    return table.Case(name).make(table.Case(name).budget, layers=1).at(0, 1)


# ------------------------------------------------------------------------------------------------ formulas


def rotated(x, pos):
    """YaRN's rotation of heads "B M T H" at positions "B T", in float64."""
    angle, (a, b) = pos[:, None, :, None] * YARN.frequencies(H), np.split(x, 2, -1)
    cos, sin = np.cos(angle) * YARN.attention_factor, np.sin(angle) * YARN.attention_factor
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Formulas:
    """What is observed of YaRN's prompts, in float64: a function for every kind of observation."""

    def __init__(self, dtype):
        self.q, self.k, self.v, self.out = (raw()[n].astype(np.float64) for n in ("q", "k", "v", "out_proj"))
        self.rq, self.rk = (rotated(x, POS).astype(dtype).astype(np.float64) for x in (self.q, self.k))
        behind = np.where(POS >= 0, POS - POS.max(1, keepdims=True), 0)
        self.bias = np.array(SLOPES)[None, :, None] * behind[:, None]

    def columns(self, found):
        logits = Logits(SCALE, CAP, WINDOW, nothing=np.array(NOTHING))
        how = {"logits": logits, "bias": self.bias, "columns": [found]}
        return attention(self.rq, self.rk, self.v, POS, np.where(LIVE, POS[:, None], EMPTY), **how)[2][0]

    def of_a_kind(self, o):
        return next(getattr(self, c.__name__) for c in type(o).__mro__ if hasattr(self, c.__name__))(o)

    def ProjectedValueNorm(self, o):
        return np.abs(np.einsum("bksh,kghd->bkgsd", self.v, self.out.reshape(K, G, H, D))).sum(-1).mean(2)

    def CentredQueries(self, o):
        mean, length = (np.asarray(o.table[name][0], np.float64) for name in ("mean", "length"))
        many = np.broadcast_to(mean[None, :, None], (B, N, 1, H))
        ahead = [rotated(many, (LENGTHS + 2**n)[:, None]) for n in range(o.furthest.bit_length())]
        longer = YARN.attention_factor / 2 * (length - np.hypot(mean, np.roll(mean, H // 2, -1)))
        turned = rotated(np.eye(H)[None, None], np.ones((1, H)))[0, 0]
        return np.mean(ahead, 0)[:, :, 0], *(np.broadcast_to(x, (B, *x.shape)) for x in (longer, turned))

    def UnrotatedKeys(self, o):
        return self.k

    def Keys(self, o):
        return self.rk

    def KeyBias(self, o):
        return self.bias

    def Hidden(self, o):
        return np.asarray(o.fn(jnp.asarray(raw()["hidden"]), 0)).swapaxes(1, 2)

    def QuerySquares(self, o):
        last = (self.rq[b][:, POS[b] >= max(n - o.rows, 0)] for b, n in enumerate(LENGTHS))
        return np.stack([np.square(x).mean(1).reshape(K, G, H).mean(1) for x in last])

    def FutureQueries(self, o):
        late = [self.q[b][:, POS[b] >= o.skip] for b in range(B)]
        return self.turned(o, [x.mean(1) for x in late], [[np.cov(y.T, bias=True) for y in x] for x in late])

    def KnownQueries(self, o):
        return self.turned(o, *(np.repeat(o.moments[n][:1].astype(np.float64), B, 0) for n in ("mean", "covariance")))

    def turned(self, o, mean, cov):
        ahead = LENGTHS[:, None, None] + np.arange(o.horizon)[:, None]
        turn = np.stack([np.mean([rotated(np.eye(H)[None, None], np.repeat(i, H)[None]) for i in x], 0) for x in ahead])
        turn = turn[:, 0, 0] * SCALE
        return np.einsum("bnj,bjh->bnh", mean, turn), np.einsum("bnij,bih,bjl->bnhl", cov, turn, turn)

    def ChunkAttention(self, o, padded=False):
        found = np.zeros((B, K, G, T))
        for b, n in enumerate(LENGTHS):
            inside = np.flatnonzero((POS[b] >= o.first) & (POS[b] < n - o.last))
            for at in (inside[i : i + o.size] for i in range(0, len(inside), o.size)):
                x = np.einsum("kgth,ksh->kgts", self.rq[b].reshape(K, G, T, H)[:, :, at], self.rk[b][:, at])
                more = o.size - len(at) if padded else 0
                p = scipy.special.softmax(np.pad(x, [(0, 0)] * 3 + [(0, more)]), axis=-1)[..., : len(at)]
                found[b][:, :, at] = p.sum(2) + more / o.size
        return found.mean(2)

    def PaddedChunkAttention(self, o):
        return self.ChunkAttention(o, padded=True)

    def Reference(self, o):
        """(the share of every slot in a row, the row's output), each row being that behind the prompt."""
        x = np.einsum("bkgth,bksh->bkgts", self.rq.reshape(B, K, G, T, H), self.rk)[:, :, :, -o.rows :] * SCALE
        x = CAP * np.tanh(x / CAP) + self.bias.reshape(B, K, G, 1, T)
        seen = np.maximum(LENGTHS[:, None] - WINDOW, EMPTY) < POS
        x = np.where(seen[:, None, None, None], x, -np.inf).reshape(B, K, -1, T)
        p = scipy.special.softmax(x, axis=-1)
        return p, p @ self.v


def of_tokens(x):
    """Numbers in float64, 0 for the second sequence's padding."""
    x, padding = np.array(x, np.float64), T - LENGTHS[1]
    where = x[1, ..., :padding] if x.shape[-1] == T else x[1, :, :padding] if x.shape[2:3] == (T,) else x[:0]
    where[...] = 0
    return x


@pytest.mark.parametrize("positions", ["original", "rank"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_observed_is_what_formulas_say(dtype, positions):
    s, of, near = Setting(positions=positions, dtype=dtype, rope=YARN), Formulas(dtype), TOLERANCE[dtype]
    kv, stats, ctx = s.read()
    nothing = jnp.zeros((B, N, T, H))
    inputs = AttentionInputs(nothing, nothing, kv, jnp.asarray(POS, jnp.int32), ctx, s.model.rotate)
    for o, found in stats.of(0).items():
        if isinstance(o, Kinds | WholeQueries):  # ids and queries as they are
            continue
        wanted = of.columns(o(inputs)) if isinstance(o, Rows) else of.of_a_kind(o)
        found = (shares(*found.weights()), found.out) if isinstance(o, Reference) else found
        for x, y in zip(*(z if isinstance(z, tuple) else (z,) for z in (found, wanted)), strict=True):
            x, y = of_tokens(x), of_tokens(y)
            np.testing.assert_allclose(x, y, atol=near * np.abs(y).max(), err_msg=str(o))


# ------------------------------------------------------------------------------------------------ methods

# The same logits by other tensors, in float16 and with more padding. Where products of queries and keys count without
# the scale, queries shrink as both are stretched; where queries are given, and where a threshold is one of key norms,
# they and keys stay.
OTHER = {"stretch": 2, "larger": 4, "width": T + 5, "dtype": "float16"}
PRODUCTS = ("compactor", "compactor_blend", "kvpress_non_causal", "kvpress_compactor", "kvpress_compactor_one_chunk")
OTHERS = {
    **dict.fromkeys(PRODUCTS, OTHER | {"larger": 0.25}),
    "expected_attention_stats": OTHER | {"larger": 1},
    "kvpress_dms": OTHER | {"stretch": 1},
}
LAYOUTS = ("shifted", "rank")


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """Outside of jit, a loop is compiled at each call."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in [*sys.modules.items()]:
            if name.startswith("kvjax.") and getattr(module, "best", None) is select.best:
                patch.setattr(module, "best", jax.jit(select.best))
        yield


@pytest.mark.parametrize("name", table.MAKE)
def test_a_method_keeps_the_same_by_any_tensors_and_in_any_layout(name):
    kv = Setting().decided(policy(name))
    others = [Setting(**OTHERS.get(name, OTHER)), *(Setting(positions=where) for where in LAYOUTS)]
    for s in others:
        found = s.decided(policy(name))
        np.testing.assert_array_equal(found.pos, kv.pos, err_msg=str(s))
        np.testing.assert_array_equal(found.channels, kv.channels)
        for x, y in ((found.v, kv.v), (found.log_weight, kv.log_weight)):
            if y is not None:
                x, y = (np.where(kv.live[..., None] if z.ndim > 3 else kv.live, z, 0) for z in (x, y))
                np.testing.assert_allclose(x, y, atol=2e-3 * max(np.abs(y).max(), 1), err_msg=str(s))
    if kv.channels is None:
        pool = to_pool(kv, int(kv.num_live.sum(-1).max()), kv.num_live)
        assert tensors.live_positions(pool) == tensors.live_positions(kv)


def test_weights_and_values_are_fitted_to_what_rows_read():
    """Attention matching by numpy's least squares, in which what is fitted stands as more rows."""
    s, method = Setting(rope=YARN), policy("attention_matching")
    kv, match = s.decided(method), method.rewrite
    before, (p, out) = raw()["v"].astype(np.float64), Formulas("float32").Reference(match.rows)
    bound, live = np.exp(match.bound), np.asarray(kv.live)
    for b, h in np.ndindex(B, K):
        e, keep = p[b, h] / p[b, h].max(-1, keepdims=True), live[b, h]
        e, mass, v = e[:, keep], e.sum(-1), before[b, h, keep]

        def fitted(a, y):
            damping = np.sqrt(1e-5 * np.square(a).sum(0).max()) * np.eye(a.shape[1])
            return np.linalg.lstsq(np.vstack([a, damping]), np.concatenate([y, 0 * y[:1].repeat(len(damping), 0)]))[0]

        weight = np.clip(1 + fitted(e, mass - e.sum(-1)), 1 / bound, bound)
        for _ in range(match.steps):
            weight = np.clip(weight - e.T @ (e @ weight - mass) / np.linalg.norm(e, 2) ** 2, 1 / bound, bound)
        e = e * weight / (e @ weight)[:, None]
        v = v + fitted(e, out[b, h] - e @ v)
        np.testing.assert_allclose(kv.log_weight[b, h, keep], np.log(weight), atol=1e-3)
        np.testing.assert_allclose(kv.v[b, h, keep], v, atol=1e-3 * np.abs(v).max())
