"""What a user does first with kvjax, each in a process of its own: loading a model, and a first answer."""

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import models
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.bench.process import held, loading


def load(checkpoint: str, dtype: str, warm: bool = False) -> dict[str, float]:
    """Loads a checkpoint in this process (`process.loading`).

    Args:
      checkpoint: a model's directory.
      dtype: of its parameters.
      warm: whether what the library starts or imports only when it is first used is there before the call.
    """
    if warm:
        jnp.zeros(()).block_until_ready()  # the backend starts
    load = lambda: jax.tree.leaves(jax.block_until_ready(models.load(checkpoint, dtype=dtype)[1]))
    return loading(load, lambda x: np.asarray(x).view(f"u{x.dtype.itemsize}").max(), lambda x: x.nbytes)


def answer(checkpoint: str, dtype: str, length: int, new: int, what: str, budget: float, folder: str) -> dict[str, int]:
    """Loads a model and generates behind a prompt, with programs that a folder keeps; returns bytes at the `peak`."""
    kvjax.keep_compiled(folder)
    model, params = models.load(checkpoint, dtype=dtype)
    tokens = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, length))
    policy = make_policy(what, budget)
    np.asarray(kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=new, eos_ids=()).tokens)
    return {"peak": held("VmHWM")}
