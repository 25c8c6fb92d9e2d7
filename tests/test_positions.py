"""Where keys stand: logits that fall with distance (ALiBi), learned positions, rotated keys as policies see them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import chain, decode_step, make_plan, methods, models, prefill, shared_layers
from kvjax.budgets import STEP
from kvjax.compose.evict import Evict, evicts
from kvjax.contract import EMPTY, Layout, PerSlot, Rewrite
from kvjax.models.gpt2 import GPT2Config
from kvjax.models.mpt import MPTConfig
from kvjax.run.layers import without_cache
from kvjax.scores.attention import Recency
from tests import table, tensors
from tests.cases import Sizes
from tests.float64 import turned
from tests.marks import marks

B, HEADS, T, NEW, BUDGET = 2, 2, 24, 7, 10
LENGTHS = np.array([T, 17])
SIZES = {"vocab_size": 61, "embed_dim": 16, "mlp_dim": 24, "num_query_heads": HEADS, "num_kv_heads": HEADS}
CONFIGS = {
    "alibi": MPTConfig(**SIZES, num_layers=3, head_dim=8, activation="gelu", tie_embeddings=True, steepest=2.0),
    "learned": GPT2Config(**SIZES, num_layers=3, head_dim=8, activation="gelu", max_position=2 * T),
}
SHALLOW = {"h2o", "streaming_llm", "h2o_pooled"}  # in a model of one layer
QUICK = {*SHALLOW, "ada_snapkv"}
OTHERS = {
    *("tova", "keyformer", "ahakv", "scissorhands", "roco", "snapkv", "nacl", "h2o_rerotated", "kvzip"),
    *("h2o_every_4", "snapkv_then_h2o", "partition_heads", "across_layers_entropy", "expected_attention", "head_table"),
} & set(table.MAKE)


@functools.cache
def random_model(kind, num_layers):
    model = models.LanguageModel(dataclasses.replace(CONFIGS[kind], num_layers=num_layers))
    return model, jax.tree.map(lambda x: 2 * x, jax.jit(model.init)(jax.random.key(3)))


def decoded(model, params, policy, tokens):
    """Logits of the last prompt token and all later ones, and positions that every layer held for each of these."""
    how = {"policy": policy, "lengths": LENGTHS, "max_new_tokens": NEW}
    first, state = prefill(model, params, tokens[:, :T], **how)
    held = lambda state: [kv.head_pos for kv in state.layers]
    makes_room = any(p.when.before for p in evicts(policy))

    @jax.jit
    def run(params, state, rest):
        def step(state, token):
            logits, after = decode_step(model, params, token, state)
            return after, (logits, held(after if makes_room else state))

        return jax.lax.scan(step, state, rest.T)[1]

    logits, positions = run(params, state, tokens[:, T:])
    return jnp.concatenate([first[:, None], logits.swapaxes(0, 1)], axis=1), positions


def what_rows_read(held, *, by_rank):
    """Which tokens every row of a layer reads "B H R S", and how many places they lie before it."""
    column = np.arange(T + NEW)[None] - (T - LENGTHS)[:, None]  # of every token its position, below 0 for padding
    rows, keys = column[:, None, :, None], column[:, None, None]
    read = np.repeat((keys >= 0) & (keys <= rows), HEADS, 1)
    places = np.repeat(rows - keys, HEADS, 1).astype(np.float32)
    for i, b, h in np.ndindex(NEW, B, HEADS):
        row = T + i
        live = np.array(sorted({*held[i, b, h].tolist(), column[b, row].item()} - {EMPTY}))
        at = live + T - LENGTHS[b]
        read[b, h, row] = False
        read[b, h, row, at] = True
        if by_rank:
            places[b, h, row, at] = np.arange(len(live))[::-1]
    return read, places


def plainly(model, params, tokens, layers):
    """Logits of every token, each layer's rows reading as `what_rows_read` says, with the whole matrix."""
    pos = jnp.asarray(np.maximum(np.arange(T + NEW)[None] - (T - LENGTHS)[:, None], EMPTY), jnp.int32)

    def attend(cache, q, k, v, *, layer, logits, **_):
        read, places = layers[layer]
        x = jnp.einsum("bhrc,bhsc->bhrs", q, k) * (q.shape[-1] ** -0.5 if logits.scale is None else logits.scale)
        if logits.slopes is not None:
            x = x - logits.slopes[None, :, None, None] * places
        p = jnp.where(read, jnp.exp(x - x.max(-1, keepdims=True, where=read, initial=-1e9)), 0.0)
        out = jnp.einsum("bhrs,bhsc->bhrc", p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30), v)
        return out, cache, ()

    outer, each = model.parts(params)
    x = model.embed(outer, tokens, pos)
    for i, own in enumerate(each):
        x, _, _ = model.block(i, own, x, None, attend)
    return model.head(outer, x)


