"""For all Mosaic GPU kernels: one warpgroup a program, tiles of 64 rows, as high as one wgmma."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.pallas_kernels import blocks as bl

BLOCK = 64
STAGES = 2  # tiles in flight: 64 x 128 in bf16 are 16 KiB each
SWIZZLE = 128
MIN_JAX = (0, 11, 2)


def backend() -> Any:
    """The Mosaic GPU backend of Pallas.

    Raises:
      NotImplementedError: this jax has none that these kernels know.
    """
    if jax.__version_info__ < MIN_JAX:
        raise NotImplementedError(f"these kernels need jax >= 0.11.2, not {jax.__version__}")
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def check_inputs(spec: bl.Spec, *xs: Array) -> None:
    """Raises NotImplementedError for what no Mosaic kernel computes."""
    for x in xs:
        if x.dtype.name not in ("bfloat16", "float16"):
            raise NotImplementedError(f"wgmma multiplies bfloat16 and float16 here, not {x.dtype.name}")
        if x.shape[-1] not in (64, 128):
            raise NotImplementedError(f"head dimensions are 64 or 128 here, not {x.shape[-1]}")
    if spec.gumbel:
        raise NotImplementedError("noise is drawn by the Triton kernels alone")


def tiled(plgpu: Any) -> tuple[Any, ...]:
    """How two-dimensional tiles of 16-bit numbers lie in shared memory for wgmma."""
    return plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE)


def pad(x: Array, axis: int, size: int, value: float) -> Array:
    """`x` with `value` behind it along `axis`, up to `size`."""
    missing = size - x.shape[axis]
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x
