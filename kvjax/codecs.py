"""Fewer bits for stored keys and values: a codec is part of a policy's `Layout`.

A row, the key or the value of one token, is coded by itself, so that tokens come and go without a change to others.
Rows are written once, when a prompt has been read or a token is decoded; evicting and compacting move their codes.
"""

import functools
import math
from typing import Final, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from kvjax.contract import Amount, Size, Value

SCALE: Final = jnp.bfloat16  # of scales: it holds what any model's numbers are, and 16 bits a row are few


class RowCodec(Value):
    """How the numbers of a row are stored. Each member is of rows "... H", and of their parts "... n".

    Rows are read without being decoded: a query is brought into the codec's space (`into`), the products with codes get
    the rows' scales, and a weighted sum of codes is brought back (`back`).
    """

    def check(self, width: Size) -> None:
        """Refuses rows of so many numbers, if it cannot code them."""

    def encode(self, x: Float[Array, "*rows H"]) -> tuple[Array, ...]:
        """The parts that are stored of rows; of the first, the last axis alone differs from the rows'."""
        raise NotImplementedError

    def numbers(self, parts: tuple[Array, ...]) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"] | None]:
        """Codes as numbers in the codec's space, and the rows' scales, None for 1."""
        raise NotImplementedError

    def into(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Rows in the codec's space, where products are those of the rows themselves."""
        return x

    def back(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """The inverse of `into`."""
        return x

    def decode(self, parts: tuple[Array, ...]) -> Float[Array, "*rows H"]:
        """Rows, float32."""
        x, scale = self.numbers(parts)
        return self.back(x if scale is None else x * scale[..., None])


class Float8(RowCodec):
    """Numbers of 8 bits, 4 of them the exponent and 3 the mantissa (e4m3); beyond 448 they are cut."""

    def encode(self, x: Float[Array, "*rows H"]) -> tuple[Array, ...]:
        """One byte a number."""
        most = float(jnp.finfo(jnp.float8_e4m3fn).max)
        return (jnp.clip(x.astype(jnp.float32), -most, most).astype(jnp.float8_e4m3fn),)

    def numbers(self, parts: tuple[Array, ...]) -> tuple[Float[Array, "*rows H"], None]:
        """The numbers themselves."""
        return parts[0].astype(jnp.float32), None


class Int8(RowCodec):
    """Whole numbers from -127 to 127, and a scale for each row, of 16 bits."""

    def encode(self, x: Float[Array, "*rows H"]) -> tuple[Array, ...]:
        """One byte a number, and the scale."""
        x = x.astype(jnp.float32)
        scale = (jnp.abs(x).max(-1, keepdims=True) / 127).astype(SCALE)
        steps = jnp.round(x / jnp.where(scale > 0, scale, 1).astype(jnp.float32))
        return jnp.clip(steps, -127, 127).astype(jnp.int8), scale

    def numbers(self, parts: tuple[Array, ...]) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
        """Steps, and their sizes."""
        return parts[0].astype(jnp.float32), parts[1][..., 0].astype(jnp.float32)


class Uniform(RowCodec):
    """Equal steps from the least to the largest number of each group of channels (values of KIVI, arXiv 2402.02750).

    A group has a step and a least number, of 16 bits each.

    Attributes:
      bits: of a number.
      group: channels that share a step.
    """

    bits: Literal[2, 4] = 4
    group: Size = 32

    def check(self, width: Size) -> None:
        """Refuses rows that groups do not divide."""
        if width % self.group or self.group * self.bits % 8:
            raise ValueError(
                f"Uniform has groups of {self.group} channels of {self.bits} bits, but the model's heads have {width}; "
                "give a group that divides them, and fills whole bytes"
            )

    def encode(self, x: Float[Array, "*rows H"]) -> tuple[Array, ...]:
        """Packed numbers of steps; steps and least numbers of the groups."""
        x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.group)
        least, most = x.min(-1), x.max(-1)
        least, step = least.astype(SCALE), ((most - least) / (2**self.bits - 1)).astype(SCALE)
        wide = jnp.where(step > 0, step, 1).astype(jnp.float32)[..., None]
        steps = jnp.clip(jnp.round((x - least.astype(jnp.float32)[..., None]) / wide), 0, 2**self.bits - 1)
        return *_packed(steps.astype(jnp.uint8).reshape(*x.shape[:-2], -1), self.bits), step, least

    def numbers(self, parts: tuple[Array, ...]) -> tuple[Float[Array, "*rows H"], None]:
        """The rows."""
        codes, step, least = _unpacked(parts[:-2], self.bits), *(x.astype(jnp.float32)[..., None] for x in parts[-2:])
        steps = codes.astype(jnp.float32).reshape(*codes.shape[:-1], -1, self.group)
        return (least + steps * step).reshape(codes.shape), None


class TurboQuant(RowCodec):
    r"""Turned rows, whose numbers go to the nearest of `2^bits` centroids (TurboQuant, arXiv 2504.19874, Algorithm 1).

    A row of norm 1 is turned by random signs and a Hadamard matrix, after which its numbers are about normal, of
    variance 1 / H. They are stored as numbers of Lloyd's and Max's best centroids, with the factor, of 16 bits, by
    which the code comes nearest to the row. The mean squared error of a row is at most
    $\sqrt 3 \pi / 2 \cdot 4^{-b}$ of its square; .009 at 4 bits. The paper's second stage (QJL), which engines leave
    out, is left out.

    Attributes:
      bits: of a number.
      seed: of the signs.
    """

    bits: Literal[2, 3, 4] = 4
    seed: Amount = 0

    def check(self, width: Size) -> None:
        """Refuses rows that no Hadamard matrix turns."""
        if width < 8 or width & (width - 1):
            raise ValueError(
                f"TurboQuant turns rows by a Hadamard matrix, whose sizes are powers of two from 8 on, but the model's "
                f"heads have {width} numbers; give Int8()"
            )

    def _turn(self, width: int) -> Float[np.ndarray, "H H"]:
        """Signs, then a Hadamard matrix: a rotation, as a matrix on the right."""
        signs = np.random.RandomState(self.seed).choice([-1.0, 1.0], width)
        return (signs[:, None] * _hadamard(width) / np.sqrt(width)).astype(np.float32)

    def into(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Turned rows."""
        return jnp.matmul(x.astype(jnp.float32), self._turn(x.shape[-1]), precision="highest")

    def back(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Rows turned back."""
        return jnp.matmul(x, self._turn(x.shape[-1]).T, precision="highest")

    def encode(self, x: Float[Array, "*rows H"]) -> tuple[Array, ...]:
        """Packed numbers of centroids, and the factor."""
        y = self.into(x)
        centroids = _centroids(self.bits)
        deviation = jnp.sqrt(jnp.square(y).mean(-1, keepdims=True))
        y = y / jnp.where(deviation > 0, deviation, 1)
        bounds = ((centroids[1:] + centroids[:-1]) / 2).astype(np.float32)
        codes = functools.reduce(jnp.add, [(y > b).astype(jnp.uint8) for b in bounds])
        z = _looked_up(codes, centroids)
        best = (y * z).sum(-1, keepdims=True) / jnp.square(z).sum(-1, keepdims=True)
        return *_packed(codes, self.bits), (deviation * best).astype(SCALE)

    def numbers(self, parts: tuple[Array, ...]) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
        """Centroids, and the factors."""
        codes = _unpacked(parts[:-1], self.bits)
        return _looked_up(codes, _centroids(self.bits)), parts[-1][..., 0].astype(jnp.float32)


class Codec(Value):
    """A codec for keys, one for values, and which rows are stored as the model computes them beside their codes.

    Attributes:
      keys, values: how rows are stored; None as the model computes them.
      centre: whether rows are coded less the mean of those that a head holds when its prompt has been read. A mean of
        keys moves no softmax, but takes numbers that codes could use; it is stored once a head.
      exact: how many first and last tokens of the text have their rows as the model computes them, too, as long as
        they stay. A row's code is there from the beginning, and is read when the row is no longer among the last.
    """

    keys: RowCodec | None
    values: RowCodec | None
    centre: bool = False
    exact: tuple[Amount, Amount] = (0, 0)

    def check(self, width: Size) -> None:
        """Refuses rows of so many numbers, if they cannot be coded."""
        for each in (self.keys, self.values):
            if each is not None:
                each.check(width)


def _hadamard(size: int) -> Float[np.ndarray, "H H"]:
    """Sylvester's matrix."""
    m = np.ones((1, 1))
    while len(m) < size:
        m = np.block([[m, m], [m, -m]])
    return m


@functools.cache
def _centroids(bits: int) -> Float[np.ndarray, "C"]:
    """The numbers that stand for a normal one with the least mean squared error (Lloyd and Max), ascending."""
    cdf = np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))))
    density = lambda x: np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    c = np.linspace(-2, 2, 2**bits)
    for _ in range(1000):
        bounds = np.concatenate([[-40.0], (c[1:] + c[:-1]) / 2, [40.0]])
        c = -np.diff(density(bounds)) / np.diff(cdf(bounds))
    return c.astype(np.float32)


