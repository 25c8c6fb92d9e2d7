"""One entry an operation; this is the only place that chooses how it is computed.

An implementation says with NotImplementedError what it does not serve; the next in its order is tried, operation by
operation: the output of one call may come from one, a statistic of it from another. Every reason is kept: in the log of
`pallas_kernels` where something served in the end, in the error where nothing did.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels import pooled, recovery, reference, xla
from kvjax.pallas_kernels.columns import Attention, Columns, Recovery, Softmax
from kvjax.pallas_kernels.kinds import NonNegative, Size
from kvjax.pallas_kernels.logits import Logits, beside_nothing

Implementation = Literal["xla", "triton", "mosaic_gpu", "cudnn", "interpret", "reference"]
Result = TypeVar("Result")

_log = logging.getLogger("kvjax.pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Order:
    """Implementations to try, in order: for the output, and for each statistic.

    Attributes:
      output, columns: names.
      own: whether the slots are the rows' own tokens, as in `attention`.
    """

    output: tuple[str, ...]
    columns: tuple[str, ...]
    own: bool = False


_TRITON_FIRST, _MOSAIC_FIRST = ("triton", "mosaic_gpu", "xla"), ("mosaic_gpu", "triton", "xla")
_ORDER = {
    "xla": Order(("xla",), ("xla",)),
    "triton": Order(("triton", "xla"), ("triton", "xla")),
    "mosaic_gpu": Order(_MOSAIC_FIRST, _MOSAIC_FIRST),
    "cudnn": Order(("cudnn", *_TRITON_FIRST), _TRITON_FIRST),
    "interpret": Order(("interpret", "xla"), ("interpret", "xla")),
    "reference": Order(("reference",), ("reference",)),
}
_HOPPER = Order(("cudnn", *_TRITON_FIRST), _MOSAIC_FIRST)
_defaults: list[Implementation] = []


@contextlib.contextmanager
def use(implementation: Implementation) -> Iterator[None]:
    """Within this context, calls that name no implementation use this one.

    Compiled functions do not know what they were traced under, so all of JAX's caches are dropped on the way in and
    on the way out. That makes it a setting for a whole run, not for a single call; calls take `implementation`.

    Args:
      implementation: as in `attention`.

    Raises:
      ValueError: an unknown implementation.
    """
    _order(implementation)
    _defaults.append(implementation)
    jax.clear_caches()
    try:
        yield
    finally:
        _defaults.pop()
        jax.clear_caches()


def attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S V"],
    q_pos: Int[Array, "B T"] | None = None,
    kv_pos: Int[Array, "B K S"] | None = None,
    *,
    columns: Sequence[Columns] = (),
    bias: Float[Array, "B N S"] | None = None,
    logits: Logits = Logits(),
    own: bool = False,
    implementation: Implementation | None = None,
) -> Attention:
    """Grouped-query attention over a cache whose slots know their positions, with column statistics on request.

    Row `t` reads slot `s` of its kv head when the slot is live (`kv_pos >= 0`), not later than the row
    (`kv_pos <= q_pos`) and inside the sliding window. A row with a negative position is padding: it reads nothing,
    returns zeros and adds nothing to any statistic. The last T slots must hold the rows' own tokens in the rows' order,
    or be dead (trivial for T = 1); the order of all other slots is free.

    Column statistics are those of NaCl's Algorithm 2 (arXiv 2408.03675) and its family. They are accumulated in float32
    and have no gradient. For T > 1 the kernels leave to XLA: rows that are not `summed`, Gaussian noise, and "above" a
    negative threshold, which counts masked probabilities too. float64 is XLA's as well.

    Args:
      q: queries.
      k, v: keys and values of every slot. Values with fewer channels than keys are padded for the product.
      q_pos: absolute position of every query row, negative for padding; the last T positions if None.
      kv_pos: absolute position of every slot, negative for a dead slot; 0 to S - 1 if None.
      columns: the statistics to measure, each one array in the result.
      bias: added to the logits of every key after the soft cap: the logarithm of a weight, or -inf.
      logits: how logits follow from `q . k`, and the sliding window.
      own: promises that the slots are those of the rows, dead for padding alone, which stands before all other rows:
        what kernels of others can read.
      implementation: what is tried first. "cudnn": cuDNN's kernel, for the output of such rows; "triton": Pallas
        kernels for any NVIDIA GPU since Ampere; "mosaic_gpu": those for Hopper; "interpret": the Triton kernels,
        interpreted on any device, slowly; "xla": no kernels; "reference": the specification, quadratic in memory. None:
        what `use` says, else the best for the device.

    Returns:
      `Attention(out, lse, columns)`.

    Raises:
      ValueError: shapes that do not fit together, or an unknown implementation.
    """
    B, N, T, K, S = _checked_sizes(q, k)
    if (fewer := k.shape[-1] - v.shape[-1]) < 0:
        raise ValueError(f"values have {v.shape[-1]} channels, but keys {k.shape[-1]}; values have no more than keys")
    if fewer:
        how: dict[str, Any] = {"columns": columns, "bias": bias, "logits": logits, "own": own}
        wide = jnp.pad(v, ((0, 0),) * 3 + ((0, fewer),))
        found = attention(q, k, wide, q_pos, kv_pos, implementation=implementation, **how)
        return dataclasses.replace(found, out=found.out[..., : v.shape[-1]])
    q_pos = jnp.broadcast_to(jnp.arange(S - T, S), (B, T)) if q_pos is None else q_pos
    kv_pos = jnp.broadcast_to(jnp.arange(S), (B, K, S)) if kv_pos is None else kv_pos
    columns = _checked_columns(columns, B, N, K, T)
    logits, bias, nothing = _without_arrays(logits, N, kv_pos, bias)
    arrays, structure = jax.tree.flatten(columns)

    def run(order, *args):
        *args, arrays = args
        if order.output[0] in _WHOLE:
            return _WHOLE[order.output[0]](*args, columns=jax.tree.unflatten(structure, arrays), logits=logits)
        static = (dataclasses.replace(order, own=own), structure, (("logits", logits),))
        return Attention(*_kernel_attention(static, *args, arrays))

    q_pos, kv_pos = (jnp.asarray(x, jnp.int32) for x in (q_pos, kv_pos))
    return _on_device(run, implementation, q, k, v, q_pos, kv_pos, bias, nothing, arrays)


def pooled_attention(
    q: Float[Array, "B N 1 H"],
    k: Float[Array, "B P H"],
    v: Float[Array, "B P H"],
    owner: Int[Array, "B P"],
    q_pos: Int[Array, "B 1"],
    kv_pos: Int[Array, "B P"],
    columns: Sequence[Columns] = (),
    *,
    num_kv_heads: Size,
    in_order: bool = False,
    bias: Float[Array, "B G P"] | None = None,
    logits: Logits = Logits(),
    implementation: Implementation | None = None,
) -> Attention:
    """One query row a head over a flat pool, where every slot belongs to one kv head: caches of per-head budgets.

    The same as `attention` with T = 1, where kv head `h` has the slots with `owner == h` for its cache. Slots may lie
    in any order. A slot is dead when its owner or its position is negative.

    Args:
      q: one query row of every query head.
      k, v: keys and values of every slot of the pool.
      owner: the kv head of every slot, negative for none.
      q_pos: absolute position of the row, negative for padding.
      kv_pos: absolute position of every slot, negative for a dead slot.
      columns: the statistics to measure.
      num_kv_heads: K; the pool does not show it.
      in_order: promises that owners are not negative and never decrease from slot to slot, which makes the product with
        the keys cheaper. Dead slots then have an owner like all others, and a negative position.
      bias: as in `attention`, for every slot one number a query head of its owner.
      logits, implementation: as in `attention`; slopes are none of a pool, whose `bias` has what they add.

    Returns:
      `Attention(out "B N 1 H", lse "B N 1", columns)`. A statistic has one number a slot, of its owner: "B P", or
      "B G P" where its `group` is None, with an axis of one row before the last where it is not `summed`. Dead slots
      have 0.

    Raises:
      ValueError: shapes that do not fit together, or an unknown implementation.
    """
    (B, N, T, _), P = q.shape, k.shape[1]
    if logits.slopes is not None:
        raise ValueError(f"logits have {len(logits.slopes)} slopes, which a pool does not read; give their bias")
    if N % num_kv_heads:
        raise ValueError(
            f"{N} query heads are not a multiple of num_kv_heads={num_kv_heads}; every kv head serves N / K query heads"
        )
    _check("bias", bias, np.floating, B, N // num_kv_heads, P)
    _check("logits' nothing", logits.nothing, np.floating, N)
    logits, nothing = dataclasses.replace(logits, nothing=None), logits.nothing
    columns = _checked_columns(columns, B, N, num_kv_heads, T)
    options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "in_order": in_order, "logits": logits}
    arrays, structure = jax.tree.flatten(columns)

    def run(order, *args):
        *args, arrays = args
        if order.output[0] in _POOLED:
            return _POOLED[order.output[0]](*args, columns=jax.tree.unflatten(structure, arrays), **options)
        return Attention(*_kernel_pool((order, structure, tuple(options.items())), *args, arrays))

    owner, q_pos, kv_pos = (jnp.asarray(x, jnp.int32) for x in (owner, q_pos, kv_pos))
    return _on_device(run, implementation, q, k, v, owner, q_pos, kv_pos, bias, nothing, arrays)


def recovered_attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    q_pos: Int[Array, "B T"],
    kv_pos: Int[Array, "B K S"],
    masks: Bool[Array, "M B K S"],
    *,
    within: Sequence[Int[Array, "B"] | None] | None = None,
    tolerance: NonNegative | None = None,
    bias: Float[Array, "B N S"] | None = None,
    logits: Logits = Logits(),
    implementation: Implementation | None = None,
) -> Recovery:
    """Compares a causal attention matrix with itself restricted to M sets of keys (FastGen's profile, 2310.01801).

    The probabilities of a group of query heads are averaged first. Rows see slots as in `attention`; the last T slots
    must hold the rows' own tokens in the rows' order. No gradient. No kernel computes this, as a restricted row is
    renormalised on what is kept of it: every order of kernels ends with XLA here, and the log says so.

    Args:
      q: queries.
      k: keys of every slot.
      q_pos: absolute position of every query row, negative for padding.
      kv_pos: absolute position of every slot, negative for a dead slot.
      masks: True where a set keeps a key for every row.
      within: for each set a band, or None: keys with `q_pos - kv_pos < within` are kept as well.
      tolerance: measures `elementwise` too: how much a probability may change. A kept entry changes when its row is
        renormalised on the kept keys, a dropped one by its whole probability. None skips that work.
      bias, logits, implementation: as in `attention`; shares are among keys, whatever part attends to nothing.

    Raises:
      ValueError: shapes that do not fit together, or an unknown implementation.
    """
    B, N, *_ = _checked_sizes(q, k)
    bands = (None,) * len(masks) if within is None else tuple(within)
    if len(bands) != len(masks):
        raise ValueError(f"{len(bands)} bands for {len(masks)} masks; give one for each, or None")
    for band in bands:
        _check("within", band, np.integer, B)
    logits, bias, _ = _without_arrays(logits, N, kv_pos, bias)

    def run(order, *args):
        def compute(name):
            if name not in _RECOVERED:
                raise NotImplementedError("no kernel renormalises rows on the keys that are kept")
            return _RECOVERED[name](*args, tolerance=tolerance, logits=logits)

        tries = [(name, functools.partial(compute, name)) for name in order.columns]
        return first_served("what sets of keys recover of attention", tries)[1]

    return _on_device(run, implementation, *lax.stop_gradient((q, k, q_pos, kv_pos, masks, bands, bias)))


_WHOLE = {"xla": xla.attention, "reference": reference.attention}
_POOLED = {"xla": pooled.pooled_attention, "reference": reference.pooled_attention}
_RECOVERED = {"xla": recovery.recovered_attention, "reference": reference.recovered_attention}


def _order(implementation: str | None) -> Order | None:
    """The `Order` to try; None where the device decides."""
    if implementation is None and _defaults:
        implementation = _defaults[-1]
    if implementation is None:
        return None
    return _ORDER[implementation]


@functools.cache
def _gpu_order() -> Order | None:
    """The order for this process's GPU, or None without one. Mosaic's kernels are for Hopper."""
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.local_devices()[0], "compute_capability", "")
    return _HOPPER if capability.startswith("9.") else _ORDER["cudnn"]


def _on_device(run: Callable[..., Result], implementation: str | None, *args: Any) -> Result:
    """`run(order, *args)` with the order of the device that the call is compiled for, unless one is named."""
    order = _order(implementation)
    if order is None:
        on_gpu = _gpu_order()
        if on_gpu is None:
            return run(_ORDER["xla"], *args)
        cuda, other = functools.partial(run, on_gpu), functools.partial(run, _ORDER["xla"])
        return lax.platform_dependent(*args, cuda=cuda, default=other)
    return run(order, *args)


def first_served(operation: str, tries: Sequence[tuple[str, Callable[[], Result]]]) -> tuple[str, Result]:
    """The first implementation that serves, with its result.

    Every choice is a record in the log of `pallas_kernels`, with the implementation as its attribute `by`: at level
    INFO with the reasons where something else was tried before, else at DEBUG.

    Args:
      operation: its name, for messages.
      tries: (implementation, what computes it).

    Raises:
      NotImplementedError: nothing serves; with all reasons.
    """
    reasons = []
    for name, compute in tries:
        try:
            result = compute()
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
        else:
            if reasons:
                why = "; ".join(reasons)
                _log.info("%s is computed by %s, because of %s", operation, name, why, extra={"by": name})
            else:
                _log.debug("%s is computed by %s", operation, name, extra={"by": name})
            return name, result
    raise NotImplementedError(f"nothing computes {operation}: {'; '.join(reasons)}")


def _forward(order, columns, q, k, v, q_pos, kv_pos, bias, nothing, *, logits):
    """Output, logsumexp and statistics, each from the first implementation that serves it."""
    from kvjax.pallas_kernels import cudnn, gpu  # Pallas takes a second to import, and only kernels need it

    arrays, spec = (q, k, v, q_pos, kv_pos), gpu.bl.Spec.of_model(logits, q.shape[-1])
    in_xla = functools.partial(xla.attention, *arrays, bias, nothing, logits=logits)

    def forward(name):
        if name == "xla":
            return in_xla(columns=columns)
        if name == "cudnn":
            if bias is not None or not order.own:
                raise NotImplementedError("it serves rows among their own tokens, without a bias")
            return *cudnn.flash_attention(q, k, v, q_pos, spec=spec), None
        return gpu.forward(*arrays, spec=spec, with_logits=bool(columns), backend=name, bias=bias)

    _, result = first_served("attention", [(name, functools.partial(forward, name)) for name in order.output])
    if isinstance(result, Attention):
        return result.out, result.lse, result.columns
    out, lse, row = result
    result = *beside_nothing(cast(Array, out), lse, nothing), row

    def column(name, wanted):
        if name == "xla":
            return in_xla(columns=(wanted,)).columns[0]
        how = {"logits": spec, "backend": name, "bias": bias, "nothing": nothing}
        return gpu.column(wanted, q, k, result, q_pos, kv_pos, **how)

    measured = []
    for c in columns:
        tries = [(name, functools.partial(column, name, c)) for name in order.columns]
        measured.append(first_served(f"a statistic ({c.describe()})", tries)[1])
    return result[0], result[1], tuple(measured)


def _pool_forward(order, columns, *arrays, num_kv_heads, in_order, logits):
    from kvjax.pallas_kernels import gpu  # see above

    def forward(name):
        if name == "xla":
            options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "in_order": in_order, "logits": logits}
            found = pooled.pooled_attention(*arrays, columns=columns, **options)
            return found.out, found.lse, found.columns
        spec = gpu.bl.Spec.of_model(logits, arrays[0].shape[-1])
        return gpu.pooled_forward(*arrays, num_kv_heads=num_kv_heads, columns=columns, spec=spec, backend=name)

    return first_served("attention over a pool", [(name, functools.partial(forward, name)) for name in order.output])[1]


def _differentiable(compute, in_xla):
    """`compute` with the gradient of the same operation in XLA, which recomputes it block by block.

    Both are called as `(static, *arrays)`, with static an order, a tree structure and options.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(static, *args):
        order, structure, options = static
        return compute(order, jax.tree.unflatten(structure, args[-1]), *args[:-1], **dict(options))

    def forward(static, *args):
        args = jax.tree.map(lambda x: x.value, args, is_leaf=lambda x: hasattr(x, "perturbed"))
        return run(static, *args), args[:-1]

    def backward(static, args, cotangents):
        is_zero = lambda d: isinstance(d, jax.custom_derivatives.SymbolicZero)
        *of_output, of_columns = cotangents
        if not all(map(is_zero, jax.tree.leaves(of_columns, is_leaf=is_zero))):
            raise NotImplementedError(
                "column statistics have no gradient here: they rank tokens. Use implementation='reference' to "
                "differentiate through them, or lax.stop_gradient to say that you do not mean to"
            )
        real = {i: x for i, x in enumerate(args) if x is not None and jax.numpy.issubdtype(x.dtype, jax.numpy.floating)}

        def f(real):
            found = in_xla(*(real.get(i, x) for i, x in enumerate(args)), **dict(static[2]))
            return found.out, found.lse

        primal, pull = jax.vjp(f, real)
        dense = [jax.numpy.zeros(x.shape, x.dtype) if is_zero(d) else d for d, x in zip(of_output, primal, strict=True)]
        (grads,) = pull(tuple(dense))
        return (*(grads.get(i) for i in range(len(args))), None)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


_kernel_attention = _differentiable(_forward, xla.attention)
_kernel_pool = _differentiable(_pool_forward, pooled.pooled_attention)


def _check(name: str, x: Any, kind: type[np.generic], *shape: int) -> None:
    """Refuses an array of other numbers or another shape, whose broadcasting would be a wrong answer. None is none."""
    if x is None:
        return
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(x).__name__}; give an array of numpy or JAX")
    if x.shape != shape or not jnp.issubdtype(x.dtype, kind):
        found, wanted = f"{x.dtype} of shape {x.shape}", f"{kind.__name__} of shape {shape}"
        raise ValueError(f"{name} is {found}, but must be {wanted} to fit the other arrays")


