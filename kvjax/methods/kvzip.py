"""KVzip (Kim et al., arXiv 2505.23416)."""

import dataclasses
from typing import Any

from kvjax.drivers.text import check_tokenizer, rendered
from kvjax.eviction import Evict
from kvjax.pallas_kernels.values import checked, tokens
from kvjax.policy import Layout
from kvjax.scoring.protect import Protect
from kvjax.scoring.replay import Replay
from kvjax.scoring.replayed import Replayed, ReplayedAttention
from kvjax.sizes.allocation import Adaptive, HeadAllocation
from kvjax.sizes.budget import Count, Tokens, as_count

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"
_MARK = "\ue000"  # stands for the context; of the private use area, which no template should hold


def kvzip(
    budget: int | float | Count,
    *,
    tokenizer: Any = None,
    repeat: tuple[int, ...] | None = None,
    repeat_next: tuple[int, ...] | None = None,
    suffix: tuple[int, ...] | None = None,
    prefix: int | None = None,
    chunk: int = 2048,
    overlap: int = 8,
    sinks: int = 4,
    plus: bool = False,
    heads: HeadAllocation = Adaptive(1.0, float("inf")),
    storage: Layout = "pool",
) -> Evict:
    r"""Keeps what the model attends to while it repeats the prompt, which no question has to be known for.

    The prompt is read whole. Then, chunk by chunk and without adding to the cache, the model reads the instruction to
    repeat it and the chunk itself. The score of a token is the most that any of these rows gives it in any query head
    of its group, under a softmax over the chunk, the sinks before it and the rows so far (section 3; `kvzip_press.py`):
    $s_j = \max_{i, g} p_{ij}$. With `plus` (KVzip+, arXiv 2601.07891) it is
    $\max_{i, g} p_{ij} \lVert v_j W_O^g \rVert_2 / \lVert h_i \rVert_2$, where $h_i$ is what the attention module reads
    of the row: the residual stream after its normalisation, as in kvpress.

    Heads compete for the budget of their layer, which is the same in all layers (`layerwise=True` in kvpress). In a
    layer with a sliding window rows see the chunk as far as the window reaches; kvpress scores without it. Prompts of a
    batch are cut by their own lengths. Of one prompt, scores are those of kvpress where layers have no window, and so
    is what is kept where budgets round to the same number. Where all layers compete, as in the paper:
    `kvjax.across_layers(methods.kvzip(...), kvjax.TopScores())`.

    Reading the prompt again takes two to five times what reading it takes, more where a chunk is a larger part of it;
    and until that is done, the whole prompt's keys and values exist in all layers.

    Args:
      budget: live tokens a kv head and layer, on average, sinks included.
      tokenizer: the model's, one of transformers. It makes the ids of the released code's instructions, and what a chat
        template has around a user's message, where ids are not given. Without it and without ids, chunks alone are
        read again.
      repeat: ids in front of the first chunk.
      repeat_next: ids in front of later chunks, which the last `overlap` tokens of the chunk before follow.
      suffix: ids between all that and the chunk.
      prefix: first tokens of the prompt that are in no chunk, as those of a chat template; all but sinks are the first
        to go.
      chunk: tokens of a chunk.
      overlap: tokens of the chunk before in front of a later one.
      sinks: first tokens that stay, and which rows of later chunks read too.
      plus: whether probabilities are weighed by what values contribute.
      heads: how the heads of a layer share its budget; the default is a competition without a floor.
      storage: "pool", or "dense" for the slots of the largest head in all.
    """
    count, sinks = as_count(budget, "budget"), checked(tokens(), "sinks", sinks)
    given = {"repeat": repeat, "repeat_next": repeat_next, "suffix": suffix, "skip": prefix}
    made = Replay() if tokenizer is None else repeating(tokenizer)
    told: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    replay = dataclasses.replace(made, chunk=chunk, overlap=overlap, **told)
    score = Replayed(ReplayedAttention(replay, sinks, plus))
    stay = min(sinks, count.n) if isinstance(count, Tokens) else sinks
    return Evict(score, budget, protect=Protect(sinks=stay), heads=heads, storage=storage)


def repeating(tokenizer: Any) -> Replay:
    """Reading again under the released code's instructions, as ids, within what a chat template has around a message.

    Args:
      tokenizer: the model's, one of transformers.

    Raises:
      ValueError: what is no tokenizer of transformers, or a chat template that does not write a message once.
    """
    check_tokenizer(tokenizer)
    around = ["", "\n"]
    if getattr(tokenizer, "chat_template", None) is not None:
        around = rendered(tokenizer, [{"role": "user", "content": _MARK}], enable_thinking=False).split(_MARK)
    if len(around) != 2:
        raise ValueError(
            f"the tokenizer's chat template writes a message {len(around) - 1} times, but a context has one place; "
            "give repeat=, repeat_next=, suffix= and prefix= in place of tokenizer="
        )
    ids = lambda text: tuple(tokenizer(text, add_special_tokens=False).input_ids)
    before, after = map(ids, around)
    return Replay(ids(_FIRST), ids(_LATER), after, skip=len(before))
