"""stories260k with its tokenizer, as a directory that transformers loads."""

import pathlib
import shutil
import struct
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space


def write_stories(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies the model and writes its tokenizer, which llama2.c stores as pieces and the order of their merges."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, target / name)
    raw, at, pieces = (source / "tok512.bin").read_bytes(), 4, []
    while at < len(raw):
        (size,) = struct.unpack_from("<i", raw, at + 4)
        pieces.append(raw[at + 8 : at + 8 + size].decode().replace(" ", SPACE))
        at += 8 + size
    pieces[:3] = "<unk>", "<s>", "</s>"
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece[:i], piece[i:])
        for piece in pieces[259:]
        for i in range(1, len(piece))
        if {piece[:i], piece[i:]} <= set(ids)
    ]
    tokenizer: Any = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(target)
    return target
