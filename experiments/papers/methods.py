"""The five papers' methods as kvjax runs them: every policy with its paper's settings, by the name that tables use.

They stand in `methods.toml`; what only papers' tables run is made here.
"""

import contextlib
import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

from jax import lax
from jaxtyping import Array, Float

from kvjax import Policy, Share, methods, shared_layers, when
from kvjax.contract import Layout, Slots
from kvjax.methods.released import easykv, papers
from kvjax.observe import Rows
from kvjax.scores.attention import Faded, ValuePrior
from kvjax.scores.softmax import EntropyScaled

Budget = int | float
T = TypeVar("T")


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

    def policy(self, budget: Budget, tokens: int) -> Policy:
        """The policy of a budget; if `whole`, a share is of `tokens`."""
        share = self.whole and isinstance(budget, float)
        return self.make(max(int(budget * tokens + 1e-9), 1) if share else budget)


# --- what kvjax.methods has not ---


def full(budget: Budget) -> Policy:
    """The full cache, whatever the budget."""
    del budget
    return methods.full()


def pooled(budget: Budget, *, of: Any, **options: Any) -> Policy:
    """A policy with Ada-KV's window and pooling, and a set for every query head."""
    return papers.by_query_head(of(budget, window=32, kernel=7, **options))


class LargestRows(ValuePrior):
    """AhaKV's score where every token sums the `num` largest that rows of the prompt give it (its Limitations)."""

    num: int = 32

    def _new(self, slots: Slots) -> Float[Array, "B K S"]:
        rows = super()._new(slots).swapaxes(2, 3)
        return lax.top_k(rows, min(self.num, rows.shape[-1]))[0].sum(-1)


def largest_rows(budget: Budget, *, recent: int) -> Policy:
    """AhaKV with the score of `LargestRows`."""
    rows = Rows(softmax=EntropyScaled(budget), summed=False)
    return dataclasses.replace(methods.ahakv(budget, recent=recent), score=LargestRows(rows, num=recent))


def ahakv_part(budget: Budget, *, without: Literal["gain", "recent", "prior"], recent: int) -> Policy:
    """AhaKV without a part of it."""
    policy = methods.ahakv(budget, recent=recent)
    if without == "prior":
        return papers.summed_by(policy, Faded)
    return papers.with_rows(policy, **{"softmax" if without == "gain" else "last": None})


def keyformer_noise(budget: Budget, *, recent: Share, noise: str) -> Policy:
    """Keyformer with other noise."""
    return papers.with_softmax(methods.keyformer(budget, recent=recent), noise=noise)


def nacl_uniform(budget: Budget) -> Policy:
    """NaCl that draws without its scores."""
    return papers.nacl_drawn(methods.nacl(budget), by="uniform")


def nacl_by_layer(budget: Budget) -> Policy:
    """NaCl with one decision for a layer's heads."""
    return papers.nacl_by_layer(methods.nacl(budget))


def keyformer_ranked(budget: Budget) -> Policy:
    """Keyformer whose tokens stand at their ranks in the cache."""
    return dataclasses.replace(methods.keyformer(budget), layout=Layout(positions="rank"))


def keyformer_shared(budget: Budget, *, recent: Share) -> Policy:
    """Keyformer with one score and one decision for all layers."""
    return shared_layers(methods.keyformer(budget, recent=recent))


def faded(budget: Budget, *, decay: float = 1.0, damping: float = 1.0) -> Policy:
    """Keyformer without noise and with temperature 1, which is H2O, whose sums fade."""
    return dataclasses.replace(methods.h2o(budget, recent=Share(0.2)), score=Faded(decay=decay, damping=damping))


def once(budget: Budget, *, of: Any, **options: Any) -> Policy:
    """A policy that evicts while the prompt is read, and keeps all that is generated."""
    return when(papers.PROMPT, of(budget, **options))


def easykv_read(budget: Budget, *, importance: easykv.Importance, stride: int) -> Policy:
    """EasyKV while a text is read in blocks of `stride`, with its rounding (D-14); all rows count (D-46)."""
    return easykv.easykv_encoding(importance, budget, stride=stride, exact=False)


def roco_by_deviation(budget: Budget, *, scope: float = 0.5) -> Policy:
    """RoCo by the paper's rule: the largest deviations stay, and no token by its position."""
    return dataclasses.replace(methods.roco(budget, scope=Share(scope)), recent=0)


def mas_beside_recent(budget: Budget, *, recent: Share) -> Policy:
    """Mean attention, beside a window of the last tokens."""
    return dataclasses.replace(methods.mas(budget), recent=recent)


# --- the table ---


def toml(path: pathlib.Path) -> dict[str, Any]:
    """What a file holds; ValueError with its name if it cannot be read."""
    with at(str(path)):
        return tomllib.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """Errors of what is read say where it stands."""
    try:
        yield
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"{where}: {e}") from e


def each(where: str, given: Mapping[str, Any], make: Callable[[str, Any], T]) -> dict[str, T]:
    """What is made of every name and its fields; errors say where these stand."""
    found = dict[str, T]()
    for name, fields in given.items():
        with at(f"{where}{name}"):
            found[name] = make(name, fields)
    return found


def read_methods(folder: pathlib.Path) -> dict[str, dict[str, Method]]:
    """Sets of methods, by name.

    Raises:
      ValueError: a method that cannot be read, with where it stands.
    """
    path = folder / "methods.toml"
    return {group: each(f"{path}, {group}.", several, _method) for group, several in toml(path).items()}


def _method(name: str, fields: dict[str, Any]) -> Method:
    options = {option: _value(option, x) for option, x in fields.pop("options", {}).items()}
    return Method(make=functools.partial(_function(fields.pop("make")), **options), **fields)


def _function(name: str) -> Any:
    """What makes policies: of this file, of `kvjax.methods` or of its `released.papers`."""
    return globals().get(name) or getattr(methods, name, None) or getattr(papers, name)


def _value(option: str, given: Any) -> Any:
    """An option's value: a function of its name, a share, or as it stands."""
    if option == "of":
        return _function(given)
    if isinstance(given, dict):
        return Share(**given)
    return tuple(given) if isinstance(given, list) else given


METHODS: Final = read_methods(pathlib.Path(__file__).parent)