def rows():
    every = [(kind, name) for kind in CONFIGS for name in sorted(QUICK | OTHERS)]
    each = [pytest.param(*row, marks=marks(row[1], QUICK if row[0] == "alibi" else (), SHALLOW)) for row in every]
    return pytest.mark.parametrize(("kind", "name"), each)


@rows()
def test_evicted_tokens_are_hidden_ones(kind, name):
    """Any policy's logits are those of plain attention under masks that hide what it has evicted.

    With positions other than the original ones, distances are counted in live tokens; where positions are learned, keys
    cannot have others.
    """
    num_layers = 1 if name in SHALLOW else 3
    model, params = random_model(kind, num_layers)
    policy = table.MAKE[name](BUDGET, Sizes(num_layers, HEADS, HEADS, 8, 16))
    moved = policy.at(0, num_layers).layout.positions != "original"
    if kind == "learned" and moved:
        with pytest.raises(ValueError, match="adds learned positions to its embeddings"):
            make_plan(model.config, policy, LENGTHS, T, NEW)
        return
    tokens = tensors.token_ids(B, T + NEW, 5)
    found, held = decoded(model, params, policy, tokens)
    layers = [what_rows_read(np.asarray(positions), by_rank=moved) for positions in held]
    assert any((read[:, :, T].sum(-1) < LENGTHS[:, None]).all() for read, _ in layers)
    wanted = np.asarray(plainly(model, params, tokens, layers))[:, T - 1 :]
    np.testing.assert_allclose(found, wanted, atol=5e-5 * np.abs(wanted).max())


@pytest.mark.slow
def test_last_hidden_states_are_what_logits_are_made_of(tiny):
    """Of a model with learned positions, and of one whose norm has another name, too."""
    ids = np.random.default_rng(0).integers(0, 61, (2, 6), np.int32)
    pos = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32)[None], (2, 6))
    for model, params in (tiny, random_model("alibi", 1), random_model("learned", 1)):
        how = {"attend": without_cache(pos), "pos": pos}
        logits, found = (jax.jit(functools.partial(f, **how))(params, ids) for f in (model, model.states))
        head = (
            params["lm_head"]["weight"].T
            if "lm_head" in params
            else next(params[name].T for name in ("embed_tokens", "wte") if name in params)
        )
        np.testing.assert_allclose(found @ head, logits, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ rotary embeddings

H, TEXT, NEXT = 6, 10, 3
GIVEN = [dict(zip("qkv", tensors.qkv(5, T=TEXT + NEXT, H=H), strict=True))]
turn = lambda x, pos: turned(x, pos.astype(x.dtype), jnp)


class Told(Rewrite):
    """Remembers the keys that it was told of, and changes nothing."""

    def memory(self, info):
        return PerSlot((info.head_dim,))

    def update(self, slots):
        return slots.kv.k

    def __call__(self, decision, slots):
        return decision


LAYOUTS = {"shifted": Layout("shifted"), "original": Layout(), "rank": Layout("rank")}
LAYOUTS |= {"pool": Layout(pool=True), "rank in a pool": Layout("rank", pool=True)}
TELLS = {name: Evict(Recency(), 6, 2, when=STEP, rewrite=Told(), layout=x) for name, x in LAYOUTS.items()}
TELLS |= {f"{name}, few channels": chain(TELLS[name], methods.think(0.5, rows=4)) for name in ("original", "rank")}
TELLS["rank, all layers"] = shared_layers(TELLS["rank"])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "," in n or n == "shifted" else pytest.mark.slow) for n in TELLS]
)
def test_policies_are_told_of_the_keys_that_rows_read(name):
    """In every layout: rotated to where they stand for the newest row, and 0 in dropped channels."""
    seen = tensors.replay(TELLS[name], GIVEN, TEXT, rotate=turn)
    kv, raw = seen.kv.view(), np.asarray(GIVEN[0]["k"], np.float64)
    (told,) = (x for x in jax.tree.leaves(kv.memory) if x.shape == (*kv.pos.shape, H))
    for b, h in np.ndindex(*told.shape[:2]):
        read = [*seen.live[-2][b][h], TEXT + NEXT - 1]
        gap = (np.array(read) < 2) * (TEXT + NEXT - len(read))  # which shifts sinks to the tokens behind them
        places = np.arange(len(read)) if "rank" in name else np.array(read) + gap * (name == "shifted")
        left = np.ones(H, bool) if kv.channels is None else np.isin(np.arange(H), kv.channels[b, h])
        keys = turned(raw[b, h, read] * (left if "rank" in name else 1), places, np) * (1 if "rank" in name else left)
        wanted = dict(zip(read, keys, strict=True))
        for slot in np.flatnonzero(kv.pos[b, h] >= 0):
            np.testing.assert_allclose(told[b, h, slot], wanted[int(kv.pos[b, h, slot])], atol=1e-5)
