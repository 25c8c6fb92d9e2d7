"""Column statistics of attention given its logsumexp: Pallas on the Triton backend (Ampere to Blackwell).

A program owns a block of keys, walks over the query blocks that may read them and writes once. So there are no atomics,
sums are bitwise repeatable, and nothing is larger than a tile. Keys lie along the first axis of a tile, which keeps the
sum over queries inside a warp.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt32

from kvjax.pallas_kernels import blocks as bl

Heads = Literal["each", "sum", "sum_before", "max_before"]


@dataclasses.dataclass(frozen=True)
class Pass:
    """The static part of one pass.

    Attributes:
      elements: what is summed, each of "p", "p2", "above".
      heads: "each" keeps query heads apart, "sum" adds their sums; "sum_before" and "max_before" combine the
        probabilities of a group, then apply the elements.
      factor: on combined probabilities, before the elements (1 / G for a mean).
      count_self: False leaves out every row's own token.
    """

    elements: tuple[str, ...]
    heads: Heads = "each"
    factor: float = 1.0
    count_self: bool = True


def block_sizes(
    dtype: jax.typing.DTypeLike,
    head_dim: int,
    num_rows: int,
    what: Pass | None = None,
    weighted: bool = False,
    own_softmax: bool = False,
    biased: bool = False,
) -> bl.BlockSizes:
    """The shipped block sizes, chosen as in `flash.block_sizes`; no accumulator is as wide as a head here.

    Exceptions keep ptxas from spilling. Tiles of less than 64 rows take 4 warps at every head dimension. Where two of
    these come together, tiles are halved, for heads above 128 once more, and where all three do, they are the smallest:
    the probabilities of a whole group; a softmax of noise or a multiplier; thresholds, weights, own tokens or biases
    that are looked up.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return bl.BlockSizes(16, 16, num_warps=4, num_stages=2)
    what = Pass(("p",)) if what is None else what
    together = what.heads in ("sum_before", "max_before")
    looked_up = "above" in what.elements or weighted or biased or not what.count_self
    burdens = together + own_softmax + looked_up
    rows = max(bl.MIN_TILE, min(64, bl.power_of_two(num_rows)))
    if burdens < 2:
        return bl.BlockSizes(rows, 64, num_warps=8 if head_dim > 128 and rows == 64 else 4, num_stages=2)
    if burdens == 2 and rows > 16 and head_dim <= 128:
        return bl.BlockSizes(32, 64, num_warps=4, num_stages=2)
    return bl.BlockSizes(16, 32 if burdens == 2 else 16, num_warps=2, num_stages=2)


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    spec: bl.Spec,
    what: Pass,
    sizes: bl.BlockSizes,
    group: int,
    num_rows: int,
    num_slots: int,
):
    ref = dict(zip(names, refs, strict=True))
    bq, bk = sizes.block_q, sizes.block_k
    block = pl.program_id(0)
    j0 = block * bk
    k = bl.load_rows(ref["k"], j0, bk, num_slots)  # stays on chip
    kv_pos = bl.load_vector(ref["kv_pos"], j0, bk, num_slots, bl.DEAD)[:, None]
    seed = ref["seed"][0] if "seed" in ref else None
    grouped = what.heads != "each"
    head0 = pl.program_id(1) * (group if grouped else 1)
    first, stop = ref["first"][block], ref["stop"][block]

    def probabilities(i0, g):
        """One tile "keys x rows" of query head `g` of the group."""
        lead = (g,) if grouped else ()
        q = bl.load_rows(ref["q"], i0, bq, num_rows, lead)
        lse = bl.load_vector(ref["lse"], i0, bq, num_rows, jnp.inf, lead)[None, :]
        q_pos = bl.load_vector(ref["q_pos"], i0, bq, num_rows, -1)[None, :]
        multiplier = bl.load_vector(ref["multiplier"], i0, bq, num_rows, 0.0)[None, :] if "multiplier" in ref else None
        bias = None
        if "bias" in ref:
            bias = bl.load_vector(ref["bias"], j0, bk, num_slots, 0.0, lead)[:, None]
        head = head0 + g if grouped else head0
        x = bl.masked_logits(
            spec, bl.products(k, q), q_pos, kv_pos, bias=bias, multiplier=multiplier, seed=seed, head=head
        )
        p = jnp.exp2(x - lse)
        return p if what.count_self else jnp.where(kv_pos == q_pos, 0.0, p)

    def add(sums, p, i0):
        found = []
        for name, total in zip(what.elements, sums, strict=True):
            f = p
            if name == "p2":
                f = p * p
            if name == "above":
                theta = bl.load_vector(ref["theta"], i0, bq, num_rows, jnp.inf)[None, :]
                f = jnp.where(p > theta, 1.0, 0.0)
            if "weight" in ref:
                f = f * bl.load_vector(ref["weight"], i0, bq, num_rows, 0.0)[None, :]
            found.append(total + jnp.sum(f, axis=1))
        return tuple(found)

    sums = tuple(jnp.zeros((bk,), jnp.float32) for _ in what.elements)
    length = jnp.maximum(stop - first, 0)
    if what.heads in ("each", "sum"):

        def body(u, sums):
            # One loop over heads and query blocks; a head is traced, the interpreter of jax 0.12 takes no Python index.
            g = lax.div(u, jnp.maximum(length, 1))
            i0 = (first + u - g * length) * bq
            return add(sums, probabilities(i0, g), i0)

        sums = lax.fori_loop(0, length * (group if grouped else 1), body, sums)
    else:

        def body(u, sums):
            i0 = (first + u) * bq
            combine = jnp.maximum if what.heads == "max_before" else jnp.add
            p = lax.fori_loop(0, group, lambda g, p: combine(p, probabilities(i0, g)), jnp.zeros((bk, bq), jnp.float32))
            return add(sums, p * what.factor, i0)

        sums = lax.fori_loop(0, length, body, sums)
    for i, x in enumerate(sums):
        bl.store_vector(ref[f"sum{i}"], j0, num_slots, x)


