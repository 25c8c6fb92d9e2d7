"""The laws of policies with drivers: decoding, blocks, and policies that change what rows read or what slots weigh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import STEP, Schedule
from kvjax.compose.around import having
from kvjax.compose.evict import Evict
from kvjax.contract import KVShape, Layout, PerSlot, Policy, Reads, Rewrite
from kvjax.observe import Rows, segment_sum
from kvjax.run.plan import infos_of
from kvjax.scores.attention import Accumulated
from tests import table, tensors, test_readme
from tests.marks import slow_but

pytestmark = pytest.mark.usefixtures("as_users_run_it")

B, N, K, H, D, LAYERS = 2, 4, 2, 8, 12, 2
C = 5  # channels of a latent
T, STEPS, LENGTHS = 24, 10, np.array([24, 17], np.int32)
KEYS = np.array([3, 4])

decoded_methods = table.rows(table.DECODED)


@functools.cache
def params():
    """Layers of `Tensors`."""
    draw = np.random.default_rng(8)
    normal = lambda *shape: draw.standard_normal(shape).astype(np.float32)
    M, sharp = T + STEPS, np.linspace(0.5, 3.0, N, dtype=np.float32)[None, :, None, None]
    layer = lambda: {"q": normal(B, N, M, H) * sharp, "k": normal(B, K, M, H), "v": normal(B, K, M, H)}
    return [layer() | {"out_proj": normal(N, H, D), "hidden": normal(B, M, D)} for _ in range(LAYERS)]


@dataclasses.dataclass(frozen=True)
class Latent(kvjax.models.ModelConfig):
    """A model whose values are the last channels of its keys."""

    def kv_shape(self, layer):
        """The same in all layers."""
        return KVShape(self.num_kv_heads, self.head_dim, C)


def of_latents(apart):
    """(model, layers) of `params` with these values; `apart` stores them so, behind zeros, which nothing changes."""
    zeros, each = (lambda *shape: np.zeros((*shape, H - C), np.float32)), []
    for x in params():
        v, out_proj = x["k"][..., -C:], x["out_proj"][:, -C:]
        if apart:
            v = np.concatenate([zeros(*v.shape[:-1]), v], -1)
            out_proj = np.concatenate([zeros(N, D).swapaxes(1, 2), out_proj], 1)
        each.append(x | {"v": v, "out_proj": out_proj})
    model = tensors.model_of(each)
    return (model, each) if apart else (dataclasses.replace(model, config=Latent(**vars(model.config))), each)


@functools.cache
def history(policy, row=None, block=None, steps=STEPS, own=None, apart=None):
    """(positions "steps+1 B K S" in every layer, weights of slots or None, whether logits were numbers).

    Args:
      policy: the policy.
      row: one sequence by itself, without padding; None for the padded batch.
      block: the blocks in which the prompt is read.
      steps: tokens that follow it.
      own: the seed of the policy's learned parameters.
      apart: as in `of_latents`; values of their own if None.
    """
    rows = np.arange(B) if row is None else np.array([row])
    first = 0 if row is None else T - LENGTHS[row]
    each = [{n: x if n == "out_proj" else x[rows] for n, x in layer.items()} for layer in params()]
    model, each = (tensors.model_of(each), each) if apart is None else of_latents(apart)
    tokens = np.broadcast_to(np.arange(first, T + steps), (len(rows), T + steps - first))
    how = {"policy": policy, "lengths": LENGTHS[rows], "max_new_tokens": steps, "block": block}
    how["key"] = jax.vmap(jax.random.key)(KEYS[rows])
    if own is not None:
        how["policy_params"] = kvjax.init_policy_params(model.config, policy, jax.random.key(own))

    @jax.jit
    def run(each, tokens):
        seen = lambda state: [
            (kv.head_pos, None if kv.log_weight is None else kv.view().log_weight) for kv in state.layers
        ]
        logits, state = kvjax.prefill(model, each, tokens[:, : T - first], **how)

        def step(state, token):
            logits, state = kvjax.decode_step(model, each, token, state)
            return state, (seen(state), jnp.isfinite(logits).all())

        after = seen(state)
        _, (later, finite) = jax.lax.scan(step, state, tokens[:, T - first :].T)
        join = lambda x, y: jnp.concatenate([x[None], y])
        return jax.tree.map(join, after, later), finite.all() & jnp.isfinite(logits).all()

    layers, finite = run(each, jnp.asarray(tokens, jnp.int32))
    return [np.asarray(pos) for pos, _ in layers], [weight for _, weight in layers], bool(finite)


def live(pos):
    """Sets of live positions, by step, sequence and head."""
    return [[[{p for p in head if p >= 0} for head in row] for row in step] for step in pos.tolist()]


@decoded_methods
def test_decoding_keeps_to_its_plan_and_what_is_evicted_stays_gone(case):
    policy = case.make(case.budget, layers=LAYERS)
    pos, _, finite = history(policy)
    assert finite, "a token found no slot"
    infos = infos_of(tensors.model_of(params()).config, policy, T, STEPS)
    for layer, info in enumerate(infos):
        here, found = policy.at(layer, LAYERS), live(pos[layer])
        sizes = here.sizes(info, LENGTHS)
        for row, n in enumerate(LENGTHS):
            for s, heads in enumerate(step[row] for step in found):
                counts = np.array([len(x) for x in heads])
                assert counts.max() <= sizes.per_head[row]
                assert counts.sum() <= sizes.total[row]
                if s:
                    assert all(x <= {*y, n + s - 1} for x, y in zip(heads, found[s - 1][row], strict=True))
                if isinstance(here, Evict) and here.when == STEP:
                    budget, sinks, recent = (int(getattr(sizes.hparams, x)[row]) for x in ("budget", "sinks", "recent"))
                    safe = {*range(min(sinks, n + s)), *range(max(n + s - recent, 0), n + s)}
                    assert all(safe <= x for x in heads)
                    if case.name not in table.FEWER:
                        assert counts.sum() == min(budget, n + s) * len(counts)  # a full budget stays in use


@table.rows(table.DECODED, smoke={"streaming_llm"})
def test_a_prompt_that_stays_is_held_at_every_step(case):
    """Of a budget of 4 tokens more than the longer one."""
    policy = case.make(T + 4, layers=LAYERS) if case.takes(T + 4) else kvjax.Policy()
    if not having(policy, "sinks") or case.name in table.NO_BUDGET | table.SMALL_PARTS:
        pytest.skip("it keeps no tokens by position, or has no number of them, or parts of it hold no such prompt")
    pos, _, finite = history(kvjax.protect(policy, recent=1, prompt=True))
    assert finite
    for row, n in enumerate(LENGTHS):
        heads = [head for layer in pos for step in live(layer) for head in step[row]]
        assert all({*range(n)} <= head for head in heads)
        if case.name in table.DECODED - table.PROMPT_OUTSIDE:  # which evict generated tokens
            assert all(len(heads[i * (STEPS + 1) * K - 1]) < n + STEPS or n + STEPS <= T + 4 for i in (1, 2))


@table.rows(table.DECODED, without=table.OF_A_BATCH)
def test_a_padded_row_decodes_as_it_does_alone(case):
    policy = case.make(case.budget, layers=LAYERS)
    together, alone = history(policy), history(policy, row=1)
    shift = lambda pos: [[step[1]] for step in live(pos)]
    assert together[2]
    assert alone[2]
    assert [shift(x) for x in together[0]] == [live(x) for x in alone[0]]


@table.rows(table.FEW, smoke=table.DECODED)
def test_a_latent_is_kept_as_a_key_with_its_value_is(case):
    """Of DeepSeek's attention, where one array holds both (arXiv 2405.04434)."""
    policy = case.make(case.budget, layers=LAYERS)
    if case.name in table.NO_LATENT:
        with pytest.raises(ValueError, match=table.NO_LATENT[case.name]):
            history(policy, steps=2, apart=False)
        return
    (latent, _, finite), (apart, _, _) = (history(policy, steps=4, apart=x) for x in (False, True))
    assert finite
    if case.name not in table.COUNTS_CHANNELS:
        assert [*map(live, latent)] == [*map(live, apart)]


