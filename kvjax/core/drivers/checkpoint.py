"""Storing compressed prompts, one file each. What is loaded goes on bit for bit.

A file holds arrays and a few words about them (safetensors), no code: the policy is given again when it is loaded.
"""

import hashlib
import json
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from kvjax.core.contract import Policy
from kvjax.core.drivers.attend import step
from kvjax.core.drivers.checks import check_is, check_model
from kvjax.core.drivers.replay import after_replay, rereads
from kvjax.core.drivers.state import State, empty_state
from kvjax.core.plan import infos_of, init_policy_params, planned


def save_state(path: str | os.PathLike[str], state: State, *, policy: Policy, notes: Any = None) -> None:
    """Writes a state, such as a compressed prompt, to a new file.

    Args:
      path: the file.
      state: what `prefill` or a later call returned.
      policy: the policy that it was read under.
      notes: anything of JSON that is to be kept beside it.

    Raises:
      ValueError: the file exists, or `state` is no state.
      OSError: it could not be written.
    """
    check_is("state", state, State, "kvjax.prefill")
    if pathlib.Path(path).exists():
        raise ValueError(f"{path} exists; choose a new file, or delete it")
    info = state.plan.infos[0]
    arrays = {f"{i:05}": _plain(x) for i, x in enumerate(jax.tree.leaves(state))}
    about = {
        "policy": _described(policy),
        "lengths": np.asarray(state.prompt_length).tolist(),
        "sizes": [info.prompt_len, info.max_new_tokens],
        "digest": _digest(arrays),
        "notes": notes,
    }
    save_file(arrays, os.fspath(path), metadata={"kvjax": json.dumps(about)})


def load_state(path: str | os.PathLike[str], model: Any, params: PyTree[Any], *, policy: Policy) -> tuple[State, Any]:
    """Reads what `save_state` wrote: the state and the notes.

    Args:
      path: the file.
      model, params: the model that read the prompt.
      policy: the policy that it was read under; an equal one, rebuilt, will do.

    Raises:
      ValueError: no such file, a damaged one, or a state of another policy or model.
    """
    check_model(model, params)
    about, arrays = _stored(path)
    if about["policy"] != _described(policy):
        raise ValueError(
            f"{path} was made under {about['policy']}, not under {_described(policy)}; give the same policy"
        )
    lengths, (width, steps), config = np.asarray(about["lengths"], np.int32), about["sizes"], model.config
    plan, hparams = planned(policy, infos_of(config, policy, width, steps), lengths)
    learned = init_policy_params(config, policy, jax.random.key(0), width=width, max_new_tokens=steps)

    def shape(params: PyTree[Any]) -> State:
        keys = jax.random.split(jax.random.key(0), len(lengths))
        given = learned if jax.tree.leaves(learned) else None
        state = empty_state(config, policy, plan, hparams, lengths, steps, keys=keys, policy_params=given)
        tokens, again = jnp.zeros((len(lengths), width), jnp.int32), rereads(state)
        how = {"grow": True, "evict": again is None, "gives": again is not None}
        _, state, stats = step(model, params, tokens, state, lengths, "prefill", **how)
        return state if again is None or stats is None else after_replay(state, stats, again)

    leaves, tree = jax.tree.flatten(jax.eval_shape(shape, params))
    found = [arrays.get(f"{i:05}") for i in range(len(leaves))]
    wanted = [jax.eval_shape(_plain, x) for x in leaves]
    here, there = ([None if x is None else (x.shape, x.dtype) for x in each] for each in (wanted, found))
    if here != there or len(arrays) != len(leaves):
        wrong = next((i for i, (x, y) in enumerate(zip(here, there, strict=True)) if x != y), len(leaves))
        raise ValueError(
            f"{path} holds the state of another model or version: of its {len(arrays)} arrays, number {wrong} does not "
            f"fit the {len(leaves)} of this model; give the model that read the prompt"
        )
    wrap = lambda x, like: jax.random.wrap_key_data(x) if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else x
    return tree.unflatten(map(wrap, found, leaves)), about["notes"]


def _described(policy: Policy) -> str:
    """A policy in words that are the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(policy))


def _plain(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x)


def _digest(arrays: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()[:16]


def _stored(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file says about its arrays, and the arrays."""
    if not pathlib.Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with safe_open(os.fspath(path), framework="flax") as file:
            about = json.loads((file.metadata() or {}).get("kvjax", "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no file of kvjax ({error}); copy it again, or save it anew") from error
    if about is None or about["digest"] != _digest(arrays):
        raise ValueError(f"{path} is damaged, or no file of kvjax; copy it again, or save it anew")
    return about, arrays
