"""The one table of methods. Every law is tested for every row."""

import dataclasses
from collections.abc import Callable

import pytest

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
      exact: every head keeps exactly its budget (adaptive heads keep it on average, full caches everything).
      decodes: evicts while decoding.
    """

    name: str
    make: Callable[..., kvjax.Policy]
    recent: Callable[[int], int] = lambda budget: 0
    sinks: int = 0
    random: bool = False
    exact: bool = True
    decodes: bool = True

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


def _norm(kv, stats, ctx):
    del stats, ctx
    return -((kv.k**2).sum(-1))


def _from_fn(budget):
    return kvjax.from_fn(_norm, budget=budget, when=kvjax.every_step())


def _count_above(budget):
    score = kvjax.scores.Accumulated(kvjax.Observe(element="above"))
    return kvjax.Evict(score, budget, protect=kvjax.Protect(recent=2), when=kvjax.every_step())


def _tova_per_head(budget):
    return methods.tova(budget, head_mode="per_kv_head", sinks=1, protect_last=1)


def _pyramidkv(budget):
    return methods.pyramidkv(budget, beta=4, window_size=4, kernel_size=3)


def _ada_snapkv(budget):
    # With alpha = 0.5 two heads tie whenever their budgets are odd, and ties go to the lower index.
    return methods.ada_snapkv(budget, alpha=0.4, window_size=4, kernel_size=3)


def _snapkv(budget, **kwargs):
    return methods.snapkv(budget, window_size=4, kernel_size=3, **kwargs)


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
    Case("pyramidkv", _pyramidkv, recent=lambda b: 4, decodes=False),
    Case("ada_snapkv", _ada_snapkv, recent=lambda b: 4, exact=False, decodes=False),
    Case("h2o_every_4", _every4_h2o, recent=lambda b: b // 2),
    Case("tova_when_over_3", _over3_tova),
    Case("h2o_adaptive", _adaptive_h2o, recent=lambda b: 4, exact=False),
    Case("h2o_pyramid", _pyramid_h2o, recent=lambda b: 4),
    Case("snapkv_then_h2o", _snapkv_then_h2o, recent=lambda b: 4),
    Case("from_fn", _from_fn),
    Case("count_above", _count_above, recent=lambda b: 2),
)

every_method = pytest.mark.parametrize("case", CASES, ids=repr)
