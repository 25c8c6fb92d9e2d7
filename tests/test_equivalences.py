"""Limits in which one method becomes another (E38, and more), after a prompt and while decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import STEP, HeadShares, LayerShares, Schedule
from kvjax.contract import Layout
from kvjax.methods import kvpress, variants
from kvjax.methods.counts import FloorThenGlobal
from kvjax.observe import Rows
from kvjax.scores.attention import Accumulated, Faded, Votes
from kvjax.scores.blends import LayerMean, Pooled
from kvjax.scores.softmax import EntropyScaled
from tests import tensors

pytestmark = pytest.mark.usefixtures("as_users_run_it")

BUDGET, WINDOW = 10, 4
PROMPT, STEPS, LENGTHS = 24, 6, np.array([24, 17], np.int32)
q, k, v = tensors.qkv(11, T=PROMPT + STEPS)
cut = lambda x: x[:, :, :PROMPT]
replace = dataclasses.replace
after_prompt = functools.partial(kvjax.when, Schedule())
snapkv = methods.snapkv(BUDGET, window=WINDOW, kernel=3)
plain_snapkv = methods.snapkv(BUDGET, window=WINDOW, kernel=1)
ada_snapkv = functools.partial(methods.ada_snapkv, BUDGET, window=WINDOW, kernel=3)
nacl = functools.partial(methods.nacl, BUDGET, recent=0, random=0)
sized = {"window": WINDOW, "kernel": 3}
h2o, window = methods.h2o(BUDGET), methods.window(BUDGET)
tova, tova_by_head = methods.tova(BUDGET), variants.tova_by_head(BUDGET)
sinks = replace(window, sinks=2)
streaming = lambda n: replace(methods.streaming_llm(BUDGET, sinks=n), layout=Layout())
ahakv = variants.ahakv_without("gain", BUDGET, recent=WINDOW)


def votes(**how):
    """The last rows' attention, summed."""
    return kvjax.Evict(Accumulated(Rows(WINDOW, **how)), BUDGET, recent=WINDOW)


PAIRS = {
    # NaCl: proxies are all rows, or the last one alone.
    "nacl of all rows is h2o": (nacl(proxies=1.0), after_prompt(methods.h2o(BUDGET, recent=0))),
    "nacl of the last row is tova by head": (
        variants.nacl_decoding(BUDGET, every=1, recent=0, random=0, proxies=1),
        tova_by_head,
    ),
    "nacl of random tokens is random": (
        variants.nacl_drawn(BUDGET, by="uniform", recent=1, proxies=1, random=BUDGET),
        after_prompt(methods.random(BUDGET)),
    ),
    # Sums without what makes them other.
    "keyformer without noise is h2o": (
        variants.keyformer_drawn(BUDGET, noise="none", tau=(1.0, 1.0), recent=5),
        h2o,
    ),
    "sums that do not decay are h2o": (kvjax.Evict(Faded(decay=1.0), BUDGET, recent=5, when=STEP), h2o),
    "all rows of history are aqas": (
        methods.scissorhands(BUDGET, history=PROMPT + STEPS, recent=5, drop=0),
        methods.aqas(BUDGET),
    ),
    "roco of protected positions is mas": (
        replace(methods.roco(BUDGET, scope=3), recent=3),
        replace(methods.mas(BUDGET), recent=3),
    ),
    # SnapKV: the mean of the window's rows.
    "snapkv without pooling is the window's sum": (plain_snapkv, votes()),
    "and a score of prompt rows": (plain_snapkv, kvjax.Evict(Votes(WINDOW), BUDGET, recent=WINDOW)),
    "ahakv without scale and prior is snapkv": (
        after_prompt(replace(ahakv, score=Faded(ahakv.score.of))),
        plain_snapkv,
    ),
    "rows below k have the usual scale": (votes(softmax=EntropyScaled(1000)), plain_snapkv),
    "snapkv of one row is tova": (
        methods.snapkv(BUDGET, window=1, kernel=1),
        after_prompt(replace(tova_by_head, recent=1)),
    ),
    "criticalkv without a second stage": (methods.criticalkv(snapkv, first=1.0), snapkv),
    "chunks of one token": (
        methods.chunkkv(plain_snapkv, size=1),
        replace(plain_snapkv, score=LayerMean(plain_snapkv.score)),
    ),
    "pooling by one": (replace(plain_snapkv, score=Pooled(Votes(WINDOW), "avg", 1)), plain_snapkv),
    # Divisions into equal parts.
    "pyramid of beta 1": (methods.pyramidkv(BUDGET, beta=1.0, **sized), snapkv),
    "factory pyramid of beta 1": (variants.pyramidkv_factory(BUDGET, beta=1.0, **sized), snapkv),
    "kvpress pyramid of beta 1": (
        kvpress.pyramidkv_kvpress(BUDGET, beta=1.0, **sized),
        methods.snapkv(BUDGET, pooling="avg", **sized),
    ),
    "ada of alpha 0": (ada_snapkv(alpha=0.0), snapkv),
    "ada of alpha 0 in a dense cache": (replace(ada_snapkv(alpha=0.0), layout=Layout()), snapkv),
    "a released floor that is everything": (variants.ada_released(BUDGET, floor=1.0, **sized), snapkv),
    "kvpress's floor that is everything": (replace(snapkv, heads=FloorThenGlobal(1.0)), snapkv),
    "ada that skips all layers": (variants.skipping(ada_snapkv(), 3), snapkv),
    "ada_pyramid of both": (methods.ada_pyramid(BUDGET, alpha=0.0, beta=1.0, **sized), snapkv),
    "adaptive h2o of alpha 0": (replace(h2o, heads=kvjax.Adaptive(0.0), layout=Layout(pool=True)), h2o),
    "equal tables": (replace(h2o, heads=HeadShares(((2.0, 2.0),) * 3), layers=LayerShares((5.0,) * 3)), h2o),
    # Recency.
    "h2o of recent tokens is window": (methods.h2o(BUDGET, recent=BUDGET), window),
    "streaming without sinks is window": (streaming(0), window),
    "streaming is window with sinks": (streaming(2), sinks),
    "dilation 0 is window": (methods.dilated_window(BUDGET, dilation=0), window),
    "anchored dilation 0 is window": (variants.dilated_window_anchored(BUDGET, dilation=0), window),
    "lagkv of a short text": (methods.lagkv(BUDGET, lag=64, sinks=2), after_prompt(sinks)),
    # Full.
    "fastgen that recovers everything": (methods.fastgen((0,), (1,), recovery=1.0), methods.full()),
    "a budget for everything": (methods.roco(PROMPT + STEPS + 20), methods.full()),
    # Compositions.
    "chained with itself": (kvjax.chain(snapkv, snapkv), snapkv),
    "one policy for all layers": (kvjax.partition({0: h2o}, (0, 0, 0)), h2o),
    "layers that share positions": (kvjax.shared_layers(window), window),
    "as soon as over by one": (kvjax.when(Schedule(over=1), h2o), h2o),
}
QUICK = ("ada of alpha 0", "keyformer without noise is h2o")


