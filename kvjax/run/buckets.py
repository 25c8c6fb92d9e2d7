"""Rounded sizes: requests of about the same size share compiled programs."""

from typing import Any

import numpy as np
from jaxtyping import Array, Int

from kvjax.contract import Policy
from kvjax.run.checks import traced
from kvjax.run.plan import Plan, infos_of, planned

_LEAST = 16


def bucket(n: int) -> int:
    """Rounds n tokens up: to a multiple of 16, beyond 128 to one of four sizes in a power of two.

    So a size is less than 16 tokens larger than n, or at most a quarter.
    """
    step = max(_LEAST, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // step) * step


def plan_request(
    config: Any,
    policy: Policy,
    lengths: Int[np.ndarray, "B"] | Int[Array, "B"],
    width: int,
    max_new_tokens: int,
    *,
    plan: Plan | None = None,
    buckets: bool = False,
) -> tuple[Plan, tuple[Any, ...]]:
    """The sizes that a request is compiled for, those of `plan` if there is one, and the policy's numbers for it.

    With `buckets`, width and new tokens are rounded up, and there are slots for a prompt of the rounded width. What is
    kept is the same. A policy that cannot work with the rounded sizes gets the exact ones.
    """
    make = lambda width, steps, **how: planned(policy, infos_of(config, policy, width, steps), lengths, plan, **how)
    if plan is not None:
        there = plan.infos[0].prompt_len, plan.infos[0].max_new_tokens
        if width > there[0] or max_new_tokens > there[1]:
            raise ValueError(
                f"a prompt of {width} columns and {max_new_tokens} new tokens are more than the plan's {there[0]} and "
                f"{there[1]}; make the plan for these"
            )
        return make(*there)
    if not buckets or traced(lengths):
        return make(width, max_new_tokens)
    try:
        return make(bucket(width), bucket(max_new_tokens), longest=bucket(width))
    except ValueError:
        return make(width, max_new_tokens)
