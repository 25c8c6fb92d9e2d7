"""A user's first run: `python -m kvjax.experiments.bench.peers.first_ours MODEL DTYPE LENGTH NEW METHOD BUDGET FOLDER`.

Without a prompt it loads, and reads each number once. It prints the seconds of that, and the bytes held at the peak.
"""

import json
import sys
import time

import jax
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.experiments.bench.process import held

checkpoint, dtype, length, new, what, budget, folder = sys.argv[1:]
kvjax.keep_compiled(folder)
start = time.perf_counter()
model, params = models.load(checkpoint, dtype=dtype)
if int(length):
    tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, int(length)))
    policy = methods.full() if what == "full" else getattr(methods, what)(float(budget))
    np.asarray(kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=int(new), eos_ids=()).tokens)
else:
    for x in jax.tree.leaves(params):
        np.asarray(x).view(f"u{x.dtype.itemsize}").max()
print(json.dumps({"seconds": time.perf_counter() - start, "peak": held("VmHWM")}))
