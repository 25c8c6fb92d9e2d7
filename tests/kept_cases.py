"""Every method, variant and composition that both libraries have, side by side: name -> (old, new).

Both are functions `(budget, sizes) -> policy` of a number of tokens or a share of the prompt, and of a model's sizes.
Not here: `kvzip`, which reads the prompt again, and `h2o_stepwise_mask`, which reads it token by token.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import core
from kvjax import methods as old
from kvjax.core import budgets, observe
from kvjax.core import methods as new
from kvjax.core.budgets import STEP, Schedule
from kvjax.core.compose import across
from kvjax.core.contract import Layout
from kvjax.core.methods import easykv, kvpress, variants
from kvjax.core.scores.attention import Accumulated
from kvjax.scoring import key_scores, row_votes, scores, select
from kvjax.scoring.predicted import HiddenHeads
from kvjax.sizes import budget as counts


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
    def hidden(self) -> tuple[Any, Callable[..., Any]]:
        """Scores of hidden states, as the old and as the new library wants them."""
        out, bias = self.normal(4, self.L, self.D, self.K), self.normal(5, self.L, self.K)
        outs, biases = jnp.asarray(out), jnp.asarray(bias)
        return HiddenHeads({"out": out, "out_bias": bias}), lambda x, layer: x @ outs[layer] + biases[layer][None, None]

    def labels(self, first: str, then: str) -> list[str]:
        """Of layers in turn."""
        return [first, then] * (self.L // 2) + [first] * (self.L % 2)

    def head_labels(self, first: str, then: str) -> list[list[str]]:
        """Of kv heads, the first head of every layer under `first`."""
        return [[first] + [then] * (self.K - 1)] * self.L


WAS = {"window": "window_size", "kernel": "kernel_size"}


def _same(name, **options):
    """A method whose options mean the same in both libraries, some under longer names in the old one."""
    was = {WAS.get(option, option): x for option, x in options.items()}
    return lambda b, s: getattr(old, name)(b, **was), lambda b, s: getattr(new, name)(b, **options)


def _drawn(**options):
    """Keyformer with other noise."""
    return lambda b, s: old.keyformer(b, **options), lambda b, s: variants.keyformer_drawn(b, **options)


def _first_channel(kv, stats, ctx):
    return -jnp.abs(kv.k[..., 0])


def _attended(statistic):
    """What slots received, and a little more for being late."""
    return lambda kv, stats, ctx: stats[statistic] + kv.pos.astype(jnp.float32) * jnp.float32(0.01)


OLD_ATTENDED, NEW_ATTENDED = _attended(kvjax.Observe()), _attended(observe.Rows())

METHODS = {
    "full": (lambda b, s: old.full(), lambda b, s: new.full()),
    "key_attention": _same("key_attention"),
    "h2o": _same("h2o"),
    "h2o_max": (lambda b, s: old.h2o(b, group="max"), lambda b, s: variants.grouped(new.h2o(b), "max")),
    "mas": (lambda b, s: old.mas(b, recent=2), lambda b, s: replace(new.mas(b), recent=2)),
    "mas_sinks": (
        lambda b, s: old.mas(b, count_self=False, sinks=1, ignore_prefix=3),
        lambda b, s: replace(variants.since(variants.of_later_rows(new.mas(b)), 3), sinks=1),
    ),
    "aqas": _same("aqas"),
    "roco": _same("roco"),
    "roco_scope": (
        lambda b, s: old.roco(b, count_self=False, sinks=2, protect_last=1, scope=5),
        lambda b, s: replace(variants.of_later_rows(new.roco(b, scope=5)), sinks=2, recent=1),
    ),
    "tova": _same("tova"),
    "tova_by_head": (lambda b, s: old.tova(b, head_mode="per_kv_head"), lambda b, s: variants.tova_by_head(b)),
    "keyformer": _same("keyformer"),
    "keyformer_per_key": _drawn(per="key", noise="gaussian", tau=(1.5, 2.0)),
    "keyformer_no_noise": _drawn(noise="none"),
    "keyformer_constant": _drawn(noise="constant"),
    "keyformer_rank": (
        lambda b, s: old.keyformer(b, recent=3, positions="rerotate"),
        lambda b, s: replace(new.keyformer(b, recent=3), layout=Layout(positions="rank")),
    ),
    "ahakv": _same("ahakv", recent=3),
    "scissorhands": _same("scissorhands", history=6, recent=3),
    "scissorhands_long": _same("scissorhands", recent=3),
    "r_kv": _same("r_kv", window=3, kernel=3, buffer=2),
    "window": _same("window"),
    "window_sinks": (lambda b, s: old.window(b, sinks=2), lambda b, s: replace(new.window(b), sinks=2)),
    "streaming_llm": _same("streaming_llm", sinks=2),
    "streaming_llm_original": (
        lambda b, s: old.streaming_llm(b, sinks=2, positions="original"),
        lambda b, s: replace(new.streaming_llm(b, sinks=2), layout=Layout()),
    ),
    "random": _same("random"),
    "dilated_window": _same("dilated_window"),
    "dilated_window_anchored": (
        lambda b, s: old.dilated_window(b, mode="anchored", dilation=2),
        lambda b, s: variants.dilated_window_anchored(b, dilation=2),
    ),
    "knorm": _same("knorm"),
    "keydiff": _same("keydiff"),
    "lagkv": _same("lagkv", lag=4, sinks=2),
    "curdkv": _same("curdkv", partition=4, sinks=2),
    "expected_attention": _same("expected_attention", horizon=8, sinks=2, eps=0.02),
    "capkv": _same("capkv", horizon=8, sinks=2),
    "compactor": (
        lambda b, s: old.compactor(b, chunk_size=6, sketch=6, sinks=2, recent=2),
        lambda b, s: new.compactor(b, chunk=6, sketch=6, sinks=2, recent=2),
    ),
    "compactor_blend": (
        lambda b, s: old.compactor(b, chunk_size=6, sketch=None, sinks=2, recent=2, blend=0.7),
        lambda b, s: new.compactor(b, chunk=6, sketch=None, sinks=2, recent=2, blend=0.7),
    ),
    "q_filters": (
        lambda b, s: old.q_filters(b, s.normal(1, s.L, s.K, s.H)),
        lambda b, s: new.q_filters(b, s.normal(1, s.L, s.K, s.H)),
    ),
    "kvzap": (lambda b, s: old.kvzap(b, s.hidden[0], recent=3), lambda b, s: new.kvzap(b, s.hidden[1], recent=3)),
    "kvzap_threshold": (
        lambda b, s: old.kvzap(b, s.hidden[0], recent=3, threshold=0.5),
        lambda b, s: new.kvzap(b, s.hidden[1], recent=3, threshold=0.5),
    ),
    "snapkv": _same("snapkv", window=4, kernel=3),
    "snapkv_average": _same("snapkv", window=4, kernel=5, pooling="avg"),
    "pyramidkv": _same("pyramidkv", beta=5, window=3, kernel=3),
    "ada_half": _same("ada_snapkv", window=3, kernel=3),
    "ada_snapkv": _same("ada_snapkv", window=4, kernel=3, alpha=0.7),
    "ada_snapkv_dense": (
        lambda b, s: old.ada_snapkv(b, window_size=4, kernel_size=3, alpha=0.7, storage="dense"),
        lambda b, s: replace(new.ada_snapkv(b, window=4, kernel=3, alpha=0.7), layout=Layout()),
    ),
    "ada_pyramid": _same("ada_pyramid", alpha=0.7, beta=4, window=3, kernel=3),
    "headkv": (
        lambda b, s: old.headkv(b, s.shares(s.K), window_size=3, kernel_size=3),
        lambda b, s: new.headkv(b, s.shares(s.K), window=3, kernel=3),
    ),
    "criticalkv": (
        lambda b, s: old.criticalkv(b, base=old.snapkv(b, window_size=4, kernel_size=3)),
        lambda b, s: new.criticalkv(new.snapkv(b, window=4, kernel=3)),
    ),
    "criticalkv_first": (
        lambda b, s: old.criticalkv(b, base=old.snapkv(b, window_size=4, kernel_size=3), first_stage=0.25, eps=0.1),
        lambda b, s: new.criticalkv(new.snapkv(b, window=4, kernel=3), first=0.25, eps=0.1),
    ),
    "chunkkv": (
        lambda b, s: old.chunkkv(b, base=old.snapkv(b, window_size=4, kernel_size=3), chunk_size=3),
        lambda b, s: new.chunkkv(new.snapkv(b, window=4, kernel=3), size=3),
    ),
    "simlayerkv": (
        lambda b, s: old.simlayerkv(0.45, sinks=2, recent=4, budget=b),
        lambda b, s: replace(new.simlayerkv(0.45, sinks=2, recent=4), budget=b),
    ),
    "simlayerkv_lazy": (
        lambda b, s: old.simlayerkv(0.1, sinks=2, recent=4, budget=b),
        lambda b, s: replace(new.simlayerkv(0.1, sinks=2, recent=4), budget=b),
    ),
    "cake": _same("cake", window=3, kernel=3),
    "lava": _same("lava", window=3, kernel=3),
    "defensivekv": _same("defensivekv", window=3, kernel=3),
    "layer_defensivekv": _same("layer_defensivekv", window=3, kernel=3, mass=0.8),
    "nacl": _same("nacl"),
    "nacl_given": (
        lambda b, s: old.nacl(b, protect=2, proxies=3, random=2),
        lambda b, s: new.nacl(b, recent=2, proxies=3, random=2),
    ),
    "nacl_begin": (
        lambda b, s: old.nacl(b, protect=2, proxies=3, random=2, first_proxies=4),
        lambda b, s: variants.nacl_both_ends(b, recent=2, proxies=3, random=2, begin=4),
    ),
    "finch": _same("finch", window=4),
    "finch_chunks": (
        lambda b, s: old.finch(b, window_size=4, chunk_length=6),
        lambda b, s: new.finch(b, window=4, chunk=6),
    ),
    "think": (lambda b, s: old.think(0.5, query_rows=4), lambda b, s: new.think(0.5, rows=4)),
    "quest": (
        lambda b, s: old.quest(b, page_size=4, dense_layers=1),
        lambda b, s: new.quest(b, size=4, dense=1),
    ),
    "duo_attention": (
        lambda b, s: old.duo_attention(s.shares(s.K), sinks=2, recent=5),
        lambda b, s: new.duo_attention(s.shares(s.K), sinks=2, recent=5),
    ),
    "duo_attention_threshold": (
        lambda b, s: old.duo_attention(s.shares(s.K), threshold=0.6, sinks=2, recent=5, storage="dense"),
        lambda b, s: new.duo_attention(s.shares(s.K), streaming=(s.shares(s.K) < 0.6).mean(), sinks=2, recent=5),
    ),
    "fastgen": (
        lambda b, s: old.fastgen(special_ids=range(3), punctuation_ids=range(3, 90), recovery_ratio=0.65),
        lambda b, s: new.fastgen(range(3), range(3, 90), recovery=0.65),
    ),
}

VARIANTS = {
    "h2o_next_step_mask": (
        lambda b, s: old.h2o(b, compat="h2o_hh_mask"),
        lambda b, s: variants.h2o_next_step_mask(b),
    ),
    "h2o_factory": (
        lambda b, s: kvjax.when(kvjax.after_prefill(), replace(old.h2o(b, recent=3), granularity="query_head")),
        lambda b, s: variants.h2o_factory(b, window=3),
    ),
    "scissorhands_by_position": (
        lambda b, s: old.scissorhands(b, history=6, recent=3, theta="1/position"),
        lambda b, s: variants.scissorhands_by_position(b, history=6, recent=3),
    ),
    "scissorhands_factory": (
        lambda b, s: replace(
            old.scissorhands(b, recent=3, element="p", decay=0.9), protect=kvjax.Protect(sinks=2, recent=3)
        ),
        lambda b, s: variants.scissorhands_factory(b, sinks=2, recent=3),
    ),
    "random_run": (
        lambda b, s: old.random(b, random_mode="run", sinks=2),
        lambda b, s: replace(variants.random_run(b), sinks=2),
    ),
    "random_shared": (
        lambda b, s: old.random(b, shared_heads=True, sinks=1, protect_recent=2),
        lambda b, s: replace(variants.random_shared(b), sinks=1, recent=2),
    ),
    "window_of_generated": (
        lambda b, s: old.window(b, scope="generated"),
        lambda b, s: variants.window_of_generated(b),
    ),
    "streaming_llm_factory": (
        lambda b, s: kvjax.when(kvjax.after_prefill(), old.streaming_llm(b, positions="original")),
        lambda b, s: variants.streaming_llm_factory(b),
    ),
    "knorm_factory": (
        lambda b, s: kvjax.partition({"full": old.full(), "rest": old.knorm(b)}, ["full"] * 2 + ["rest"] * (s.L - 2)),
        lambda b, s: variants.knorm_factory(b),
    ),
    "tova_easykv": (
        lambda b, s: old.tova(b, head_mode="per_kv_head", sinks=4, protect_last=3),
        lambda b, s: variants.tova_easykv(b, recent=3),
    ),
    "roco_easykv": (
        lambda b, s: old.roco(b, protect_last=2, sinks=2, ignore_prefix=5),
        lambda b, s: variants.roco_easykv(b, recent=2, sinks=2, prefix=5),
    ),
    "mas_of_later_rows": (
        lambda b, s: old.mas(b, count_self=False),
        lambda b, s: variants.of_later_rows(new.mas(b)),
    ),
    "nacl_from_all": (
        lambda b, s: old.nacl(b, protect=2, proxies=3, random=3, random_pool="all"),
        lambda b, s: variants.nacl_drawn(b, among="all", recent=2, proxies=3, random=3),
    ),
    "nacl_uniform": (
        lambda b, s: old.nacl(b, protect=2, proxies=3, random=3, random_distribution="uniform"),
        lambda b, s: variants.nacl_drawn(b, by="uniform", recent=2, proxies=3, random=3),
    ),
    "nacl_normalised": (
        lambda b, s: old.nacl(
            b, protect=2, proxies=3, random=3, random_distribution="normalised", random_temperature=0.5
        ),
        lambda b, s: variants.nacl_drawn(b, by="normalised", temperature=0.5, recent=2, proxies=3, random=3),
    ),
    "nacl_interval": (
        lambda b, s: old.nacl(b, protect=2, proxies=3, random=0, decode_every=3, decode_rows="interval"),
        lambda b, s: variants.nacl_decoding(b, every=3, proxies_are="all", recent=2, proxies=3, random=0),
    ),
    "nacl_non_causal": (
        lambda b, s: old.nacl(b, protect=1, proxies=5, random=0, proxy_causal=False),
        lambda b, s: variants.nacl_non_causal(b, recent=1, proxies=5, random=0),
    ),
    "nacl_headbug": (
        lambda b, s: old.nacl(b, protect=1, proxies=5, random=0, compat="nacl_headbug"),
        lambda b, s: variants.nacl_headbug(b, recent=1, proxies=5, random=0),
    ),
    "nacl_grouped": (
        lambda b, s: old.nacl(b, protect=1, proxies=5, random=2, group="max"),
        lambda b, s: variants.grouped(new.nacl(b, recent=1, proxies=5, random=2), "max"),
    ),
    "nacl_by_layer": (
        lambda b, s: old.nacl(b, protect=1, proxies=5, random=2, head_mode="layer"),
        lambda b, s: variants.nacl_by_layer(b, recent=1, proxies=5, random=2),
    ),
    "nacl_global": (
        lambda b, s: old.nacl(b, protect=1, proxies=5, random=2, head_mode="global"),
        lambda b, s: variants.nacl_global(b, recent=1, proxies=5, random=2),
    ),
    "nacl_llama3": (
        lambda b, s: old.nacl_llama3(b, sinks=2, protect=2, proxies=5, min_len=30),
        lambda b, s: replace(variants.nacl_llama3(b, recent=2, proxies=5, min_len=30), sinks=2),
    ),
    "snapkv_text": (
        lambda b, s: old.snapkv(b, window_size=3, kernel_size=3, pool_before_rows=True, softmax_over="outside_window"),
        lambda b, s: variants.snapkv_text(b, window=3, kernel=3),
    ),
    "snapkv_rows_pooled": (
        lambda b, s: old.snapkv(b, window_size=3, kernel_size=3, pool_before_rows=True),
        lambda b, s: variants.snapkv_text(b, window=3, kernel=3, outside=False),
    ),
    "snapkv_outside_window": (
        lambda b, s: old.snapkv(b, window_size=3, kernel_size=3, softmax_over="outside_window"),
        lambda b, s: variants.snapkv_outside_window(b, window=3, kernel=3),
    ),
    "snapkv_grouped": (
        lambda b, s: old.snapkv(b, window_size=3, kernel_size=3, group="max"),
        lambda b, s: variants.grouped(new.snapkv(b, window=3, kernel=3), "max"),
    ),
    "snapkv_valid_average": (
        lambda b, s: old.snapkv(b, window_size=3, kernel_size=5, pooling="avg", avg_pad="valid_count"),
        lambda b, s: variants.snapkv_valid_average(b, window=3, kernel=5),
    ),
    "snapkv_factory": (
        lambda b, s: old.snapkv(b, window_size=3, granularity="query_head"),
        lambda b, s: variants.snapkv_factory(b, window=3),
    ),
    "pyramidkv_factory": (
        lambda b, s: old.pyramidkv(b, window_size=2, kernel_size=3, beta=4, preset="pyramid_factory"),
        lambda b, s: variants.pyramidkv_factory(b, beta=4, window=2, kernel=3),
    ),
    "pyramidkv_adakv": (
        lambda b, s: old.pyramidkv(b, window_size=2, kernel_size=3, beta=4, preset="pyramid_adakv"),
        lambda b, s: variants.pyramidkv_adakv(b, beta=4, window=2, kernel=3),
    ),
    "pyramidkv_kvpress": (
        lambda b, s: old.pyramidkv(b, window_size=2, kernel_size=3, pooling="avg", beta=3, preset="pyramid_kvpress"),
        lambda b, s: kvpress.pyramidkv_kvpress(b, beta=3, window=2, kernel=3),
    ),
    "ada_text": (
        lambda b, s: old.ada_snapkv(
            b, window_size=3, kernel_size=3, pool_before_rows=True, softmax_over="outside_window"
        ),
        lambda b, s: variants.ada_text(b, window=3, kernel=3),
    ),
    "ada_released": (
        lambda b, s: old.ada_snapkv(b, alpha=0.8, window_size=3, kernel_size=3, rounding="half_even"),
        lambda b, s: variants.ada_released(b, window=3, kernel=3),
    ),
    "ada_released_normalized": (
        lambda b, s: old.ada_snapkv(b, alpha=0.5, window_size=3, kernel_size=3, rounding="half_even", normalize=True),
        lambda b, s: variants.ada_released(b, floor=0.5, normalize=True, window=3, kernel=3),
    ),
    "ada_factory": (
        lambda b, s: old.ada_snapkv(
            b,
            alpha=0.8,
            window_size=3,
            kernel_size=3,
            rounding="half_even",
            normalize=True,
            granularity="query_head",
        ),
        lambda b, s: variants.ada_factory(b, window=3, kernel=3),
    ),
    "ada_normalized": (
        lambda b, s: old.ada_snapkv(b, alpha=1.0, window_size=3, kernel_size=3, normalize=True),
        lambda b, s: variants.ada_normalized(b, alpha=1.0, window=3, kernel=3),
    ),
    "ada_floor_then_global": (
        lambda b, s: old.ada_snapkv(b, alpha=0.7, window_size=3, kernel_size=3, safeguard="floor_then_global"),
        lambda b, s: kvpress.kvpress_adakv(new.snapkv(b, window=3, kernel=3), alpha=0.7),
    ),
    "ada_global": (
        lambda b, s: old.ada_snapkv(b, alpha=0.0, window_size=3, kernel_size=3, safeguard="floor_then_global"),
        lambda b, s: kvpress.kvpress_adakv(new.snapkv(b, window=3, kernel=3), alpha=0.0),
    ),
    "ada_skip": (
        lambda b, s: old.ada_snapkv(b, window_size=3, kernel_size=3, skip_layers=1),
        lambda b, s: variants.skipping(new.ada_snapkv(b, window=3, kernel=3), 1),
    ),
    "ada_pyramid_adakv": (
        lambda b, s: old.ada_pyramid(
            b, alpha=0.8, window_size=2, kernel_size=3, rounding="half_even", preset="pyramid_adakv"
        ),
        lambda b, s: variants.ada_pyramid_adakv(b, window=2, kernel=3),
    ),
    "ahakv_equation_5": (
        lambda b, s: old.ahakv(b, recent=3, rows=4),
        lambda b, s: variants.ahakv_equation_5(b, recent=3),
    ),
    "ahakv_scaled": (
        lambda b, s: old.ahakv(b, recent=3, sg_apply="scaled"),
        lambda b, s: variants.ahakv_gain(b, recent=3, apply="scaled"),
    ),
    "ahakv_floor": (
        lambda b, s: old.ahakv(b, recent=3, sg_floor=1.0),
        lambda b, s: variants.ahakv_gain(b, recent=3, floor=1.0),
    ),
    "ahakv_selected": (
        lambda b, s: old.ahakv(b, recent=3, sg_k="selected"),
        lambda b, s: variants.ahakv_gain(b, recent=3, k=budgets.Combined("less", (b, 3))),
    ),
    "ahakv_cache": (
        lambda b, s: old.ahakv(b, recent=3, sg_count="cache"),
        lambda b, s: variants.ahakv_gain(b, recent=3, seen="cache"),
    ),
    "ahakv_without_gain": (
        lambda b, s: old.ahakv(b, recent=3, step_gain_softmax=False),
        lambda b, s: variants.ahakv_without("gain", b, recent=3),
    ),
    "ahakv_all_rows": (
        lambda b, s: old.ahakv(b, recent=3, recent_accumulation=False),
        lambda b, s: variants.ahakv_without("recent", b, recent=3),
    ),
    "ahakv_pooled_score": (
        lambda b, s: old.ahakv(b, recent=3, pool_target="score", pool_kernel=5),
        lambda b, s: variants.ahakv_prior(b, target="score", recent=3, kernel=5),
    ),
    "ahakv_pooled_both": (
        lambda b, s: old.ahakv(b, recent=3, pool_target="both"),
        lambda b, s: variants.ahakv_prior(b, target="both", recent=3),
    ),
    "ahakv_prior_each_step": (
        lambda b, s: old.ahakv(b, recent=3, prior_each_step=True),
        lambda b, s: variants.ahakv_prior(b, each_step=True, recent=3),
    ),
    "ahakv_without_prior": (
        lambda b, s: old.ahakv(b, recent=3, value_prior=False),
        lambda b, s: variants.ahakv_without("prior", b, recent=3),
    ),
    "keyformer_released": (
        lambda b, s: old.keyformer(b, tau_delta=0.01),
        lambda b, s: variants.keyformer_released(b),
    ),
    "keyformer_share_batch": (
        lambda b, s: old.keyformer(b, share_batch=True),
        lambda b, s: variants.keyformer_share_batch(b),
    ),
    "keyformer_damped": (
        lambda b, s: old.keyformer(b, damping=0.5),
        lambda b, s: variants.keyformer_damped(b, damping=0.5),
    ),
    "keyformer_mask": (
        lambda b, s: old.keyformer(b, compat="keyformer_mask"),
        lambda b, s: variants.keyformer_mask(b),
    ),
    "r_kv_released": (
        lambda b, s: old.r_kv(
            b, importance=0.07, softmax_over="outside_window", group="max", window_size=3, kernel_size=3
        ),
        lambda b, s: variants.r_kv_released(b, window=3, kernel=3),
    ),
    "lava_released": (
        lambda b, s: old.lava(b, window_size=3, kernel_size=3, alpha=0.4, max_ratio=3.0),
        lambda b, s: variants.lava_released(b, floor=0.6, max_ratio=3.0, window=3, kernel=3),
    ),
    "defensivekv_released": (
        lambda b, s: replace(
            old.defensivekv(_int(b), window_size=3),
            score=row_votes.Defensive(
                counts.Fixed(kvjax.Share(b, "int"), counts.Less(kvjax.Share(1.0), kvjax.Tokens(3))), 3
            ),
        ),
        lambda b, s: variants.defensivekv_released(b, window=3),
    ),
    "headkv_factory": (
        lambda b, s: replace(old.headkv(b + 3, s.shares(s.N), beta=2, window_size=3), granularity="query_head"),
        lambda b, s: variants.headkv_factory(b, s.shares(s.N), window=3),
    ),
    "cam_factory": (
        lambda b, s: old.snapkv(b, window_size=3, kernel_size=1, granularity="query_head"),
        lambda b, s: variants.cam_factory(b, window=3),
    ),
    "expected_attention_stats": (
        lambda b, s: old.expected_attention(
            b, horizon=8, sinks=2, queries={"mean": s.normal(2, s.L, s.N, s.H), "covariance": s.covariance}
        ),
        lambda b, s: kvpress.expected_attention_stats(b, s.normal(2, s.L, s.N, s.H), s.covariance, horizon=8, sinks=2),
    ),
    "fastgen_port": (
        lambda b, s: old.fastgen(
            special_ids=range(3),
            punctuation_ids=range(3, 90),
            recovery_ratio=0.62,
            recovery="elementwise",
            rounding="ceil",
        ),
        lambda b, s: variants.fastgen_port(tuple(range(3)), tuple(range(3, 90)), recovery=0.62),
    ),
    "quest_by_query_head": (
        lambda b, s: old.quest(b, page_size=4, dense_layers=1, granularity="query_head"),
        lambda b, s: variants.quest_by_query_head(b, size=4, dense=1),
    ),
}


def _int(b):
    return kvjax.Ratio(b, "int")


def _press(b, **options):
    """kvpress's SnapKV in the old library."""
    return old.snapkv(_int(b), window_size=4, kernel_size=5, pooling="avg", **options)


