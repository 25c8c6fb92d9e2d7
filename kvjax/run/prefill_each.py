"""One reading of prompts for several policies, each of which then evicts from the same full state.

Letters: B batch, T tokens of a prompt, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, PyTree

from kvjax.contract import Amount, Ids, Layout, Model, Observation, Phase, Policy, PRNGKey, kv_layers, unique
from kvjax.observe import Reread
from kvjax.run.apply import HidesTokens
from kvjax.run.checks import check_block, check_model, check_positions, check_prompts, traced
from kvjax.run.forward import forward
from kvjax.run.plan import infos_of, learns, planned, rereads
from kvjax.run.reread import check_rereads, repeated
from kvjax.run.state import AttnStats, Prompts, State
from kvjax.run.steps import read_prompts, start


class Stored(Policy):
    """The full cache, stored in given ways.

    Attributes:
      layouts: one a layer.
      again: how the prompt is read again, before anything is evicted.
      more: what is observed of the prompt.
    """

    layouts: tuple[Layout, ...]
    again: tuple[Reread, ...] = ()
    more: tuple[Observation, ...] = ()

    @property
    def layout(self) -> Layout:
        return self.layouts[0]

    def at(self, layer: int, num_layers: int) -> "Stored":
        return dataclasses.replace(self, layouts=self.layouts[layer : layer + 1])

    def observe(self, phase: Phase) -> tuple[Observation, ...]:
        return {"prefill": self.more, "replay": self.again}.get(phase, ())


def stored_as(policy: Policy, num_layers: int) -> Stored:
    """How the prompt must be stored in every layer, and read again, so that the policy can be applied to it."""
    each = [policy.at(i, num_layers) for i in range(num_layers)]
    kept = lambda x: Layout("rank" if x.positions == "rank" else "original", by_query_head=x.by_query_head)
    return Stored(tuple(kept(p.layout) for p in each), unique(o for p in each for o in rereads(p)))


def read_whole(
    model: Model,
    params: PyTree,
    prompts: Prompts,
    max_new_tokens: Amount,
    *,
    policies: Sequence[Policy],
    stored: Stored,
    key: PRNGKey = None,
) -> tuple[Float[Array, "B V"], State, AttnStats]:
    """Logits of the next token, the state that holds whole prompts, and what some policies want to see of them.

    Args:
      model, params: the model.
      prompts: the prompts, which have been checked.
      max_new_tokens: rows that may follow.
      policies: the policies.
      stored: how every layer is stored, how prompts are read again, and what else is observed.
      key: one PRNG key for the batch, or one a sequence.
    """
    how: dict[str, Any] = {"lengths": prompts.lengths, "max_new_tokens": max_new_tokens, "key": key}
    state = start(model, policy=stored, width=prompts.tokens.shape[1], **how)
    if not traced(prompts.lengths):
        check_positions(model.config, state.plan, np.asarray(prompts.lengths), max_new_tokens)
    if stored.again:
        check_rereads(model, state.plan, not traced(*prompts))
    how = {"valid": prompts.lengths, "observe": tuple(dict.fromkeys(policies))}
    logits, state, stats = forward(model, params, prompts.tokens, state, **how)
    if stored.again:
        stats = repeated(model, params, np.asarray(prompts.tokens), np.asarray(prompts.lengths), state, stats)
    return logits, state, stats


def prefill_each(
    model: Model,
    params: PyTree,
    tokens: Ids,
    policies: Mapping[str, Policy],
    *,
    max_new_tokens: Amount,
    lengths: Ids | None = None,
    attention_mask: Ids | None = None,
    key: PRNGKey = None,
) -> Iterator[tuple[str, Float[Array, "B V"], State]]:
    """Reads prompts once, and evicts from them under each of several policies: `prefill` for all of them.

    What any of them looks at is observed in one pass over the full cache, of which each then keeps what its own prefill
    keeps. Policies that store keys in another way (at their ranks, for every query head), or have prompts read again
    (KVzip), share a pass of their own. Those that hide tokens from the prompt's rows have a prefill each.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      policies: by name, at any budgets.
      max_new_tokens: tokens that may be read behind the prompt.
      lengths, attention_mask, key: as of `prefill`.

    Returns:
      (name, logits of the next token, state) of one policy after another, those that share a pass together; only one
      state and the full one need to be held at a time.

    Raises:
      ValueError: no policies, one with learned parameters, and what `prefill` refuses; before anything runs.
    """
    if not policies:
        raise ValueError("policies={}: give policies by name, such as {'h2o': kvjax.methods.h2o(64)}")
    check_model(model, params)
    prompts = check_prompts(model, tokens, lengths, attention_mask)
    steps, L, T = max_new_tokens, len(kv_layers(model.config)), prompts.tokens.shape[1]
    groups: dict[Stored, list[str]] = {}
    for name, policy in policies.items():
        try:
            plan, _ = planned(policy, infos_of(model.config, policy, T, steps), prompts.lengths)
            check_block(plan, None, T)
            if plan.again:
                check_rereads(model, plan, not traced(*prompts))
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from e
        if learns(policy, plan.infos):
            raise ValueError(f"{name}: the policy has learned parameters; use kvjax.prefill(..., policy_params=)")
        groups.setdefault(stored_as(policy, L), []).append(name)

    def each() -> Iterator[tuple[str, Float[Array, "B V"], State]]:
        for stored, names in groups.items():
            own = {"policies": [policies[name] for name in names], "stored": stored, "key": key}
            logits, state, stats = read_whole(model, params, prompts, steps, **own)
            for name in names:
                try:
                    yield name, logits, policies[name](state, stats)
                except HidesTokens:  # rows of its prompt read less than is stored
                    yield name, *read_prompts(model, params, prompts, policies[name], steps, key=key)

    return each()
