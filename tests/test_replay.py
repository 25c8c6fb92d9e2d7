"""Tokens that read a cache without adding to it, and policies that decide by what they read (KVzip)."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.drivers.attention import without_cache
from kvjax.drivers.replay import read_again
from kvjax.models import gpt2
from kvjax.scoring import replayed
from kvjax.scoring.replay import Replay
from kvjax.scoring.replayed import ReplayedAttention
from kvjax.scoring.stats import Measurement, Moment
from tests import helpers

T, R, LENGTHS, READ = 24, 5, (24, 17), (5, 3)
kvzip = functools.partial(methods.kvzip, repeat=(1, 2), repeat_next=(3,), suffix=(4,), chunk=9, overlap=2, sinks=2)


def tokens(width, seed=0):
    return np.asarray(helpers.token_ids(2, width, seed))


def prompted(small, policy, **options):
    """The state after two prompts of different lengths."""
    model, params = small
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=R, lengths=LENGTHS)
    read = jax.jit(lambda p, t, n: kvjax.prefill(model, p, t, plan, lengths=n, **options)[1])
    return read(params, tokens(T), jnp.asarray(LENGTHS))


# --- the driver ---


def test_logits_are_those_of_a_model_that_reads_both(shallow):
    """Of every row of a padded batch; and every row gives one in all to what it reads."""
    model, params = shallow
    state, more = prompted(shallow, kvjax.identity()), tokens(R, 1)
    read = lambda p, s: kvjax.replay(model, p, more, s, lengths=READ, measure=[kvjax.Observe()])
    logits, stats = jax.jit(read)(params, state)
    for row, (n, m) in enumerate(zip(LENGTHS, READ, strict=True)):
        whole = jnp.asarray(np.concatenate([tokens(T)[row, T - n :], more[row, R - m :]])[None])
        pos = jnp.arange(n + m, dtype=jnp.int32)[None]
        wanted = model(params, whole, (None,), attend=without_cache(pos), last_only=False)[0]
        np.testing.assert_allclose(logits[row, R - m :], wanted[0, n:], atol=2e-5 * np.abs(wanted).max())
        assert np.isnan(logits[row, : R - m]).all()
    received = stats.layers[0][kvjax.Observe()]
    assert received.shape == (2, 2, state.layers[0].num_slots + R)
    np.testing.assert_allclose(received.sum(-1), np.array(READ)[:, None] * np.ones(2), rtol=1e-5)


@pytest.mark.parametrize(
    "policy",
    [kvjax.when(kvjax.after_prefill(), methods.streaming_llm(8, sinks=2)), methods.ada_snapkv(8, window_size=4)],
    ids=["positions by rank", "pool"],
)
def test_of_an_evicted_cache_too_it_reads_what_decoding_reads(shallow, policy):
    state, more = prompted(shallow, policy), tokens(R, 1)
    found, _ = kvjax.replay(*shallow, more, state, lengths=READ)
    wanted, _ = kvjax.feed(*shallow, more, state, lengths=READ)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.nanmax(np.abs(wanted)))


@dataclasses.dataclass(frozen=True)
class Hidden(Measurement):
    """The hidden states themselves."""

    @property
    def sees_hidden(self):
        return True

    def measure(self, moment):
        return moment.hidden


@dataclasses.dataclass(frozen=True)
class Blind(Hidden):
    """The same, without asking for them."""

    @property
    def sees_hidden(self):
        return False


def test_hidden_states_are_what_queries_are_projections_of(shallow):
    """Drivers keep them for measurements that ask; nobody else pays for them."""
    model, params = shallow
    state, more = prompted(shallow, kvjax.identity()), tokens(R, 1)
    _, stats = kvjax.replay(model, params, more, state, measure=[Hidden()])
    x = np.asarray(params["embed_tokens"])[more]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.norm_eps)
    wanted = x * np.asarray(params["layers_0"]["input_layernorm"]["scale"])
    np.testing.assert_allclose(stats.layers[0][Hidden()], wanted, rtol=1e-5, atol=1e-6)
    for asked, given in ((Hidden(), True), (Blind(), False)):
        policy = kvjax.from_fn(lambda kv, stats, ctx: kv.pos.astype(jnp.float32), budget=8, observe=[asked])
        plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=0)
        _, _, stats = kvjax.forward(model, params, tokens(T), kvjax.init_state(plan, [T, T]))
        assert (stats.layers[0][asked] is not None) == given


SIZES = {"vocab_size": 61, "embed_dim": 16, "mlp_dim": 24, "num_query_heads": 2, "num_kv_heads": 2, "head_dim": 8}
GPT2 = gpt2.GPT2Config(**SIZES, num_layers=1, max_position=32)


def test_replays_that_cannot_be_are_refused(shallow):
    model, params = shallow
    state, more = prompted(shallow, kvjax.identity()), tokens(R, 1)
    with pytest.raises(ValueError, match=r"hides slots of layer 0 from each row .* use kvjax.feed"):
        kvjax.replay(model, params, more, prompted(shallow, methods.dilated_window(8)))
    with pytest.raises(ValueError, match="measures rows that repeat a prompt chunk by chunk, but these tokens are any"):
        kvjax.replay(model, params, more, state, measure=[ReplayedAttention(Replay())])
    with pytest.raises(ValueError, match="token id 61 is outside the vocabulary of 61"):
        kvjax.replay(model, params, more + 61 - more.max(), state)
    learned = models.LanguageModel(GPT2)
    plan = kvjax.make_plan(GPT2, kvjax.identity(), prompt_len=T, max_new_tokens=0)
    state = jax.eval_shape(lambda: kvjax.init_state(plan, [T, T]))
    state = dataclasses.replace(state, length=jnp.asarray([T, T]))
    with pytest.raises(ValueError, match="end 34 tokens from the first, but this model has learned 32 positions"):
        kvjax.replay(learned, learned.shapes, tokens(10), state)


# --- what is read again ---


def test_chunks_are_those_of_a_rows_own_tokens():
    """By hand: an instruction, the end of the chunk before, the suffix, the chunk."""
    replay = Replay((91, 92), (93,), (94,), chunk=3, overlap=2, skip=1)
    prompts, lengths = jnp.asarray([[10, 11, 12, 13, 14, 15, 16, 17], [0, 0, 0, 0, 20, 21, 22, 23]]), jnp.array([8, 4])
    wanted = [
        ([91, 92, 94, 11, 12, 13], [91, 92, 94, 21, 22, 23]),
        ([93, 12, 13, 94, 14, 15, 16], []),
        ([93, 15, 16, 94, 17], []),
    ]
    spans = [([1, 1], [4, 4]), ([4, 4], [7, 4]), ([7, 4], [8, 4])]
    assert replay.count(8) == 3
    for i, (rows, span) in enumerate(zip(wanted, spans, strict=True)):
        read, valid = replay.read(prompts, lengths, i)
        assert read.shape == (2, replay.rows(8)) == (2, 7)
        assert [row[7 - n :] for row, n in zip(read.tolist(), valid, strict=True)] == list(rows)
        assert tuple(x.tolist() for x in replay.span(8, lengths, i)) == span
    assert (replay.count(1), Replay(skip=3).count(3), Replay((1,)).read(prompts, lengths, 0)[0].shape) == (0, 0, (2, 9))


def largest(measurement, moment):
    """`ReplayedAttention` in loops over rows, heads and keys."""
    q, k, v = (np.asarray(x, np.float64) for x in (moment.q, moment.kv.k, moment.kv.v))
    (B, N, rows, H), (_, K, S, _) = q.shape, k.shape
    pos, here = np.asarray(moment.kv.pos), np.asarray(moment.pos)
    first, last = (np.asarray(x) for x in moment.ctx.again)
    scale = H**-0.5 if moment.scale is None else moment.scale
    out = np.zeros((B, K, S))
    for b, n, i in np.ndindex(B, N, rows):
        h, row = n // (N // K), here[b, i]
        if row < 0:
            continue
        behind = np.arange(S) >= S - rows
        of_chunk = (pos[b, h] >= first[b]) & (pos[b, h] < last[b]) & ~behind
        early = (pos[b, h] >= 0) & (pos[b, h] < min(measurement.sinks, first[b])) & ~behind
        reads = (of_chunk | early | behind) & (pos[b, h] >= 0) & (pos[b, h] <= row)
        if moment.window is not None:
            reads &= pos[b, h] > row - moment.window
        x = k[b, h] @ q[b, n, i] * scale
        x = x if moment.softcap is None else moment.softcap * np.tanh(x / moment.softcap)
        x = x if moment.slopes is None else x + moment.slopes[n] * pos[b, h]
        e = np.where(reads, np.exp(x - x[reads].max()), 0.0)
        p = e / e.sum()
        if measurement.weighed:
            norm = np.linalg.norm(v[b, h] @ np.asarray(moment.out_proj[n], np.float64), axis=-1)
            p = p * norm / np.linalg.norm(np.asarray(moment.hidden[b, i], np.float64))
        out[b, h] = np.where(of_chunk, np.maximum(out[b, h], p), out[b, h])
    return out


@pytest.mark.parametrize(
    ("how", "weighed"),
    [({}, False), ({"scale": 0.7, "window": 12, "softcap": 1.5}, True), ({"slopes": (0.5, 0.25, 0.1, 0.05)}, False)],
    ids=["plain", "weighed in a window", "alibi"],
)
def test_the_largest_probability_is_that_of_loops(how, weighed, monkeypatch):
    """Of rows in several blocks, slots in any order, chunks and padding of each row's own."""
    monkeypatch.setattr(replayed, "_LOGITS", 3 * 2 * 4 * 15)  # three rows a block
    monkeypatch.setattr(replayed, "_ROWS", 1)
    measurement = ReplayedAttention(Replay(chunk=6), sinks=2, weighed=weighed)
    q, k, v = helpers.qkv(3, T=T + 7)
    order = np.random.default_rng(0).permuted(np.tile(np.arange(T), (2, 2, 1)), axis=-1)
    places = np.maximum(np.arange(T) - (T - np.array(LENGTHS))[:, None], -1)[:, None]
    rows = np.where(np.arange(7) < np.array([[0], [2]]), -1, np.array(LENGTHS)[:, None] + np.arange(7) - [[0], [2]])
    by_head = lambda x: np.tile(x, (1, 2, 1))
    pos = np.concatenate([np.take_along_axis(by_head(places), order, 2), by_head(rows[:, None])], 2)
    kv = kvjax.LayerKV(k, v, jnp.asarray(pos, jnp.int32))
    ctx = helpers.context(helpers.site(T=T), length=[31, 22], prompt_length=LENGTHS)
    ctx = dataclasses.replace(ctx, again=(jnp.array([12, 12]), jnp.array([18, 17])))
    given = {"out_proj": jax.random.normal(jax.random.key(1), (4, 8, 5)), "hidden": q[:, 0, -7:]}
    moment = Moment(q[:, :, -7:], q[:, :, -7:], kv, jnp.asarray(rows, jnp.int32), ctx, lambda x, _: x, **given, **how)
    np.testing.assert_allclose(measurement.measure(moment), largest(measurement, moment), rtol=1e-5, atol=1e-7)


