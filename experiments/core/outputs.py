"""What long answers tell beside their score: whether they end and repeat themselves, and what was evicted meanwhile."""

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float

LONG: Final = 128
"""Tokens that an answer may have, from which on lines tell what is here."""
LAST: Final = 256
"""Tokens at the end of an answer whose text is compressed."""
TOLD: Final = ("ended", "compressed", "repeated", "mean_live", "evictions")
"""The names of what is told."""
_RUN = 4  # tokens


def told(answer: Sequence[int], end_of_text: str, ended: bool, live: Float[np.ndarray, "m"]) -> dict[str, float | int]:
    """What lines say of a long answer.

    Args:
      answer: token ids.
      end_of_text: the text of its last `LAST` tokens.
      ended: whether it ended by itself, before its tokens were used up.
      live: live tokens a head, the mean of all heads and layers, before the answer and after each token that was read.

    Returns:
      ended: 1 or 0. compressed: bytes of that text as zlib leaves them, over its bytes, 1 at most; a text that goes
      round in circles has few. repeated: the share of its runs of four tokens that stand in the answer before.
      mean_live: live tokens a head after a token, on average. evictions: after how many tokens some head had fewer
      than one more.
    """
    text = end_of_text.encode()
    runs = [tuple(answer[i : i + _RUN]) for i in range(len(answer) - _RUN + 1)]
    return {
        "ended": int(ended),
        "compressed": min(1.0, len(zlib.compress(text, 9)) / max(len(text), 1)),
        "repeated": 1 - len({*runs}) / len(runs) if runs else 0.0,
        "mean_live": float(live[1:].mean()) if len(live) > 1 else 0.0,
        "evictions": int((np.diff(live) < 1 - 1e-6).sum()),
    }
