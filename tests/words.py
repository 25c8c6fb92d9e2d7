"""A tokenizer of words, for models of 61 tokens."""

import functools
import itertools

import tokenizers
import transformers

V = 61


@functools.cache
def words(**options):
    """A tokenizer whose token i is a word of two letters, "aa" to "hb" with eight of them."""
    names = ["".join(x) for x in itertools.islice(itertools.product("abcdefgh", repeat=2), V)]
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="aa"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="aa", **options)