@table.rows(table.FEW, smoke={"h2o"})
def test_one_block_is_the_whole_prompt(case):
    policy = case.make(case.budget, layers=LAYERS)
    if any(policy.at(i, LAYERS).layout.prompt != "any" for i in range(LAYERS)):
        pytest.skip("it is refused in blocks")
    one, other = history(policy, steps=1), history(policy, steps=1, block=T)
    assert one[2]
    assert other[2]
    assert [live(x) for x in one[0]] == [live(x) for x in other[0]]


@table.rows(table.FEW, without=table.LOSSY, smoke={"h2o"})
def test_a_budget_that_holds_everything_is_full_attention(case, shallow, tiny):
    model, weights = tiny if case.policy.joint else shallow
    draw = np.random.default_rng(1)
    ids, more = draw.integers(0, 61, (B, T)), draw.integers(0, 61, (B, 6))

    def logits(policy):
        first, state = kvjax.prefill(model, weights, ids, policy=policy, lengths=LENGTHS, max_new_tokens=6)
        return jnp.concatenate([first[:, None], kvjax.feed(model, weights, more, state)[0]], axis=1)

    sizes = {"layers": model.config.num_layers, "width": model.config.embed_dim}
    roomy = case.make(200 if case.takes(200) else 1.0, **sizes)
    np.testing.assert_allclose(logits(roomy), logits(methods.full()), rtol=2e-4, atol=2e-4)


# ------------------------------------------------------------------------------------------------ what rows read


Delayed, Admit = (test_readme.run(name)[kind] for name, kind in test_readme.READING.items())


class Faint(Policy):
    """Tokens count less, by their keys, for rows that are `delay` or more behind them."""

    delay: int = 3

    def reads(self, kv, inputs, ctx):
        return Reads(log_weight=-jnp.abs(kv.k[..., 0]), delay=self.delay)


class Watched(Policy):
    """Adds up the attention that slots receive, which says what rows read."""

    def observe(self, phase):
        return (Rows(),)

    def memory(self, info):
        return PerSlot()

    def update(self, kv, stats, ctx):
        return kv.replace(memory=kv.memory + stats[Rows()])


