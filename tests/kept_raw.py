"""What every policy keeps of drawn tensors, as digests: `python -m tests.kept_raw` records the old library's."""

import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import tqdm

import kvjax
from tests import conftest  # whose settings decide how numbers round
from tests.kept import digest
from tests.kept_cases import BY_LAYER, CASES, SHARED, Sizes

GOLDEN = pathlib.Path(__file__).parent / "golden" / "kept_raw.json"
BUDGETS = (10, 0.5)
SIZES = Sizes(L=3, N=4, K=2, H=8, D=12)
B, T, LENGTHS = 2, 40, np.array([40, 29], np.int32)
POSITIONS = np.maximum(np.arange(T) - (T - LENGTHS)[:, None], -1)[:, None]


@functools.cache
def tensors():
    """(q, k, v) and what else a layer has, of a padded batch; later heads look more sharply."""
    draw, s = np.random.default_rng(3), SIZES
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    sharpness = jnp.linspace(0.5, 3.0, s.N)[None, :, None, None]
    q, k, v = normal(B, s.N, T, s.H) * sharpness, normal(B, s.K, T, s.H), normal(B, s.K, T, s.H)
    tokens = jnp.asarray(draw.integers(0, 120, (B, T)), jnp.int32)
    return (q, k, v), {"out_proj": normal(s.N, s.H, s.D), "hidden": normal(B, T, s.D), "tokens": tokens}


def layers(case):
    """The layers that are compared: the middle one of 3, where a pyramid is even, or both ends."""
    return (0, SIZES.L - 1) if case in BY_LAYER else (0,) if case in SHARED else (1,)


def kept(evict, case, policy):
    """Digests of the case's layers, joined; `evict` gives the positions that live of one layer."""
    arrays, more = tensors()
    each = [evict(policy, *arrays, lengths=LENGTHS, layer=i, num_layers=SIZES.L, **more) for i in layers(case)]
    return "".join(map(digest, each))


def old(policy, *arrays, **more):
    """Positions that the old library keeps in one layer."""
    return np.where(np.asarray(kvjax.evict_layer(policy, *arrays, **more).keep), POSITIONS, -1)


def record():
    """Writes `golden/kept_raw.json`: a line a case, whose budgets are those that the old library accepts."""
    lines, refused = [], []
    for case, (make, _) in tqdm.tqdm(CASES.items()):
        found = {}
        for budget in BUDGETS:
            try:
                found[str(budget)] = kept(old, case, make(budget, SIZES))
            except ValueError as e:
                refused.append(f"{case} {budget}: {e}")
        lines.append(f"{json.dumps(case)}: {json.dumps(found)}")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(*refused, sep="\n")


if __name__ == "__main__":
    assert conftest.CACHE
    record()
