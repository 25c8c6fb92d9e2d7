"""Text in, left-padded token batches out."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.token_classes import token_classes as token_classes
from models.weights import locate


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """The tokenizer of a checkpoint directory or hub id, as transformers loads it.

    Raises:
      ValueError: no tokenizer files.
    """
    path = locate(source)
    if not any(
        (path / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    ):
        raise ValueError(
            f"{path} has no tokenizer.json, tokenizer.model or vocab.json; encode text elsewhere, or add one"
        )
    from transformers import AutoTokenizer  # slow to import, and only wanted for text

    return AutoTokenizer.from_pretrained(path)


def pad_left(
    sequences: Sequence[Sequence[int]], *, width: int | None = None, pad_id: int = 0
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Sequences as one left-padded array, and their lengths.

    Args:
      sequences: token ids.
      width: T; the longest sequence if None.
      pad_id: what fills the left. Padding is never attended to, whatever it is.

    Raises:
      ValueError: an empty sequence, or one longer than `width`.
    """
    lengths = np.array([len(s) for s in sequences], np.int32)
    if not len(lengths) or lengths.min() < 1:
        raise ValueError("every sequence needs at least one token; add BOS to empty ones")
    width = int(lengths.max()) if width is None else width
    if lengths.max() > width:
        raise ValueError(
            f"a sequence has {lengths.max()} tokens, but the batch is {width} wide; raise width or truncate"
        )
    tokens = np.full((len(sequences), width), pad_id, np.int32)
    for row, s in zip(tokens, sequences, strict=True):
        row[width - len(s) :] = s
    return tokens, lengths
