"""Tokenizers of GGUF files, as a tokenizer.json that transformers reads."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6  # of tokenizer.ggml.token_type
_SPACE = "\u2581"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{x}{_ENDINGS}?" for x in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_GPT4O += rf"|\p{{N}}{{1,3}}|{_REST}".replace(r"]+[\r\n]*", r"]+[\r\n/]*")
_SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "gpt-4o": (_GPT4O,),
}
"""What cuts a text into words before byte pairs are merged, by `tokenizer.ggml.pre`: each cuts what the last left."""
_WHOLE = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token is one, whatever its merges; and BOS comes first
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # texts are brought to Unicode's composed form
SPECIAL: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def write_tokenizer(directory: pathlib.Path, keys: Mapping[str, Any], vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json; nothing for a file without a tokenizer.

    Args:
      directory: where.
      keys: the metadata of a GGUF file.
      vocab_size: how many tokens the model has.

    Raises:
      ValueError: a tokenizer that is not known, or of another size than the vocabulary.
    """
    get = lambda name, default=None: keys.get(f"tokenizer.ggml.{name}", default)
    kind, tokens = get("model", "none"), get("tokens", [])
    if kind in ("none", "no_vocab"):
        return
    makers = {"gpt2": _by_bytes, "llama": _by_pieces}
    if kind not in makers:
        raise ValueError(f"tokenizer {kind!r} is not supported; supported are {sorted(makers)}")
    types = get("token_type") or [1] * len(tokens)
    if not len(tokens) == len(types) == vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokens)} tokens and {len(types)} types of them, the embedding {vocab_size} rows; "
            "convert the model again with its own tokenizer"
        )
    names = {n: tokens[i] for n, long in SPECIAL.items() if (i := get(f"{long}_token_id")) is not None}
    tokenizer, adds_bos = makers[kind](get, tokens, types, names)
    added = {_CONTROL: True, _USER: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=added[kind])
            for token, kind in zip(tokens, types, strict=True)
            if kind in added and tokenizer.token_to_id(token) is not None
        ]
    )
    ends = [
        (names.get("bos"), "{} $A", get("add_bos_token", adds_bos)),
        (names.get("eos"), "$A {}", get("add_eos_token")),
    ]
    template, used = "$A", []
    for token, place, wanted in ends:
        if wanted and token is not None:
            template = template.replace("$A", place.format(token))
            used.append((token, tokenizer.token_to_id(token)))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {f"{name}_token": token for name, token in names.items()}
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in keys:
        config["chat_template"] = keys["tokenizer.chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _by_bytes(
    get: Any, tokens: Sequence[str], types: Sequence[int], names: Mapping[str, str]
) -> tuple[Tokenizer, bool]:
    """A tokenizer that merges pairs of bytes, and whether BOS comes first where the file is silent."""
    del types, names
    pre = get("pre", "default")
    if pre not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; supported are {sorted(_SPLITS)}")
    merges = [tuple(pair.split(" ", 1)) for pair in get("merges", [])]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(ids, merges, ignore_merges=pre in _WHOLE))
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in _SPLITS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre in _WHOLE


def _by_pieces(
    get: Any, tokens: Sequence[str], types: Sequence[int], names: Mapping[str, str]
) -> tuple[Tokenizer, bool]:
    """A tokenizer of SentencePiece's pieces, and whether BOS comes first where the file is silent.

    Of two neighbours, those are merged first whose piece has the highest score, after all that make a piece which the
    model's makers defined.
    """
    spelled = [t if t.strip(" ") else _SPACE * len(t) for t in tokens]
    ids, scores = {t: i for i, t in enumerate(spelled)}, get("scores", [0.0] * len(tokens))
    pairs = (
        ((types[i] != _USER, -scores[i], i, -cut), (piece[:cut], piece[cut:]))
        for i, piece in enumerate(spelled)
        for cut in range(1, len(piece))
        if types[i] not in (_UNKNOWN, _CONTROL, _BYTE) and piece[:cut] in ids and piece[cut:] in ids
    )
    merges = [pair for _, pair in sorted(pairs)]
    prefix = get("add_space_prefix", True)
    tokenizer: Any = Tokenizer(
        models.BPE(ids, merges, unk_token=names.get("unk", tokens[0]), fuse_unk=True, byte_fallback=_BYTE in types)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer, True
