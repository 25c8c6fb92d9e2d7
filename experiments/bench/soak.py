"""Whether memory stays flat: a thousand generations under mixed policies, lengths, batches and numbers of tokens.

    python -m kvjax.experiments.bench.soak

One process with the embedded model repeats 40 requests in a drawn order. The first 200 generations have seen every
shape; from then on nothing is compiled, and resident memory is to stay within 5 %. Needs Linux.
"""

import functools
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_whole
from kvjax.experiments.bench.process import held
from kvjax.experiments.core.command import check_output, script
from kvjax.experiments.core.provenance import write_found
from kvjax.models.embedded import EMBEDDED

_MOST = 0.05  # growth that is no leak
_POLICIES: tuple[Callable[[], kvjax.Policy], ...] = (
    methods.full,
    *(functools.partial(getattr(methods, x), 24, window=8) for x in ("snapkv", "pyramidkv", "ada_snapkv")),
    *(functools.partial(getattr(methods, x), 24) for x in ("h2o", "tova", "streaming_llm", "keyformer")),
)


def soak(generations: int = 1000, warm: int = 200, requests: int = 40, output: pathlib.Path | None = None) -> None:
    """Prints resident memory after the first generations and after all.

    Args:
      generations: how many.
      warm: after how many of them memory is first read.
      requests: how many differ; each is made once before any comes again.
      output: a JSON file for the figures.

    Raises:
      ValueError: requests that come after the first reading, nothing that does, or memory that grew by more than 5 %.
    """
    check_output(output)
    check_whole(1, requests=requests)
    check_whole(requests, warm=warm)
    check_whole(warm + 1, generations=generations)
    model, params = models.load(EMBEDDED)
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(30, 500)), int(rng.integers(1, 5)), int(rng.integers(2, 40))) for _ in range(requests)]
    order = [*range(requests), *rng.integers(0, requests, generations - requests).tolist()]
    read: dict[str, int] = {}
    start = time.perf_counter()
    for done, i in enumerate(order, 1):
        length, batch, new = sizes[i]
        tokens = rng.integers(4, model.config.vocab_size, (batch, length))
        tokens[:, -2:] = 5, 6  # what ends in equal tokens may be taken for padding
        lengths = np.maximum(length - rng.integers(0, 8, batch), 25)
        how = {"policy": _POLICIES[i % len(_POLICIES)](), "key": jax.random.key(done), "eos_ids": ()}
        kvjax.generate(model, params, tokens, lengths=lengths, max_new_tokens=new, **how).tokens.block_until_ready()
        if done in (requests, warm, generations):
            read[str(done)] = held("VmRSS")
            print(f"{done:5d} generations: {held('VmRSS') / 2**20:,.0f} MiB, {time.perf_counter() - start:,.0f} s")
    growth = read[str(generations)] / read[str(warm)] - 1
    print(f"from {warm} to {generations}: {growth:+.1%}")
    write_found(output, held=read, growth=growth)
    if growth > _MOST:
        raise ValueError(f"memory grew by {growth:.1%}, more than {_MOST:.0%}: something holds what is no longer used")


if __name__ == "__main__":
    script(soak)
