"""What kvjax asks of a language model and its tokenizer. Whatever has these members runs, as of `kvjax.models`."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PyTree


@runtime_checkable
class Config(Protocol):
    """Sizes of a language model.

    Where a configuration also has `window(layer)`, `embed_dim`, `max_position`, `learned_positions`,
    `additive_rotation`, `eos_ids` and others of `kvjax.models.ModelConfig`, these are used, too.

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
        self, layer: int, params: PyTree, x: Float[Array, "B T D"], cache: Any, attend: Callable[..., Any], /
    ) -> tuple[Float[Array, "B T D"], Any, Any]:
        """The residual stream and the cache after a layer, and what else `attend` returned.

        Args:
          layer: its number, or that of a layer that differs in parameters alone (`alike`).
          params: the layer's parameters.
          x: the residual stream before.
          cache: the layer's cache, which goes to `attend` with the tokens' queries, keys and values.
          attend: what stores these, attends, and returns the output "B N T H", the cache and what else it found.
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
    def bos_token_id(self) -> Any: ...

    def __call__(self, text: Any, /, **options: Any) -> Any:
        """What holds `input_ids`, the token ids of a text."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """The id of each token."""
        ...

    def decode(self, ids: Any, /, **options: Any) -> Any:
        """The text of token ids."""
        ...
