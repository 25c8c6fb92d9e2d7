"""What a user's first run is, with transformers or kvpress, in the environment without kvjax: as `first_ours`."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from ..process import held
from .theirs import make_press

checkpoint, dtype, length, new, what, budget, _ = sys.argv[1:]
start = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), trust_remote_code=False)
if int(length):
    model.generation_config.eos_token_id = None  # so that as much is generated
    tokens = torch.randint(4, model.config.vocab_size, (1, int(length)))
    how = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": int(new), "do_sample": False}
    with make_press(what, float(budget))(model):
        model.generate(tokens, **how)
else:
    for x in model.parameters():
        x.detach().view(dtype=getattr(torch, f"int{8 * x.element_size()}")).max()
print(json.dumps({"seconds": time.perf_counter() - start, "peak": held("VmHWM")}))
