"""The one table of methods. Every law is tested for every row."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.scoring.predicted import HiddenHeads

import kvjax
from kvjax import methods


@dataclasses.dataclass(frozen=True)
class Case:
    """A method as the laws see it.

    Attributes:
      name: for test ids.
      make: the policy at a budget of tokens or a share of the prompt.
      recent: last tokens that it must keep, for a budget of tokens.
      sinks: first tokens that it must keep.
      random: its draws depend on the kv head, so permuting heads does not commute.
      by_layer: it treats layers differently, so that one layer does not show what it does.
      by_head: it knows kv heads by their index, so permuting heads does not commute either.
      exact: every head keeps exactly its budget (adaptive heads keep it on average, full caches everything).
      total: all heads together keep exactly their budgets.
      decodes: evicts while decoding.
      slack: how many more than its budget a head may hold.
      dips: how far below its budget an eviction goes.
      fills: uses the budget that it has; otherwise the budget is a cap, and heads may hold less.
      together: such a cap is one of all heads together.
      lossless: a budget that holds everything leaves attention as it is.
      replays: it decides by rows that read the prompt again, or by hidden states, so that one layer's tensors do not
        show what it does.
    """

    name: str
    make: Callable[..., kvjax.Policy]
    recent: Callable[[int], int] = lambda budget: 0
    sinks: int = 0
    random: bool = False
    by_layer: bool = False
    by_head: bool = False
    exact: bool = True
    total: bool = True
    decodes: bool = True
    slack: int = 0
    dips: int = 0
    fills: bool = True
    together: bool = False
    lossless: bool = True
    replays: bool = False

    def __repr__(self):
        return self.name


def _every4_h2o(budget):
    return kvjax.when(kvjax.every(4), methods.h2o(budget))


def _over3_tova(budget):
    return kvjax.when(kvjax.when_over(3), methods.tova(budget))


def _adaptive_h2o(budget):
    return dataclasses.replace(methods.h2o(budget, recent=4), heads=kvjax.Adaptive())


def _pyramid_h2o(budget):
    return dataclasses.replace(methods.h2o(budget, recent=4), layers=kvjax.Pyramid(beta=4))


def _snapkv_then_h2o(budget):
    return kvjax.chain(methods.snapkv(budget, window_size=4), methods.h2o(budget, recent=4))


def _snapkv_then_think(budget):
    return kvjax.chain(_snapkv(budget), methods.think())


def _first_channel(kv, stats, ctx):
    """Not the norm, which equal tokens of a text share on paper whatever rotation does to their keys."""
    del stats, ctx
    return -jnp.abs(kv.k[..., 0])


def _from_fn(budget):
    return kvjax.from_fn(_first_channel, budget=budget, when=kvjax.every_step())


def _count_above(budget):
    score = kvjax.scoring.scores.Accumulated(kvjax.Observe(element="above"))
    return kvjax.Evict(score, budget, protect=kvjax.Protect(recent=2), when=kvjax.every_step())


def _scissorhands(budget):
    return methods.scissorhands(budget, history=7, recent=2, drop=3)


def _roco(budget):
    return methods.roco(budget, protect_last=2)


def _nacl(budget):
    return methods.nacl(budget, protect=2, proxies=5, random=3, sinks=1)


def _nacl_global(budget):
    return methods.nacl(budget, protect=2, proxies=5, random=3, sinks=1, head_mode="global")


def _nacl_decoding(budget):
    return methods.nacl(
        budget, protect=2, proxies=5, random=0, random_distribution="uniform", decode_every=3, decode_rows="interval"
    )


def _ahakv(budget):
    return methods.ahakv(budget, recent=3, pool_kernel=3)


def _keyformer(budget):
    return methods.keyformer(budget, recent=3)


def _keyformer_per_key(budget):
    return methods.keyformer(budget, recent=3, per="key", noise="gaussian", positions="rerotate")


def _criticalkv(budget):
    return methods.criticalkv(budget, base=_snapkv(budget))


def _chunkkv(budget):
    return methods.chunkkv(budget, base=_snapkv(budget), chunk_size=4)


def _h2o_rerotated(budget):
    return dataclasses.replace(methods.h2o(budget), positions="rerotate")


def _ada_pyramid(budget):
    return methods.ada_pyramid(budget, beta=4, window_size=4, kernel_size=3)


def _snapkv_rows_pooled(budget):
    return _snapkv(budget, pool_before_rows=True, softmax_over="outside_window")


def _tova_per_head(budget):
    return methods.tova(budget, head_mode="per_kv_head", sinks=1, protect_last=1)


def _pyramidkv(budget):
    return methods.pyramidkv(budget, beta=4, window_size=4, kernel_size=3)


def _ada_snapkv(budget):
    return methods.ada_snapkv(budget, window_size=4, kernel_size=3)


def _ada_snapkv_dense(budget):
    return dataclasses.replace(_ada_snapkv(budget), storage="dense", heads=kvjax.Adaptive(max_ratio=4.0))


def _h2o_pooled(budget):
    policy = methods.h2o(budget, recent=4)
    return dataclasses.replace(policy, heads=kvjax.Adaptive(), storage="pool", positions="compact")


def _ada(budget, **kwargs):
    return methods.ada_snapkv(budget, window_size=4, kernel_size=3, **kwargs)


def _pyramid_factory(budget):
    return methods.pyramidkv(budget, beta=4, window_size=2, kernel_size=3, preset="pyramid_factory")


def _pyramid_kvpress(budget):
    return methods.pyramidkv(budget, beta=2, window_size=3, kernel_size=3, preset="pyramid_kvpress")


def _layer_table(budget):
    return dataclasses.replace(methods.h2o(budget, recent=4), layers=kvjax.LayerTable((3.0, 1.0, 2.0)))


def _head_table(budget):
    return dataclasses.replace(
        methods.h2o(budget, recent=4), heads=kvjax.HeadTable(((1.0, 2.0), (3.0, 1.0), (1.0, 1.0)))
    )


def _quest(budget):
    return methods.quest(budget, page_size=2, dense_layers=1)


def _duo_attention(budget):
    count = budget if isinstance(budget, int) else 10  # streaming heads hold a number of tokens, never a share
    return methods.duo_attention([[0.9, 0.2], [0.1, 0.8], [0.3, 0.6]], sinks=2, recent=max(count - 2, 1))


def _fastgen(budget, **kwargs):
    ratios = {"frequent_ratio": 0.2, "local_ratio": 0.2, **kwargs}  # leaves room for full heads to differ from the rest
    return methods.fastgen(special_ids=range(3), punctuation_ids=range(3, 9), budget=budget, **ratios)


def _fastgen_elementwise(budget):
    return _fastgen(budget, recovery_ratio=0.62, recovery="elementwise")


def _fastgen_lossless(budget):
    ratios = dict.fromkeys(("frequent_ratio", "local_ratio"), 0.0)
    return methods.fastgen(special_ids=(), punctuation_ids=(), recovery_ratio=1.0, budget=budget, **ratios)


def _snapkv(budget, **kwargs):
    return methods.snapkv(budget, window_size=4, kernel_size=3, **kwargs)


FILTERS = np.random.default_rng(0).standard_normal((3, 2, 8)).astype(np.float32)
HIDDEN = HiddenHeads(
    {
        "out": np.random.default_rng(1).standard_normal((3, 32, 2)).astype(np.float32),
        "out_bias": np.zeros((3, 2), np.float32),
    }
)


def _compactor(budget):
    return methods.compactor(budget, chunk_size=5, sketch=4, sinks=1, recent=2)


def _r_kv(budget):
    return methods.r_kv(budget, window_size=2, kernel_size=3, buffer=3, importance=0.5)


def _lava(budget):
    return methods.lava(budget, window_size=4, kernel_size=3, alpha=0.4)


def _headkv(budget):
    return methods.headkv(budget, [[3, 1], [0, 0], [1, 1]], beta=1.5, window_size=4, kernel_size=3)


def _finch_chunks(budget):
    return methods.finch(budget, window_size=4, chunk_length=6)


def _simlayerkv(budget):
    return methods.simlayerkv(0.4, sinks=2, recent=4, rows=2, budget=budget)


def _kvzap(budget, **kwargs):
    return methods.kvzap(budget, HIDDEN, recent=3, **kwargs)


def _kvzip(budget, **kwargs):
    return methods.kvzip(budget, repeat=(1, 2), repeat_next=(3,), suffix=(4,), chunk=9, overlap=2, sinks=2, **kwargs)


CASES = (
    Case("full", lambda b: methods.full(), exact=False, decodes=False),
    Case("window", methods.window, recent=lambda b: b),
    Case("streaming_llm", lambda b: methods.streaming_llm(b, sinks=2), recent=lambda b: b - 2, sinks=2),
    Case("random", methods.random, recent=lambda b: 1, random=True),
    Case("h2o", methods.h2o, recent=lambda b: b // 2),
    Case("tova", methods.tova),
    Case("tova_per_head", _tova_per_head, recent=lambda b: 1, sinks=1),
    Case("snapkv", _snapkv, recent=lambda b: 4, decodes=False),
    Case("snapkv_avg", lambda b: _snapkv(b, pooling="avg", group="max"), recent=lambda b: 4, decodes=False),
    Case("pyramidkv", _pyramidkv, by_layer=True, recent=lambda b: 4, decodes=False),
    Case("ada_snapkv", _ada_snapkv, recent=lambda b: 4, exact=False, decodes=False),
    Case("ada_snapkv_dense", _ada_snapkv_dense, recent=lambda b: 4, exact=False, decodes=False),
    Case("h2o_pooled", _h2o_pooled, recent=lambda b: 4, exact=False),
    Case("ada_normalized", lambda b: _ada(b, normalize=True), recent=lambda b: 4, exact=False, decodes=False),
    Case(
        "ada_floor_then_global",
        lambda b: _ada(b, alpha=0.7, safeguard="floor_then_global"),
        recent=lambda b: 4,
        exact=False,
        decodes=False,
    ),
    Case(
        "ada_skip_layers",
        lambda b: _ada(b, skip_layers=1),
        by_layer=True,
        recent=lambda b: 4,
        exact=False,
        decodes=False,
    ),
    Case("pyramid_factory", _pyramid_factory, by_layer=True, recent=lambda b: 2, decodes=False),
    Case("pyramid_kvpress", _pyramid_kvpress, by_layer=True, recent=lambda b: 3, decodes=False),
    Case("layer_table", _layer_table, by_layer=True, recent=lambda b: 4),
    Case("head_table", _head_table, by_layer=True, recent=lambda b: 4, by_head=True, exact=False),
    Case("h2o_every_4", _every4_h2o, recent=lambda b: b // 2, slack=3),
    Case("tova_when_over_3", _over3_tova, slack=2),
    Case("h2o_adaptive", _adaptive_h2o, recent=lambda b: 4, exact=False),
    Case("h2o_pyramid", _pyramid_h2o, by_layer=True, recent=lambda b: 4),
    Case("snapkv_then_h2o", _snapkv_then_h2o, recent=lambda b: 4),
    Case("from_fn", _from_fn),
    Case("h2o_rerotated", _h2o_rerotated, recent=lambda b: b // 2),
    Case("random_run", lambda b: methods.random(b, random_mode="run"), recent=lambda b: 1, random=True),
    Case("dilated_mask", methods.dilated_window, recent=lambda b: b, lossless=False),
    Case("dilated_anchored", lambda b: methods.dilated_window(b, mode="anchored"), recent=lambda b: 1),
    Case("key_attention", methods.key_attention),
    Case("mas", lambda b: methods.mas(b, recent=2, sinks=1), recent=lambda b: 2, sinks=1),
    Case("mas_without_self", lambda b: methods.mas(b, count_self=False), recent=lambda b: 1),
    Case("aqas", methods.aqas, recent=lambda b: b // 2),
    Case("scissorhands", _scissorhands, recent=lambda b: 2, slack=1, dips=2),
    Case("roco", _roco, recent=lambda b: 2),
    Case("nacl", _nacl, recent=lambda b: 2, sinks=1, random=True, decodes=False),
    Case("nacl_global", _nacl_global, by_layer=True, recent=lambda b: 2, sinks=1, random=True, decodes=False),
    Case("nacl_decoding", _nacl_decoding, recent=lambda b: 2, slack=2),
    Case("ahakv", _ahakv, recent=lambda b: 3),
    Case("keyformer", _keyformer, recent=lambda b: 3, random=True),
    Case("keyformer_per_key", _keyformer_per_key, recent=lambda b: 3, random=True),
    Case("ada_pyramid", _ada_pyramid, by_layer=True, recent=lambda b: 4, exact=False, decodes=False),
    Case("snapkv_rows_pooled", _snapkv_rows_pooled, recent=lambda b: 4, decodes=False),
    Case("knorm", methods.knorm, decodes=False),
    Case("keydiff", lambda b: methods.keydiff(b, when=kvjax.every_step())),
    Case("lagkv", lambda b: methods.lagkv(b, lag=5, sinks=2), sinks=2, decodes=False),
    Case("expected_attention", lambda b: methods.expected_attention(b, horizon=8), sinks=4, decodes=False),
    Case("criticalkv", _criticalkv, recent=lambda b: 4, decodes=False),
    Case("chunkkv", _chunkkv, recent=lambda b: 0, exact=False, total=False, decodes=False, slack=4),
    Case("capkv", lambda b: methods.capkv(b, horizon=8, sinks=2), sinks=2, decodes=False),
    Case("curdkv", lambda b: methods.curdkv(b, partition=5, sinks=1), sinks=1, decodes=False),
    Case("q_filters", lambda b: methods.q_filters(b, FILTERS), by_layer=True, by_head=True, decodes=False),
    Case("r_kv", _r_kv, recent=lambda b: 2, slack=2),
    Case("compactor", _compactor, recent=lambda b: 2, sinks=1, random=True, decodes=False),
    Case(
        "defensivekv",
        lambda b: methods.defensivekv(b, window_size=4, kernel_size=3),
        recent=lambda b: 4,
        exact=False,
        decodes=False,
    ),
    Case(
        "layer_defensivekv",
        lambda b: methods.layer_defensivekv(b, window_size=4, kernel_size=3),
        by_layer=True,
        recent=lambda b: 4,
        exact=False,
        decodes=False,
    ),
    Case(
        "cake",
        lambda b: methods.cake(b, window_size=4, kernel_size=3),
        by_layer=True,
        recent=lambda b: 4,
        decodes=False,
    ),
    Case("lava", _lava, by_layer=True, recent=lambda b: 4, exact=False, decodes=False),
    Case("headkv", _headkv, by_layer=True, by_head=True, recent=lambda b: 4, exact=False, decodes=False),
    Case("finch", lambda b: methods.finch(b, window_size=4), recent=lambda b: 4, decodes=False),
    Case("finch_chunks", _finch_chunks, recent=lambda b: 4, exact=False, fills=False, decodes=False),
    Case(
        "simlayerkv", _simlayerkv, recent=lambda b: 4, sinks=2, exact=False, fills=False, decodes=False, lossless=False
    ),
    Case("think", lambda b: methods.think(0.5, query_rows=4), exact=False, decodes=False, lossless=False),
    Case("snapkv_then_think", _snapkv_then_think, recent=lambda b: 4, decodes=False, lossless=False),
    Case("count_above", _count_above, recent=lambda b: 2),
    Case("fastgen", lambda b: _fastgen(b, recovery_ratio=0.65), exact=False, fills=False),
    Case("fastgen_elementwise", _fastgen_elementwise, exact=False, fills=False),
    Case(
        "fastgen_pooled",
        lambda b: _fastgen(b, recovery_ratio=0.65, storage="pool"),
        exact=False,
        fills=False,
        together=True,
    ),
    Case("fastgen_lossless", _fastgen_lossless),
    Case("kvzip", _kvzip, sinks=2, exact=False, decodes=False, replays=True),
    Case("kvzip_plus", lambda b: _kvzip(b, plus=True), sinks=2, exact=False, decodes=False, replays=True),
    Case("kvzap", _kvzap, recent=lambda b: 3, by_layer=True, by_head=True, replays=True),
    Case(
        "kvzap_threshold",
        lambda b: _kvzap(b, threshold=0.0),
        recent=lambda b: 3,
        by_layer=True,
        by_head=True,
        exact=False,
        fills=False,
        lossless=False,
        replays=True,
    ),
    Case("quest", _quest, by_layer=True, exact=False, decodes=False),
    Case(
        "duo_attention",
        _duo_attention,
        recent=lambda b: min(b - 2, 8),
        sinks=2,
        by_layer=True,
        by_head=True,
        exact=False,
        together=True,
        fills=False,
    ),
)
OF_ONE_LAYER = [case for case in CASES if not case.replays]

# Every row costs seconds. With `-m slow` every row crosses every law; the default run has the rows of distinct
# mechanisms, fewer of them where a model is compiled for each, and so has CI of what is slow for any row.
CORE = {
    *("full", "window", "streaming_llm", "random", "h2o", "tova", "snapkv", "pyramidkv", "ada_snapkv", "h2o_every_4"),
    *("tova_when_over_3", "h2o_pooled", "snapkv_then_h2o", "scissorhands", "roco", "nacl_decoding", "ahakv"),
    *("keyformer", "fastgen", "chunkkv", "think", "h2o_rerotated", "criticalkv", "r_kv", "compactor"),
    *("layer_defensivekv", "finch_chunks", "kvzip", "quest"),
}
SAMPLE = {"streaming_llm", "h2o", "ada_snapkv", "h2o_pooled", "keyformer", "fastgen"}
FEW = {"h2o", "ada_snapkv", "quest"}
ONE = {"ada_snapkv"}


def _rows(quick, other=pytest.mark.slow):
    assert {case.name for case in CASES} >= quick
    rows = [pytest.param(c, marks=() if c.name in quick else other) for c in CASES]
    return pytest.mark.parametrize("case", rows, ids=repr)


every_method, all_methods = _rows(CORE), _rows(CORE, pytest.mark.exhaustive)
sampled_methods, few_methods, one_method = _rows(SAMPLE), _rows(FEW), _rows(ONE)
