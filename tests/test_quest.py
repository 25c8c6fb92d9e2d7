"""Quest: what a row reads is what loops over pages choose, however its summaries were kept and its slots are stored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.eviction import Evict, Mask
from kvjax.scoring.pages import Pages
from kvjax.scoring.scores import Recency
from tests import helpers
from tests.test_pages import by_loops

B, N, K, H, T, M = 2, 4, 2, 3, 13, 21
SIZE, PAGES = 4, 2  # of a page; read
LENGTHS = (T, 9)
q, k, v = helpers.qkv(5, B=B, N=N, K=K, T=M, H=H)
SLOPES = (0.9, 0.6, 0.4, 0.2)


def quest(**options):
    return methods.quest(SIZE * PAGES, page_size=SIZE, dense_layers=0, **options)


def read_by_loops(b, h, live, *, group=np.max, heads=N // K, **how):
    """The positions that the newest token reads of those that a head holds."""
    newest, shift = max(live), T - LENGTHS[b]
    here, keys = slice(h * heads, (h + 1) * heads), np.asarray(k[b, h * heads * K // N, [p + shift for p in live]])
    bounds = [by_loops(keys, live, row) for row in np.asarray(q[b, here, newest + shift])]
    scale, softcap, window = H**-0.5, how.get("softcap"), how.get("window")
    logit = lambda x: x * scale if softcap is None else softcap * np.tanh(x * scale / softcap)
    slopes = how.get("slopes", (0,) * N)[here]
    total = {}
    for page in bounds[0]:
        nearest = min(SIZE * page + SIZE - 1, newest)
        if window is None or nearest > newest - window:
            total[page] = group([logit(x[page]) - s * (newest - nearest) for x, s in zip(bounds, slopes, strict=True)])
    total.pop(newest // SIZE)
    pages = {newest // SIZE, *sorted(total, key=lambda page: (-total[page], page))[: PAGES - 1]}
    return [p for p in sorted(live) if p // SIZE in pages]


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {}),
        ({"group": "mean"}, {"softcap": 0.7}),
        ({}, {"window": 9}),
        ({}, {"slopes": SLOPES}),
        ({"granularity": "query_head"}, {}),
    ],
    ids=["plain", "mean", "window", "slopes", "query_head"],
)
def test_a_row_reads_what_loops_choose(options, how):
    """Under padding, while pages fill; by the rows' own positions."""
    seen = helpers.replay(quest(**options), q, k, v, T, lengths=LENGTHS, **how)
    by_query = options.get("granularity") == "query_head"
    loops = {"group": np.mean if options.get("group") == "mean" else np.max, "heads": 1 if by_query else N // K}
    for step, (read, before) in enumerate(zip(seen.read, seen.live, strict=False)):
        for b, row in enumerate(before):
            for h, live in enumerate(row):
                assert read[b][h] == read_by_loops(b, h, [*live, LENGTHS[b] + step], **loops, **how)


@pytest.mark.parametrize("first", [True, False])
def test_pages_of_a_cache_that_evicts_are_those_of_what_it_holds(first):
    tova = methods.tova(10)
    seen = helpers.replay(kvjax.chain(quest(), tova) if first else kvjax.chain(tova, quest()), q, k, v, T)
    for step, (read, before) in enumerate(zip(seen.read, seen.live, strict=False)):
        for b, row in enumerate(before):
            for h, live in enumerate(row):
                assert len(live) == 10
                if b == 0:
                    assert read[b][h] == read_by_loops(b, h, [*live, T + step])


@dataclasses.dataclass(frozen=True)
class Anew(Mask):
    """The specification: bounds of all keys at every step, and a mask of all slots."""

    def __call__(self, moment):
        kv, ctx = moment.kv, moment.ctx
        pages = Pages(SIZE)
        number, newest = pages.number(ctx.site), (ctx.length - 1)[:, None, None]
        of = jax.nn.one_hot(jnp.where(kv.live, kv.pos // SIZE, -1), number, axis=-1) > 0  # "B K S P"
        keys, of = kv.k[:, :, :, None], of[..., None]
        high, low = jnp.where(of, keys, -jnp.inf).max(2), jnp.where(of, keys, jnp.inf).min(2)
        row = moment.q.reshape(*kv.pos.shape[:2], -1, 1, kv.k.shape[-1])
        bound = jnp.maximum(row * high[:, :, None], row * low[:, :, None]).sum(-1).max(2)
        there = of.any((2, 4))
        page = jnp.arange(number)[None, None]
        bound = jnp.where(page == newest // SIZE, jnp.inf, jnp.where(there, bound, -jnp.inf))
        rank = (bound[..., None, :] > bound[..., None]).sum(-1)
        return kv.live & jnp.take_along_axis(rank < PAGES, jnp.maximum(kv.pos // SIZE, 0), axis=-1)


EVERYTHING = Evict(Recency(), 2**20, mask=Anew())


def run(shallow, policy):
    model, params = shallow
    prompt = np.random.default_rng(4).integers(0, 61, (B, T))
    options = {"lengths": LENGTHS, "max_new_tokens": 7, "policy": policy}
    generated = kvjax.generate(model, params, prompt, **options)
    beams = kvjax.generate_beams(model, params, prompt, num_beams=2, **options)
    return generated.tokens, generated.state, beams.tokens, beams.scores


def test_models_read_what_is_chosen_anew_at_every_step(shallow):
    """Token by token and in beams, whose caches are copied; streams and sessions take the same steps."""
    found, wanted = run(shallow, quest()), run(shallow, EVERYTHING)
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[2], wanted[2])
    np.testing.assert_allclose(found[3], wanted[3], rtol=1e-5)
    full = run(shallow, methods.full())
    assert not np.array_equal(found[2], full[2]) or not np.allclose(found[3], full[3], rtol=1e-3)
    assert (found[1].num_live == full[1].num_live).all(), "nothing is evicted"


def test_a_pool_is_read_by_pages_too(shallow):
    """Under a mask, as its slots are one array of all heads."""
    snapkv = lambda storage: methods.ada_snapkv(9, window_size=4, kernel_size=3, storage=storage, max_ratio=4.0)
    pooled, dense = (run(shallow, kvjax.chain(snapkv(storage), quest())) for storage in ("pool", "dense"))
    np.testing.assert_array_equal(pooled[0], dense[0])
    np.testing.assert_allclose(pooled[3], dense[3], rtol=1e-5)


def test_first_layers_and_rows_that_read_everything_carry_nothing():
    dense = methods.quest(8, page_size=4)
    assert [len(dense.rules(helpers.site(layer=i))) for i in range(3)] == [0, 0, 1]
    site = helpers.site(T=24, max_new_tokens=16)
    assert quest().init(site, 1).counts.value.shape == (1, 2, 10)
    assert methods.quest(40, page_size=4).init(site, 1) == ()
    assert methods.quest(0.25, page_size=4).init(site, 1) != ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.quest(8), "a budget of 8 tokens holds no page of 16; raise the budget"),
        (lambda: methods.quest(16, group="sum"), "group='sum' is not one of"),
        (lambda: kvjax.chain(methods.streaming_llm(8), quest()), r"want \['compact', 'original'\]"),
        (lambda: kvjax.shared_layers(quest()), "but ReadPages.* carries what it knows of the keys of layer 0"),
        (lambda: kvjax.partition_heads({"a": methods.full(), "b": quest()}, [list("ab")] * 3), "hides slots from rows"),
        (lambda: kvjax.soften(quest(), 1.0), "does not keep the best of a score"),
        (lambda: kvjax.when(kvjax.every(4), quest()), "has no schedule"),
    ],
)
def test_what_cannot_work_is_refused(tiny, make, message):
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(tiny[0].config, make(), prompt_len=24, max_new_tokens=16)


def test_another_budget_is_another_program(tiny):
    plan = kvjax.make_plan(tiny[0].config, quest(), prompt_len=24, max_new_tokens=16)
    with pytest.raises(ValueError, match="they differ in ReadPages"):
        plan.sizes(methods.quest(4, page_size=4, dense_layers=0), [24])
