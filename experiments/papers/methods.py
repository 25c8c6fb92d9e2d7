"""The five papers' methods as kvjax runs them: every policy with its paper's settings, by the name that tables use."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

from jax import lax
from jaxtyping import Array, Float

from kvjax import Policy, Share, methods, shared_layers, when
from kvjax.contract import Layout, Slots
from kvjax.methods import variants
from kvjax.methods.variants import PROMPT, by_query_head
from kvjax.observe import Rows
from kvjax.scores.attention import Faded, ValuePrior
from kvjax.scores.softmax import EntropyScaled

Budget = int | float


@dataclasses.dataclass(frozen=True)
class Method:
    """One of a paper's methods, as kvjax runs it.

    Attributes:
      title: as the paper names it.
      make: the policy of a budget (tokens if an int, a share of the prompt if a float), with the paper's settings.
      block: tokens of the blocks that the prompt is read in, None for the whole prompt at once.
      note: what the paper leaves open, and what is taken.
      whole: a share is of the longest prompt and all tokens to come.
    """

    title: str
    make: Callable[[Budget], Policy]
    block: int | None = None
    note: str = ""
    whole: bool = False


def _of(title: str, make: Any, note: str = "", *, block: int | None = None, **options: Any) -> Method:
    """A method that has a paper's options beside its budget."""
    return Method(title, functools.partial(make, **options) if options else make, block, note)


def _full(title: str) -> Method:
    return Method(title, lambda _: methods.full())


METHODS: Final[dict[str, dict[str, Method]]] = {}  # by the names that entries.toml has for them

# --- Ada-KV. The paper ran a set for every query head: keys and values were copied to query heads before eviction. ---


def _pooled(budget: Budget, *, of: Any, **options: Any) -> Policy:
    return by_query_head(of(budget, window=32, kernel=7, **options))


_BETA: Final = "beta is not given: 20"
METHODS["ada-kv"] = {
    "full": _full("Full Cache"),
    "h2o": _of("H2O", methods.h2o, "half heavy hitters, half recent, as H2O's paper has it; for kv heads"),
    "streaming_llm": _of("StreamingLLM", methods.streaming_llm, sinks=4),
    "snapkv": _of("SnapKV", _pooled, of=methods.snapkv),
    "pyramidkv": _of("Pyramid", _pooled, _BETA, of=methods.pyramidkv),
    "ada_snapkv": _of("Ada-SnapKV", _pooled, of=methods.ada_snapkv, alpha=0.5),
    "ada_pyramid": _of("Ada-Pyramid", _pooled, _BETA, of=methods.ada_pyramid, alpha=0.5),
}

# --- AhaKV ---

METHODS["ahakv"] = {
    "full": _full("Full Cache"),
    "streaming_llm": _of("Sink", methods.streaming_llm, sinks=4),
    "h2o": _of("H2O", methods.h2o, recent=32),
    "snapkv": _of("SnapKV", methods.snapkv, "pooling is not given: max, kernel 7", window=32),
    "nacl": _of("NACL", methods.nacl, "shares are not given: those of NaCl's Table 4"),
    "tova": _of("TOVA", methods.tova),
    "ahakv": _of("AhaKV", methods.ahakv, "the pooling kernel is not given: 7", recent=32),
}


class LargestRows(ValuePrior):
    """AhaKV's score where every token sums the `num` largest that rows of the prompt give it (its Limitations)."""

    num: int = 32

    def _new(self, slots: Slots) -> Float[Array, "B K S"]:
        rows = super()._new(slots).swapaxes(2, 3)
        return lax.top_k(rows, min(self.num, rows.shape[-1]))[0].sum(-1)


def _largest_rows(budget: Budget, *, recent: int) -> Policy:
    rows = Rows(softmax=EntropyScaled(budget), summed=False)
    return dataclasses.replace(methods.ahakv(budget, recent=recent), score=LargestRows(rows, num=recent))