def _ada_press(b, alpha):
    return old.ada_snapkv(
        _int(b), window_size=4, kernel_size=5, pooling="avg", safeguard="floor_then_global", alpha=alpha
    )


def _competing(policy):
    """A policy of the old library, whose heads compete as in kvpress."""
    return replace(policy, heads=kvjax.Adaptive(0.2, math.inf, safeguard="floor_then_global"))


def _generated(interval, policy):
    """A policy of the old library that evicts generated text alone."""
    return kvjax.when(replace(kvjax.every(interval), prefill=False), policy)


# Presses take the share that goes.
KVPRESS = {
    "kvpress_snapkv": (lambda b, s: _press(b), lambda b, s: kvpress.kvpress_snapkv(1 - b, window=4)),
    "kvpress_snapkv_cut": (
        lambda b, s: old.snapkv(_int(b), window_size=20, kernel_size=5, pooling="avg", cut_window=True),
        lambda b, s: kvpress.kvpress_snapkv(1 - b, window=20),
    ),
    "kvpress_pyramidkv": (
        lambda b, s: old.pyramidkv(
            b, window_size=12, kernel_size=5, pooling="avg", beta=20, preset="pyramid_kvpress", cut_window=True
        ),
        lambda b, s: kvpress.kvpress_pyramidkv(1 - b, window=12),
    ),
    "kvpress_adakv": (
        lambda b, s: _ada_press(b, 0.2),
        lambda b, s: kvpress.kvpress_adakv(kvpress.kvpress_snapkv(1 - b, window=4)),
    ),
    "kvpress_adakv_keydiff": (
        lambda b, s: _competing(old.keydiff(_int(b))),
        lambda b, s: kvpress.kvpress_adakv(kvpress.kvpress_keydiff(1 - b)),
    ),
    "kvpress_adakv_curdkv": (
        lambda b, s: _competing(old.curdkv(_int(b))),
        lambda b, s: kvpress.kvpress_adakv(kvpress.kvpress_curdkv(1 - b)),
    ),
    "kvpress_adakv_expected_attention": (
        lambda b, s: _competing(old.expected_attention(_int(b), eps=0.01, horizon=9)),
        lambda b, s: kvpress.kvpress_adakv(kvpress.kvpress_expected_attention(1 - b, eps=0.01, horizon=9)),
    ),
    "kvpress_criticalkv": (
        lambda b, s: old.criticalkv(_int(b), base=_press(b)),
        lambda b, s: kvpress.kvpress_criticalkv(kvpress.kvpress_snapkv(1 - b, window=4)),
    ),
    "kvpress_criticalkv_first": (
        lambda b, s: old.criticalkv(_int(b), base=_press(b), eps=0.1, first_stage=0.25),
        lambda b, s: kvpress.kvpress_criticalkv(kvpress.kvpress_snapkv(1 - b, window=4), eps=0.1, first=0.25),
    ),
    "kvpress_criticalkv_keydiff": (
        lambda b, s: old.criticalkv(_int(b), base=old.keydiff(_int(b)), eps=0.5),
        lambda b, s: kvpress.kvpress_criticalkv(kvpress.kvpress_keydiff(1 - b), eps=0.5),
    ),
    "kvpress_critical_adakv": (
        lambda b, s: old.criticalkv(
            _int(b), base=_ada_press(b, 0.5), eps=0.01, first_stage=0.3, least=kvjax.Share(0.5, "int")
        ),
        lambda b, s: kvpress.kvpress_critical_adakv(
            kvpress.kvpress_snapkv(1 - b, window=4), alpha=0.5, eps=0.01, first=0.3
        ),
    ),
    "kvpress_tova": (
        lambda b, s: kvjax.when(kvjax.after_prefill(), old.tova(_int(b), protect_last=1)),
        lambda b, s: kvpress.kvpress_tova(1 - b),
    ),
    "kvpress_observed_attention": (
        lambda b, s: old.mas(_int(b)),
        lambda b, s: kvpress.kvpress_observed_attention(1 - b),
    ),
    "kvpress_knorm": (lambda b, s: old.knorm(_int(b)), lambda b, s: kvpress.kvpress_knorm(1 - b)),
    "kvpress_lagkv_cross": (
        lambda b, s: old.lagkv(_int(b), lag=4, sinks=2, cross_scoring=True),
        lambda b, s: kvpress.kvpress_lagkv(1 - b, lag=4, sinks=2, cross=True),
    ),
    "kvpress_streaming_llm": (
        lambda b, s: kvjax.when(kvjax.after_prefill(), old.streaming_llm(_int(b), positions="original")),
        lambda b, s: kvpress.kvpress_streaming_llm(1 - b),
    ),
    "kvpress_expected_attention": (
        lambda b, s: old.expected_attention(_int(b), horizon=9, sinks=2, covariance=False, value_norms=False),
        lambda b, s: kvpress.kvpress_expected_attention(1 - b, horizon=9, sinks=2, covariance=False, value_norms=False),
    ),
    "kvpress_capkv": (
        lambda b, s: old.capkv(_int(b), tau=1.0, horizon=9, sinks=1),
        lambda b, s: kvpress.kvpress_capkv(1 - b, tau=1.0, horizon=9, sinks=1),
    ),
    "kvpress_chunkkv": (
        lambda b, s: old.chunkkv(_int(b), base=_press(b), chunk_size=5),
        lambda b, s: kvpress.kvpress_chunkkv(kvpress.kvpress_snapkv(1 - b, window=4), size=5),
    ),
    "kvpress_random": (
        lambda b, s: kvjax.when(kvjax.after_prefill(), old.random(_int(b), protect_recent=0)),
        lambda b, s: kvpress.kvpress_random(1 - b),
    ),
    "kvpress_curdkv_key": (
        lambda b, s: old.curdkv(_int(b), of="key"),
        lambda b, s: kvpress.kvpress_curdkv(1 - b, of="key"),
    ),
    "kvpress_curdkv_mean": (
        lambda b, s: old.curdkv(_int(b), of="mean", partition=None),
        lambda b, s: kvpress.kvpress_curdkv(1 - b, of="mean", partition=None),
    ),
    "kvpress_leverage": (
        lambda b, s: kvjax.Evict(key_scores.Leverage(None), _int(b)),
        lambda b, s: kvpress.kvpress_leverage(1 - b, sketch=None),
    ),
    "kvpress_non_causal": (
        lambda b, s: old.compactor(_int(b), blend=0.0, chunk_size=16, sinks=0, recent=0, filled=True),
        lambda b, s: kvpress.kvpress_non_causal(1 - b, chunk=16),
    ),
    "kvpress_compactor": (
        lambda b, s: old.compactor(_int(b), sinks=2, recent=1, chunk_size=10, filled=True),
        lambda b, s: kvpress.kvpress_compactor(1 - b, sinks=2, recent=1, chunk=10),
    ),
    "kvpress_compactor_one_chunk": (
        lambda b, s: old.compactor(_int(b), sinks=2, recent=1, filled=True),
        lambda b, s: kvpress.kvpress_compactor(1 - b, sinks=2, recent=1),
    ),
    "kvpress_chunk": (
        lambda b, s: replace(old.knorm(_int(b)), select=select.PerChunk(7, _int(b))),
        lambda b, s: kvpress.kvpress_chunk(kvpress.kvpress_knorm(1 - b), size=7),
    ),
    "kvpress_dms": (
        lambda b, s: replace(old.knorm(1000), select=select.AboveThreshold(-2.6), protect=kvjax.Protect(recent=5)),
        lambda b, s: kvpress.kvpress_dms(new.knorm(1000), -2.6, recent=5),
    ),
    "kvpress_dms_snapkv": (
        lambda b, s: replace(
            old.snapkv(1000, window_size=4, kernel_size=5, pooling="avg"), select=select.AboveThreshold(4 * 0.02)
        ),
        lambda b, s: kvpress.kvpress_dms(new.snapkv(1000, window=4, kernel=5, pooling="avg"), 0.02, recent=4),
    ),
    "kvpress_kvzap": (
        lambda b, s: kvjax.when(kvjax.after_prefill(), old.kvzap(_int(b), s.hidden[0], recent=0)),
        lambda b, s: kvpress.kvpress_kvzap(1 - b, s.hidden[1]),
    ),
    "kvpress_simlayerkv": (
        lambda b, s: old.simlayerkv(0.1, sinks=2, recent=9, rows=3, compat="kvpress"),
        lambda b, s: kvpress.kvpress_simlayerkv(0.1, sinks=2, recent=9, rows=3),
    ),
    "kvpress_simlayerkv_all": (
        lambda b, s: old.simlayerkv(0.6, sinks=2, recent=9, rows=3, compat="kvpress"),
        lambda b, s: kvpress.kvpress_simlayerkv(0.6, sinks=2, recent=9, rows=3),
    ),
    "kvpress_finch": (
        lambda b, s: old.finch(_int(b), window_size=4),
        lambda b, s: kvpress.kvpress_finch(1 - b, window=4),
    ),
    "kvpress_finch_chunk": (
        lambda b, s: old.finch(_int(b), window_size=4, chunk_length=6, normalize=False, positions="original"),
        lambda b, s: kvpress.kvpress_finch(1 - b, window=4, chunk=6, normalize=False, rerotate=False),
    ),
    "kvpress_key_rerotation": (
        lambda b, s: replace(old.snapkv(b, window_size=3, kernel_size=3), positions="rerotate"),
        lambda b, s: kvpress.kvpress_key_rerotation(new.snapkv(b, window=3, kernel=3)),
    ),
    "kvpress_decoding": (
        lambda b, s: _generated(2, old.keydiff(b)),
        lambda b, s: kvpress.kvpress_decoding(new.keydiff(b), interval=2),
    ),
    "kvpress_cam": (
        lambda b, s: _generated(3, replace(old.knorm(b), score=scores.LayerMean(old.knorm(b).score))),
        lambda b, s: kvpress.kvpress_cam(new.knorm(b), interval=3),
    ),
    "kvpress_think": (
        lambda b, s: old.think(0.5, query_rows=4, storage="zeroed"),
        lambda b, s: kvpress.kvpress_think(0.5, rows=4),
    ),
}


