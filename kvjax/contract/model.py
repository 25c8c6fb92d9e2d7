"""What kvjax asks of a language model and its tokenizer. Whatever has these members runs, as of `kvjax.models`."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PyTree

from kvjax.contract.types import Rotate
from kvjax.contract.values import value
from kvjax.pallas_kernels.kinds import Amount, Size
from kvjax.pallas_kernels.logits import Logits
from kvjax.pallas_kernels.pytree import pytree


@runtime_checkable
class Config(Protocol):
    """Sizes of a language model.

    Where a configuration also has `window(layer)`, `embed_dim`, `max_position`, `learned_positions`,
    `additive_rotation`, `eos_ids` and others of `kvjax.models.ModelConfig`, these are used, too. Where some layers hold
    no keys and values, `holds_kv(layer)` says which do, and `own_state(layer, batch)` what the others hold. Layers may
    differ in what they store of a token, and values be channels of keys: `kv_shape(layer)` says so. A layer that holds
    none may read those of an earlier one: `kv_source(layer)` says which, or None.

    Attributes:
      vocab_size: V, tokens.
      num_layers: L.
      num_query_heads, num_kv_heads, head_dim: N, K and H, of every layer.
      dtype: of activations and the KV cache.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_query_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...


@value
class KVShape:
    """What a layer stores of a token.

    Attributes:
      num_kv_heads: K.
      head_dim: H, channels of a key.
      latent: how many of these, the last ones, are the value, too (multi-head latent attention, arXiv 2405.04434,
        Section 2.1); 0 where a value has H channels of its own.
    """

    num_kv_heads: Size
    head_dim: Size
    latent: Amount = 0

    def __post_init__(self) -> None:
        if self.latent > self.head_dim:
            raise ValueError(
                f"latent={self.latent} channels are more than head_dim={self.head_dim}; they are some of it"
            )


def kv_layers(config: Config) -> tuple[int, ...]:
    """The layers of a model that hold keys and values. Policies count these alone, from 0 on."""
    holds = getattr(config, "holds_kv", lambda layer: True)
    return tuple(i for i in range(config.num_layers) if holds(i))


def kv_sources(config: Config) -> dict[int, int]:
    """For every layer that reads the keys and values of an earlier one, the place of that among `kv_layers`."""
    source, held = getattr(config, "kv_source", lambda layer: None), kv_layers(config)
    found = {n: source(n) for n in range(config.num_layers)}
    return {n: held.index(of) for n, of in found.items() if of is not None}


def kv_shape(config: Config, layer: int) -> KVShape:
    """What a layer stores of a token: the same in all layers, where the configuration has no `kv_shape`."""
    usual = lambda layer: KVShape(config.num_kv_heads, config.head_dim)
    return getattr(config, "kv_shape", usual)(layer)


@runtime_checkable
class Attend(Protocol):
    """What a layer of a model calls: it stores keys and values, attends, observes and evicts."""

    def __call__(
        self,
        cache: Any,
        q: Float[Array, "B N T H"],
        k: Float[Array, "B K T H"],
        v: Float[Array, "B K T V"],
        /,
        *,
        layer: int,
        rotate: Rotate,
        out_proj: Float[Array, "N V D"] | None = None,
        hidden: Float[Array, "B T D"] | None = None,
        logits: Logits = Logits(),
    ) -> tuple[Float[Array, "B N T V"], Any, Any]:
        """The attention output, the cache afterwards, and what else was found.

        Args:
          cache: what the layer was given.
          q, k, v: of the new tokens, before rotation. Values have as many channels as keys, or are their last ones,
            which do not turn (`KVShape.latent`). A layer that reads an earlier one's gives None for keys and values.
          layer: what the layer was given.
          rotate: the rotary embedding, called with vectors "B K T H" and their positions; `lambda x, pos: x` for none.
          out_proj, hidden: the output projection and the layer's normalised input, for methods that look at them.
          logits: how logits follow from products, and the layer's sliding window.
        """
        ...


@pytree
class Positions:
    """What a layer that holds no keys and values is called with in place of `attend`.

    Attributes:
      pos: positions of the tokens, `EMPTY` for padding, which stands before others and changes no state.
    """

    pos: Int[Array, "B T"]


@runtime_checkable
class Model(Protocol):
    """A language model: pure functions of its parameters. It is hashable, since programs are compiled for it.

    Attributes:
      config: its sizes.
      alike: for every layer, the first one that differs from it in parameters alone: they share a program.
    """

    @property
    def config(self) -> Config: ...
    @property
    def alike(self) -> tuple[int, ...]: ...

    def parts(self, params: PyTree, /) -> tuple[PyTree, tuple[PyTree, ...]]:
        """The parameters that are of no layer, and those of every layer."""
        ...

    def embed(self, params: PyTree, tokens: Int[Array, "B T"], pos: Int[Array, "B T"], /) -> Float[Array, "B T D"]:
        """The residual stream before the first layer, of tokens at positions, -1 for padding."""
        ...

    def block(
        self, layer: int, params: PyTree, x: Float[Array, "B T D"], cache: Any, attend: Any, /
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """The residual stream and the cache after a layer, and what else `attend` returned.

        Args:
          layer: its number, or that of a layer that differs in parameters alone (`alike`).
          params: the layer's parameters.
          x: the residual stream before.
          cache: the layer's cache, which goes to `attend`.
          attend: called with the queries, keys and values of the tokens (`Attend`); `Positions` where there are none.
        """
        ...

    def head(self, params: PyTree, x: Float[Array, "B T D"], /) -> Float[Array, "B T V"]:
        """Logits of the residual stream after the last layer."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer of transformers, as `kvjax.models.load_tokenizer` returns.

    Attributes:
      bos_token_id: the token before texts, None for none.
    """

    @property
    def bos_token_id(self) -> int | None: ...

    def __call__(self, text: Any, /, **options: Any) -> Any:
        """What holds `input_ids`, the token ids of a text."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """The id of each token."""
        ...

    def decode(self, ids: Any, /, **options: Any) -> Any:
        """The text of token ids."""
        ...
