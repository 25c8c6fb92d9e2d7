"""Few sizes for many: requests of about the same size share compiled programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.pallas_kernels.values import checked, flag
from kvjax.plan import CachePlan, ModelConfig, make_plan
from kvjax.policy import Policy

_LEAST = 16


def bucket(n: int) -> int:
    """The least size that holds n tokens: multiples of 16, and beyond 128 four sizes to a power of two.

    So a size is less than 16 tokens larger than n, or at most a quarter.
    """
    step = max(_LEAST, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // step) * step


def padded(tokens: Array | np.ndarray, width: int) -> Int[Array, "B W"]:
    """Known tokens with so much padding on their left that they are `width` wide."""
    known = np.asarray(tokens)
    return jnp.asarray(np.pad(known, ((0, 0), (width - known.shape[1], 0))), jnp.int32)


def rounds(buckets: Any, *arguments: Any) -> bool:
    """Whether sizes are rounded up: where it is asked for, and none of the arguments is traced."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
    return checked(flag, "buckets", buckets) and not traced


def plan_request(
    config: ModelConfig,
    policy: Policy,
    tokens: Int[Array, "B T"],
    lengths: np.ndarray | Int[Array, "B"],
    max_new_tokens: int,
    *,
    buckets: bool,
) -> tuple[CachePlan, Int[Array, "B W"]]:
    """A plan for prompts, and the prompts in its width.

    With `buckets`, the width and the number of new tokens are rounded up (`bucket`), the latter where no rule says that
    what it keeps depends on it (`LayerSpec.timed`). What is kept and generated is the same, since padding is no token
    and nobody asks for the further steps; the cache has more slots where the policy's number of them grows with either.
    Policies or models that have no room for the rounded sizes are planned for the exact ones.

    Args:
      config: the model's sizes.
      policy: the policy.
      tokens, lengths: the prompts and their own lengths, checked (`check_prompts`); not traced where sizes are rounded.
      max_new_tokens: tokens to generate.
      buckets: whether sizes are rounded (`rounds`).

    Raises:
      ValueError: what `make_plan` refuses of the sizes that were asked for.
    """
    known = lengths if isinstance(lengths, np.ndarray) else None
    width, max_new_tokens = tokens.shape[1], int(max_new_tokens)

    def make(width: int, steps: int) -> CachePlan:
        plan = make_plan(config, policy, prompt_len=width, max_new_tokens=steps, lengths=known)
        return dataclasses.replace(plan, rounded=buckets)

    if not buckets or known is None or (bucket(width), bucket(max_new_tokens)) == (width, max_new_tokens):
        return make(width, max_new_tokens), tokens
    try:
        plan = make(bucket(width), bucket(max_new_tokens))
        if any(spec.timed for spec in plan.specs):
            plan = make(bucket(width), max_new_tokens)
    except ValueError:
        return make(width, max_new_tokens), tokens
    for site in plan.sites:  # a second plan would take as long as the first, seconds for prompts of 32k tokens
        for n in sorted(set(known.tolist())):
            policy.check(dataclasses.replace(site, prompt_len=width, max_new_tokens=max_new_tokens), n)
    return plan, padded(tokens, plan.prompt_len)