def _easykv(importance):
    """The three modes of EasyKV's code. Budgets hold the last 10 tokens and 4 sinks that some of them keep."""
    wide = lambda b: b if isinstance(b, float) else b + 12
    return {
        f"easykv_encoding_{importance}": (
            lambda b, s: old.easykv(importance, wide(b), mode="encoding", stride=4, rounding="easykv", prefix=3),
            lambda b, s: easykv.easykv_encoding(importance, wide(b), stride=4, exact=False, prefix=3),
        ),
        f"easykv_decoding_{importance}": (
            lambda b, s: old.easykv(importance, wide(b), mode="decoding"),
            lambda b, s: easykv.easykv_decoding(importance, wide(b)),
        ),
        f"easykv_both_{importance}": (
            lambda b, s: old.easykv(importance, wide(b), mode="encoding_decoding"),
            lambda b, s: easykv.easykv_encoding_decoding(importance, wide(b)),
        ),
    }


COMPOSITIONS = {
    "h2o_every_4": (
        lambda b, s: kvjax.when(kvjax.every(4), old.h2o(b)),
        lambda b, s: core.when(Schedule(every=4), new.h2o(b)),
    ),
    "tova_when_over_3": (
        lambda b, s: kvjax.when(kvjax.when_over(3), old.tova(b)),
        lambda b, s: core.when(Schedule(over=3), new.tova(b)),
    ),
    "keydiff_every_step": (
        lambda b, s: old.keydiff(b, when=kvjax.every_step()),
        lambda b, s: core.when(STEP, new.keydiff(b)),
    ),
    "h2o_adaptive": (
        lambda b, s: replace(old.h2o(b, recent=4), heads=kvjax.Adaptive(0.5, 4.0)),
        lambda b, s: replace(new.h2o(b, recent=4), heads=core.Adaptive(0.5, 4.0)),
    ),
    "h2o_at_most_twice": (
        lambda b, s: replace(old.h2o(b, recent=2), heads=kvjax.Adaptive(1.0, 1.2)),
        lambda b, s: replace(new.h2o(b, recent=2), heads=core.Adaptive(1.0, 1.2)),
    ),
    "h2o_pooled": (
        lambda b, s: replace(old.h2o(b, recent=4), heads=kvjax.Adaptive(0.5, 4.0), storage="pool"),
        lambda b, s: replace(new.h2o(b, recent=4), heads=core.Adaptive(0.5, 4.0), layout=Layout(pool=True)),
    ),
    "h2o_rerotated": (
        lambda b, s: replace(old.h2o(b), positions="rerotate"),
        lambda b, s: replace(new.h2o(b), layout=Layout(positions="rank")),
    ),
    "h2o_pyramid": (
        lambda b, s: replace(old.h2o(b, recent=2), layers=kvjax.Pyramid(beta=4)),
        lambda b, s: replace(new.h2o(b, recent=2), layers=core.Pyramid(beta=4)),
    ),
    "layer_table": (
        lambda b, s: replace(old.h2o(b, recent=2), layers=kvjax.LayerTable(tuple(s.shares(1)[:, 0].tolist()))),
        lambda b, s: replace(new.h2o(b, recent=2), layers=budgets.LayerShares(tuple(s.shares(1)[:, 0].tolist()))),
    ),
    "head_table": (
        lambda b, s: replace(old.h2o(b, recent=2), heads=kvjax.HeadTable(tuple(map(tuple, s.shares(s.K).tolist())))),
        lambda b, s: replace(new.h2o(b, recent=2), heads=budgets.HeadShares(tuple(map(tuple, s.shares(s.K).tolist())))),
    ),
    "count_above": (
        lambda b, s: kvjax.Evict(
            scores.Accumulated(kvjax.Observe(element="above")),
            b,
            protect=kvjax.Protect(recent=2),
            when=kvjax.every_step(),
        ),
        lambda b, s: core.Evict(Accumulated(observe.Rows(element="above")), b, recent=2, when=STEP),
    ),
    "from_fn": (
        lambda b, s: kvjax.from_fn(_first_channel, budget=b, when=kvjax.every_step()),
        lambda b, s: core.from_fn(_first_channel, b, when=STEP),
    ),
    "from_fn_observing": (
        lambda b, s: kvjax.from_fn(OLD_ATTENDED, budget=b, observe=(kvjax.Observe(),)),
        lambda b, s: core.from_fn(NEW_ATTENDED, b, observe=(observe.Rows(),)),
    ),
    "snapkv_then_h2o": (
        lambda b, s: kvjax.chain(old.snapkv(b, window_size=4, kernel_size=3), old.h2o(b, recent=4)),
        lambda b, s: core.chain(new.snapkv(b, window=4, kernel=3), new.h2o(b, recent=4)),
    ),
    "snapkv_then_tova": (
        lambda b, s: kvjax.chain(old.snapkv(b, window_size=4, kernel_size=3), old.tova(b)),
        lambda b, s: core.chain(new.snapkv(b, window=4, kernel=3), new.tova(b)),
    ),
    "snapkv_then_think": (
        lambda b, s: kvjax.chain(old.snapkv(b, window_size=4, kernel_size=3), old.think()),
        lambda b, s: core.chain(new.snapkv(b, window=4, kernel=3), new.think()),
    ),
    "many_then_few": (
        lambda b, s: kvjax.chain(old.knorm(0.7), old.h2o(b), old.window(b)),
        lambda b, s: core.chain(new.knorm(0.7), new.h2o(b), new.window(b)),
    ),
    "partition": (
        lambda b, s: kvjax.partition({"h": old.h2o(b), "w": old.window(b, sinks=2)}, s.labels("h", "w")),
        lambda b, s: core.partition({"h": new.h2o(b), "w": replace(new.window(b), sinks=2)}, s.labels("h", "w")),
    ),
    "partition_heads": (
        lambda b, s: kvjax.partition_heads(
            {"h": old.h2o(b), "t": old.tova(b, head_mode="per_kv_head")}, s.head_labels("h", "t")
        ),
        lambda b, s: core.partition_heads({"h": new.h2o(b), "t": variants.tova_by_head(b)}, s.head_labels("h", "t")),
    ),
    "partition_heads_dense": (
        lambda b, s: kvjax.partition_heads(
            {"f": old.full(), "s": old.snapkv(b, window_size=4, kernel_size=3)},
            s.head_labels("f", "s"),
            storage="dense",
        ),
        lambda b, s: core.partition_heads(
            {"f": new.full(), "s": new.snapkv(b, window=4, kernel=3)}, s.head_labels("f", "s"), pool=False
        ),
    ),
    "chain_of_partitions": (
        lambda b, s: kvjax.chain(
            kvjax.partition({"k": old.knorm(0.7), "f": old.full()}, s.labels("f", "k")), old.tova(b)
        ),
        lambda b, s: core.chain(
            core.partition({"k": new.knorm(0.7), "f": new.full()}, s.labels("f", "k")), new.tova(b)
        ),
    ),
    "shared_layers": (
        lambda b, s: kvjax.shared_layers(old.keyformer(b)),
        lambda b, s: core.shared_layers(new.keyformer(b)),
    ),
    "shared_layers_snapkv": (
        lambda b, s: kvjax.shared_layers(old.snapkv(b, window_size=4, kernel_size=3)),
        lambda b, s: core.shared_layers(new.snapkv(b, window=4, kernel=3)),
    ),
    "across_layers_entropy": (
        lambda b, s: kvjax.across_layers(old.snapkv(b, window_size=4, kernel_size=3), kvjax.ScoreEntropy()),
        lambda b, s: core.across_layers(new.snapkv(b, window=4, kernel=3), across.ScoreEntropy()),
    ),
    "across_layers_preference": (
        lambda b, s: kvjax.across_layers(old.knorm(b), kvjax.Preference(3, 1.6, 0.6)),
        lambda b, s: core.across_layers(new.knorm(b), across.Preference(3, 1.6, 0.6)),
    ),
    "across_layers_top_scores": (
        lambda b, s: kvjax.across_layers(
            replace(old.snapkv(b, window_size=4, kernel_size=3), heads=kvjax.Adaptive(1.0, math.inf)), kvjax.TopScores()
        ),
        lambda b, s: core.across_layers(
            replace(new.snapkv(b, window=4, kernel=3), heads=core.Adaptive(1.0)), across.by_top_scores
        ),
    ),
}

EASYKV = {
    name: row
    for importance in ("roco", "mas", "h2o", "tova", "recency", "random")
    for name, row in _easykv(importance).items()
}
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = METHODS | VARIANTS | KVPRESS | EASYKV | COMPOSITIONS

# Those whose layers differ. Where one decision is made for all of them, the first one's numbers decide draws.
SHARED = {"nacl_global", "shared_layers", "shared_layers_snapkv"}
BY_LAYER = {
    *("pyramidkv", "ada_pyramid", "headkv", "q_filters", "kvzap", "kvzap_threshold", "quest", "duo_attention"),
    *("duo_attention_threshold", "knorm_factory", "pyramidkv_factory", "pyramidkv_adakv", "pyramidkv_kvpress"),
    *("ada_skip", "ada_pyramid_adakv", "headkv_factory", "expected_attention_stats", "quest_by_query_head"),
    *("kvpress_pyramidkv", "kvpress_kvzap", "h2o_pyramid", "layer_table", "head_table", "partition"),
    *("partition_heads", "partition_heads_dense", "chain_of_partitions"),
}
assert set(CASES) >= SHARED | BY_LAYER
