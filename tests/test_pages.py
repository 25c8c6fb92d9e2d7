"""Pages of positions: bounds by loops over keys, and tables that are brought up to date."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.state import compact, evict, insert
from kvjax.scoring.pages import Pages
from tests import helpers

B, K, H, S, SIZE = 2, 2, 3, 14, 4
PAGES = Pages(SIZE)


def cache(rng, positions):
    """A layer that holds one token a position, in slots drawn for every head."""
    pos = np.full((B, K, S), -1)
    for row in pos.reshape(-1, S):
        row[rng.permutation(S)[: len(positions)]] = positions
    k = jnp.asarray(rng.standard_normal((B, K, S, H)), jnp.float32)
    return kvjax.LayerKV(k, k, jnp.asarray(pos, jnp.int32))


def by_loops(k, pos, q):
    """The bound of every page that holds a token, for one head and one query: the definition."""
    found = {}
    for page in {p // SIZE for p in pos if p >= 0}:
        keys = [key for key, p in zip(k, pos, strict=True) if p >= 0 and p // SIZE == page]
        high, low = ([end(key[d] for key in keys) for d in range(H)] for end in (max, min))
        found[page] = sum(max(q[d] * high[d], q[d] * low[d]) for d in range(H))
    return found


def test_bounds_are_those_of_the_definition_and_no_product_is_beyond_them():
    rng = np.random.default_rng(0)
    kv = cache(rng, [0, 1, 3, 8, 9, 10, 11, 17])
    q = rng.standard_normal((B, K, 2, H)).astype(np.float32)
    bounds = np.asarray(PAGES.bounds(PAGES.of(kv, 5), jnp.asarray(q)))
    for b, h, g in np.ndindex(B, K, 2):
        k, pos = np.asarray(kv.k[b, h]), np.asarray(kv.pos[b, h])
        for page, bound in by_loops(k, pos, q[b, h, g]).items():
            np.testing.assert_allclose(bounds[b, h, g, page], bound, rtol=1e-5)
            assert (k[pos // SIZE == page] @ q[b, h, g] <= bound + 1e-5).all()


def test_a_table_is_brought_up_to_date_and_made_anew_where_that_is_not_enough():
    """A number that only a table made anew replaces tells the two apart."""
    rng = np.random.default_rng(1)
    site = helpers.site(T=12, N=2 * K, K=K, H=H, max_new_tokens=8)
    kv, newest = cache(rng, range(9)), jnp.asarray([8, 8])
    step = jax.jit(PAGES.joined)
    table = step(PAGES.init(site, B), kv, newest)

    def token(kv, active):
        new = jnp.asarray(rng.standard_normal((B, K, 1, H)), jnp.float32)
        return insert(kv, new, new, jnp.where(active, newest + 1, -1)[:, None])

    events = {
        "token": lambda kv: (token(kv, np.array([True, True])), 1),
        "one of two": lambda kv: (token(kv, np.array([True, False])), np.array([1, 0])),
        "nothing": lambda kv: (kv, 0),
        "moved": lambda kv: (compact(kv, S), 0),
        "evicted": lambda kv: (evict(kv, kv.pos % 5 != 2), 0),
        "evicted the token": lambda kv: (evict(token(kv, np.array([True, True])), kv.live), 1),
        "another": lambda kv: (token(kv, np.array([True, True])), 1),
    }
    made_anew = []
    for event, happens in events.items():
        marked = jnp.full_like(table.extremes.value[..., -1, :], 7.0)  # of a page without tokens
        table = dataclasses.replace(
            table, extremes=kvjax.cache.state.PerHead(table.extremes.value.at[..., -1, :].set(marked))
        )
        kv, added = happens(kv)
        newest = newest + added
        table, wanted = step(table, kv, newest), PAGES.of(kv, PAGES.number(site))
        if (table.extremes.value[..., -1, :] != 7.0).any():
            made_anew.append(event)
        at = lambda t: dataclasses.replace(t, extremes=t.extremes.value[..., :-1, :])
        jax.tree.map(np.testing.assert_array_equal, at(table), at(wanted))
    assert made_anew == ["moved", "evicted"]


def test_a_page_has_a_position():
    with pytest.raises(ValueError, match=r"Pages\(size=0\): a page has at least 1 position"):
        Pages(0)
