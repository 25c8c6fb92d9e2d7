"""The models that come with the project: small, made to retrieve, trained by `experiments/train.py embedded` and
`experiments/train.py varied`.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, Final

EMBEDDED: Final = pathlib.Path(__file__).parent / "tiny_retriever"
VARIED: Final = pathlib.Path(__file__).parent / "varied_retriever"
INCLUDED: Final = {"embedded": EMBEDDED, "varied": VARIED}


def included(name: str) -> str | pathlib.Path:
    """The directory of a model of `INCLUDED`; any other name as it is.

    Raises:
      ValueError: the varied model, from a wheel, which does not hold it.
    """
    found = INCLUDED.get(name, name)
    if found == VARIED and not VARIED.is_dir():
        raise ValueError(
            "the varied model comes with the repository, not with the wheel; run this in a clone, or make it, in 76 "
            "minutes: kvjax train varied --text FILE, and name its directory in place of varied"
        )
    return found


def save_tokenizer(path: pathlib.Path, tokenizer: Any, *, special: dict[str, str]) -> None:
    """Writes a tokenizer of the library `tokenizers` in the format that transformers 4 and 5 read.

    Args:
      path: the checkpoint directory.
      tokenizer: a `tokenizers.Tokenizer`.
      special: which of its tokens are `pad_token`, `bos_token`, `eos_token` and `unk_token`.
    """
    from kvjax.models.tokenizer import import_transformers

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
