"""What all decoders do: vectors of tokens, the layers in turn, logits. Layers of one kind share a program."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache.context import LayerRead
from kvjax.drivers.attention import Attend
from kvjax.models.parts import dense, embedded, embedding
from kvjax.pallas_kernels.loops import zeros_after
from kvjax.scoring.stats import LayerStats

_LONGEST_PERIOD = 8  # layers after which kinds may repeat


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
        self.norm = self.last_norm()
        if not c.tie_embeddings:
            self.projection = dense(c, c.vocab_size, self.output_bias, self.output)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"] | None) -> Float[Array, "B T D"]:
        """The residual stream before the first layer; `positions` are for models that have learned some."""
        del positions
        return embedded(self.table, tokens)

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of the residual stream after the last layer."""
        x = self.norm(x)
        return x @ self.table.T if self.config.tie_embeddings else self.projection(x)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        caches: tuple[Any, ...],
        *,
        attend: Attend,
        last_only: bool,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B _ V"], tuple[Any, ...], tuple[LayerStats, ...]]:
        """Logits, caches and measurements of all layers; `last_only` skips all logits but the last column's."""
        x, caches, stats = decoded(self.blocks, self.embed(tokens, positions), caches, attend)
        return self.head(x[:, -1:] if last_only else x), caches, stats


class _Unlike(Exception):
    """The residual stream has another dtype after a layer than before it, as under parameters of another dtype."""


def decoded(
    blocks: Sequence[nn.Module], x: Float[Array, "B T D"], layers: tuple[Any, ...], attend: Attend
) -> tuple[Float[Array, "B T D"], tuple[Any, ...], tuple[LayerStats, ...]]:
    """The residual stream, caches and measurements after all layers.

    Where `attend` allows it (`kvjax.drivers.layers.LayerSteps.shares`), layers of one kind become one scan, so that
    compilation does not grow with depth. Every iteration copies the parameters of its layer, once in a pass. They are
    not stored as one array over layers: decoding reads them for every token, and would copy them each time.

    Args:
      blocks: the layers, whose `config` says which are of one kind (`DecoderConfig.kind`).
      x: the residual stream before.
      layers: a cache for each.
      attend: what each calls with its queries, keys and values.
    """
    done: list[tuple[Any, LayerStats]] = []
    for start, period, times in _runs(blocks, layers, attend):
        if times > 1:
            try:
                x, found = _repeated(blocks, x, layers, attend, start, period, times)
                done += found
                continue
            except (LayerRead, _Unlike, jax.errors.JAXTypeError):  # it needs values, in a prefill outside of jit
                pass
        for i in range(start, start + period * times):
            x, cache, measured = blocks[i](x, layers[i], layer=i, attend=attend)
            done.append((cache, measured))
    return x, tuple(cache for cache, _ in done), tuple(measured for _, measured in done)


def _repeated(
    blocks: Sequence[nn.Module], x: Array, layers: tuple[Any, ...], attend: Any, start: int, period: int, times: int
) -> tuple[Array, list[tuple[Any, LayerStats]]]:
    """Layers from `start` on, of which those `period` apart are of one kind, `times` times."""
    run = range(start, start + period)
    apply = [_pure(blocks[i]) for i in run]
    params = [[blocks[i + period * t].variables["params"] for t in range(times)] for i in run]
    caches = [jax.tree.map(lambda *each: jnp.stack(each), *layers[i : i + period * times : period]) for i in run]

    def step(x: Array, t: Array, before: list[Any]) -> tuple[Array, list[tuple[Any, LayerStats]]]:
        found = []
        for i, one, each, cache in zip(run, apply, params, before, strict=True):
            here = lax.switch(t, [lambda p=p: p for p in each])
            x, cache, measured = one(here, x, cache, layer=i, attend=attend.at(jnp.int32(i) + period * t))
            found.append((cache, measured))
        if jax.typeof(x) != before_all:
            raise _Unlike
        return x, found

    def stored(carry: tuple[Array, Any], at: tuple[Array, list[Any]]) -> tuple[tuple[Array, Any], None]:
        (x, kept), (t, _) = carry, at
        x, found = step(x, *at)
        return (x, jax.tree.map(lambda all_, y: lax.dynamic_update_index_in_dim(all_, y, t, 0), kept, found)), None

    before_all, first = jax.typeof(x), jax.tree.map(lambda y: y[0], caches)
    shapes = jax.eval_shape(step, x, jnp.int32(0), first)[1]
    # Stacked by hand: a scan's own stack starts from zeros, and XLA would make those of all scans before the first one.
    start = jax.tree.map(lambda y: zeros_after((times, *y.shape), y.dtype, x), shapes)
    (x, kept), _ = lax.scan(stored, (x, start), (jnp.arange(times, dtype=jnp.int32), caches))
    return x, [jax.tree.map(lambda y, t=t: y[t], each) for t in range(times) for each in kept]


def _pure(block: nn.Module) -> Callable[..., Any]:
    """A block as a function of its parameters."""
    alone = block.clone(parent=None, name=None)
    return lambda params, *arguments, **options: alone.apply({"params": params}, *arguments, **options)


def _runs(blocks: Sequence[nn.Module], layers: tuple[Any, ...], attend: Any) -> list[tuple[int, int, int]]:
    """The runs of layers that are programs of their own: see `runs`."""
    if not getattr(attend, "shares", False) or blocks[0].is_initializing():
        return [(0, len(blocks), 1)]

    def kind(i: int) -> Hashable:
        leaves, tree = jax.tree.flatten((blocks[i].variables["params"], layers[i]))
        return attend.kind(i), blocks[i].config.kind(i), tree, tuple((x.shape, x.dtype) for x in leaves)

    here = range(len(blocks))
    return runs([kind(i) for i in here], [attend.together(i) for i in here])


def runs(kinds: Sequence[Hashable], together: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first layer, period, times) of runs in which kinds repeat; `times` is 1 where nothing does.

    Args:
      kinds: of all layers.
      together: how many layers may share a program with each.
    """
    found, start = [], 0
    while start < len(kinds):
        periods = range(1, min(_LONGEST_PERIOD, len(kinds) - start) + 1)
        often = [(_times(kinds, start, p), p) for p in periods]
        times, period = max(often, key=lambda run: run[0] * run[1] if run[0] > 1 else 2 - run[1])
        times = max(1, min(times, *(together[i] // period for i in range(start, start + period))))
        found.append((start, period, times))
        start += period * times
    return found


def _times(kinds: Sequence[Hashable], start: int, period: int) -> int:
    """How often a run of `period` kinds stands in a row from `start` on."""
    stop = start + period
    while kinds[stop : stop + period] == kinds[start : start + period]:
        stop += period
    return (stop - start) // period
