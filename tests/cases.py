"""Every method, variant and composition: name -> function `(budget, sizes) -> policy`.

The budget is a number of tokens or a share of the prompt; sizes are those of a model.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import budgets, methods, observe
from kvjax.budgets import STEP, Schedule
from kvjax.compose import across
from kvjax.contract import Layout
from kvjax.decide.select import Pages
from kvjax.methods.released import counts, easykv, factory, kvpress, papers, parts
from kvjax.scores.attention import Accumulated, Faded
from kvjax.scores.learned import SinkGates
from kvjax.scores.softmax import SeesAll


@dataclasses.dataclass(frozen=True)
class Sizes:
    """L layers of N query and K kv heads of width H, D numbers a token; and arrays drawn for them, always the same."""

    L: int
    N: int
    K: int
    H: int
    D: int

    def normal(self, seed: int, *shape: int) -> np.ndarray:
        """Numbers around 0."""
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def shares(self, heads: int) -> np.ndarray:
        """Numbers in (0, 1) "L heads"."""
        return np.random.default_rng(7).random((self.L, heads)).round(3) * 0.9 + 0.05

    @functools.cached_property
    def covariance(self) -> np.ndarray:
        """Positive matrices "L N H H"."""
        x = self.normal(3, self.L, self.N, self.H, self.H)
        return np.einsum("lnij,lnkj->lnik", x, x) / np.float32(self.H)

    @functools.cached_property
    def hidden(self) -> Callable[..., Any]:
        """A score of hidden states."""
        out, bias = jnp.asarray(self.normal(4, self.L, self.D, self.K)), jnp.asarray(self.normal(5, self.L, self.K))
        return lambda x, layer: x @ out[layer] + bias[layer][None, None]

    @functools.cached_property
    def gates(self) -> SinkGates:
        """Gates with 2 sinks of 3 channels."""
        K, G, S, d = self.K, self.N // self.K, 2, 3
        shapes = {"q_proj.weight": (K * G * d, self.D), "q_proj.bias": (K * G * d,), "k_proj.weight": (K * d, self.D)}
        shapes |= {"q_norm.weight": (d,), "k_norm.weight": (d,), "k_base": (K, 1, S, d), "b": (K, 1, G)}
        return SinkGates({n: self.normal(10 + i, self.L, *x) for i, (n, x) in enumerate(shapes.items())})

    @property
    def curves(self) -> np.ndarray:
        """What heads lose, "99 L K"."""
        return np.linspace(0.01, 0.99, 99)[:, None, None] ** self.shares(self.K)

    def labels(self, first: str, then: str) -> list[str]:
        """Of layers in turn."""
        return [first, then] * (self.L // 2) + [first] * (self.L % 2)

    def head_labels(self, first: str, then: str) -> list[list[str]]:
        """Of kv heads, the first head of every layer under `first`."""
        return [[first] + [then] * (self.K - 1)] * self.L


def _plain(method, **options):
    """A method with these options."""
    return lambda b, s: method(b, **options)


def _triattention(b, s, **options):
    """A quarter of the budget beside the prompt, and centres that are drawn."""
    centres = s.normal(8, s.L, s.N, s.H), 3 + s.normal(9, s.L, s.N, s.H) ** 2
    return methods.triattention(budgets.Combined("sum", (1.0, budgets.Times(b, 0.25))), *centres, every=2, **options)


def _first_channel(kv, stats, ctx):
    return -jnp.abs(kv.k[..., 0])


def _attended(kv, stats, ctx):
    """What slots received, and a little more for being late."""
    return stats[observe.Rows()] + kv.pos.astype(jnp.float32) * jnp.float32(0.01)


METHODS = {
    "full": lambda b, s: methods.full(),
    "key_attention": _plain(methods.key_attention),
    "h2o": _plain(methods.h2o),
    "h2o_max": lambda b, s: papers.grouped(methods.h2o(b), "max"),
    "mas": lambda b, s: replace(methods.mas(b), recent=2),
    "mas_sinks": lambda b, s: replace(papers.with_score(methods.mas(b), count_self=False, first=3), sinks=1),
    "aqas": _plain(methods.aqas),
    "roco": _plain(methods.roco),
    "roco_scope": lambda b, s: replace(
        papers.with_score(methods.roco(b, scope=5), count_self=False), sinks=2, recent=1
    ),
    "tova": _plain(methods.tova),
    "tova_by_head": _plain(papers.tova_by_head),
    "keyformer": _plain(methods.keyformer),
    "keyformer_per_key": lambda b, s: papers.with_softmax(
        methods.keyformer(b, tau=(1.5, 2.0)), per="key", noise="gaussian"
    ),
    "keyformer_no_noise": lambda b, s: papers.with_softmax(methods.keyformer(b), noise="none"),
    "keyformer_constant": lambda b, s: papers.with_softmax(methods.keyformer(b), noise="constant"),
    "keyformer_rank": lambda b, s: replace(methods.keyformer(b, recent=3), layout=Layout(positions="rank")),
    "ahakv": _plain(methods.ahakv, recent=3),
    "scissorhands": _plain(methods.scissorhands, history=6, recent=3),
    "scissorhands_long": _plain(methods.scissorhands, recent=3),
    "r_kv": _plain(methods.r_kv, window=3, kernel=3, buffer=2),
    "lazy_eviction": _plain(methods.lazy_eviction, threshold=0.05, window=3),
    "vase": _plain(methods.vase, window=3, kernel=3, sinks=2),
    "triattention": _triattention,
    "triattention_per_head": functools.partial(_triattention, mode="per_head"),
    "triattention_union": functools.partial(_triattention, mode="union"),
    "window": _plain(methods.window),
    "window_sinks": lambda b, s: replace(methods.window(b), sinks=2),
    "streaming_llm": _plain(methods.streaming_llm, sinks=2),
    "streaming_llm_original": lambda b, s: replace(methods.streaming_llm(b, sinks=2), layout=Layout()),
    "random": _plain(methods.random),
    "random_attention": lambda b, s: methods.random_attention(
        budgets.Combined("sum", (1.0, budgets.Times(b, 0.25))), every=2
    ),
    "dilated_window": _plain(methods.dilated_window),
    "dilated_window_anchored": _plain(papers.dilated_window_anchored, dilation=2),
    "knorm": _plain(methods.knorm),
    "keydiff": _plain(methods.keydiff),
    "lagkv": _plain(methods.lagkv, lag=4, sinks=2),
    "curdkv": _plain(methods.curdkv, partition=4, sinks=2),
    "expected_attention": _plain(methods.expected_attention, horizon=8, sinks=2, eps=0.02),
    "capkv": _plain(methods.capkv, horizon=8, sinks=2),
    "compactor": _plain(methods.compactor, chunk=6, sketch=6, sinks=2, recent=2),
    "compactor_blend": _plain(methods.compactor, chunk=6, sketch=None, sinks=2, recent=2, blend=0.7),
    "q_filters": lambda b, s: methods.q_filters(b, s.normal(1, s.L, s.K, s.H)),
    "kvzap": lambda b, s: methods.kvzap(b, s.hidden, recent=3),
    "kvzap_threshold": lambda b, s: methods.kvzap(b, s.hidden, recent=3, threshold=0.5),
    "snapkv": _plain(methods.snapkv, window=4, kernel=3),
    "snapkv_average": _plain(methods.snapkv, window=4, kernel=5, pooling="avg"),
    "pyramidkv": _plain(methods.pyramidkv, beta=5, window=3, kernel=3),
    "ada_half": _plain(methods.ada_snapkv, window=3, kernel=3),
    "ada_snapkv": _plain(methods.ada_snapkv, window=4, kernel=3, alpha=0.7),
    "ada_snapkv_dense": lambda b, s: replace(methods.ada_snapkv(b, window=4, kernel=3, alpha=0.7), layout=Layout()),
    "ada_pyramid": _plain(methods.ada_pyramid, alpha=0.7, beta=4, window=3, kernel=3),
    "headkv": lambda b, s: methods.headkv(b, s.shares(s.K), window=3, kernel=3),
    "criticalkv": lambda b, s: methods.criticalkv(methods.snapkv(b, window=4, kernel=3)),
    "criticalkv_first": lambda b, s: methods.criticalkv(methods.snapkv(b, window=4, kernel=3), first=0.25, eps=0.1),
    "chunkkv": lambda b, s: methods.chunkkv(methods.snapkv(b, window=4, kernel=3), size=3),
    "entropy_chunkkv": lambda b, s: methods.entropy_chunkkv(methods.snapkv(b, window=4, kernel=3), size=4, rescue=2),
    "simlayerkv": lambda b, s: replace(methods.simlayerkv(0.45, sinks=2, recent=4), budget=b),
    "simlayerkv_lazy": lambda b, s: replace(methods.simlayerkv(0.1, sinks=2, recent=4), budget=b),
    "cake": _plain(methods.cake, window=3, kernel=3),
    "kvcompose": _plain(methods.kvcompose, window=3),
    "lava": _plain(methods.lava, window=3, kernel=3),
    "defensivekv": _plain(methods.defensivekv, window=3, kernel=3),
    "layer_defensivekv": _plain(methods.layer_defensivekv, window=3, kernel=3, mass=0.8),
    "dropkv": _plain(methods.dropkv, window=3, kernel=3),
    "dropkv_buffer": _plain(methods.dropkv, window=3, kernel=1, buffer=2),
    "nacl": _plain(methods.nacl),
    "nacl_given": _plain(methods.nacl, recent=2, proxies=3, random=2),
    "nacl_begin": lambda b, s: papers.nacl_both_ends(methods.nacl(b, recent=2, proxies=3, random=2), 4),
    "finch": _plain(methods.finch, window=4),
    "finch_chunks": _plain(methods.finch, window=4, chunk=6),
    "think": lambda b, s: methods.think(0.5, rows=4),
    "quest": _plain(methods.quest, size=4, dense=1),
    "duo_attention": lambda b, s: methods.duo_attention(s.shares(s.K), sinks=2, recent=5),
    "duo_attention_threshold": lambda b, s: methods.duo_attention(
        s.shares(s.K), streaming=(s.shares(s.K) < 0.6).mean(), sinks=2, recent=5
    ),
    "fastgen": lambda b, s: methods.fastgen(range(3), range(3, 90), recovery=0.65),
}

VARIANTS = {
    "h2o_next_step_mask": _plain(papers.h2o_next_step_mask),
    "h2o_factory": _plain(factory.h2o_factory, window=3),
    "scissorhands_by_position": lambda b, s: papers.with_score(
        methods.scissorhands(b, history=6, recent=3), threshold="1/position"
    ),
    "scissorhands_factory": _plain(factory.scissorhands_factory, sinks=2, recent=3),
    "random_run": lambda b, s: replace(methods.random(b), select=parts.RandomRun(), sinks=2),
    "random_shared": lambda b, s: replace(papers.with_score(methods.random(b), shared=True), sinks=1, recent=2),
    "window_of_generated": lambda b, s: easykv.easykv_decoding("recency", b),
    "streaming_llm_factory": _plain(factory.streaming_llm_factory),
    "knorm_factory": _plain(factory.knorm_factory),
    "tova_easykv": lambda b, s: replace(papers.tova_by_head(b), sinks=4, recent=3),
    "roco_easykv": lambda b, s: replace(papers.with_score(methods.roco(b), first=5), sinks=2, recent=2),
    "mas_of_later_rows": lambda b, s: papers.with_score(methods.mas(b), count_self=False),
    "nacl_from_all": lambda b, s: papers.nacl_drawn(methods.nacl(b, recent=2, proxies=3, random=3), among="all"),
    "nacl_uniform": lambda b, s: papers.nacl_drawn(methods.nacl(b, recent=2, proxies=3, random=3), by="uniform"),
    "nacl_normalised": lambda b, s: papers.nacl_drawn(
        methods.nacl(b, recent=2, proxies=3, random=3), by="normalised", temperature=0.5
    ),
    "nacl_interval": lambda b, s: replace(
        papers.summed_by(methods.nacl(b, recent=2, proxies=3, random=0), parts.Proxies, interval=3),
        when=Schedule(every=3),
    ),
    "nacl_non_causal": lambda b, s: papers.with_rows(methods.nacl(b, recent=1, proxies=5, random=0), softmax=SeesAll()),
    "nacl_headbug": lambda b, s: papers.summed_by(
        papers.with_rows(methods.nacl(b, recent=1, proxies=5, random=0), group=None), parts.ByIndex
    ),
    "nacl_grouped": lambda b, s: papers.grouped(methods.nacl(b, recent=1, proxies=5, random=2), "max"),
    "nacl_by_layer": lambda b, s: papers.nacl_by_layer(methods.nacl(b, recent=1, proxies=5, random=2)),
    "nacl_global": lambda b, s: kvjax.shared_layers(
        papers.nacl_by_layer(methods.nacl(b, recent=1, proxies=5, random=2))
    ),
    "nacl_llama3": lambda b, s: replace(papers.nacl_llama3(b, recent=2, proxies=5, min_len=30), sinks=2),
    "snapkv_text": _plain(papers.snapkv_text, window=3, kernel=3),
    "snapkv_rows_pooled": _plain(papers.snapkv_text, window=3, kernel=3, outside=False),
    "snapkv_outside_window": _plain(papers.snapkv_outside_window, window=3, kernel=3),
    "snapkv_grouped": lambda b, s: papers.grouped(methods.snapkv(b, window=3, kernel=3), "max"),
    "snapkv_valid_average": lambda b, s: papers.with_score(
        methods.snapkv(b, window=3, kernel=5, pooling="avg"), pad="valid"
    ),
    "snapkv_factory": _plain(factory.snapkv_factory, window=3),
    "pyramidkv_factory": _plain(factory.pyramidkv_factory, beta=4, window=2, kernel=3),
    "pyramidkv_adakv": lambda b, s: replace(
        methods.pyramidkv(b, window=2, kernel=3), layers=counts.FloorPyramid(4, uniform=False)
    ),
    "pyramidkv_kvpress": lambda b, s: kvpress.pyramidkv_kvpress(b, beta=3, window=2, kernel=3),
    "ada_text": _plain(papers.ada_text, window=3, kernel=3),
    "ada_released": _plain(papers.ada_released, window=3, kernel=3),
    "ada_released_normalized": _plain(papers.ada_released, floor=0.5, normalize=True, window=3, kernel=3),
    "ada_factory": _plain(factory.ada_factory, window=3, kernel=3),
    "ada_normalized": lambda b, s: replace(
        methods.ada_snapkv(b, window=3, kernel=3), heads=counts.Normalized(kvjax.Adaptive(1.0))
    ),
    "ada_floor_then_global": lambda b, s: kvpress.kvpress_adakv(methods.snapkv(b, window=3, kernel=3), alpha=0.7),
    "ada_global": lambda b, s: kvpress.kvpress_adakv(methods.snapkv(b, window=3, kernel=3), alpha=0.0),
    "ada_skip": lambda b, s: papers.skipping(methods.ada_snapkv(b, window=3, kernel=3), 1),
    "ada_pyramid_adakv": lambda b, s: replace(
        papers.ada_released(b, window=2, kernel=3), layers=counts.FloorPyramid(uniform=False)
    ),
    "ahakv_equation_5": lambda b, s: papers.with_rows(methods.ahakv(b, recent=3), last=4),
    "ahakv_scaled": lambda b, s: papers.with_softmax(methods.ahakv(b, recent=3), apply="scaled"),
    "ahakv_floor": lambda b, s: papers.with_softmax(methods.ahakv(b, recent=3), floor=1.0),
    "ahakv_selected": lambda b, s: papers.with_softmax(methods.ahakv(b, recent=3), k=budgets.Combined("less", (b, 3))),
    "ahakv_cache": lambda b, s: papers.with_softmax(methods.ahakv(b, recent=3), seen="cache"),
    "ahakv_without_gain": lambda b, s: papers.with_rows(methods.ahakv(b, recent=3), softmax=None),
    "ahakv_all_rows": lambda b, s: papers.with_rows(methods.ahakv(b, recent=3), last=None),
    "ahakv_pooled_score": lambda b, s: papers.with_score(methods.ahakv(b, recent=3, kernel=5), target="score"),
    "ahakv_pooled_both": lambda b, s: papers.with_score(methods.ahakv(b, recent=3), target="both"),
    "ahakv_prior_each_step": lambda b, s: papers.with_score(methods.ahakv(b, recent=3), each_step=True),
    "ahakv_without_prior": lambda b, s: papers.summed_by(methods.ahakv(b, recent=3), Faded),
    "keyformer_released": lambda b, s: papers.with_softmax(methods.keyformer(b), tau_delta=0.01),
    "keyformer_share_batch": lambda b, s: papers.summed_by(methods.keyformer(b), parts.OverBatch),
    "keyformer_damped": lambda b, s: papers.summed_by(methods.keyformer(b), Faded, damping=0.5),
    "keyformer_mask": _plain(papers.keyformer_mask),
    "r_kv_released": _plain(papers.r_kv_released, window=3, kernel=3),
    "lava_released": _plain(papers.lava_released, floor=0.6, max_ratio=3.0, window=3, kernel=3),
    "defensivekv_released": _plain(papers.defensivekv_released, window=3),
    "headkv_factory": lambda b, s: factory.headkv_factory(b, s.shares(s.N), window=3),
    "cam_factory": _plain(factory.snapkv_factory, window=3, kernel=1),
    "expected_attention_stats": lambda b, s: kvpress.expected_attention_stats(
        b, s.normal(2, s.L, s.N, s.H), s.covariance, horizon=8, sinks=2
    ),
    "fastgen_port": lambda b, s: replace(
        methods.fastgen(tuple(range(3)), tuple(range(3, 90)), recovery=0.62), by="entries", rounding="ceil"
    ),
    "quest_by_query_head": _plain(papers.quest_by_query_head, size=4, dense=1),
}


# Presses take the share that goes.
KVPRESS = {
    "kvpress_snapkv": lambda b, s: kvpress.kvpress_snapkv(1 - b, window=4),
    "kvpress_snapkv_cut": lambda b, s: kvpress.kvpress_snapkv(1 - b, window=20),
    "kvpress_pyramidkv": lambda b, s: kvpress.pyramidkv_kvpress(b, window=12),
    "kvpress_adakv": lambda b, s: kvpress.kvpress_adakv(kvpress.kvpress_snapkv(1 - b, window=4)),
    "kvpress_adakv_keydiff": lambda b, s: kvpress.kvpress_adakv(methods.keydiff(kvpress.kept(1 - b))),
    "kvpress_adakv_curdkv": lambda b, s: kvpress.kvpress_adakv(methods.curdkv(kvpress.kept(1 - b))),
    "kvpress_adakv_expected_attention": lambda b, s: kvpress.kvpress_adakv(
        methods.expected_attention(kvpress.kept(1 - b), eps=0.01, horizon=9)
    ),
    "kvpress_criticalkv": lambda b, s: methods.criticalkv(kvpress.kvpress_snapkv(1 - b, window=4)),
    "kvpress_criticalkv_first": lambda b, s: methods.criticalkv(
        kvpress.kvpress_snapkv(1 - b, window=4), eps=0.1, first=0.25
    ),
    "kvpress_criticalkv_keydiff": lambda b, s: methods.criticalkv(methods.keydiff(kvpress.kept(1 - b)), eps=0.5),
    "kvpress_critical_adakv": lambda b, s: kvpress.kvpress_critical_adakv(
        kvpress.kvpress_snapkv(1 - b, window=4), alpha=0.5, eps=0.01, first=0.3
    ),
    "kvpress_tova": lambda b, s: kvpress.kvpress_tova(1 - b),
    "kvpress_observed_attention": lambda b, s: kvpress.kvpress_observed_attention(1 - b),
    "kvpress_knorm": lambda b, s: methods.knorm(kvpress.kept(1 - b)),
    "kvpress_lagkv_cross": lambda b, s: papers.with_score(
        methods.lagkv(kvpress.kept(1 - b), lag=4, sinks=2), cross=True
    ),
    "kvpress_streaming_llm": lambda b, s: factory.streaming_llm_factory(kvpress.kept(1 - b)),
    "kvpress_expected_attention": lambda b, s: papers.with_score(
        methods.expected_attention(kvpress.kept(1 - b), horizon=9, sinks=2), covariance=False, value_norms=False
    ),
    "kvpress_capkv": lambda b, s: methods.capkv(kvpress.kept(1 - b), tau=1.0, horizon=9, sinks=1),
    "kvpress_chunkkv": lambda b, s: kvpress.kvpress_chunkkv(kvpress.kvpress_snapkv(1 - b, window=4), size=5),
    "kvpress_random": lambda b, s: kvpress.kvpress_random(1 - b),
    "kvpress_curdkv_key": lambda b, s: papers.with_score(methods.curdkv(kvpress.kept(1 - b)), of="key"),
    "kvpress_curdkv_mean": lambda b, s: papers.with_score(
        methods.curdkv(kvpress.kept(1 - b)), of="mean", partition=None
    ),
    "kvpress_leverage": lambda b, s: kvpress.kvpress_leverage(1 - b, sketch=None),
    "kvpress_non_causal": lambda b, s: kvpress.kvpress_non_causal(1 - b, chunk=16),
    "kvpress_compactor": lambda b, s: kvpress.kvpress_compactor(1 - b, sinks=2, recent=1, chunk=10),
    "kvpress_compactor_one_chunk": lambda b, s: kvpress.kvpress_compactor(1 - b, sinks=2, recent=1),
    "kvpress_chunk": lambda b, s: kvpress.kvpress_chunk(methods.knorm(kvpress.kept(1 - b)), size=7),
    "kvpress_dms": lambda b, s: kvpress.kvpress_dms(methods.knorm(1000), -2.6, recent=5),
    "kvpress_dms_snapkv": lambda b, s: kvpress.kvpress_dms(
        methods.snapkv(1000, window=4, kernel=5, pooling="avg"), 0.02, recent=4
    ),
    "kvpress_kvzap": lambda b, s: kvpress.kvpress_kvzap(1 - b, s.hidden),
    "kvpress_fastkvzip": lambda b, s: kvpress.kvpress_fastkvzip(1 - b, s.gates, sinks=2),
    "kvpress_fastkvzip_layerwise": lambda b, s: kvpress.kvpress_fastkvzip(1 - b, s.gates, sinks=2, layerwise=True),
    "kvpress_simlayerkv": lambda b, s: kvpress.kvpress_simlayerkv(0.1, sinks=2, recent=9, rows=3),
    "kvpress_simlayerkv_all": lambda b, s: kvpress.kvpress_simlayerkv(0.6, sinks=2, recent=9, rows=3),
    "kvpress_finch": lambda b, s: kvpress.kvpress_finch(1 - b, window=4),
    "kvpress_finch_chunk": lambda b, s: replace(
        papers.with_rows(kvpress.kvpress_finch(1 - b, window=4, chunk=6), by_length=False), layout=Layout()
    ),
    "kvpress_key_rerotation": lambda b, s: kvpress.kvpress_key_rerotation(methods.snapkv(b, window=3, kernel=3)),
    "kvpress_decoding": lambda b, s: kvpress.kvpress_decoding(methods.keydiff(b), interval=2),
    "kvpress_ratio_decoding": lambda b, s: kvpress.kvpress_ratio_decoding(
        methods.keydiff(1), 1 - b, interval=2, most=200
    ),
    "kvpress_cam": lambda b, s: kvpress.kvpress_cam(methods.knorm(b), interval=3),
    "kvpress_think": lambda b, s: parts.ZeroChannels(0.5, rows=4),
}


def _easykv(importance):
    """The three modes of EasyKV's code. Budgets hold the last 10 tokens and 4 sinks that some of them keep."""
    wide = lambda b: b if isinstance(b, float) else b + 12
    return {
        f"easykv_encoding_{importance}": lambda b, s: easykv.easykv_encoding(
            importance, wide(b), stride=4, exact=False, prefix=3
        ),
        f"easykv_decoding_{importance}": lambda b, s: easykv.easykv_decoding(importance, wide(b)),
        f"easykv_both_{importance}": lambda b, s: easykv.easykv_encoding_decoding(importance, wide(b)),
    }