def heads_of(one, other, **how):
    """One kv head under each."""
    return kvjax.partition_heads({"a": one, "b": other}, [["a", "b"]] * LAYERS, **how)


CHANGE_READS = {
    "until": Delayed(4),
    "until the next": Delayed(1),
    "admitted": Admit(4),
    "weights": Faint(),
    "both": kvjax.chain(Delayed(4), Faint()),
    "heads": heads_of(Delayed(4), Faint(), pool=False),
    "heads in a pool": heads_of(Delayed(4), Faint()),
}


@pytest.mark.parametrize("name", slow_but(CHANGE_READS, "until", "heads in a pool"))
def test_a_prompt_read_whole_is_one_read_token_by_token(name):
    """The same tokens live afterwards, and have received the same attention."""
    policy = kvjax.chain(CHANGE_READS[name], Watched())
    found = {}
    for block in (None, 1, 5):
        model = tensors.model_of(params())
        own = kvjax.init_policy_params(model.config, policy, jax.random.key(1))
        how = {"lengths": LENGTHS, "max_new_tokens": 1, "block": block, "policy_params": own}
        _, state = kvjax.prefill(model, params(), tensors.columns(params(), T), policy=policy, **how)
        views = [kv.view() for kv in state.layers]
        received = [jax.tree.leaves(kv.memory)[-1] for kv in views]
        found[block] = [by_position(kv.pos, x) for kv, x in zip(views, received, strict=True)]
    for block in (1, 5):
        for one, other in zip(found[None], found[block], strict=True):
            np.testing.assert_array_equal(one >= 0, other >= 0)
            np.testing.assert_allclose(one, other, atol=2e-5)


def by_position(pos, x):
    """A number for every position "B K T+STEPS", -1 where no slot holds it."""
    found = np.full((*pos.shape[:2], T + STEPS), -1.0, np.float32)
    for b, k, s in np.argwhere(np.asarray(pos) >= 0):
        found[b, k, pos[b, k, s]] = x[b, k, s]
    return found


# ------------------------------------------------------------------------------------------------ what slots weigh


class IntoNearest(Rewrite):
    """An evicted token is averaged into the kept one that stands nearest in the text, which weighs so much more."""

    @property
    def writes(self):
        return ("v", "log_weight")

    def __call__(self, decision, slots):
        kv, S = slots.kv, slots.kv.pos.shape[-1]
        gap = jnp.abs(kv.pos[..., :, None] - kv.pos[..., None, :])
        target = jnp.where(kv.live, jnp.where(decision.keep[..., None, :], gap, 2**30).argmin(-1), S)
        count = jnp.where(kv.live, jnp.exp(kv.log_weight), 0.0)
        total = segment_sum(count, target, S)
        v = jax.vmap(lambda x: segment_sum(x, target, S), -1, -1)(count[..., None] * kv.v)
        v, weight = v / jnp.maximum(total, 1e-9)[..., None], jnp.log(jnp.maximum(total, 1e-9))
        stay = lambda new, old: jnp.where(decision.keep.reshape(*decision.keep.shape, *(1,) * (old.ndim - 3)), new, old)
        return dataclasses.replace(decision, v=stay(v, kv.v), log_weight=stay(weight, kv.log_weight))


def merges(budget=8, **how):
    """H2O that merges what it evicts."""
    return Evict(Accumulated(Rows()), budget, recent=2, rewrite=IntoNearest(), **{"when": STEP, **how})


POOL = {"heads": kvjax.Adaptive(0.5, 2.0), "layout": Layout(pool=True)}
MERGES = {
    "after the prompt": (merges(when=Schedule()), None),
    "every step": (merges(), None),
    "in blocks": (merges(), 5),
    "every second step": (merges(when=Schedule(every=2)), None),
    "when over": (merges(when=Schedule(over=2)), None),
    "while decoding": (merges(when=Schedule(prefill=False, every=1)), None),
    "by rank": (merges(layout=Layout("rank")), None),
    "in a pool": (merges(**POOL), None),
    "in a pool, every second step": (merges(**POOL, when=Schedule(every=2)), None),
    "for query heads": (merges(layout=Layout(by_query_head=True)), None),
    "in a chain": (kvjax.chain(merges(14, when=Schedule()), merges()), None),
    "by head": (heads_of(merges(), merges(10, when=Schedule(over=2)), pool=False), None),
    "by head in a pool": (heads_of(merges(), merges(10, when=Schedule(over=2))), None),
}


@pytest.mark.parametrize("name", slow_but(MERGES, "in blocks", "in a pool"))
def test_weights_of_a_head_add_up_to_the_tokens_that_it_has_read(name):
    policy, block = MERGES[name]
    pos, weights, finite = history(policy, block=block)
    assert finite
    read = LENGTHS + np.arange(STEPS + 1)[:, None]
    for at, weight in zip(pos, weights, strict=True):
        total = np.where(at >= 0, np.exp(weight), 0.0).sum(-1)
        np.testing.assert_allclose(total, np.broadcast_to(read[..., None], total.shape), rtol=1e-5)
