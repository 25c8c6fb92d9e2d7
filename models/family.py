"""A family of architectures: the config, the module and the names of one file."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from kvjax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a parameter, or a part of one, is stored.

    Attributes:
      name: of the tensor.
      shape: of the tensor.
      part: the indices of the part along the parameter's first axes, none for all of it.
      members: those that the part has of every group, along the parameter's second axis.
      start: the tensor's row where the part begins.
      flip: whether the tensor's last two axes stand the other way round.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int, ...] = ()
    members: slice | None = None
    start: int = 0
    flip: bool = False


_TEXT = "language_model."
_OWN_NAMES = {"scale": "weight", "gain": "scale"}  # of parameters here, and of their tensors
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclasses.dataclass(frozen=True)
class Family:
    """Architectures that one file implements.

    A parameter's tensor is called like its path: `layers_0/self_attn/o_proj/weight` is stored as
    `model.layers.0.self_attn.o_proj.weight`.

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
      joined: projections in one, in groups of which each has some rows of all, and the tensors that hold them one
        after another, or one that has this order itself: those to queries, keys and values ("K G+2 H D",
        `kvjax.models.parts.heads`), and those to the gate and up. A tensor that holds several is named as often.
      stacked: the submodule whose parameters hold those of a list's members along their first axis: `experts/w1`
        "E ..." is stored as E matrices, `experts.0.w1.weight` and so on, `norms/scale` "N H" as N vectors,
        `norms.0.weight` and so on.
      further: whether files may hold layers behind the last one, or `mtp`, which predict further ahead: not read.
      swapped: parameters of experts whose last two axes are stored the other way round.
      packed: whether experts may be stored in 4 bits (MXFP4).
      unread: prefixes of stored tensors, within layers, that a config makes no parameters of.
      float32: endings of stored tensors that are in float32 whatever the dtype of the others.
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
    joined: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: _JOINED)
    stacked: str | None = None
    further: bool = False
    swapped: tuple[str, ...] = ()
    packed: bool = False
    float32: tuple[str, ...] = ()
    unread: Callable[[Any], tuple[str, ...]] = lambda config: ()

    def tensors(self, path: tuple[str, ...], shape: tuple[int, ...]) -> list["Tensor"]:
        """Where a parameter of this shape is stored: as one tensor, or as several parts."""
        flip = (self.conv1d and path[-1] == "weight" and path[0] != self.head) or path[-1] in self.swapped
        *_, module, own = ("", *path)
        if module == self.stacked:
            leaf = (own,) if own == "scale" else (own, "weight")
            names = (self.stored_name((*path[:-1], str(i), *leaf)) for i in range(shape[0]))
            return [Tensor(name, shape[1:], (i,)) for i, name in enumerate(names)]
        if module not in self.joined:
            shape = (*shape[:-2], shape[-1], shape[-2]) if flip else shape
            return [Tensor(self.stored_name(path), shape, flip=flip)]
        names = self.joined[module]
        groups, every, width = shape[:3]
        cuts = itertools.pairwise((0, *range(every - len(names) + 1, every), every))
        found, rows = [], dict.fromkeys(names, 0)
        for name, cut in zip(names, cuts, strict=True):
            found.append((name, slice(*cut), rows[name]))
            rows[name] += groups * (cut[1] - cut[0]) * width
        whole = {name: (n, *shape[3:])[:: -1 if flip else 1] for name, n in rows.items()}
        stored = {name: self.stored_name((*path[:-2], name, own)) for name in names}
        return [Tensor(stored[n], whole[n], members=cut, start=start, flip=flip) for n, cut, start in found]

    def stored_name(self, path: tuple[str, ...]) -> str:
        """The name of a parameter's tensor in a checkpoint."""
        name, _, number = path[0].rpartition("_")
        parts = [f"{name}.{number}" if name == self.layers else path[0], *path[1:]]
        if parts[-1] in _OWN_NAMES:
            parts[-1] = _OWN_NAMES[parts[-1]]
        elif len(parts) == 1:
            parts.append("weight")
        return ".".join(parts if parts[0] == self.head else [self.prefix, *parts])

    def prefixed(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by their full names, where a part of the prefix is missing, as in checkpoints of decoders alone.

        Of a model of text and images, those of the text model, whose names have `language_model`.
        """
        if texts := {n: x for n, x in tensors.items() if _TEXT in n}:
            heads = {n: x for n, x in tensors.items() if n.startswith(f"{self.head}.")}
            tensors = {n.replace(_TEXT, "", 1): x for n, x in texts.items()} | heads
        parts = self.prefix.split(".")
        tails = (".".join([*parts[i:], ""]) for i in range(len(parts) + 1))
        tail = next(tail for tail in tails if any(name.startswith(tail) for name in tensors) or not tail)
        before = f"{self.prefix}.".removesuffix(tail)
        return {n if n.startswith(f"{self.head}.") else before + n: x for n, x in tensors.items()}
