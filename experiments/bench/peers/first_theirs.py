"""As `first_ours` with transformers or kvpress, in the environment without kvjax."""

import json
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
import transformers

from ..process import held, loading
from .theirs import attend, make_press, version


def pretrained(checkpoint: str, dtype: str) -> Any:
    """A model."""
    how = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **how)


def load(checkpoint: str, dtype: str, warm: bool = False) -> dict[str, float]:
    """As `first_ours.load`."""
    if warm:
        config: Any = transformers.AutoConfig.from_pretrained(checkpoint)
        getattr(transformers, config.architectures[0])  # its file is imported
    read = lambda x: x.detach().view(dtype=getattr(torch, f"int{8 * x.element_size()}")).max()
    return loading(lambda: [*pretrained(checkpoint, dtype).parameters()], read, lambda x: x.numel() * x.element_size())


def answer(checkpoint: str, dtype: str, length: int, new: int, what: str, budget: float, _: str) -> dict[str, int]:
    """As `first_ours.answer`."""
    model = pretrained(checkpoint, dtype)
    model.generation_config.eos_token_id = None  # so that as much is generated
    tokens = torch.randint(4, model.config.vocab_size, (1, length))
    how = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": new, "do_sample": False}
    with make_press(what, budget)(model):
        model.generate(tokens, **how)
    return {"peak": held("VmHWM")}


def answers(checkpoint: str, dtype: str, what: str, budget: float, file: str) -> list[list[int]]:
    """Greedy answers under a press; a file has of every prompt its tokens, the most new ones, and those that end it."""
    model = pretrained(checkpoint, dtype).eval()
    return [_answered(model, what, budget, *asked) for asked in json.loads(pathlib.Path(file).read_bytes())]


@torch.inference_mode()
def _answered(
    model: Any, what: str, budget: float, tokens: Sequence[int], most: int, ends: Collection[int]
) -> list[int]:
    cache, found = transformers.DynamicCache(), list[int]()
    attend(model, "eager" if what == "ObservedAttentionPress" else "sdpa")
    with make_press(what, budget)(model):
        out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    attend(model, "sdpa")
    while True:
        found.append(int(out.logits[0, -1].argmax()))
        if len(found) == most or found[-1] in ends:
            return found
        at = torch.tensor([[len(tokens) + len(found) - 1]])
        out = model(torch.tensor([found[-1:]]), past_key_values=cache, use_cache=True, position_ids=at)


def versions() -> dict[str, str | None]:
    """Of what answers."""
    return {name: version(name) for name in ("torch", "transformers", "kvpress")}
