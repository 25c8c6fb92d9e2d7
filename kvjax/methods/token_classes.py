"""Which ids of a tokenizer are special tokens, and which are punctuation."""

import string
import unicodedata
from typing import Any


def token_classes(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Finds (special ids, punctuation ids) of a tokenizer of transformers, each in increasing order.

    Special are the tokens that it declares special, those of chat templates included. Punctuation are the tokens whose
    text, without the mark of a leading space, is nothing but ASCII punctuation or characters of Unicode's classes P.

    Raises:
      ValueError: `tokenizer` is none of transformers.
    """
    if not hasattr(tokenizer, "added_tokens_decoder"):
        raise ValueError(f"{tokenizer!r} is no tokenizer; load one, such as with models.load_tokenizer")
    added = tokenizer.added_tokens_decoder
    special = {int(i) for i in tokenizer.all_special_ids} | {int(i) for i, token in added.items() if token.special}
    pieces = sorted((int(i), piece) for piece, i in tokenizer.get_vocab().items())
    punctuation = (i for i, piece in pieces if i not in special and _is_punctuation(tokenizer, piece))
    return tuple(sorted(special)), tuple(punctuation)


def _is_punctuation(tokenizer: Any, piece: str) -> bool:
    text = tokenizer.convert_tokens_to_string([piece]).strip(" \u2581\u0120")
    return bool(text) and all(c in string.punctuation or unicodedata.category(c)[0] == "P" for c in text)