METHODS["ahakv-rows"] = {"largest_rows": _of("AhaKV, each token's 32 largest rows", _largest_rows, recent=32)}
METHODS["ahakv-ablation"] = {
    "without_ra": Method("w/o RA", lambda b: variants.ahakv_without("recent", b, recent=32)),
    "without_sgs": Method("w/o SGS", lambda b: variants.ahakv_without("gain", b, recent=32)),
    "without_vpe": Method("w/o VPE", lambda b: variants.ahakv_without("prior", b, recent=32)),
    "ahakv": METHODS["ahakv"]["ahakv"],
}

# --- Keyformer ---


def _keyformer(budget: Budget, *, of: Any = methods.keyformer, recent: float = 0.3, **options: Any) -> Policy:
    """Keyformer with a recent window of a share of the budget; the text calls 20 to 30 % the best."""
    return of(budget, recent=Share(recent), **options)


def _faded(budget: Budget, *, decay: float = 1.0, damping: float = 1.0) -> Policy:
    """Keyformer without noise and with temperature 1, which is H2O, whose sums fade."""
    return dataclasses.replace(methods.h2o(budget, recent=Share(0.2)), score=Faded(decay=decay, damping=damping))


METHODS["keyformer"] = {
    "full": _full("Full Attention"),
    "window": _of("Window Attention", methods.window),
    "h2o": _of("H2O", methods.h2o, "half heavy hitters, half recent: not given"),
    "streaming_llm": _of("StreamingLLM", methods.streaming_llm, sinks=4),
    "key_attention": _of("Key Attention", methods.key_attention),
    "keyformer": _of("Keyformer", _keyformer, "recent window of 30 % of the cache"),
}
METHODS["keyformer-positions"] = {
    **{m: METHODS["keyformer"][m] for m in ("full", "window", "h2o", "streaming_llm")},
    "new_positions": Method(  # tokens stand at their ranks in the cache
        "Keyformer (New Pos), Per-Layer",
        lambda b: dataclasses.replace(methods.keyformer(b), layout=Layout(positions="rank")),
    ),
    "keyformer": _of("Keyformer (Org Pos), Per-Layer", _keyformer),
    "shared": Method("Keyformer (Org Pos), Shared", lambda b: shared_layers(_keyformer(b))),
}
METHODS["keyformer-noises"] = {
    "full": METHODS["keyformer"]["full"],
    "gumbel": _of("Gumbel", _keyformer),
    "gaussian": _of("Gaussian", _keyformer, of=variants.keyformer_drawn, noise="gaussian"),
    "constant": _of("Constant", _keyformer, "changes no softmax (D-38)", of=variants.keyformer_drawn, noise="constant"),
    "none": _of("None", _keyformer, "the temperatures of the others", of=variants.keyformer_drawn, noise="none"),
}
_FACTORS: Final = (0.8, 0.9, 0.95, 1.0)
METHODS["keyformer-damped"] = {
    **{f"rows-{a}": _of(f"later rows by {a}", _faded, damping=a) for a in _FACTORS},
    **{f"score-{a}": _of(f"sum by {a}", _faded, decay=a) for a in _FACTORS[:-1]},
}
METHODS["keyformer-recent"] = {
    f"recent-{r}": _of(f"recent ratio {r} %", _keyformer, recent=r / 100) for r in range(10, 100, 10)
}
METHODS["keyformer-tau"] = {
    **{f"tau-{t}": _of(f"tau {t}", _keyformer, tau=(t, t)) for t in (1.0, 1.5, 2.0, 5.0, 10.0)},
    "tau-1-2": _of("tau 1 to 2", _keyformer),
}

# --- NaCl ---


def _nacl(budget: Budget, **options: Any) -> Policy:
    """NaCl with other shares, and no proxy that stays, so that any share can be drawn at random."""
    return methods.nacl(budget, recent=0, **options)