def attention_colstats(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    lse: Float[Array, "B N T"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    *,
    spec: bl.Spec,
    what: Pass,
    theta: Float[Array, "B K T"] | None = None,
    weight: Float[Array, "B T"] | None = None,
    bias: Float[Array, "B N S"] | None = None,
    multiplier: Float[Array, "B K T"] | None = None,
    seed: UInt32[Array, "B"] | None = None,
    sizes: bl.BlockSizes | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B _ S"], ...]:
    """For every key, sums over query rows of functions of `p = exp(logit - lse)`.

    NaCl's Algorithm 2 (arXiv 2408.03675) for any subset of sums of `p`, `p^2` and `p > theta`.

    Args:
      q, k: queries and keys.
      lse: natural-log logsumexp of the softmax in question.
      q_pos: positions of the rows, negative for rows that do not count.
      kv_pos: positions of the keys, `blocks.DEAD` for keys that nobody reads.
      spec: how logits follow from products.
      what: the sums, and how query heads are combined.
      theta: thresholds of the rows, where "above" is asked for; not negative.
      weight: of the rows, or None for ones.
      bias, multiplier, seed, sizes, interpret: as in `flash.flash_attention`.

    Returns:
      For each element "B N S" where heads are kept apart, else "B K S". float32.

    Raises:
      NotImplementedError: for dtypes that the kernel does not read.
    """
    bl.check_inputs(q, k)
    B, N, T, H = q.shape
    K, S = k.shape[1:3]
    G = N // K
    if sizes is None:
        own_softmax = spec.gumbel or multiplier is not None
        sizes = block_sizes(q.dtype, H, T, what, weight is not None, own_softmax, bias is not None)
    q, k = bl.pad_head_dim(q, k)
    H = q.shape[-1]
    meet = bl.meetings(spec, q_pos, kv_pos, sizes.block_q, sizes.block_k)
    first, stop = bl.first_and_stop(meet.swapaxes(2, 3))
    # A row without keys gets +inf: its probabilities are 0, not NaN.
    lse = jnp.where(jnp.isfinite(lse), lse * bl.LOG2E, jnp.inf)
    grouped = what.heads != "each"
    kv = (lambda h: h) if grouped else (lambda h: h // G)
    num_blocks = pl.cdiv(S, sizes.block_k)

    def of_query_heads(x):
        """An input with a query head axis, whole groups where they are combined."""
        rest = x.shape[2:]
        zeros = (0,) * len(rest)
        if not grouped:
            return x, pl.BlockSpec((None, None, *rest), lambda j, h, b: (b, h, *zeros))
        return x.reshape(B, K, G, *rest), pl.BlockSpec((None, None, G, *rest), lambda j, h, b: (b, h, 0, *zeros))

    def of_kv_heads(x):
        zeros = (0,) * (x.ndim - 2)
        return x, pl.BlockSpec((None, None, *x.shape[2:]), lambda j, h, b: (b, kv(h), *zeros))

    rows = pl.BlockSpec((None, T), lambda j, h, b: (b, 0))
    inputs: dict[str, tuple[Any, Any]] = {
        "q": of_query_heads(q),
        "k": of_kv_heads(k),
        "lse": of_query_heads(lse),
        "q_pos": (q_pos, rows),
        "kv_pos": of_kv_heads(kv_pos),
        "first": of_kv_heads(first),
        "stop": of_kv_heads(stop),
    }
    if theta is not None:
        inputs["theta"] = of_kv_heads(theta.astype(jnp.float32))
    if weight is not None:
        inputs["weight"] = weight.astype(jnp.float32), rows
    if bias is not None:
        inputs["bias"] = of_query_heads(bias.astype(jnp.float32))
    if multiplier is not None:
        inputs["multiplier"] = of_kv_heads(multiplier.astype(jnp.float32))
    if spec.gumbel and seed is not None:
        inputs["seed"] = seed[:, None], pl.BlockSpec((None, 1), lambda j, h, b: (b, 0))
    heads = K if grouped else N
    names = tuple(f"sum{i}" for i in range(len(what.elements)))
    kernel = functools.partial(
        _kernel, names=(*inputs, *names), spec=spec, what=what, sizes=sizes, group=G, num_rows=T, num_slots=S
    )
    return tuple(
        bl.call(
            kernel,
            [x for x, _ in inputs.values()],
            grid=(num_blocks, heads, B),
            in_specs=[x for _, x in inputs.values()],
            out_specs=[pl.BlockSpec((None, None, S), lambda j, h, b: (b, h, 0)) for _ in names],
            out_shape=[jax.ShapeDtypeStruct((B, heads, S), jnp.float32) for _ in names],
            interpret=interpret,
            name="kvjax_colstats",
            compiler_params=bl.compiler_params(sizes),
        )
    )
