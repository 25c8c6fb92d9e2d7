"""As `first_ours` with transformers or kvpress, in the environment without kvjax."""

from typing import Any

import torch
import transformers

from ..process import held, loading
from .theirs import make_press


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