COMPOSITIONS = {
    "h2o_every_4": lambda b, s: kvjax.when(Schedule(every=4), methods.h2o(b)),
    "tova_when_over_3": lambda b, s: kvjax.when(Schedule(over=3), methods.tova(b)),
    "keydiff_every_step": lambda b, s: kvjax.when(STEP, methods.keydiff(b)),
    "h2o_adaptive": lambda b, s: replace(methods.h2o(b, recent=4), heads=kvjax.Adaptive(0.5, 4.0)),
    "h2o_at_most_twice": lambda b, s: replace(methods.h2o(b, recent=2), heads=kvjax.Adaptive(1.0, 1.2)),
    "h2o_pooled": lambda b, s: replace(
        methods.h2o(b, recent=4), heads=kvjax.Adaptive(0.5, 4.0), layout=Layout(pool=True)
    ),
    "h2o_rerotated": lambda b, s: replace(methods.h2o(b), layout=Layout(positions="rank")),
    "h2o_pyramid": lambda b, s: replace(methods.h2o(b, recent=2), layers=kvjax.Pyramid(beta=4)),
    "layer_table": lambda b, s: replace(
        methods.h2o(b, recent=2), layers=budgets.LayerShares(tuple(s.shares(1)[:, 0].tolist()))
    ),
    "head_table": lambda b, s: replace(
        methods.h2o(b, recent=2), heads=budgets.HeadShares(tuple(map(tuple, s.shares(s.K).tolist())))
    ),
    "head_curves": lambda b, s: replace(methods.knorm(1), sinks=2, **budgets.head_curves(s.curves, 1 - b)),
    "count_above": lambda b, s: kvjax.Evict(Accumulated(observe.Rows(element="above")), b, recent=2, when=STEP),
    "from_fn": lambda b, s: kvjax.from_fn(_first_channel, b, when=STEP),
    "from_fn_observing": lambda b, s: kvjax.from_fn(_attended, b, observe=(observe.Rows(),)),
    "snapkv_then_h2o": lambda b, s: kvjax.chain(methods.snapkv(b, window=4, kernel=3), methods.h2o(b, recent=4)),
    "snapkv_then_tova": lambda b, s: kvjax.chain(methods.snapkv(b, window=4, kernel=3), methods.tova(b)),
    "snapkv_then_think": lambda b, s: kvjax.chain(methods.snapkv(b, window=4, kernel=3), methods.think()),
    "many_then_few": lambda b, s: kvjax.chain(methods.knorm(0.7), methods.h2o(b), methods.window(b)),
    "partition": lambda b, s: kvjax.partition(
        {"h": methods.h2o(b), "w": replace(methods.window(b), sinks=2)}, s.labels("h", "w")
    ),
    "partition_heads": lambda b, s: kvjax.partition_heads(
        {"h": methods.h2o(b), "t": papers.tova_by_head(b)}, s.head_labels("h", "t")
    ),
    "partition_heads_dense": lambda b, s: kvjax.partition_heads(
        {"f": methods.full(), "s": methods.snapkv(b, window=4, kernel=3)}, s.head_labels("f", "s"), pool=False
    ),
    "chain_of_partitions": lambda b, s: kvjax.chain(
        kvjax.partition({"k": methods.knorm(0.7), "f": methods.full()}, s.labels("f", "k")), methods.tova(b)
    ),
    "pages": lambda b, s: replace(methods.h2o(b, recent=2), select=Pages(3, "best"), sinks=1),
    "shared_heads": lambda b, s: kvjax.shared_heads(replace(methods.keydiff(b), when=STEP, select=Pages(3))),
    "shared_layers": lambda b, s: kvjax.shared_layers(methods.keyformer(b)),
    "shared_layers_snapkv": lambda b, s: kvjax.shared_layers(methods.snapkv(b, window=4, kernel=3)),
    "across_layers_entropy": lambda b, s: kvjax.across_layers(
        methods.snapkv(b, window=4, kernel=3), across.ScoreEntropy()
    ),
    "across_layers_preference": lambda b, s: kvjax.across_layers(methods.knorm(b), across.Preference(3, 1.6, 0.6)),
    "across_layers_top_scores": lambda b, s: kvjax.across_layers(
        replace(methods.snapkv(b, window=4, kernel=3), heads=kvjax.Adaptive(1.0)), across.by_top_scores
    ),
}

