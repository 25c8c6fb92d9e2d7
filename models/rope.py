"""Rotary position embeddings and their length scalings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.checks import flag, positive, whole
from pallas_kernels.values import one_of

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]

_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_YARN = ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor")
_SECTION = {"default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": _YARN, "llama3": _LLAMA3}
_ORIGINAL = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding of the half-split kind (RoFormer, arXiv 2104.09864).

    Attributes:
      kind: "default"; "linear" position interpolation (arXiv 2306.15595); "dynamic" NTK, whose base grows with the
        sequence; "yarn" (arXiv 2309.00071); "llama3" frequency bands (Llama 3.1).
      theta: the base.
      factor: how much longer than the original context.
      original_max: the original context, in tokens.
      low_freq_factor, high_freq_factor: llama3's band limits.
      beta_fast, beta_slow, truncate: yarn's band limits, in rotations over the original context.
      attention_factor: yarn's factor on cos and sin.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self):
        one_of("kind", self.kind, *_KINDS)
        flag("truncate", self.truncate)
        object.__setattr__(self, "original_max", whole("original_max", self.original_max))
        for name in ("theta", *_LLAMA3, "beta_fast", "beta_slow", "attention_factor"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not less than high_freq_factor={self.high_freq_factor}; "
                "they are the limits of a band"
            )
        if self.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"theta={self.theta} is not greater than 1, as yarn needs it")

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], max_position: int) -> "Rope":
        """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

        Where both sections stand, `rope_scaling` replaces the other whole, and the original context of "llama3" and
        "yarn" is that outside of the section, as in transformers.

        Raises:
          ValueError: a scaling that is not supported, or a value that its key cannot have.
        """
        section = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if not isinstance(section, Mapping):
            raise ValueError(f"the rotary section is {section!r}, not an object such as {{'rope_type': 'default'}}")
        if nested := [k for k, v in section.items() if isinstance(v, Mapping)]:
            raise ValueError(f"rotary sections of their own for {nested} are not supported; all layers share one")
        kind = section.get("rope_type", section.get("type", "default"))
        if kind not in _KINDS:
            raise ValueError(f"rotary scaling {kind!r} is not supported; supported are {_KINDS}")
        if any(x.get("partial_rotary_factor") not in (None, 1.0) for x in (raw, section)):
            raise ValueError("partial_rotary_factor != 1 is not supported for these architectures")
        theta = positive("rope_theta", section.get("rope_theta", raw.get("rope_theta", 10000.0)))
        wanted = () if kind == "yarn" else _SECTION[kind]
        if missing := [k for k in wanted if k not in section]:
            raise ValueError(f"rotary scaling {kind!r} needs {missing} in config.json; it has {sorted(section)}")
        fields: dict[str, Any] = {"kind": kind, "theta": theta, **{k: section[k] for k in wanted}}
        if kind == "dynamic":
            fields["original_max"] = max_position
        if kind in ("llama3", "yarn"):
            found = [x for x in (raw.get(_ORIGINAL), section.get(_ORIGINAL), max_position) if x is not None]
            fields["original_max"] = whole(_ORIGINAL, found[0])
        if kind == "yarn":
            factor = section.get("factor")
            factor = positive("factor", max_position / fields["original_max"] if factor is None else factor)
            fields["factor"] = factor
            fields["beta_fast"] = section.get("beta_fast") or 32.0
            fields["beta_slow"] = section.get("beta_slow") or 1.0
            fields["truncate"] = section.get("truncate", True) or False
            fields["attention_factor"] = _yarn_attention_factor(section, factor)
        return cls(**fields)

    @property
    def used(self) -> tuple[Any, ...]:
        """The values of the fields that this kind depends on."""
        names = ("kind", "theta", "attention_factor", *_SECTION[self.kind])
        original = () if self.kind in ("default", "linear") else (self.original_max,)
        return (*(getattr(self, n) for n in names), *original)

    def to_hugging_face(self) -> dict[str, Any]:
        """`rope_theta` and, if positions are scaled, `rope_scaling`, as transformers 4 and 5 read them."""
        section = {"rope_type": self.kind, **{k: getattr(self, k) for k in _SECTION[self.kind]}}
        if self.kind in ("llama3", "yarn"):
            section[_ORIGINAL] = self.original_max
        return {"rope_theta": self.theta} | ({} if self.kind == "default" else {"rope_scaling": section})

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians a position, "H/2" in float64. For "dynamic", those of sequences inside the original context."""
        exponent = np.arange(0, head_dim, 2) / head_dim
        base = self.theta**-exponent
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            wavelength = 2 * math.pi / base
            smooth = (self.original_max / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            smooth = np.clip(smooth, 0.0, 1.0)  # 0: slow bands, divided by the factor; 1: fast bands, kept
            return base * (smooth + (1 - smooth) / self.factor)
        if self.kind == "yarn":
            return base * self._yarn_ramp(head_dim)
        return base

    def _yarn_ramp(self, head_dim: int) -> np.ndarray:
        """1 for fast channels, 1 / factor for slow ones, linear in between."""

        def channel(rotations: float) -> float:
            return head_dim * math.log(self.original_max / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        slow = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 1e-3), 0.0, 1.0)
        return slow / self.factor + (1 - slow)

    def __call__(self, x: Float[Array, "B N T H"], pos: Int[Array, "B #N T"]) -> Float[Array, "B N T H"]:
        """Rotates `x` at positions `pos`. Negative positions (padding) give finite values that nobody reads.

        Angles are computed in float32 whatever the dtype of `x`: bfloat16 cannot tell position 256 from 257.
        """
        H = x.shape[-1]
        freq = jnp.asarray(self.frequencies(H), jnp.float32)[None]
        if self.kind == "dynamic":
            # The base grows with the longest position of the pass, for every sequence on its own.
            length = jnp.maximum(pos.max((1, 2)) + 1, self.original_max).astype(jnp.float32)
            growth = self.factor * length / self.original_max - (self.factor - 1.0)
            exponent = jnp.asarray(np.arange(0, H, 2) / H * (H / (H - 2)), jnp.float32)[None]
            freq = freq * growth[:, None] ** -exponent
        angle = pos[..., None].astype(jnp.float32) * freq[:, None, None]
        cos, sin = jnp.cos(angle) * self.attention_factor, jnp.sin(angle) * self.attention_factor
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return positive("attention_factor", scaling["attention_factor"])

    def mscale(scale: float, m: float = 1.0) -> float:
        return 0.1 * m * math.log(scale) + 1.0 if scale > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = (positive(k, scaling[k]) for k in ("mscale", "mscale_all_dim"))
        return mscale(factor, above) / mscale(factor, below)
    return mscale(factor)
