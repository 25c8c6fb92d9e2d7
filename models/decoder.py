"""Models as kvjax sees them: pure functions of their parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.drivers.attention import Attend
from kvjax.scoring.stats import LayerStats
from models.config import DecoderConfig
from models.families import family_of


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model as kvjax sees it: a pure function of its parameters, hashable and compared by its config.

    Attributes:
      config: sizes and switches.
    """

    config: DecoderConfig

    def __post_init__(self):
        if not isinstance(self.config, DecoderConfig):
            raise ValueError(
                f"config is a {type(self.config).__name__}, not a ModelConfig; models.load makes one of a checkpoint"
            )
        family_of(self.config)

    @property
    def _module(self) -> Any:
        return family_of(self.config).module(self.config)

    def __call__(
        self,
        params: PyTree[Any],
        tokens: Int[Array, "B T"],
        layers: tuple[Any, ...],
        *,
        attend: Attend,
        last_only: bool,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B _ V"], tuple[Any, ...], tuple[LayerStats, ...]]:
        """See `kvjax.drivers.requests.Model`.

        Raises:
          ValueError: parameters of another model, or no positions for one that has learned them.
        """
        check_params(self, params)
        how: dict[str, Any] = {"attend": attend, "last_only": last_only}
        if self.config.learned_positions:
            if positions is None:
                raise ValueError("this model adds learned positions to its embeddings; give positions= of the tokens")
            how["positions"] = positions
        logits, caches, stats = self._module.apply({"params": params}, tokens, layers, **how)
        return logits.astype(jnp.float32), caches, stats

    def init(self, key: Array) -> PyTree[Any]:
        """Random parameters.

        Raises:
          ValueError: `key` is not one key.
        """
        kind, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
        typed = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
        if shape != () if typed else (kind, shape) != (jnp.uint32, (2,)):
            raise ValueError(f"key={key!r} is not one key; make it with jax.random.key(seed)")
        attend = lambda cache, q, k, v, **_: (q, cache, LayerStats())
        token, caches = jnp.zeros((1, 1), jnp.int32), (None,) * self.config.num_layers
        where = {"positions": token} if self.config.learned_positions else {}
        variables = self._module.init(key, token, caches, attend=attend, last_only=True, **where)
        return variables["params"]

    @property
    def shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the parameters, without making any."""
        return jax.tree.map(lambda x: x, _abstract(self, jax.config.jax_enable_x64))  # pyrefly: ignore[missing-attribute]


@functools.lru_cache(maxsize=64)
def _abstract(model: LanguageModel, wide: bool) -> PyTree[jax.ShapeDtypeStruct]:
    del wide  # whether there is float64
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


@functools.lru_cache(maxsize=64)
def _shapes(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    return _named(model.shapes)


def _named(params: PyTree[Any]) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}


def check_params(model: LanguageModel, params: PyTree[Any]) -> None:
    """Refuses parameters of other names or shapes than the model's, some of which flax would pass over.

    Raises:
      ValueError: how many there are, and what the first is and should be.
    """
    here, wanted = _named(params), _shapes(model)
    wrong = [n for n in sorted({*here, *wanted}) if here.get(n) != wanted.get(n)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{len(wrong)} of {len(wanted)} parameters do not fit the model: {name} is {here.get(name, 'absent')}, but "
            f"the model wants {wanted.get(name, 'none')}; give the parameters that were loaded or made with this model"
        )
