"""The steps that join a model and a policy: read prompts, whole or in blocks, and decode a token.

`prefill`, `decode_step` and `start` are for users, and check what they are given; `read_prompts` and `decode` are what
`generation` uses. All may stand inside `jax.jit`.

Letters: B batch, T tokens of a prompt, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree
from tqdm.auto import tqdm

from kvjax.contract import Amount, Ids, LayerParams, Model, Policy, PRNGKey, Size
from kvjax.run.apply import check_layers_kept, check_lost, evict_layers
from kvjax.run.checks import (
    as_array,
    check_block,
    check_ids,
    check_lengths,
    check_model,
    check_positions,
    check_prompts,
    check_room,
    check_state,
    traced,
)
from kvjax.run.layers import step
from kvjax.run.mesh import check_mesh, on_mesh, placed
from kvjax.run.plan import Plan, plan_request
from kvjax.run.reread import check_rereads, repeated
from kvjax.run.state import Prompts, State, empty_state, row_keys


def start(
    model: Model,
    *,
    policy: Policy,
    lengths: Ids,
    max_new_tokens: Amount,
    width: Size | None = None,
    key: PRNGKey = None,
    plan: Plan | None = None,
    policy_params: LayerParams = None,
    mesh: Mesh | None = None,
) -> State:
    """An empty state for prompts of the given lengths, into which `forward` reads them.

    Args:
      model: the model.
      policy: the policy.
      lengths: tokens of each prompt "B".
      max_new_tokens: tokens that may follow.
      width: columns that the prompts will have; the longest prompt's tokens if None.
      key: one PRNG key for the batch, or one a sequence.
      plan: sizes of a larger budget or request, whose slots and programs are used (`make_plan`).
      policy_params: the policy's learned parameters (`init_policy_params`), if it has any.
      mesh: devices that share the prompts and the heads (`make_mesh`), with parameters from `shard_params`.

    Raises:
      ValueError: sizes that the policy or the plan cannot work with, learned parameters that are missing, a text beyond
        positions that the model has learned, a mesh that does not divide the prompts or the heads.
    """
    lengths = as_array("lengths", lengths, np.integer, (None,), "integers, one a prompt")
    if width is None and traced(lengths):
        raise ValueError("lengths are traced; give width=, the columns that the prompts will have")
    width = int(np.max(lengths)) if width is None else width
    lengths = check_lengths(lengths, len(lengths), width)
    if mesh is not None:
        check_mesh(mesh, model.config, len(lengths))
    plan, hparams = plan_request(model.config, policy, lengths, width, max_new_tokens, plan=plan)
    if not traced(lengths):
        check_positions(model.config, plan, np.asarray(lengths), max_new_tokens)
    how = {"keys": row_keys(key, len(lengths)), "policy_params": policy_params}
    state = empty_state(model.config, policy, plan, hparams, lengths, max_new_tokens, **how)
    return state if mesh is None else placed(state, mesh)


def prefill(
    model: Model,
    params: PyTree,
    tokens: Ids,
    *,
    policy: Policy = Policy(),
    max_new_tokens: Amount,
    lengths: Ids | None = None,
    attention_mask: Ids | None = None,
    key: PRNGKey = None,
    block: Size | None = None,
    plan: Plan | None = None,
    policy_params: LayerParams = None,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> tuple[Float[Array, "B V"], State]:
    """Reads prompts and evicts from them, layer by layer.

    A row of a padded batch keeps what it would keep alone.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      policy: what to evict; everything is kept by default.
      max_new_tokens: tokens that may be read behind the prompt.
      lengths: the prompts' own lengths "B"; T if None.
      attention_mask: in place of `lengths`, 1 for tokens and 0 for padding "B T", which may stand anywhere.
      key: one PRNG key for the batch, or one a sequence; policies that draw at random use it.
      block: reads so many tokens at a time, each block followed by an eviction, so that memory is that of the budget
        and a block, whatever the prompt's length (RoCo, arXiv 2402.06262, section 3.3). None reads all at once.
      plan: sizes of a larger budget or request, whose slots and programs are used (`make_plan`).
      policy_params: the policy's learned parameters (`init_policy_params`), if it has any.
      mesh: devices that share the rows and the heads (`make_mesh`). The state knows it from then on.
      progress: shows a bar of the layers that are compiled and read, a widget in notebooks.

    Returns:
      Logits of the next token, and the state.

    Raises:
      ValueError: empty prompts, token ids outside the vocabulary, lengths outside the prompt, padding on the right,
        parameters of another model, sizes that the policy or the plan cannot work with, blocks for a policy that
        looks at the whole prompt (FastGen, KVzip), or others than of one token for one that lets every row decide
        (H2O's stepwise mask), a mesh that does not divide rows or heads; always before anything runs. After it, logits
        or scores that are not numbers.
    """
    check_model(model, params)
    prompts = check_prompts(model, tokens, lengths, attention_mask)
    params = on_mesh(model, params, mesh, len(prompts.tokens))
    how = {"key": key, "block": block, "plan": plan, "policy_params": policy_params, "mesh": mesh, "progress": progress}
    return read_prompts(model, params, prompts, policy, max_new_tokens, **how)


def read_prompts(
    model: Model,
    params: PyTree,
    prompts: Prompts,
    policy: Policy,
    max_new_tokens: Amount,
    *,
    key: PRNGKey = None,
    block: Size | None = None,
    plan: Plan | None = None,
    policy_params: LayerParams = None,
    mesh: Mesh | None = None,
    buckets: bool = False,
    warns: bool = True,
    progress: bool | None = False,
) -> tuple[Float[Array, "B V"], State]:
    """Reads prompts that were checked, and evicts from them.

    `buckets` drops columns that no prompt fills, and rounds sizes up (`plan_request`); without `warns`, texts beyond
    the model's positions get no warning. With `progress` None there is a bar where stderr is a terminal.
    """
    config, lengths, known = model.config, prompts.lengths, not traced(*prompts)
    if buckets and known:
        prompts = Prompts(prompts.tokens[:, -int(np.max(lengths)) :], lengths)
    B, T = prompts.tokens.shape
    plan, hparams = plan_request(config, policy, lengths, T, max_new_tokens, plan=plan, buckets=buckets and known)
    block = check_block(plan, block, T)
    if warns and not traced(lengths):
        check_positions(config, plan, np.asarray(lengths), max_new_tokens, block)
    how = {"keys": row_keys(key, B), "slots": block is not None, "policy_params": policy_params}
    state = empty_state(config, policy, plan, hparams, lengths, max_new_tokens, **how)
    state = state if mesh is None else placed(state, mesh)
    if plan.again:
        check_rereads(model, plan, known)
    xp: Any = np if known else jnp
    num, L = 1 if block is None else -(-T // block), len(state.layers)
    total = L * (num + sum(len([*how.firsts(plan.infos[0].prompt_len)]) for how in plan.again))
    with tqdm(total=total, desc="prompt", unit="layer", disable=None if progress is None else not progress) as bar:
        read = functools.partial(step, model, params, after_layer=bar.update)
        if block is not None:
            tokens = xp.pad(prompts.tokens, ((0, 0), (num * block - T, 0)))
            behind = block * xp.arange(num - 1, 0, -1)
            valid = xp.clip(lengths[None] - behind[:, None], 0, block)
            blocks = tokens[:, :-block].reshape(B, num - 1, block).swapaxes(0, 1)

            def read_block(state: State, given: tuple[Array | np.ndarray, Array | np.ndarray]) -> tuple[State, None]:
                return read(given[0], state, given[1], ends=False)[1], None

            if traced(*jax.tree.leaves((params, prompts))):  # compiles one block, whatever their number
                state, _ = jax.lax.scan(read_block, state, (blocks, valid))
            else:
                for given in zip(blocks, valid, strict=True):
                    state, _ = read_block(state, given)
            logits, state, _ = read(tokens[:, -block:], state, xp.minimum(lengths, block))
            return checked_logits(logits, state), state
        tokens = xp.pad(prompts.tokens, ((0, 0), (plan.infos[0].prompt_len - T, 0)))
        logits, state, stats = read(tokens, state, lengths, evict=not plan.again, gives=bool(plan.again))
        if plan.again:
            stats = repeated(model, params, tokens, np.asarray(lengths), state, stats, bar.update)
            state, lost = evict_layers(state, stats)
            check_lost(state, lost)
        return checked_logits(logits, state), state


_no_numbers = jax.jit(lambda logits: jnp.isnan(logits).any())


def checked_logits(logits: Float[Array, "B V"], state: State) -> Float[Array, "B V"]:
    """Returns the logits; raises ValueError where they are no numbers.

    Inside of jit they alone can say that a token found no slot, or that tokens went by scores that are no numbers.
    """
    if not traced(logits) and bool(_no_numbers(logits)):
        if state.steady:  # otherwise `forward` may have exceeded budgets
            check_layers_kept(state)
        raise ValueError(
            "logits are not numbers: the model's are not, the policy keeps more tokens than its `sizes` asked for, or "
            "`forward` read more tokens at once than there is room for between evictions"
        )
    return logits


def decode_step(
    model: Model, params: PyTree, token: Ids, state: State, *, active: Ids | None = None
) -> tuple[Float[Array, "B V"], State]:
    """Reads one token of every sequence, and evicts if it is time to.

    Args:
      model, params: the model.
      token: the token ids "B".
      state: what `prefill` or an earlier step returned. Donate it under `jax.jit` to write in place.
      active: which sequences read their token "B"; the others keep their cache. All do if None.

    Returns:
      Logits of the next token, and the state after. Inside `jax.jit`, logits of a sequence are NaN where its token
      found no slot; beware that the largest of them is token 0 for `argmax`.

    Raises:
      ValueError: another number of tokens than sequences, ids outside the vocabulary, a state of another model, without
        a prompt, or that has read all the tokens that it was planned for. Outside of jit, logits that are not numbers,
        as where a token found no slot.
    """
    check_state(model, params, state)
    B = len(state.length)
    token = as_array("token", token, np.integer, (B,), "integers, one a sequence")
    if active is not None:
        active = as_array("active", active, np.bool_, (B,), "True or False, one a sequence")
    check_ids(model, token if active is None or traced(token, active) else token[active])
    check_room(state, 1 if active is None else active.astype(np.int32))
    reads = None if active is None else jnp.asarray(active)
    logits, after = decode(model, params, jnp.asarray(token, jnp.int32), state, reads)
    checked_logits(logits if active is None or traced(active) else logits[np.flatnonzero(active)], after)
    return logits, after


def decode(
    model: Model, params: PyTree, token: Int[Array, "B"], state: State, active: Bool[Array, "B"] | None = None
) -> tuple[Float[Array, "B V"], State]:
    """Reads one checked token of every sequence, and evicts.

    Logits are NaN behind the last token that a sequence was planned for, which under `jax.jit` they alone can say.
    """
    logits, after, _ = step(model, params, token[:, None], state, active)
    past = after.length - after.prompt_length > after.max_new_tokens
    return jnp.where(past[:, None], jnp.nan, logits), after