METHODS["nacl"] = {
    "full": _full("Full cache"),
    "streaming_llm": _of("Attention Sink", methods.streaming_llm, sinks=4),
    "h2o": METHODS["keyformer"]["h2o"],
    "tova": _of("MSRNN", methods.tova),
    "scissorhands": _of("Scissorhands", methods.scissorhands, "history and drop are not given"),
    "nacl": _of("NaCl", methods.nacl, "shares of Table 4"),
}
METHODS["nacl-ablation"] = {
    "nacl": METHODS["nacl"]["nacl"],
    "without_proxies": _of(
        "- Eviction w. Proxy Tokens", _nacl, "all of the budget is drawn at random", random=Share(1.0)
    ),
    "without_random": _of("- Random Eviction", methods.nacl, random=0),
    "uniform_sampling": _of("- Probability Sampling", variants.nacl_drawn, by="uniform"),
    "without_global": _of("- Global Eviction", methods.nacl, "evicts after every token that is read", block=1),
    "without_headwise": _of("- Head-wise Eviction", variants.nacl_by_layer, "one decision for a layer's heads"),
}
METHODS["nacl-blocks"] = {
    "full": METHODS["nacl"]["full"],
    "block-1": _of("NaCl, evicting after every token that is read", methods.nacl, block=1),
    "once": _of("NaCl, evicting once", methods.nacl),
}
METHODS["nacl-swept"] = {
    **{f"proxies-{s}": _of(f"NaCl, {s} % proxies", _nacl, proxies=s / 100) for s in (1, 10, 30, 60, 100)},
    **{f"random-{s}": _of(f"NaCl, {s} % random", _nacl, random=Share(s / 100)) for s in (0, 10, 30, 50, 70, 90, 100)},
}

# --- RoCo. The text protects no token by its position (D-12); the released code the last 10, as kvjax by default. ---


def _once(budget: Budget, *, of: Any, **options: Any) -> Policy:
    """A policy that evicts while the prompt is read, and keeps all that is generated."""
    return when(PROMPT, of(budget, **options))


def _roco(budget: Budget, *, scope: float = 0.5) -> Policy:
    """RoCo by the paper's rule: the largest deviations stay, and no token by its position."""
    return dataclasses.replace(methods.roco(budget, scope=Share(scope)), recent=0)


def _mas_beside(budget: Budget, *, recent: Share) -> Policy:
    return dataclasses.replace(methods.mas(budget), recent=recent)


_POLICIES: Final[dict[str, tuple[str, Any, dict[str, Any]]]] = {
    "random": ("Random", methods.random, {}),
    "streaming_llm": ("StreamLLM", methods.streaming_llm, {"sinks": 4}),
    "scissorhands": ("ScissorHands", methods.aqas, {"recent": Share(0.5)}),
    "h2o": ("H2O", methods.h2o, {"recent": Share(0.5)}),
    "tova": ("TOVA", methods.tova, {}),
    "roco": ("RoCo", _roco, {}),
    "roco_recent": ("RoCo, and the last 10 (kvjax's default)", methods.roco, {}),
}
_INSIDE: Final = "the prompt is inside the budget"
_SCOPES: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
METHODS["roco-full"] = {"full": _full("full cache")}
METHODS["roco"] = METHODS["roco-full"] | {
    name: _of(title, _once, block=1, of=make, **options) for name, (title, make, options) in _POLICIES.items()
}
METHODS["roco-generating"] = METHODS["roco-full"] | {
    name: _of(title, make, _INSIDE, **options) for name, (title, make, options) in _POLICIES.items()
}
METHODS["roco-blocks"] = {
    f"{name}-{size}": _of(f"{title}, blocks of {size}", _once, block=size, of=make)
    for name, title, make in (("block", "RoCo", _roco), ("recent-block", "RoCo, and the last 10", methods.roco))
    for size in (1, 2, 4, 8, 16)
}
METHODS["roco-response"] = {
    name: dataclasses.replace(METHODS["roco-generating"][name], whole=True) for name in ("full", "roco", "roco_recent")
}
METHODS["roco-scopes"] = {
    **{f"window-{s}": _of(f"local window of {s}", _once, block=1, of=_mas_beside, recent=Share(s)) for s in _SCOPES},
    **{f"deviation-{s}": _of(f"largest deviation, {s}", _once, block=1, of=_roco, scope=s) for s in _SCOPES},
}
