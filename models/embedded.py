"""The model that comes with the project: small, trained by `experiments/train_tiny.py`, made to retrieve."""

import pathlib
from collections.abc import Sequence
from typing import Any, Final

EMBEDDED: Final = pathlib.Path(__file__).parent / "tiny_retriever"


def write_tokenizer(path: pathlib.Path, vocabulary: Sequence[str], *, special: dict[str, str]) -> None:
    """Writes a tokenizer with one token a word, in the format of transformers.

    Args:
      path: the checkpoint directory.
      vocabulary: words, in the order of their ids.
      special: which of them are `pad_token`, `bos_token`, `eos_token` and `unk_token`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    from models.tokenizer import import_transformers

    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer: Any = Tokenizer(models.WordLevel(ids, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = import_transformers().PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, **special, padding_side="left").save_pretrained(path)