@functools.cache
def kept(policy):
    how = {"out_proj": jnp.ones((4, 8, 8)), "tokens": tensors.token_ids(2, PROMPT)}
    kv = kvjax.evict_layer(policy, cut(q), cut(k), cut(v), lengths=LENGTHS, layer=1, num_layers=3, **how)
    return tensors.live_positions(kv)


@pytest.mark.parametrize("name", PAIRS)
def test_e38_the_same_tokens_of_a_prompt(name):
    one, other = PAIRS[name]
    assert kept(one) == kept(other)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.exhaustive) for n in PAIRS])
def test_e38_the_same_tokens_while_decoding(name):
    one, other = (p.at(0, 3) for p in PAIRS[name])
    layer, count = {"q": q, "k": k, "v": v, "out_proj": jnp.ones((4, 8, 8))}, 3 if "tables" in name else 1
    run = lambda policy: tensors.replay(policy, [layer] * count, PROMPT)
    assert run(one).live == run(other).live


def test_e38_has_all_of_its_limits(examples):
    """Those of the file under the names that they have here."""
    names = {
        "nacl_all_rows_is_h2o": "nacl of all rows is h2o",
        "nacl_last_row_is_tova": "nacl of the last row is tova by head",
        "snapkv_kernel1_is_window_sum": "snapkv without pooling is the window's sum",
        "ahakv_reduces_to_snapkv_order": "ahakv without scale and prior is snapkv",
        "pyramid_beta1_is_uniform": "pyramid of beta 1",
        "keyformer_no_noise_tau1_is_h2o": "keyformer without noise is h2o",
    }
    assert examples["E38"]["expected"] == dict.fromkeys(names, True)
    assert set(names.values()) <= set(PAIRS)


def test_the_pairs_are_of_different_policies():
    assert [name for name, (one, other) in PAIRS.items() if one == other] == []
    each = (h2o, methods.key_attention(BUDGET), window, snapkv, plain_snapkv, tova)
    assert len({str(kept(policy)) for policy in each}) == 6


def test_a_prior_of_equal_norms_says_nothing():
    alike = v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    policy = methods.ahakv(BUDGET, recent=WINDOW, kernel=1)
    of = lambda policy: kvjax.evict_layer(policy, cut(q), cut(k), cut(alike)).live
    np.testing.assert_array_equal(of(policy), of(variants.ahakv_without("prior", BUDGET, recent=WINDOW)))


@pytest.mark.parametrize("policy", [h2o, methods.roco(BUDGET), snapkv, tova], ids=["h2o", "roco", "snapkv", "tova"])
def test_sets_of_query_heads_are_sets_of_copied_kv_heads(policy):
    copied = lambda x: jnp.repeat(cut(x), 2, axis=1)
    apart = kvjax.evict_layer(variants.by_query_head(policy), cut(q), cut(k), cut(v))
    np.testing.assert_array_equal(apart.live, kvjax.evict_layer(policy, cut(q), copied(k), copied(v)).live)


@pytest.mark.parametrize("policy", [methods.h2o(PROMPT + STEPS), methods.keyformer(PROMPT + STEPS)])
def test_every_row_gives_one_in_all(policy):
    """Sums total the number of rows, of the prompt and while decoding, as long as nothing is evicted."""
    seen = tensors.replay(policy, [{"q": q[:1], "k": k[:1], "v": v[:1]}], PROMPT)
    (total,) = (x for x in jax.tree.leaves(seen.kv.memory) if x.shape == seen.kv.pos.shape)
    np.testing.assert_allclose(total.sum(-1), PROMPT + STEPS, rtol=1e-5)