def _looked_up(codes: UInt8[Array, "*rows H"], centroids: Float[np.ndarray, "C"]) -> Float[Array, "*rows H"]:
    """The centroids of codes."""
    return jnp.asarray(centroids)[codes]


# How numbers of so many bits lie in bytes: for each part, the bits of a number in it.
_PLANES: Final = {2: (2,), 3: (2, 1), 4: (4,)}


def _packed(codes: UInt8[Array, "*rows H"], bits: int) -> list[UInt8[Array, "*rows _"]]:
    """Codes in bytes: a byte holds numbers that lie an equal part of the row apart."""
    found: list[Array] = []
    for n in _PLANES[bits]:
        parts = jnp.split(codes & (2**n - 1), 8 // n, axis=-1)
        found.append(functools.reduce(jnp.bitwise_or, [x << (n * i) for i, x in enumerate(parts)]))
        codes = codes >> n
    return found


def _unpacked(parts: tuple[Array, ...], bits: int) -> UInt8[Array, "*rows H"]:
    """The inverse of `_packed`."""
    codes, low = [], 0
    for x, n in zip(parts, _PLANES[bits], strict=True):
        each = [(x >> (n * i)) & (2**n - 1) for i in range(8 // n)]
        codes.append(jnp.concatenate(each, axis=-1) << low)
        low += n
    return functools.reduce(jnp.bitwise_or, codes)