EASYKV = {
    name: row
    for importance in ("roco", "mas", "h2o", "tova", "recency", "random")
    for name, row in _easykv(importance).items()
}
CASES: dict[str, Callable[..., Any]] = METHODS | VARIANTS | KVPRESS | EASYKV | COMPOSITIONS

# Those whose layers differ. Where one decision is made for all of them, the first one's numbers decide draws.
SHARED = {"nacl_global", "shared_layers", "shared_layers_snapkv", "triattention_per_head", "triattention_union"}
BY_LAYER = {
    "triattention",
    *("pyramidkv", "ada_pyramid", "headkv", "q_filters", "kvzap", "kvzap_threshold", "quest", "duo_attention"),
    *("duo_attention_threshold", "knorm_factory", "pyramidkv_factory", "pyramidkv_adakv", "pyramidkv_kvpress"),
    *("ada_skip", "ada_pyramid_adakv", "headkv_factory", "expected_attention_stats", "quest_by_query_head"),
    *("kvpress_fastkvzip", "kvpress_fastkvzip_layerwise", "head_curves"),
    *("kvpress_pyramidkv", "kvpress_kvzap", "h2o_pyramid", "layer_table", "head_table", "partition"),
    *("partition_heads", "partition_heads_dense", "chain_of_partitions"),
}
assert set(CASES) >= SHARED | BY_LAYER
