"""All sizes of a run, before anything is traced."""

from typing import Any

import jax
import numpy as np

from kvjax.core.contract import LayerInfo, Policy, compiled, value


@value
class Plan:
    """What is compiled: equal plans share programs, whatever their budgets.

    Attributes:
      policy: the policy without data, where it decides for all layers at once.
      layers: the policy of every layer without data.
      infos: the layers' sizes.
      capacities: slots of a head in every layer, or of all its heads in a pool.
    """

    policy: Policy
    layers: tuple[Policy, ...]
    infos: tuple[LayerInfo, ...]
    capacities: tuple[int, ...]


def infos_of(config: Any, policy: Policy, width: int, max_new_tokens: int) -> tuple[LayerInfo, ...]:
    """What is known of every layer of a model that runs under a policy."""
    L, N, K, H = config.num_layers, config.num_query_heads, config.num_kv_heads, config.head_dim
    heads = lambda i: N if policy.at(i, L).layout.by_query_head else K
    window = getattr(config, "window", lambda i: None)
    D = getattr(config, "embed_dim", 0)
    return tuple(LayerInfo(i, L, N, heads(i), H, width, max_new_tokens, D, window(i)) for i in range(L))


def make_plan(config: Any, policy: Policy, lengths, width: int, max_new_tokens: int) -> Plan:
    """The plan of a policy for prompts of these lengths in `width` columns. A run under `plan=` of a larger budget
    shares its slots and programs.
    """
    return planned(policy, infos_of(config, policy, width, max_new_tokens), lengths)[0]


def planned(policy: Policy, infos: tuple[LayerInfo, ...], lengths, plan: Plan | None = None) -> tuple[Plan, tuple]:
    """(plan, hparams of every layer) for prompts of these lengths. Traced ones get slots for the longest there may be."""
    traced, L = isinstance(lengths, jax.core.Tracer), len(infos)
    given, lengths = lengths, np.arange(1, infos[0].prompt_len + 1) if traced else np.asarray(lengths)
    each = [policy.at(i, L) for i in range(L)]
    sizes = [p.sizes(info, lengths) for p, info in zip(each, infos, strict=True)]
    hparams = tuple(x.hparams for x in sizes)
    if traced:  # the data of all lengths, of which each sequence takes its own
        hparams = jax.tree.map(lambda x: x[given - 1], hparams)
    slots = [np.asarray(x.total if p.layout.pool else x.per_head) for p, x in zip(each, sizes, strict=True)]
    need = tuple(int(x.max()) for x in slots)
    found = Plan(compiled(policy) if policy.joint else Policy(), tuple(map(compiled, each)), infos, need)
    if plan is None:
        return found, hparams
    least = (
        [int(x.min()) for x in slots] if traced else need
    )  # of traced lengths it may be the longest that there is none of
    if short := [i for i in range(L) if least[i] > plan.capacities[i]]:
        raise ValueError(
            f"layer {short[0]} needs {least[short[0]]} slots, but the plan has {plan.capacities[short[0]]}"
        )
    if (plan.layers, plan.policy, plan.infos) != (found.layers, found.policy, found.infos):
        raise ValueError("the policy differs from the plan's in more than data")
    return plan, hparams


def init_policy_params(config: Any, policy: Policy, key: Any, *, width: int = 0, max_new_tokens: int = 0) -> tuple:
    """Learned parameters of a policy, one tree a layer: what `prefill(..., policy_params=)` takes."""
    infos = infos_of(config, policy, width, max_new_tokens)
    return tuple(policy.at(i, len(infos)).init_params(info, jax.random.fold_in(key, i)) for i, info in enumerate(infos))
