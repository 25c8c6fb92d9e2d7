"""Prompts as token ids, and token ids as text piece by piece."""

import functools
import itertools

import numpy as np
import pytest
import tokenizers
import transformers

from kvjax.text import encode

WORDS = ["<unk>", "<s>", "</s>", "[user]", "[bot]", "the", "goat", "crossed", "lake"]
BOS, EOS = 1, 2
WITH_BOS = "{{ bos_token }} {% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}" + (
    "{% if add_generation_prompt %}[bot]{% endif %}"
)
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }} ")
STRICT = "{{ raise_exception('only one message') }}"
CHAT = [{"role": "user", "content": "the goat"}]


def by_words(template=None, *, adds=True, bos="<s>", ends=False):
    """A tokenizer of words that may put BOS before texts and EOS behind them."""
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    single = f"{'<s> ' if adds else ''}$A{' </s>' if ends else ''}"
    special = [("<s>", BOS), ("</s>", EOS)]
    raw.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token="</s>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(("adds", "ends"), [(True, True), (True, False), (False, True), (False, False)])
def test_bos_is_there_at_most_once(adds, ends):
    """As the tokenizer puts it, whether the text or the chat template has it already or not; and no EOS behind."""
    tokenizer = by_words(adds=adds, ends=ends)
    encoded = lambda prompt, **options: encode.encode(tokenizer, prompt, **options)
    assert encoded("the goat") == [BOS] * adds + [5, 6]
    assert encoded("<s> the goat") == encoded("<s> <s> the goat") == encoded("the goat", bos=True) == [BOS, 5, 6]
    assert encoded("<s> the <s>", bos=False) == [5, BOS]
    assert encoded("") == [BOS] * adds
    theirs = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    for template in (WITH_BOS, WITHOUT_BOS):
        tokenizer.chat_template = template
        body, written = [3, 5, 6], template == WITH_BOS
        assert encoded(CHAT) == [BOS] * (adds or written) + [*body, 4]
        assert encoded(CHAT, bos=written) == theirs(CHAT, add_generation_prompt=True)
        assert encoded(CHAT, bos=False, add_generation_prompt=False) == body


def test_a_tokenizer_without_bos_gets_none():
    tokenizer = by_words(WITHOUT_BOS, adds=False, bos=None)
    assert encode.encode(tokenizer, "<s> goat") == [BOS, 6]  # a word like others
    assert encode.encode(tokenizer, CHAT) == [3, 5, 6, 4]
    with pytest.raises(ValueError, match="bos=True, but the tokenizer has no BOS"):
        encode.encode(tokenizer, "goat", bos=True)


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "options", "message"),
    [
        (by_words(), CHAT, {}, "the tokenizer has no chat template; encode a text"),
        (by_words(STRICT), CHAT, {}, "chat template refuses these messages: only one message"),
        (by_words(WITH_BOS), [{"content": "goat"}], {}, "is neither a text nor messages such as"),
        (by_words(WITH_BOS), "goat", {"tools": []}, r"\['tools'\] are for chat templates, but prompt is a text"),
        (by_words(), "go\ud800at", {}, "prompt has half of a character"),
        (by_words(WITH_BOS), CHAT, {"tokenize": True}, r"\['tokenize'\] are for what comes after a chat template"),
        (by_words("{{ messages[0].content + 5 }}"), CHAT, {}, "chat template refuses these messages: can only conc"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_prompt_is_refused(tokenizer, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        encode.encode(tokenizer, prompt, **options)


def by_bytes():
    """A token for every byte, as in GPT-2, and a special one."""
    vocabulary = {p: i for i, p in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


def by_pieces():
    """Pieces that carry the space before them, and bytes for what no piece has, as in Llama 2."""
    pieces = ["<unk>", *"▁the ▁goat s ▁ é".split(), *(f"<0x{i:02X}>" for i in range(256))]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    raw.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")


EMOJI = [6 + b for b in "🐐".encode()]
STREAMS = {
    "characters of several bytes": (by_bytes(), "naïve 🐐, 山羊 ☃"),
    "bytes that are no characters": (by_bytes(), np.random.default_rng(0).integers(0, 256, 200).tolist()),
    "spaces before pieces": (by_pieces(), [1, 2, 3, *EMOJI, 1, 5, *EMOJI, *EMOJI, 4, 4, 2]),
    "special tokens": (by_pieces(), [262, 1, 262, 262, 2, 3, 262]),
    "words": (by_words(), "<s> the goat crossed </s> the lake"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_pieces_are_the_text(name):
    """Together, and none of them ends within a character."""
    tokenizer, ids = STREAMS[name]
    ids = tokenizer(ids, add_special_tokens=False).input_ids if isinstance(ids, str) else ids
    pieces = encode.TextPieces(tokenizer)
    found = [pieces.push(i) for i in ids]
    assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in found)
    found.append(pieces.push(None, last=True))
    assert "".join(found) == pieces.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert sum(map(bool, found)) > len(ids) // 5


@pytest.mark.parametrize("stop", [("ab",), ("b",), ("abc", "bc"), ("aab", "ba"), ("aaa",), ("caab", "a")])
def test_a_stop_string_ends_the_text_wherever_it_is_cut(stop):
    """Before the stop string that is complete first; what cannot become one is not held back."""
    tokenizer = by_bytes()
    for letters in itertools.product("abc", repeat=5):
        whole, pieces = "".join(letters), encode.TextPieces(tokenizer, stop)
        end = next((e for e in range(6) if whole[:e].endswith(stop)), None)
        kept = None if end is None else min(end - len(s) for s in stop if whole[:end].endswith(s))
        for n, token in enumerate(tokenizer(whole).input_ids, 1):
            pieces.push(token)
            held = max(m for m in range(n + 1) if any(s[:-1].startswith(whole[n - m : n]) for s in stop))
            assert pieces.text == (whole[: n - held] if end is None or n < end else whole[:kept])
        pieces.push(None, last=True)
        assert (pieces.text, pieces.stopped) == ((whole, False) if end is None else (whole[:kept], True))


def test_a_chat_template_stands_around_what_is_repeated():
    words = by_words(WITHOUT_BOS)
    words.add_tokens(["previous"])
    how, after = encode.repeating(words), [4]
    assert (how.prefix, how.suffix, words.decode(how.repeat).count("previous")) == (1, tuple(after), 1)
    words.chat_template = None
    assert (encode.repeating(words).prefix, encode.repeating(words).suffix) == (0, ())
    words.chat_template = "{{ messages[0].content }} {{ messages[0].content }}"
    with pytest.raises(ValueError, match="writes a message 2 times, but the text goes on in one place"):
        encode.repeating(words)
