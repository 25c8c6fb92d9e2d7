"""Eviction losses: their formula, Theorems 1 to 3 of Ada-KV, and the losses of a model's output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from kvjax.analysis import losses
from kvjax.pallas_kernels import Logits

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def plain_layer_loss(q, k, v, keep, w, lengths=None, scale=None, window=None, softcap=None):
    """Every field of `LayerLoss` as a dict, with loops."""
    q, k, v, w = (np.asarray(x, np.float64) for x in (q, k, v, w))
    keep = np.asarray(keep)
    B, N, R, H = q.shape
    S = k.shape[2]
    scale = H**-0.5 if scale is None else scale
    heads = {1: np.zeros((B, R)), 2: np.zeros((B, R))}
    output, heads_bound, output_bound = ({1: np.zeros((B, R)), 2: np.zeros((B, R))} for _ in range(3))
    lost = np.zeros((B, N, R))
    for b in range(B):
        first = S - (S if lengths is None else lengths[b])
        for r in range(R):
            t = S - R + r
            if t < first:
                continue
            start = first if window is None else max(first, t - window + 1)
            moved = []
            for n in range(N):
                kv, own = n * k.shape[1] // N, n * keep.shape[1] // N
                x = k[b, kv, start : t + 1] @ q[b, n, r] * scale
                x = x if softcap is None else softcap * np.tanh(x / softcap)
                p = np.exp(x - x.max())
                p = p / p.sum()
                kept = p * keep[b, own, start : t + 1]
                lost[b, n, r] = (p - kept).sum()
                after = kept / kept.sum() if kept.sum() > 0 else kept
                moved.append((p - after) @ v[b, kv, start : t + 1])
            moved = np.stack(moved)
            projected = np.einsum("nh,nhd->d", moved, w)
            for order in (1, 2):
                heads[order][b, r] = np.linalg.norm(moved.reshape(-1), order)
                output[order][b, r] = np.linalg.norm(projected, order)
                largest = max(np.linalg.norm(x, order) for x in v[b, :, first:].reshape(-1, H))
                heads_bound[order][b, r] = 2 * largest * lost[b, :, r].sum()
                rows = [v[b, n * k.shape[1] // N, first:] @ w[n] for n in range(N)]
                largest = max(np.linalg.norm(x, order) for x in np.concatenate(rows))
                output_bound[order][b, r] = 2 * largest * lost[b, :, r].sum()
    return {
        "heads": heads, "output": output, "heads_bound": heads_bound, "output_bound": output_bound, "lost": lost
    }  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"lengths": (9, 5), "window": 4}, {"softcap": 2.0, "scale": 0.7, "heads": 4}], ids=str
)
def test_the_loss_of_a_layer_is_that_of_plain_loops(options):
    B, N, K, S, H, R = 2, 4, 2, 9, 3, 6
    options, rng = dict(options), np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q, k, v, w = 2 * normal(B, N, R, H), normal(B, K, S, H), normal(B, K, S, H), normal(N, H, 5)
    keep = rng.random((B, options.pop("heads", K), S)) < 0.6
    keep[0, 0] = False  # a head that kept nothing
    wanted = plain_layer_loss(q, k, v, keep, w, **options)
    lengths = options.pop("lengths", None)
    found = losses.layer_loss(q, k, v, keep, out_proj=w, lengths=lengths, logits=Logits(**options))
    np.testing.assert_allclose(found.lost, wanted["lost"], atol=2e-6)
    for name in ("heads", "output", "heads_bound", "output_bound"):
        np.testing.assert_allclose(getattr(found, name).l1, wanted[name][1], rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(getattr(found, name).l2, wanted[name][2], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("order", [1, 2])
def test_a_row_loses_no_more_than_its_bound_of_which_top_k_has_the_least(order):
    """2,048 rows of very different sharpness."""
    rng = np.random.default_rng(order)
    (B, N, K, S), f = (2048, 4, 2, 10), lambda x: jnp.asarray(x, jnp.float32)
    p = special.softmax(rng.standard_normal((B, N, S)) * rng.uniform(0.05, 12, (B, N, 1)), axis=-1)
    v, w = rng.standard_normal((B, K, S, 3)) * rng.uniform(0.1, 10, (B, K, S, 1)), rng.standard_normal((N, 3, 4))
    keep = rng.random((B, K, S)) < rng.uniform(0.05, 0.95, (B, K, 1))
    keep[:, :, 3] = True
    row = f(p), f(v), f(w)
    loss, bound = (f(*row, keep, order=order) for f in (losses.eviction_loss, losses.eviction_bound))
    least = losses.least_bound(*row, keep.sum(-1), order=order)
    assert (np.asarray(loss) <= np.asarray(bound) * (1 + 1e-5)).all()
    assert (np.asarray(least) <= np.asarray(bound) * (1 + 1e-5)).all()


def test_a_bound_that_is_attained():
    """Half of the attention goes to a value opposite to what is kept: the loss is the bound, not less."""
    row = (
        jnp.asarray([[[0.5, 0.5]]]),
        jnp.asarray([[[[1.0], [-1.0]]]]),
        jnp.ones((1, 1, 1)),
        np.asarray([[[True, False]]]),
    )
    assert float(losses.eviction_loss(*row)[0]) == float(losses.eviction_bound(*row)[0]) == 1.0


def test_losses_of_the_output():
    rng = np.random.default_rng(12)
    a, b = rng.normal(size=(2, 3, 7))
    p, q = special.softmax(a, -1), special.softmax(b, -1)
    f = lambda x: jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(losses.output_kl(f(a), f(b)), (p * np.log(p / q)).sum(-1), rtol=1e-4)
    targets = np.asarray([2, 0, 6])
    np.testing.assert_allclose(losses.task_loss(f(a), targets), -np.log(p[np.arange(3), targets]), rtol=1e-5)
    assert jnp.isnan(jax.jit(losses.task_loss)(jnp.ones((2, 7)), jnp.asarray([-1, 7]))).all()


QKV = jnp.ones((1, 4, 6, 3)), jnp.ones((1, 2, 6, 3)), jnp.ones((1, 2, 6, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.layer_loss(*QKV, np.ones((1, 3, 6), bool)), "keep has 3 heads, but there are 2 kv heads and 4"),
        (lambda: losses.layer_loss(*QKV, np.ones((1, 2, 6), bool), lengths=[7]), "lengths go from 7 to 7"),
        (lambda: losses.task_loss(jnp.ones((2, 3)), [2, -1]), "targets lie between -1 and 2, but in a vocabulary of 3"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
