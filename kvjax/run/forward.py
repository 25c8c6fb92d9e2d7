"""`forward`, which reads tokens and returns what was observed; `policy(state, stats)` then evicts.

Letters: B batch, T tokens, L layers, V vocabulary.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from kvjax.contract import Ids, Model, Policy
from kvjax.run.apply import own_arrays
from kvjax.run.checks import as_array, check_block, check_ids, check_model, check_room, traced
from kvjax.run.layers import step
from kvjax.run.state import AttnStats, State
from kvjax.run.steps import checked_logits


def forward(
    model: Model,
    params: PyTree,
    tokens: Ids,
    state: State,
    *,
    valid: Ids | None = None,
    evict: bool = False,
    observe: tuple[Policy, ...] = (),
) -> tuple[Float[Array, "B V"], State, AttnStats]:
    """Reads tokens after the text of a state, and returns statistics: `policy(state, stats)` then evicts.

    Into an empty state (`start`) they are the prompt, and a policy must be applied to it before anything follows.
    Afterwards one token is a decode step, and several take slots that are free.

    Args:
      model, params: the model.
      tokens: token ids "B T", padded on the left.
      state: the state before.
      valid: how many of the last columns are tokens of each sequence "B"; all if None.
      evict: whether the state's policy is applied at once.
      observe: policies that will be applied to what is observed here, besides the state's.

    Returns:
      Logits of the next token, the state after, and what was observed.

    Raises:
      ValueError: ids outside the vocabulary, another number of sequences, a state that holds a whole prompt to which no
        policy was applied, more tokens than it has free slots or was planned for, or than its policy can read at once.
        Outside of jit, logits or scores that are not numbers.
    """
    check_model(model, params)
    B, grow = len(state.length), not state.ready
    tokens = as_array("tokens", tokens, np.integer, (B, None), "integers, one row a sequence")
    T = tokens.shape[1]
    valid = np.full(B, T, np.int32) if valid is None else as_array("valid", valid, np.integer, (B,), "integers")
    if not traced(valid) and not 0 <= valid.min() <= valid.max() <= T:
        raise ValueError(f"valid goes from {valid.min()} to {valid.max()}, but a row has 0 to {T} tokens")
    check_ids(model, tokens if traced(tokens, valid) else tokens[np.arange(T)[None] >= T - valid[:, None]])
    if grow and state.layers[0].pos.shape[-1]:
        raise ValueError(
            "this state holds a whole prompt: apply a policy to it, policy(state, stats), before more is read"
        )
    if not grow:
        check_room(state, valid)
    elif not traced(valid, state.prompt_length) and (wrong := np.asarray(state.prompt_length) != valid).any():
        row = int(wrong.argmax())
        raise ValueError(
            f"prompt {row} is read with {valid[row]} tokens, but the state was started for {state.prompt_length[row]}; "
            "give valid=lengths, the tokens of each row, and start(lengths=) the same"
        )
    if grow:
        check_block(state.plan, None, T)
    elif T > 1 and (picky := [p for p in state.plan.layers if p.layout.prompt != "any"]):
        raise ValueError(
            f"{type(picky[0]).__name__} looks at a whole prompt, and at 1 token at a time behind it, but these are "
            f"{T}; read them one by one"
        )
    if grow and evict and state.plan.again:
        raise ValueError("the policy reads prompts again, but forward(evict=True) reads them once; use kvjax.prefill")
    tokens, valid = jnp.asarray(tokens), jnp.asarray(valid, jnp.int32)
    logits, after, stats = step(model, params, tokens, state, valid, evict=evict, gives=True, observe=observe)
    if T > 1:
        checked_logits(logits, after)
    return logits, own_arrays(after), stats
