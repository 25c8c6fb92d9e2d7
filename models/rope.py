"""Rotary position embeddings and their length scalings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]

_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


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

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], max_position: int) -> "Rope":
        """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
        scaling = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in _KINDS:
            raise ValueError(f"rotary scaling {kind!r} is not supported; supported are {_KINDS}")
        if raw.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError("partial_rotary_factor != 1 is not supported for these architectures")
        if kind == "default":
            return cls(theta=theta)
        original = scaling.get("original_max_position_embeddings") or max_position
        factor = scaling.get("factor") or max_position / original
        fields: dict[str, Any] = {"kind": kind, "theta": theta, "factor": factor, "original_max": original}
        wanted = {"linear": ("factor",), "dynamic": ("factor",), "llama3": _LLAMA3}.get(kind, ())
        if missing := [k for k in wanted if k not in scaling]:
            raise ValueError(f"rotary scaling {kind!r} needs {missing} in config.json; it has {sorted(scaling)}")
        if kind == "dynamic":
            fields["original_max"] = max_position
        if kind == "llama3":
            fields |= {k: scaling[k] for k in ("low_freq_factor", "high_freq_factor")}
        if kind == "yarn":
            fields["beta_fast"] = scaling.get("beta_fast") or 32.0
            fields["beta_slow"] = scaling.get("beta_slow") or 1.0
            fields["truncate"] = scaling.get("truncate", True)
            fields["attention_factor"] = _yarn_attention_factor(scaling, factor)
        return cls(**fields)

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
        slow = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
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
        return scaling["attention_factor"]

    def mscale(scale: float, m: float = 1.0) -> float:
        return 0.1 * m * math.log(scale) + 1.0 if scale > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(factor, scaling["mscale"]) / mscale(factor, scaling["mscale_all_dim"])
    return mscale(factor)
