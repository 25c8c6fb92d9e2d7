"""A user's first run, with kvjax: `python -m kvjax.experiments.bench.peers.first_ours MODEL DTYPE LENGTH NEW`."""

import sys

import numpy as np

import kvjax
from kvjax import models

checkpoint, dtype, length, new = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
model, params = models.load(checkpoint, dtype=dtype)
tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, length))
print(np.asarray(kvjax.generate(model, params, tokens, max_new_tokens=new).tokens).shape)
