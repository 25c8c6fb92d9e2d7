"""Models as kvjax sees them: pure functions of their parameters."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.drivers.attention import Attend
from kvjax.drivers.requests import check_params
from kvjax.models.config import DecoderConfig
from kvjax.models.families import family_of
from kvjax.scoring.stats import LayerStats


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
            how["positions"] = positions
        logits, caches, stats = self._module.apply({"params": params}, tokens, layers, **how)
        return logits.astype(jnp.float32), caches, stats

    @functools.cached_property
    def alike(self) -> tuple[int, ...]:
        """For every layer, the first one that differs from it in parameters alone: they share a program."""
        kinds = [self.config.kind(i) for i in range(self.config.num_layers)]
        return tuple(map(kinds.index, kinds))

    def parts(self, params: PyTree[Any]) -> tuple[PyTree[Any], tuple[PyTree[Any], ...]]:
        """The parameters that are of no layer, and those of every layer."""
        names = [f"{self._module.layers}_{i}" for i in range(self.config.num_layers)]
        return {n: x for n, x in params.items() if n not in names}, tuple(params[n] for n in names)

    def embed(self, params: PyTree[Any], tokens: Int[Array, "B T"], pos: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The residual stream before the first layer, of tokens at positions, -1 for padding."""
        return self._module.apply({"params": params}, tokens, pos, method="embed")

    def block(
        self, layer: int, params: PyTree[Any], x: Float[Array, "B T D"], cache: Any, attend: Any
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """The residual stream and the cache after a layer, and what else `attend` returned.

        Args:
          layer: its number, or that of a layer that differs in parameters alone (`alike`).
          params: the layer's parameters.
          x: the residual stream before.
          cache: the layer's cache.
          attend: called with it and the queries, keys and values of the tokens.
        """
        return self._module.block().apply({"params": params}, x, cache, layer=layer, attend=attend)

    def head(self, params: PyTree[Any], x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the residual stream after the last layer."""
        return self._module.apply({"params": params}, x, method="head").astype(jnp.float32)

    def last_hidden(
        self,
        params: PyTree[Any],
        tokens: Int[Array, "B T"],
        *,
        attend: Attend,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """What logits are made of: the residual stream after all layers and the last norm, without a cache.

        Args:
          params: the parameters.
          tokens: token ids.
          attend: what attends in every layer (`kvjax.drivers.attention.without_cache`).
          positions: see `__call__`.

        Raises:
          ValueError: what `__call__` refuses, or a model that has no norm after its layers.
        """
        check_params(self, params)
        caches = (None,) * self.config.num_layers
        where = {} if positions is None else {"positions": positions}
        _, found = self._module.apply(
            {"params": params},
            tokens,
            caches,
            attend=attend,
            last_only=False,
            capture_intermediates=lambda module, method: module.path in _LAST_NORMS and method == "__call__",
            mutable="intermediates",
            **where,
        )
        if not (norms := found.get("intermediates", {})):
            raise ValueError(f"{type(self.config).__name__} has no norm after its layers whose output could be given")
        return jax.tree.leaves(norms)[0]

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

    def split_axes(self, params: PyTree[Any]) -> list[int | None]:
        """For every leaf of the parameters the axis of heads or of feed-forward channels, which devices may share.

        A projection to them is split by its outputs, one from them by its inputs, so that what lies between is made
        and used where it is (arXiv 1909.08053). None is for the others: norms, embeddings, and projections to queries,
        keys and values in one, whose outputs are in no order that could be split.
        """
        del self
        return [_split_axis(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]

    @property
    def shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the parameters, without making any."""
        return jax.tree.map(lambda x: x, _abstract(self, jax.config.jax_enable_x64))  # pyrefly: ignore[missing-attribute]


_LAST_NORMS = {("norm",), ("ln_f",), ("final_layer_norm",), ("norm_f",)}


@functools.lru_cache(maxsize=64)
def _abstract(model: LanguageModel, wide: bool) -> PyTree[jax.ShapeDtypeStruct]:
    del wide  # whether there is float64
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


_OUTPUTS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc", "fc_in", "fc1", "dense_h_to_4h", "w1", "w3"}
_INPUTS = {"o_proj", "out_proj", "down_proj", "c_proj", "dense", "fc_out", "fc2", "dense_4h_to_h", "w2"}


def _split_axis(path: Sequence[Any]) -> int | None:
    names = {getattr(entry, "key", None) for entry in path}
    if names & _OUTPUTS:
        return -1  # of a bias too
    return -2 if names & _INPUTS and "bias" not in names else None
