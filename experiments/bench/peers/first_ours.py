"""What a user does first with kvjax, each in a process of its own: loading a model, and a first answer."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import models
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.bench.process import held


def load(checkpoint: str, dtype: str, warm: bool = False) -> dict[str, float]:
    """Loads a checkpoint in this process, and reads each number once.

    Args:
      checkpoint: a model's directory.
      dtype: of its parameters.
      warm: whether what the library starts or imports only when it is first used is there before the call.

    Returns:
      `ready` and `read`: until the call returned with parameters that can be used, and until each has been read
      once; `processor`: seconds of all threads until then; `peak`: bytes that the process has held at most; `before`:
      those that it held before; `size`: those of the parameters.
    """
    if warm:
        jnp.zeros(()).block_until_ready()  # the backend starts
    before, start, spent = held("VmRSS"), time.perf_counter(), time.process_time()
    params = jax.tree.leaves(jax.block_until_ready(models.load(checkpoint, dtype=dtype)[1]))
    ready = time.perf_counter() - start
    for x in params:
        np.asarray(x).view(f"u{x.dtype.itemsize}").max()
    read, spent = time.perf_counter() - start, time.process_time() - spent
    size = sum(x.nbytes for x in params)
    took = {"ready": ready, "read": read, "processor": spent}
    return took | {"before": before, "peak": held("VmHWM"), "size": size}


def answer(checkpoint: str, dtype: str, length: int, new: int, what: str, budget: float, folder: str) -> dict[str, int]:
    """Loads a model and generates behind a prompt, with programs that a folder keeps; returns bytes at the `peak`."""
    kvjax.keep_compiled(folder)
    model, params = models.load(checkpoint, dtype=dtype)
    tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, length))
    policy = make_policy(what, budget)
    np.asarray(kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=new, eos_ids=()).tokens)
    return {"peak": held("VmHWM")}
