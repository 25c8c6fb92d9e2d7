"""The pass of all decoders: embeddings, the layers in turn, logits."""

from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int

from kvjax.contract import Positions
from kvjax.models.parts import Attend, dense, embedded, embedding, product


class Decoder(nn.Module):
    """A whole decoder. Families name its parts as their checkpoints do, and say what a layer and the last norm are.

    Attributes:
      config: sizes and switches.
      words, layers, output: names of the table of tokens, of the layers and of the output head.
      output_bias: whether the output head has a bias.
    """

    config: Any
    words: ClassVar[str] = "embed_tokens"
    layers: ClassVar[str] = "layers"
    output: ClassVar[str] = "lm_head"
    output_bias: ClassVar[bool] = False

    @nn.nowrap
    def block(self, name: str | None = None) -> nn.Module:
        """A layer, called with the residual stream "B T D", a cache, `layer` and `attend`."""
        raise NotImplementedError

    @nn.nowrap
    def last_norm(self) -> nn.Module:
        """The norm after the last layer."""
        raise NotImplementedError

    def setup(self):
        """Makes the parts under the names of their parameters."""
        c = self.config
        self.table = embedding(self, self.words, c.vocab_size)
        self.blocks = [self.block(name=f"{self.layers}_{i}") for i in range(c.num_layers)]
        self.norm: Any = self.last_norm()
        if not c.tie_embeddings:
            self.projection = dense(c, c.vocab_size, self.output_bias, self.output)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The residual stream before the first layer; `positions` are for models that have learned some."""
        del positions
        return embedded(self.table, tokens)

    def states(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend) -> Float[Array, "B T D"]:
        """The residual stream after all layers and the last norm, of texts that are read at once, without a cache."""
        x, c, caches = self.embed(tokens, positions), self.config, dict[int | None, Any]()
        for i, block in enumerate(self.blocks):
            source = c.kv_source(i)
            attends = c.holds_kv(i) or source is not None
            x, caches[i], _ = block(x, caches.get(source), layer=i, attend=attend if attends else Positions(positions))
        return self.norm(x)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the residual stream after the last norm."""
        return product(x, self.table) if self.config.tie_embeddings else self.projection(x)

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the residual stream after the last layer."""
        return self.logits(self.norm(x))

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend
    ) -> Float[Array, "B T V"]:
        """Logits of texts that are read at once, without a cache."""
        return self.logits(self.states(tokens, positions, attend))
