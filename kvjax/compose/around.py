"""Policies around another one, which they ask all that they do not answer themselves."""

import dataclasses
from typing import Any

from jaxtyping import Array, Int, Key, PyTree

from kvjax.codecs import Codec, RowCodec
from kvjax.contract import (
    AttentionInputs,
    Context,
    LayerInfo,
    LayerView,
    Layout,
    Observation,
    Phase,
    Policy,
    Prompts,
    Reads,
    Sizes,
    Stats,
)


class Around(Policy):
    """A policy that does as another one.

    Attributes:
      policy: that one.
    """

    policy: Policy

    @property
    def layout(self) -> Layout:
        return self.policy.layout

    @property
    def writes(self) -> tuple[str, ...]:
        return self.policy.writes

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return self.policy.observe(phase)

    def sizes(self, info: LayerInfo, lengths: Prompts) -> Sizes:
        return self.policy.sizes(info, lengths)

    def memory(self, info: LayerInfo) -> PyTree:
        return self.policy.memory(info)

    def init_params(self, info: LayerInfo, key: Key[Array, ""]) -> PyTree:
        return self.policy.init_params(info, key)

    def enter(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> LayerView:
        return self.policy.enter(kv, inputs, ctx)

    def reads(self, kv: LayerView, inputs: AttentionInputs, ctx: Context) -> Reads | None:
        return self.policy.reads(kv, inputs, ctx)

    def update(self, kv: LayerView, stats: Stats, ctx: Context) -> LayerView:
        return self.policy.update(kv, stats, ctx)

    def update_layers(
        self, layers: tuple[LayerView, ...], stats: tuple[Stats, ...], ctxs: tuple[Context, ...]
    ) -> tuple[LayerView, ...]:
        return self.policy.update_layers(layers, stats, ctxs)

    def reserve(self, kv: LayerView, ctx: Context) -> Int[Array, "B K"]:
        return self.policy.reserve(kv, ctx)


class Coded(Around):
    """A policy whose layers are stored in fewer bits (`coded`).

    Attributes:
      policy: what is evicted.
      codec: how what stays is stored.
    """

    codec: Codec

    def __post_init__(self):
        if any(p.layout.codec is not None for p in inside(self.policy)):
            raise ValueError("a policy inside has a codec already; give one codec")

    @property
    def joint(self) -> bool:  # pyrefly: ignore[bad-override]
        return self.policy.joint

    @property
    def layout(self) -> Layout:
        return dataclasses.replace(self.policy.layout, codec=self.codec)

    def at(self, layer: int, num_layers: int) -> Policy:
        """The same of that layer's policy."""
        return dataclasses.replace(self, policy=self.policy.at(layer, num_layers))


def coded(policy: Policy, codec: RowCodec | Codec) -> Policy:
    """The same policy, with keys and values stored in fewer bits.

    While a prompt is read, rows attend to exact keys and values, and the policy decides by them. What stays is coded
    once, and moves as it is. Generated tokens are coded when they are stored, before any row reads them.

    Args:
      policy: what to evict; `Policy()` keeps all.
      codec: of keys and values alike, or `Codec(keys, values)`.

    Raises:
      ValueError: a policy that has a codec. Runs are refused, before anything is traced, if the codec cannot code rows
        of the model's size, if layers hold latents, or if keys are coded and the policy drops some of their channels.
    """
    return Coded(policy, codec if isinstance(codec, Codec) else Codec(codec, codec))


def inside(x: object) -> list[Policy]:
    """A policy, or a tuple of policies, and those that they are made of."""
    if isinstance(x, tuple):
        return [p for y in x for p in inside(y)]
    if not isinstance(x, Policy):
        return []
    return [x, *inside(tuple(getattr(x, f.name) for f in dataclasses.fields(x)))]


def having(policy: Policy, field: str) -> list[Any]:
    """The policies inside of one that have a field."""
    return [p for p in inside(policy) if hasattr(p, field)]