def _checked_sizes(q: Any, k: Any) -> tuple[int, int, int, int, int]:
    """(B, N, T, K, S) of rows and slots that fit together."""
    (B, N, T, _), (K, S) = q.shape, k.shape[1:3]
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} kv heads; every kv head serves N / K query heads")
    if S < T:
        raise ValueError(f"{T} query rows need their own {T} slots among the keys, but there are only {S} slots")
    return B, N, T, K, S


def _without_arrays(logits: Logits, N: int, kv_pos: Any, bias: Any) -> tuple[Logits, Any, Any]:
    """Logits without arrays, which are static, the bias of keys with what slopes add, and the logits for nothing."""
    _check("logits' slopes", logits.slopes, np.floating, N)
    _check("logits' nothing", logits.nothing, np.floating, N)
    static, bias = logits.biased(kv_pos, bias)
    return dataclasses.replace(static, nothing=None), bias, logits.nothing


def _checked_columns(columns: Sequence[Columns], B: int, N: int, K: int, T: int) -> tuple[Columns, ...]:
    """The statistics as a tuple, with arrays that fit the rows."""
    found = tuple(columns)
    for c in found:
        own = Softmax() if c.softmax is None else c.softmax
        _check("a column's weight", c.weight, np.floating, B, T)
        _check("a softmax's multiplier", own.multiplier, np.floating, B, K, T)
        _check("a softmax's seed", own.seed, np.integer, B)
        _check("a softmax's before", own.before, np.integer, B)
        _check("a softmax's heads", own.heads, np.integer, N)
    return found