def test_what_weighs_must_be_given():
    measurement = ReplayedAttention(Replay(), weighed=True)
    q, k, v = helpers.qkv(3, T=4)
    ctx = helpers.context(helpers.site(T=4), length=[4, 4])
    moment = Moment(q, q, kvjax.LayerKV(k, v, jnp.zeros((2, 2, 4), jnp.int32)), ctx.tokens, ctx, lambda x, _: x)
    with pytest.raises(ValueError, match=r"measures rows that repeat a prompt; read it with kvjax\.prefill"):
        measurement.measure(moment)
    ctx = dataclasses.replace(ctx, again=(ctx.length, ctx.length))
    with pytest.raises(ValueError, match=r"pass out_proj= of shape \(N, H, D\) and hidden= of shape \(B, T, D\)"):
        measurement.measure(dataclasses.replace(moment, ctx=ctx))


# --- policies ---

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "kvzip.json").read_text())


@pytest.mark.parametrize("case", [c for c in GOLDEN["cases"] if c["layerwise"]], ids=["kvzip", "plus"])
def test_kept_tokens_and_scores_are_those_of_kvpress(case, embedded):
    """Recorded with the same checkpoint; the tokens that it reads again are the recorded ones too."""
    model, params, tokenizer = embedded
    ids, n = jnp.asarray([GOLDEN["ids"]], jnp.int32), len(GOLDEN["ids"])
    policy = methods.kvzip(0.5, tokenizer=tokenizer, chunk=GOLDEN["chunk"], plus=case["plus"])
    told = {name: tuple(GOLDEN[name]) for name in ("repeat", "repeat_next", "suffix")}
    assert policy == methods.kvzip(0.5, **told, chunk=GOLDEN["chunk"], plus=case["plus"])
    plan = kvjax.make_plan(model.config, policy, prompt_len=n, max_new_tokens=1)
    for i, wanted in enumerate(GOLDEN["read"]):
        again, valid = plan.replays[0].read(ids, jnp.array([n]), i)
        assert again[0, -int(valid[0]) :].tolist() == wanted
    _, state = kvjax.prefill(model, params, ids, plan)
    assert [helpers.live_positions(kv)[0] for kv in state.layers] == case["kept"]
    _, state, stats = kvjax.forward(model, params, ids, kvjax.init_state(plan, [n]))
    for found, wanted in zip(read_again(model, params, ids, state, stats).layers, case["scores"], strict=True):
        np.testing.assert_allclose(found[policy.score.of][0, :, 4:], wanted, rtol=6e-3)  # to three digits


