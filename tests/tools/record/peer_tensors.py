"""What both sides of the recorded cases of other libraries are given: drawn by numpy from a case's seed.

A case has `layers` layers of `QUERY_HEADS` query and `KV_HEADS` kv heads. Hidden states are queries, keys and values
before rotation, one beside the other, so that the projections of the layer that reads them only cut them apart.
"""

from typing import Any

import numpy as np

QUERY_HEADS, KV_HEADS, THETA = 4, 2, 10000.0
_DRAWN, _OF_TORCH, _OUT_PROJ = 1000, 1001, 1002


def embed_dim(head_dim: int) -> int:
    """The width of hidden states."""
    return (QUERY_HEADS + 2 * KV_HEADS) * head_dim


def layer_tensors(case: dict[str, Any], layer: int) -> dict[str, np.ndarray]:
    """(q "N T H", k "K T H", v "K T H", out_proj "N H D") of one layer, before rotation, in 32 bits.

    Keys and queries have a mean of their own in every head, as those of trained models do. The projection is the same
    for all prompts of a seed.

    Args:
      case: an entry of the file; `tokens` of its prompt, and `more` that follow.
      layer: which one.
    """
    T, H = case["tokens"] + case.get("more", 0), case["head_dim"]
    rng = np.random.default_rng([case["seed"], layer])
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q = 1.5 * normal(QUERY_HEADS, T, H) + normal(QUERY_HEADS, 1, H)
    k = normal(KV_HEADS, T, H) + normal(KV_HEADS, 1, H)
    v = normal(KV_HEADS, T, H)
    weights = np.random.default_rng([case["seed"], layer, _OUT_PROJ])
    out_proj = weights.standard_normal((QUERY_HEADS, H, embed_dim(H))).astype(np.float32)
    return {"q": q, "k": k, "v": v, "out_proj": out_proj}


def hidden_states(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Hidden states "T D" of one layer's tensors."""
    parts = [tensors[name].swapaxes(0, 1).reshape(tensors[name].shape[1], -1) for name in "qkv"]
    return np.concatenate(parts, axis=-1)


def drawn(case: dict[str, Any], *shape: int | str) -> np.ndarray:
    """Standard normal numbers that a method is given, such as filters.

    Args:
      case: an entry of the file.
      *shape: numbers, or the letters of layers (L), query heads (N), kv heads (K), their width (H) and that of hidden
        states (D).
    """
    H = case["head_dim"]
    sizes = {"L": case["layers"], "N": QUERY_HEADS, "K": KV_HEADS, "H": H, "D": embed_dim(H)}
    shape_ = [sizes[x] if isinstance(x, str) else x for x in shape]
    return np.random.default_rng([case["seed"], _DRAWN]).standard_normal(shape_).astype(np.float32)


def uniform(case: dict[str, Any], *shape: int | str) -> np.ndarray:
    """As `drawn`, between 0 and 1."""
    return np.asarray(1 / (1 + np.exp(-drawn(case, *shape))), np.float32)


def spread(case: dict[str, Any], *shape: int | str) -> np.ndarray:
    """As `drawn`, matrices x x^T / H, which are covariances."""
    x = drawn(case, *shape)
    return x @ x.swapaxes(-1, -2) / x.shape[-1]


def centres(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """The "mean" of queries before rotation "L N H", and the mean "length" of each channel's pair, which is longer."""
    mean, more = drawn(case, "L", "N", "H"), uniform(case, "L", "N", "H")
    first, then = np.split(mean, 2, axis=-1)
    length = np.hypot(first, then) + np.split(more, 2, axis=-1)[0]
    return {"mean": mean, "length": np.concatenate([length, length], -1)}


def random_numbers(case: dict[str, Any], call: int, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """What torch's `randn` ("normal"), `rand` and `bernoulli` ("uniform") give in place of their generator's numbers.

    Args:
      case: an entry of the file.
      call: how many such calls were made before in this case.
      shape: of what is drawn.
      kind: "normal", or "uniform"; a Bernoulli draw is 1 where its probability is above the number.
    """
    rng = np.random.default_rng([case["seed"], _OF_TORCH, call])
    numbers = rng.standard_normal(shape) if kind == "normal" else rng.uniform(size=shape)
    return numbers.astype(np.float32)
