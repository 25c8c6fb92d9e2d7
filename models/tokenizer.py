"""Text in, left-padded token batches out."""

import json
import logging
import os
import pathlib
import reprlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.contract import MOST
from kvjax.contract.checks import whole
from kvjax.models.sources import locate
from kvjax.models.stored import check_whole
from kvjax.text.encode import encode as encode

_WITHOUT_TORCH = "Models won't be available"  # of transformers, that is, where PyTorch is not installed
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def import_transformers() -> ModuleType:
    """transformers, which is slow to import and only wanted for text, without its warning that PyTorch is missing."""
    logging.getLogger("transformers").addFilter(_is_of_use)
    import transformers

    return transformers


def _is_of_use(record: logging.LogRecord) -> bool:
    return _WITHOUT_TORCH not in record.getMessage()


def load_tokenizer(source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None) -> Any:
    """The tokenizer of a directory, a hub id or a preset, as transformers loads it; no weights, and no code of theirs.

    Args:
      source, revision, token: as for `kvjax.models.load`.

    Raises:
      ValueError: no tokenizer files, damaged ones, or a tokenizer that is code.
    """
    path = locate(source, revision=revision, token=token, weights=False)
    files = [path / f for f in _FILES if (path / f).is_file()]
    if not files:
        raise ValueError(
            f"{path} has no tokenizer.json, tokenizer.model or vocab.json; encode text elsewhere, or add one"
        )
    for file in files:
        check_whole(file)
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as e:
        if "trust_remote_code" in str(e):
            raise ValueError(
                f"{path}: its tokenizer is code of its own, which kvjax never runs; where you trust it, save what it "
                "makes as a tokenizer.json that transformers reads without it"
            ) from e
        names = [f.name for f in files]
        raise ValueError(f"{path}: no tokenizer can be made of {names} ({e}); download them again") from e


def save_tokenizer(path: pathlib.Path, tokenizer: Any, *, special: dict[str, str]) -> None:
    """Writes a tokenizer of the library `tokenizers` in the format that transformers 4 and 5 read.

    Args:
      path: the checkpoint directory.
      tokenizer: a `tokenizers.Tokenizer`.
      special: which of its tokens are `pad_token`, `bos_token`, `eos_token` and `unk_token`.
    """
    fast = import_transformers().PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, **special, padding_side="left").save_pretrained(path)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # version 5 has a new name
    file.write_text(json.dumps({k: x for k, x in config.items() if k != "backend"}, indent=2) + "\n")


def write_tokenizer(path: pathlib.Path, vocabulary: Sequence[str], *, special: dict[str, str]) -> None:
    """Writes a tokenizer with one token a word, in the format of transformers.

    Args:
      path: the checkpoint directory.
      vocabulary: words, in the order of their ids.
      special: which of them are `pad_token`, `bos_token`, `eos_token` and `unk_token`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer: Any = Tokenizer(models.WordLevel(ids, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_tokenizer(path, tokenizer, special=special)


def pad_left(
    sequences: Sequence[Sequence[int]], *, width: int | None = None, pad_id: int = 0
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Sequences as one left-padded array, and their lengths.

    Args:
      sequences: token ids.
      width: T; the longest sequence if None.
      pad_id: what fills the left. Padding is never attended to, whatever it is.

    Raises:
      ValueError: no sequences, an empty one, one longer than `width`, or token ids that are not whole numbers from 0.
    """
    pad_id = whole("pad_id", pad_id, least=0)
    if not isinstance(sequences, Iterable) or getattr(sequences, "ndim", 1) == 0:
        raise ValueError(f"sequences={sequences!r} is not a sequence of sequences of token ids")
    rows = [_ids(i, s) for i, s in enumerate(sequences)]
    if not rows:
        raise ValueError("sequences is empty; a batch needs at least one")
    lengths = np.array([len(row) for row in rows], np.int32)
    if lengths.min() < 1:
        raise ValueError("every sequence needs at least one token; add BOS to empty ones")
    width = int(lengths.max()) if width is None else whole("width", width)
    if lengths.max() > width:
        raise ValueError(
            f"a sequence has {lengths.max()} tokens, but the batch is {width} wide; raise width or truncate"
        )
    tokens = np.full((len(rows), width), pad_id, np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[width - len(row) :] = row
    return tokens, lengths


def _ids(index: int, sequence: Sequence[int]) -> Int[np.ndarray, "T"]:
    """One sequence as an array, if token ids are what it holds."""
    try:
        ids = np.asarray(sequence)
    except (ValueError, TypeError, RuntimeError):  # rows of several lengths, and what numpy cannot read
        ids = np.zeros(())
    if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= MOST)):
        raise ValueError(
            f"sequence {index} is {reprlib.repr(sequence)}, not token ids, whole numbers from 0 to {MOST - 1:,}"
        )
    return ids.astype(np.int32)