def held(state, row=0):
    """What every head of every layer holds of a row."""
    return [helpers.live_positions(kv)[row] for kv in state.layers]


def test_a_padded_row_gets_what_it_gets_alone(shallow):
    """Rows have chunks of their own, and widths are rounded up; what is kept is read by what follows."""
    model, params = shallow
    run = functools.partial(kvjax.generate, model, params, policy=kvzip(8, plus=True), max_new_tokens=3)
    both = run(tokens(T), lengths=LENGTHS)
    for row, n in enumerate(LENGTHS):
        alone = run(tokens(T)[row : row + 1, T - n :])
        np.testing.assert_array_equal(both.tokens[row], alone.tokens[0])
        assert held(both.state, row) == held(alone.state)
        assert sum(map(len, held(both.state, row)[0])) == 2 * (8 + 2)


def test_layers_and_rules_that_read_again_stand_beside_others(tiny):
    """In a chain all see the same reading; by layer, each has the instructions of its own policy."""
    other = kvzip(8, repeat=(9,), chunk=30)
    mixed = kvjax.partition(
        {"chain": kvjax.chain(kvzip(12), methods.tova(8)), "other": other, "all": methods.full()},
        ["chain", "other", "all"],
    )
    state, first, second = (prompted(tiny, policy) for policy in (mixed, kvzip(12), other))
    assert state.plan.replays == (first.plan.replays[0], second.plan.replays[0])
    for row, n in enumerate(LENGTHS):
        chained, whole = held(state, row)[0], held(first, row)[0]
        assert all(len(x) <= 8 and set(x) <= set(y) for x, y in zip(chained, whole, strict=True))
        assert held(state, row)[1] == held(second, row)[1]
        assert held(state, row)[2] == [list(range(n))] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"storage": "dense"},
        {"heads": kvjax.UniformHeads(), "positions": "rerotate"},
        {"heads": kvjax.UniformHeads(), "positions": "compact"},
    ],
    ids=["dense", "rerotate", "compact"],
)
def test_stored_otherwise_it_keeps_the_same(shallow, change):
    plain = {name: x for name, x in change.items() if name == "heads"}
    found, wanted = (prompted(shallow, dataclasses.replace(kvzip(8), **x)) for x in (change, plain))
    for row in range(2):
        assert held(found, row) == held(wanted, row)


