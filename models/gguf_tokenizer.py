"""Tokenizers of GGUF files, written as a tokenizer.json that transformers reads."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6  # what tokenizer.ggml.token_type calls a token
_SPACE = "\u2581"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _END + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{_END}?" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_LLAMA3 = (_WORDS.replace("DIGITS", "{1,3}"),)
_MARKED = _WORDS.replace("DIGITS", "").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK += r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_WORDS.replace("DIGITS", ""),)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3[0],)),
    "qwen35": (_MARKED,),
    "gpt-4o": (_CASED + r"|\p{N}{1,3}" + _AFTER,),
    "tekken": (_CASED.replace(f"{_END}?", "") + r"|\p{N}" + _AFTER,),
    "deepseek-v3": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK),
}
"""What cuts a text into words, by `tokenizer.ggml.pre`: each expression cuts what the one before it left."""


def write_tokenizer(directory: pathlib.Path, keys: Mapping[str, Any], vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json from metadata; nothing where that has no tokenizer.

    Raises:
      ValueError: a tokenizer that is not known, or of another size than the vocabulary.
    """
    own = {k.removeprefix("tokenizer.ggml."): x for k, x in keys.items() if k.startswith("tokenizer.ggml.")}
    kind, tokens = own.get("model", "none"), own.get("tokens", [])
    if kind in ("none", "no_vocab") and not tokens:
        return
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer {kind!r} is not supported; supported are 'gpt2' (byte pairs) and 'llama' (pieces)")
    types = own.get("token_type") or [1] * len(tokens)
    if not len(tokens) == len(types) == vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokens)} tokens of {len(types)} types, but the embedding {vocab_size} rows; "
            "convert the model again together with its own tokenizer"
        )
    longer = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: own.get(f"{long}_token_id", vocab_size) for name, long in longer.items()}
    special = {name: tokens[i] for name, i in ids.items() if i < vocab_size}
    made, first = (_by_bytes if kind == "gpt2" else _by_pieces)(own, tokens, types, special.get("unk", tokens[0]))
    added = [
        AddedToken(token, normalized=False, special=known == _CONTROL)
        for token, known in zip(tokens, types, strict=True)
        if known in (_CONTROL, _USER) and made.token_to_id(token) is not None
    ]
    made.add_tokens(added)
    before = [special["bos"]] if own.get("add_bos_token", first) and "bos" in special else []
    after = [special["eos"]] if own.get("add_eos_token", False) and "eos" in special else []
    ends = [(token, made.token_to_id(token)) for token in {*before, *after}]
    if ends:
        made.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ends)
    made.save(str(directory / "tokenizer.json"))
    config = {f"{name}_token": token for name, token in special.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
    if template := keys.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _by_bytes(own: Mapping[str, Any], tokens: list[str], types: list[int], unknown: str) -> tuple[Any, bool]:
    """A tokenizer that merges pairs of bytes, and whether BOS comes first where the file is silent."""
    del types, unknown
    pre = own.get("pre", "default")
    if pre not in _CUTS:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; supported are {sorted(_CUTS)}")
    if not own.get("merges"):
        raise ValueError("tokenizer.ggml.merges is missing; convert the model again with llama.cpp")
    merges, whole = [tuple(pair.split(" ", 1)) for pair in own["merges"]], _CUTS[pre] is _LLAMA3 or pre == "tekken"
    try:
        made: Any = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=whole))
    except Exception as e:  # of the library tokenizers, which has none of its own
        raise ValueError(f"tokenizer.ggml.merges do not fit its tokens ({e}); convert the model again") from e
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in _CUTS[pre]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([*cuts, last]), decoders.ByteLevel()
    if "qwen" in pre:
        made.normalizer = normalizers.NFC()
    return made, whole


def _by_pieces(own: Mapping[str, Any], tokens: list[str], types: list[int], unknown: str) -> tuple[Any, bool]:
    """The same for SentencePiece: what makes a piece of the makers' is merged first, then by the pieces' scores."""
    if len(own.get("scores", ())) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens have {len(own.get('scores', ()))} scores; convert the model again")
    pieces = [t if t.strip(" ") else _SPACE * len(t) for t in tokens]
    ids, scores, prefix = {t: i for i, t in enumerate(pieces)}, own["scores"], own.get("add_space_prefix", True)
    pairs = sorted(
        (types[i] != _USER, -scores[i], i, -cut, piece[:cut], piece[cut:])
        for i, piece in enumerate(pieces)
        if types[i] not in (_UNKNOWN, _CONTROL, _BYTE)
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    )
    merges, falls = [pair[-2:] for pair in pairs], _BYTE in types
    made: Any = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=falls))
    spaces, prepend = normalizers.Replace(" ", _SPACE), [normalizers.Prepend(_SPACE)] if prefix else []
    made.normalizer = normalizers.Sequence([*prepend, spaces])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return made, True
