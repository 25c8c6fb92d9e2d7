"""Rotary position embeddings and their length scalings."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.contract import Rotate
from kvjax.contract.checks import flag, one_of, positive, whole

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]

_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_YARN = ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor")
_LONGROPE = ("short_factor", "long_factor", "attention_factor")
_SECTION = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": _YARN,
    "llama3": _LLAMA3,
    "longrope": _LONGROPE,
    "proportional": ("factor", "partial_rotary_factor"),
}
_OF_ANY_LENGTH = ("default", "linear", "proportional")
_CONTEXT = ("llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_GROWTH = "llama_4_scaling_beta"


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary embedding (RoFormer, arXiv 2104.09864).

    Attributes:
      kind: "default"; "linear" position interpolation (arXiv 2306.15595); "dynamic" NTK, whose base grows with the
        sequence; "yarn" (arXiv 2309.00071); "llama3" frequency bands (Llama 3.1); "longrope", a factor for every
        pair of channels (arXiv 2402.13753); "proportional", the fast pairs of all channels alone (Gemma 4).
      theta: the base.
      factor: how much longer than the original context.
      original_max: the original context, in tokens.
      low_freq_factor, high_freq_factor: llama3's band limits.
      beta_fast, beta_slow, truncate: yarn's band limits, in rotations over the original context.
      attention_factor: yarn's and longrope's factor on cos and sin.
      short_factor, long_factor: longrope's, for sequences inside the original context and for longer ones.
      partial_rotary_factor: which part of all pairs turns, for "proportional".
      channels: how many of a head's channels turn, the first ones; all if None.
      interleaved: whether neighbours make the pairs that turn (GPT-J), or channels half of those apart.
      growth: queries at position p are multiplied by `1 + growth * log(1 + floor(p / original_max))` (Llama 4).
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    channels: int | None = None
    interleaved: bool = False
    growth: float = 0.0

    def __post_init__(self):
        one_of("kind", self.kind, *_KINDS)
        flag("truncate", self.truncate)
        flag("interleaved", self.interleaved)
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, _positives(name, getattr(self, name)))
        if self.channels is not None:
            object.__setattr__(self, "channels", whole("channels", self.channels, least=2))
            if self.channels % 2:
                raise ValueError(f"channels={self.channels} is odd; rotary embeddings turn pairs of channels")
        if self.kind == "longrope" and (not self.short_factor or len(self.short_factor) != len(self.long_factor)):
            raise ValueError(
                f"short_factor has {len(self.short_factor)} numbers and long_factor {len(self.long_factor)}; longrope "
                "needs one for every pair of channels in both"
            )
        object.__setattr__(self, "original_max", whole("original_max", self.original_max))
        for name in ("theta", *_LLAMA3, "beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor"):
            object.__setattr__(self, name, positive(name, getattr(self, name)))
        object.__setattr__(self, "growth", self.growth and positive("growth", self.growth))
        if self.growth and self.kind in ("dynamic", "longrope"):
            raise ValueError(
                f"growth={self.growth} beside rotary scaling {self.kind!r} is not supported; give growth=0"
            )
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not less than high_freq_factor={self.high_freq_factor}; "
                "they are the limits of a band"
            )
        if self.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"theta={self.theta} is not greater than 1, as yarn needs it")

    @classmethod
    def from_hugging_face(
        cls,
        raw: Mapping[str, Any],
        max_position: int,
        *,
        head_dim: int | None = None,
        partial: bool = False,
        grows: bool = False,
    ) -> "Rope":
        """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

        Where both sections stand, `rope_scaling` replaces the other whole, and the original context of "llama3",
        "yarn" and "longrope" is that outside of the section, as in transformers.

        Args:
          raw: the contents of a config.json.
          max_position: its longest position.
          head_dim: H, for what is a share of it.
          partial: whether the architecture reads `partial_rotary_factor`.
          grows: whether it has queries that grow with their position, and `llama_4_scaling_beta` to say by how much.

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
        shares = [x["partial_rotary_factor"] for x in (section, raw) if x.get("partial_rotary_factor") is not None]
        if shares and shares[0] != 1 and not partial and kind != "proportional":
            raise ValueError("partial_rotary_factor != 1 is not supported for these architectures")
        theta = positive("rope_theta", section.get("rope_theta", raw.get("rope_theta", 10000.0)))
        wanted = {"yarn": (), "longrope": _LONGROPE[:2], "proportional": ()}.get(kind, _SECTION[kind])
        if missing := [k for k in wanted if k not in section]:
            raise ValueError(f"rotary scaling {kind!r} needs {missing} in config.json; it has {sorted(section)}")
        fields: dict[str, Any] = {"kind": kind, "theta": theta, **{k: section[k] for k in wanted}}
        if kind == "dynamic":
            fields["original_max"] = max_position
        if kind == "proportional":
            fields |= {k: section[k] for k in _SECTION[kind] if section.get(k) is not None}
            head_dim = None
        if shares and shares[0] != 1 and head_dim is not None:
            fields["channels"] = int(head_dim * positive("partial_rotary_factor", shares[0]))
        if grows:
            if missing := [k for k in (_GROWTH, _ORIGINAL) if section.get(k) is None]:
                raise ValueError(f"queries grow with their position, but the rotary section lacks {missing}")
            fields["growth"] = positive(_GROWTH, section[_GROWTH])
        if kind in _CONTEXT or grows:
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
        if kind == "longrope":
            original, factor = fields["original_max"], section.get("factor")
            factor = positive("factor", max_position / original if factor is None else factor)
            default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            given = section.get("attention_factor")
            fields["attention_factor"] = default if given is None else positive("attention_factor", given)
        rope = cls(**fields)
        if kind == "longrope" and head_dim is not None and len(rope.short_factor) != (rope.channels or head_dim) // 2:
            raise ValueError(
                f"short_factor has {len(rope.short_factor)} numbers for {rope.channels or head_dim} turning channels; "
                "longrope needs one for every pair"
            )
        return rope

    @property
    def used(self) -> tuple[Any, ...]:
        """The values of the fields that this kind depends on."""
        names = ("kind", "theta", "attention_factor", "channels", "interleaved", "growth", *_SECTION[self.kind])
        original = () if self.kind in _OF_ANY_LENGTH and not self.growth else (self.original_max,)
        return (*(getattr(self, n) for n in names), *original)

    def to_hugging_face(self) -> dict[str, Any]:
        """`rope_theta` and, if positions are scaled, `rope_scaling`, as transformers 4 and 5 read them."""
        section = {"rope_type": self.kind, **{k: getattr(self, k) for k in _SECTION[self.kind]}}
        section = {k: list(x) if isinstance(x, tuple) else x for k, x in section.items()}
        if self.kind in _CONTEXT or self.growth:
            section[_ORIGINAL] = self.original_max
        if self.growth:
            section[_GROWTH] = self.growth
        scaled = self.kind != "default" or self.growth
        return {"rope_theta": self.theta} | ({"rope_scaling": section} if scaled else {})

    @property
    def additive(self) -> bool:
        """Whether turning twice is turning once by the sum: not where angles or scale depend on the length."""
        return self.kind not in ("dynamic", "longrope") and self.attention_factor == 1.0

    @property
    def reach(self) -> int:
        """The tokens that a scaling of the original context makes room for, 0 without one that says so."""
        return 0 if self.kind in _OF_ANY_LENGTH else int(self.factor * self.original_max)

    def turning(self, head_dim: int) -> int:
        """How many of a head's channels turn."""
        return head_dim if self.channels is None else self.channels

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians a position, one for every pair of channels, in float64.

        For "dynamic" and "longrope", those of sequences inside the original context.
        """
        head_dim = self.turning(head_dim)
        exponent = np.arange(0, head_dim, 2) / head_dim
        base = self.theta**-exponent
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "proportional":
            return np.where(np.arange(len(base)) < self.partial_rotary_factor * head_dim // 2, base / self.factor, 0.0)
        if self.kind == "llama3":
            wavelength = 2 * math.pi / base
            smooth = (self.original_max / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            smooth = np.clip(smooth, 0.0, 1.0)  # 0: slow bands, divided by the factor; 1: fast bands, kept
            return base * (smooth + (1 - smooth) / self.factor)
        if self.kind == "yarn":
            return base * self._yarn_ramp(head_dim)
        if self.kind == "longrope":
            return base / np.array(self.short_factor)
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

    def __call__(
        self, x: Float[Array, "B N T H"], pos: Int[Array, "B #N T"], *, least: Int[Array, "B"] | None = None
    ) -> Float[Array, "B N T H"]:
        """Rotates `x` at positions `pos`. Negative positions (padding) give finite values that nobody reads.

        Angles are computed in float32 whatever the dtype of `x`: bfloat16 cannot tell position 256 from 257. Scalings
        that depend on the length take it from the last position, or from `least`, if that is more.
        """
        return self._turned(x, *self._factors(pos, x.shape[-1], least))

    def queries(self, x: Float[Array, "B N T H"], pos: Int[Array, "B #N T"]) -> Float[Array, "B N T H"]:
        """Rotates queries, which may have a factor that grows with their position."""
        turned = self(x, pos)
        if not self.growth:
            return turned
        factor = 1 + self.growth * jnp.log1p((pos // self.original_max).clip(0).astype(jnp.float32))
        return turned * factor.astype(x.dtype)[..., None]

    def of_text(self, least: Int[Array, "B"]) -> Rotate:
        """The rotation in texts of at least so many tokens, of which the positions may be a part."""
        return functools.partial(self, least=least) if self.kind in ("dynamic", "longrope") else self

    def _factors(
        self, pos: Int[Array, "B #N T"], head_dim: int, least: Int[Array, "B"] | None = None
    ) -> tuple[Float[Array, "B #N T pairs"], Float[Array, "B #N T pairs"]]:
        """Cosines and sines that turn pairs of channels."""
        H = self.turning(head_dim)
        freq = jnp.asarray(self.frequencies(H), jnp.float32)[None]
        # The length is every sequence's own.
        length = jnp.maximum(pos.max((1, 2)) + 1, self.original_max)[:, None]
        length = length if least is None else jnp.maximum(length, least[:, None])
        if self.kind == "dynamic":
            growth = self.factor * length.astype(jnp.float32) / self.original_max - (self.factor - 1.0)
            exponent = jnp.asarray(np.arange(0, H, 2) / H * (H / (H - 2)), jnp.float32)[None]
            freq = freq * growth**-exponent
        if self.kind == "longrope":
            stretched = np.array(self.short_factor) / np.array(self.long_factor)
            freq = jnp.where(length > self.original_max, freq * jnp.asarray(stretched, jnp.float32)[None], freq)
        angle = pos[..., None].astype(jnp.float32) * freq[:, None, None]
        return jnp.cos(angle) * self.attention_factor, jnp.sin(angle) * self.attention_factor

    def _turned(
        self, x: Float[Array, "B N T H"], cos: Float[Array, "B #N T pairs"], sin: Float[Array, "B #N T pairs"]
    ) -> Float[Array, "B N T H"]:
        H = self.turning(x.shape[-1])
        turning, rest = x[..., :H].astype(jnp.float32), x[..., H:]
        a, b = (turning[..., ::2], turning[..., 1::2]) if self.interleaved else jnp.split(turning, 2, axis=-1)
        a, b = a * cos - b * sin, b * cos + a * sin
        turned = jnp.stack([a, b], axis=-1).reshape(turning.shape) if self.interleaved else jnp.concatenate([a, b], -1)
        return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1) if rest.shape[-1] else turned.astype(x.dtype)


def _positives(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name}={values!r} is not a list of numbers")
    return tuple(positive(name, x) for x in values)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return positive("attention_factor", scaling["attention_factor"])

    def mscale(scale: float, m: float = 1.0) -> float:
        return 0.1 * m * math.log(scale) + 1.0 if scale > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = (positive(k, scaling[k]) for k in ("mscale", "mscale_all_dim"))
        return mscale(factor, above) / mscale(factor, below)
    return mscale(factor)
