"""A family of architectures: the config, the module and the names of one file."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from kvjax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a parameter, or a part of one, is stored.

    Attributes:
      name: of the tensor.
      part: the indices of the part along the parameter's first axes, none for all of it.
      shape: of the tensor.
      flip: whether its axes stand the other way round.
    """

    name: str
    part: tuple[int, ...]
    shape: tuple[int, ...]
    flip: bool


@dataclasses.dataclass(frozen=True)
class Family:
    """Architectures that one file implements.

    A parameter's tensor is called like its path: `layers_0/self_attn/q_proj/kernel` is stored as
    `model.layers.0.self_attn.q_proj.weight`.

    Attributes:
      architectures: what `architectures` of a config.json may name, each with its `model_type`.
      config: the sizes and switches.
      module: the decoder, a Flax module of the config, whose layers leave attention to an `attend` that they are given.
      read: the fields of `config` but `dtype`, from the contents of a config.json and its architecture.
      write: the contents of a config.json, `architectures` and `model_type` among them.
      prefix: of stored names, apart from the output head's. Checkpoints without it are read as well.
      layers: the list of layers in stored names; parameters have `layers_0`, `layers_1`, ...
      embedding, head: the parameter that is the table of tokens, and the submodule that is the output head.
      ignored: endings of stored tensors that are no parameters: buffers which older files hold.
      conv1d: whether projections are stored with their inputs first, apart from the output head.
      stacked: the submodule whose parameters hold those of a list's members along their first axis: `experts/w1`
        "E ..." is stored as E matrices, `experts.0.w1.weight` and so on, `norms/scale` "N H" as N vectors,
        `norms.0.weight` and so on.
    """

    architectures: Mapping[str, str]
    config: type[DecoderConfig]
    module: Callable[[Any], nn.Module]
    read: Callable[[Mapping[str, Any], str], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    prefix: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    conv1d: bool = False
    stacked: str | None = None

    def tensors(self, path: tuple[str, ...], shape: tuple[int, ...]) -> list["Tensor"]:
        """Where a parameter of this shape is stored: as one tensor, or as one for each of its first axis."""
        flip = path[-1] == "kernel" and (not self.conv1d or path[0] == self.head)
        if len(path) < 2 or path[-2] != self.stacked:
            return [Tensor(self.stored_name(path), (), shape[::-1] if flip else shape, flip)]
        own = (path[-1],) if path[-1] == "scale" else (path[-1], "kernel")
        names = (self.stored_name((*path[:-1], str(i), *own)) for i in range(shape[0]))
        return [Tensor(name, (i,), shape[:0:-1], True) for i, name in enumerate(names)]

    def stored_name(self, path: tuple[str, ...]) -> str:
        """The name of a parameter's tensor in a checkpoint."""
        name, _, number = path[0].rpartition("_")
        parts = [f"{name}.{number}" if name == self.layers else path[0], *path[1:]]
        if parts[-1] in ("kernel", "scale"):
            parts[-1] = "weight"
        elif len(parts) == 1:
            parts.append("weight")
        return ".".join(parts if parts[0] == self.head else [self.prefix, *parts])

    def prefixed(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by their full names, where a part of the prefix is missing, as in checkpoints of decoders alone."""
        parts = self.prefix.split(".")
        tails = (".".join([*parts[i:], ""]) for i in range(len(parts) + 1))
        tail = next(tail for tail in tails if any(name.startswith(tail) for name in tensors) or not tail)
        before = f"{self.prefix}.".removesuffix(tail)
        return {n if n.startswith(f"{self.head}.") else before + n: x for n, x in tensors.items()}
