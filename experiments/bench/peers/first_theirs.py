"""What a user's first run is, with transformers, in the environment without kvjax: as `first_ours`."""

import sys

import torch
from transformers import AutoModelForCausalLM

checkpoint, dtype, length, new = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), trust_remote_code=False)
tokens = torch.randint(4, model.config.vocab_size, (1, length))
generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False)
print(tuple(generated[:, length:].shape))
