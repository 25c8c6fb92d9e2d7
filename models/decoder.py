"""Models as kvjax sees them: pure functions of their parameters."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.contract import Positions
from kvjax.models.config import DecoderConfig
from kvjax.models.families import family_of
from kvjax.models.parts import Attend
from kvjax.run.checks import check_model


@functools.cache
def _alike(config: DecoderConfig) -> tuple[int, ...]:
    kinds = [config.kind(i) for i in range(config.num_layers)]
    return tuple(map(kinds.index, kinds))


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

    @property
    def alike(self) -> tuple[int, ...]:
        """For every layer, the first one that differs from it in parameters alone: they share a program."""
        return _alike(self.config)

    def parts(self, params: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
        """The parameters that are of no layer, and those of every layer."""
        names = [f"{self._module.layers}_{i}" for i in range(self.config.num_layers)]
        return {n: x for n, x in params.items() if n not in names}, tuple(params[n] for n in names)

    def embed(self, params: PyTree, tokens: Int[Array, "B T"], pos: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The residual stream before the first layer, of tokens at positions, -1 for padding."""
        return self._module.apply({"params": params}, tokens, pos, method="embed")

    def block(
        self, layer: int, params: PyTree, x: Float[Array, "B T D"], cache: Any, attend: Attend | Positions
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """The residual stream and the cache after a layer, and what else `attend` returned.

        Args:
          layer: its number, or that of a layer that differs in parameters alone (`alike`).
          params: the layer's parameters.
          x: the residual stream before.
          cache: the layer's cache.
          attend: called with it and the queries, keys and values of the tokens; positions, where a layer has none.
        """
        return self._module.block().apply({"params": params}, x, cache, layer=layer, attend=attend)

    def head(self, params: PyTree, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the residual stream after the last layer."""
        return self._module.apply({"params": params}, x, method="head").astype(jnp.float32)

    def __call__(
        self, params: PyTree, tokens: Int[Array, "B T"], *, attend: Attend, pos: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits of texts that are read at once, without a cache, as in training.

        Args:
          params: the parameters.
          tokens: token ids.
          attend: called in every layer, with None for the cache.
          pos: positions of the tokens, -1 for padding; from 0 if None.

        Raises:
          ValueError: parameters of another model.
        """
        return self._whole(params, tokens, attend, pos, "__call__").astype(jnp.float32)

    def states(
        self, params: PyTree, tokens: Int[Array, "B T"], *, attend: Attend, pos: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """The residual stream after all layers and the last norm: the input of the output head."""
        return self._whole(params, tokens, attend, pos, "states")

    def _whole(self, params: PyTree, tokens: Array, attend: Attend, pos: Array | None, method: str) -> Array:
        check_model(self, params)
        pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape) if pos is None else pos
        return self._module.apply({"params": params}, tokens, pos, attend, method=method)

    def init(self, key: Array) -> PyTree:
        """Random parameters.

        Raises:
          ValueError: `key` is not one key.
        """
        kind, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
        typed = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
        if shape != () if typed else (kind, shape) != (jnp.uint32, (2,)):
            raise ValueError(f"key={key!r} is not one key; make it with jax.random.key(seed)")
        attend = lambda cache, q, k, v, **_: (q if v is None else q[..., : v.shape[-1]], cache, ())
        token = jnp.zeros((1, 1), jnp.int32)
        return self._module.init(key, token, token, attend)["params"]

    def split_axes(self, params: PyTree) -> list[int | None]:
        """For every leaf of the parameters the axis of heads or of feed-forward channels, which devices may share.

        A projection to them is split by its outputs, one from them by its inputs, so that what lies between is made
        and used where it is (arXiv 1909.08053). None is for the others: norms and embeddings.
        """
        del self
        return [_split_axis(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]

    @property
    def shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the parameters, without making any."""
        return jax.tree.map(lambda x: x, _abstract(self, jax.config.jax_enable_x64))  # pyrefly: ignore[missing-attribute]


@functools.lru_cache(maxsize=64)
def _abstract(model: LanguageModel, wide: bool) -> PyTree[jax.ShapeDtypeStruct]:
    del wide  # whether there is float64
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


_OUTPUTS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc", "fc_in", "fc1", "dense_h_to_4h", "w1", "w3"}
_INPUTS = {"o_proj", "out_proj", "down_proj", "c_proj", "dense", "fc_out", "fc2", "dense_4h_to_h", "w2"}


def _split_axis(path: Sequence[Any]) -> int | None:
    names = {getattr(entry, "key", None) for entry in path}
    if getattr(path[-1], "key", None) == "gate_up_proj":  # of experts
        return -2
    if names & {"qkv_proj", "gate_up_proj"}:
        return 0  # that of kv heads, or of groups
    if names & _OUTPUTS:
        return -1 if "bias" in names else -2
    return -1 if names & _INPUTS and "bias" not in names else None
