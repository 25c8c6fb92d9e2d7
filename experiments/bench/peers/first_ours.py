"""What a user's first run is, with kvjax: `python -m kvjax.experiments.bench.peers.first_ours MODEL LENGTH NEW`."""

import sys

import numpy as np

import kvjax
from kvjax import models

checkpoint, length, new = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model, params = models.load(checkpoint)
tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, length))
print(np.asarray(kvjax.generate(model, params, tokens, max_new_tokens=new).tokens).shape)
