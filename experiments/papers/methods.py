"""The five papers' methods as kvjax runs them: every policy with its paper's settings, by the name that tables use."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

from kvjax import Policy, Share, methods, shared_layers, when
from kvjax.contract import Layout
from kvjax.methods import variants
from kvjax.methods.variants import PROMPT, by_query_head
from kvjax.scores.attention import Faded

Budget = int | float


@dataclasses.dataclass(frozen=True)
class Method:
    """One of a paper's methods, as kvjax runs it.

    Attributes:
      title: as the paper names it.
      make: the policy of a budget (tokens if an int, a share of the prompt if a float), with the paper's settings.
      block: tokens of the blocks that the prompt is read in, None for the whole prompt at once.
      note: what the paper leaves open, and what is taken.
    """

    title: str
    make: Callable[[Budget], Policy]
    block: int | None = None
    note: str = ""


METHODS: Final[dict[str, dict[str, Method]]] = {}  # by the names that entries.toml has for them


def _full(title: str) -> Method:
    return Method(title, lambda _: methods.full())


def _sinks(title: str) -> Method:
    return Method(title, lambda b: methods.streaming_llm(b, sinks=4))


# --- Ada-KV. The paper ran a set for every query head: keys and values were copied to query heads before eviction. ---


def _pooled(budget: Budget, *, make: Any, **options: Any) -> Policy:
    return by_query_head(make(budget, window=32, kernel=7, **options))


def _over_query_heads(title: str, make: Any, note: str = "", **options: Any) -> Method:
    return Method(title, functools.partial(_pooled, make=make, **options), note=note)


_BETA: Final = "beta is not given: 20"
METHODS["ada-kv"] = {
    "full": _full("Full Cache"),
    "h2o": Method("H2O", methods.h2o, note="half heavy hitters, half recent, as H2O's paper has it; for kv heads"),
    "streaming_llm": _sinks("StreamingLLM"),
    "snapkv": _over_query_heads("SnapKV", methods.snapkv),
    "pyramidkv": _over_query_heads("Pyramid", methods.pyramidkv, _BETA),
    "ada_snapkv": _over_query_heads("Ada-SnapKV", methods.ada_snapkv, alpha=0.5),
    "ada_pyramid": _over_query_heads("Ada-Pyramid", methods.ada_pyramid, _BETA, alpha=0.5),
}

# --- AhaKV ---

METHODS["ahakv"] = {
    "full": _full("Full Cache"),
    "streaming_llm": _sinks("Sink"),
    "h2o": Method("H2O", lambda b: methods.h2o(b, recent=32)),
    "snapkv": Method("SnapKV", lambda b: methods.snapkv(b, window=32), note="pooling is not given: max, kernel 7"),
    "nacl": Method("NACL", methods.nacl, note="shares are not given: those of NaCl's Table 4"),
    "tova": Method("TOVA", methods.tova),
    "ahakv": Method("AhaKV", lambda b: methods.ahakv(b, recent=32), note="the pooling kernel is not given: 7"),
}
METHODS["ahakv-ablation"] = {
    "without_ra": Method("w/o RA", lambda b: variants.ahakv_without("recent", b, recent=32)),
    "without_sgs": Method("w/o SGS", lambda b: variants.ahakv_without("gain", b, recent=32)),
    "without_vpe": Method("w/o VPE", lambda b: variants.ahakv_without("prior", b, recent=32)),
    "ahakv": METHODS["ahakv"]["ahakv"],
}

# --- Keyformer ---


def _keyformer(budget: Budget, *, make: Any = methods.keyformer, recent: float = 0.3, **options: Any) -> Policy:
    """Keyformer with a recent window of a share of the budget; the text calls 20 to 30 % the best."""
    return make(budget, recent=Share(recent), **options)


def _new_positions(budget: Budget) -> Policy:
    """Keyformer whose tokens stand at their ranks in the cache."""
    return dataclasses.replace(methods.keyformer(budget), layout=Layout(positions="rank"))


def _damped(budget: Budget, *, damping: float) -> Policy:
    """Keyformer without noise and with temperature 1, which is H2O, where what rows add is damped."""
    return dataclasses.replace(methods.h2o(budget, recent=Share(0.2)), score=Faded(damping=damping))


def _noised(title: str, noise: str, note: str = "") -> Method:
    return Method(title, functools.partial(_keyformer, make=variants.keyformer_drawn, noise=noise), note=note)


METHODS["keyformer"] = {
    "full": _full("Full Attention"),
    "window": Method("Window Attention", methods.window),
    "h2o": Method("H2O", methods.h2o, note="half heavy hitters, half recent: not given"),
    "streaming_llm": _sinks("StreamingLLM"),
    "key_attention": Method("Key Attention", methods.key_attention),
    "keyformer": Method("Keyformer", _keyformer, note="recent window of 30 % of the cache"),
}
METHODS["keyformer-positions"] = {
    **{m: METHODS["keyformer"][m] for m in ("full", "window", "h2o", "streaming_llm")},
    "new_positions": Method("Keyformer (New Pos), Per-Layer", _new_positions),
    "keyformer": Method("Keyformer (Org Pos), Per-Layer", _keyformer),
    "shared": Method("Keyformer (Org Pos), Shared", lambda b: shared_layers(_keyformer(b))),
}
METHODS["keyformer-noises"] = {
    "full": METHODS["keyformer"]["full"],
    "gumbel": Method("Gumbel", _keyformer),
    "gaussian": _noised("Gaussian", "gaussian"),
    "constant": _noised("Constant", "constant", "changes no softmax (D-38)"),
    "none": Method("None", lambda b: methods.h2o(b, recent=Share(0.3))),
}
METHODS["keyformer-damped"] = {
    f"damping-{a}": Method(f"damped by {a}", functools.partial(_damped, damping=a)) for a in (0.8, 0.9, 0.95, 1.0)
}
METHODS["keyformer-recent"] = {
    f"recent-{r}": Method(f"recent ratio {r} %", functools.partial(_keyformer, recent=r / 100))
    for r in range(10, 100, 10)
}
METHODS["keyformer-tau"] = {
    **{f"tau-{t}": Method(f"tau {t}", functools.partial(_keyformer, tau=(t, t))) for t in (1.0, 1.5, 2.0, 5.0, 10.0)},
    "tau-1-2": Method("tau 1 to 2", _keyformer),
}

# --- NaCl ---


def _nacl(budget: Budget, **options: Any) -> Policy:
    """NaCl with other shares, and no proxy that stays, so that any share can be drawn at random."""
    return methods.nacl(budget, recent=0, **options)


METHODS["nacl"] = {
    "full": _full("Full cache"),
    "streaming_llm": _sinks("Attention Sink"),
    "h2o": METHODS["keyformer"]["h2o"],
    "tova": Method("MSRNN", methods.tova),
    "scissorhands": Method("Scissorhands", methods.scissorhands, note="history and drop are not given"),
    "nacl": Method("NaCl", methods.nacl, note="shares of Table 4"),
}
METHODS["nacl-ablation"] = {
    "nacl": METHODS["nacl"]["nacl"],
    "without_proxies": Method(
        "- Eviction w. Proxy Tokens",
        functools.partial(_nacl, random=Share(1.0)),
        note="all of the budget is drawn at random",
    ),
    "without_random": Method("- Random Eviction", lambda b: methods.nacl(b, random=0)),
    "uniform_sampling": Method("- Probability Sampling", lambda b: variants.nacl_drawn(b, by="uniform")),
    "without_global": Method("- Global Eviction", methods.nacl, block=1, note="evicts after every token that is read"),
    "without_headwise": Method("- Head-wise Eviction", variants.nacl_by_layer, note="one decision for a layer's heads"),
}
METHODS["nacl-swept"] = {
    **{
        f"proxies-{share}": Method(f"NaCl, {share} % proxies", functools.partial(_nacl, proxies=share / 100))
        for share in (1, 10, 30, 60, 100)
    },
    **{
        f"random-{share}": Method(f"NaCl, {share} % random", functools.partial(_nacl, random=Share(share / 100)))
        for share in (0, 10, 30, 50, 70, 90, 100)
    },
}

# --- RoCo. The text protects no token by its position, the released code the last 10, as kvjax does by default. ---


def _once(budget: Budget, *, make: Any, **options: Any) -> Policy:
    """A policy that evicts while the prompt is read, and keeps all that is generated."""
    return when(PROMPT, make(budget, **options))


def _mas_beside(budget: Budget, *, recent: Share) -> Policy:
    return dataclasses.replace(methods.mas(budget), recent=recent)


def _read_in_blocks(title: str, make: Any, block: int = 1, **options: Any) -> Method:
    return Method(title, functools.partial(_once, make=make, **options), block=block)


_POLICIES: Final[dict[str, tuple[str, Any, dict[str, Any]]]] = {
    "random": ("Random", methods.random, {}),
    "streaming_llm": ("StreamLLM", methods.streaming_llm, {"sinks": 4}),
    "scissorhands": ("ScissorHands", methods.aqas, {"recent": Share(0.5)}),
    "h2o": ("H2O", methods.h2o, {"recent": Share(0.5)}),
    "tova": ("TOVA", methods.tova, {}),
    "roco": ("RoCo", methods.roco, {"scope": Share(0.5)}),
}
METHODS["roco-full"] = {"full": _full("full cache")}
METHODS["roco"] = {
    **METHODS["roco-full"],
    **{name: _read_in_blocks(title, make, **options) for name, (title, make, options) in _POLICIES.items()},
}
METHODS["roco-generating"] = {
    **METHODS["roco-full"],
    **{
        name: Method(title, functools.partial(make, **options), note="the prompt is inside the budget")
        for name, (title, make, options) in _POLICIES.items()
    },
}
METHODS["roco-blocks"] = {
    f"block-{size}": _read_in_blocks(f"RoCo, blocks of {size}", methods.roco, size) for size in (1, 2, 4, 8, 16)
}
_SCOPES: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
METHODS["roco-scopes"] = {
    **{f"window-{s}": _read_in_blocks(f"local window of {s}", _mas_beside, recent=Share(s)) for s in _SCOPES},
    **{f"deviation-{s}": _read_in_blocks(f"largest deviation, {s}", methods.roco, scope=Share(s)) for s in _SCOPES},
}