def test_sets_of_query_heads_are_those_of_copied_kv_heads(shallow):
    """The largest over a group is what its heads say apart."""
    state = prompted(shallow, dataclasses.replace(kvzip(8), granularity="query_head", heads=kvjax.UniformHeads()))
    assert state.layers[0].head_pos.shape[1] == 4
    apart, together = held(state)[0], prompted(shallow, dataclasses.replace(kvzip(24), heads=kvjax.UniformHeads()))
    assert all(len(x) == 8 for x in apart)
    assert held(together)[0] == [list(range(T))] * 2
    mixed = {"again": dataclasses.replace(kvzip(8), heads=kvjax.UniformHeads()), "all": methods.full()}
    by_head = prompted(shallow, kvjax.partition_heads(mixed, [["again", "all"]]))
    alone = prompted(shallow, mixed["again"])
    assert held(by_head)[0] == [held(alone)[0][0], list(range(T))]


def test_all_chunks_are_read_by_one_program(shallow):
    """A longer prompt has no more products of matrices."""
    model, _ = shallow

    def products(width):
        plan = kvjax.make_plan(model.config, kvzip(8), prompt_len=width, max_new_tokens=1)
        prompt = jax.ShapeDtypeStruct((1, width), jnp.int32)
        read = jax.make_jaxpr(lambda p, t: kvjax.prefill(model, p, t, plan)[1])
        return str(read(model.shapes, prompt)).count("dot_general[")

    assert products(90) == products(27)


