"""What a family of architectures is: one file's config, module and names, in a record."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """Architectures that one file implements.

    A parameter's tensor is called like its path: `layers_0/self_attn/q_proj/kernel` is stored as
    `model.layers.0.self_attn.q_proj.weight`.

    Attributes:
      architectures: what `architectures` of a config.json may name, each with its `model_type`.
      config: the sizes and switches.
      module: the decoder, a Flax module of the config, called with tokens "B T", caches of all layers, `attend` and
        `last_only`, and returns logits, caches and measurements (see `kvjax.drivers.generation.Model`).
      read: the fields of `config` but `dtype`, from the contents of a config.json and its architecture.
      write: the contents of a config.json, `architectures` and `model_type` among them.
      prefix: of stored names, apart from the output head's. Checkpoints without it are read as well.
      layers: the list of layers in stored names; parameters have `layers_0`, `layers_1`, ...
      embedding, head: the parameter that is the table of tokens, and the submodule that is the output head.
      ignored: endings of stored tensors that are no parameters: buffers which older files hold.
      conv1d: whether projections are stored with their inputs first.
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

    def transposed(self, leaf: str) -> bool:
        """Whether a parameter of this last name is stored with its two axes exchanged."""
        return leaf == "kernel" and not self.conv1d