def test_policies_that_read_again_say_where_they_cannot(shallow):
    model, params = shallow
    ids = tokens(T)
    plan = functools.partial(kvjax.make_plan, model.config, prompt_len=T, max_new_tokens=1)
    with pytest.raises(ValueError, match="looks at the whole prompt at once, but block=5 reads 24 tokens in parts"):
        kvjax.generate(model, params, ids, policy=kvzip(8), max_new_tokens=1, block=5)
    with pytest.raises(ValueError, match=r"one layer has no model to read it; give the model to kvjax\.prefill"):
        kvjax.evict_layer(kvzip(8), *helpers.qkv())
    with pytest.raises(ValueError, match=r"forward\(evict=True\) reads them once; use kvjax.prefill"):
        kvjax.forward(model, params, ids, kvjax.init_state(plan(kvzip(8)), LENGTHS), evict=True)
    with pytest.raises(ValueError, match=r"sums attention statistics over them, but ReplayedAttention.* is none"):
        plan(kvjax.shared_layers(kvzip(8)))
    with pytest.raises(ValueError, match=r"ranks prompt tokens only, but .* evicts while decoding"):
        kvjax.when(kvjax.every_step(), kvzip(8))
    with pytest.raises(ValueError, match=r"the token id 61, but the model's vocabulary 61 \(0 to 60\)"):
        plan(kvzip(8, suffix=(61,)))
    with pytest.raises(ValueError, match=r"24 tokens and 13 that repeat a chunk of it are 37 .* learned 32 positions"):
        kvjax.make_plan(GPT2, kvzip(8), prompt_len=T, max_new_tokens=1)
    with pytest.raises(ValueError, match="'z' decides by rows that read the prompt again, which is no choice"):
        kvjax.analysis.grid.make_grid(model.config, {"z": kvzip}, [8], prompt_len=T, max_new_tokens=1, lengths=None)
    with pytest.raises(ValueError, match="a reading has none; use prefill"):
        kvjax.analysis.reading.read(model, params, ids, ids, measure=[[("kv_head", kvzip(8).score.of)]])


class Template:
    """As much of a tokenizer as makes instructions."""

    chat_template, bos_token_id = "{message}", None

    def __init__(self, written):
        self.written = written

    def __call__(self, text, add_special_tokens=False):
        return type("Encoded", (), {"input_ids": list(text.encode())})

    def decode(self, ids):
        return bytes(ids).decode()

    def apply_chat_template(self, messages, **options):
        return self.written.replace("{message}", messages[0]["content"])


def test_a_chat_template_stands_around_what_is_repeated():
    replay = methods.kvzip(8, tokenizer=Template("<u>{message}</u>")).score.of.replay
    assert (replay.skip, replay.suffix) == (3, tuple(b"</u>"))
    assert bytes(replay.repeat).decode() == "\n\nRepeat the previous context exactly."
    assert methods.kvzip(8, tokenizer=Template("<u>{message}"), prefix=0, suffix=(7,)).score.of.replay.skip == 0
    with pytest.raises(ValueError, match="writes a message 2 times, but a context has one place; give repeat="):
        methods.kvzip(8, tokenizer=Template("{message} {message}"))
