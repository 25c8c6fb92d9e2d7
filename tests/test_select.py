"""Which tokens stay: chunks, draws and two stages, whatever is protected, and drops of many tokens at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.contract import Layout
from kvjax.decide.select import Chunks, Pages, PerChunk, all_but_worst, best
from kvjax.methods.released import kvpress, papers
from tests import tensors
from tests.marks import slow_but

pytestmark = pytest.mark.usefixtures("as_users_run_it")

T = 40
ARRAYS = tensors.qkv(1, T=T, B=1)
TENSORS = [dict(zip("qkv", ARRAYS, strict=True))]
replace = dataclasses.replace


def kept(policy, n=T, **more):
    """Positions that both heads keep of the last `n` tokens as a prompt."""
    kv = kvjax.evict_layer(policy, *ARRAYS, lengths=[n], **more)
    return tensors.live_positions(kv)[0]


def test_of_equal_scores_the_older_goes_and_no_dead_slot_is_chosen():
    """In any order of the slots; one of five slots is dead, and the budget is four, or all that there are."""
    score, pos = (
        jnp.asarray([[[1.0, 0.5, 0.5, 2.0, 9.0], [0.5, 2.0, 0.5, 0.5, 9.0]]]),
        [[4, 3, 0, 2, -1], [3, 1, 5, 0, -1]],
    )
    pos = jnp.asarray(pos)[None]
    for budget, wanted in ((3, [[0, 1, 3], [0, 1, 2]]), (5, [[0, 1, 2, 3]] * 2)):
        budgets = jnp.full((1, 2), budget)
        for choose in (best, all_but_worst):
            found = [np.flatnonzero(head).tolist() for head in choose(score, pos, budgets)[0]]
            assert found == wanted, (choose, budget)


def test_sorting_on_a_gpu_chooses_what_bits_do(monkeypatch):
    """Among many equal scores and dead slots, for every budget from none to more than there are."""
    rng = np.random.default_rng(0)
    score = jnp.asarray(rng.integers(-1, 2, (2, 3, 9)), jnp.float32)
    pos = jnp.asarray(rng.permuted(np.tile(np.r_[-1, -1, 0:7], (2, 3, 1)), axis=-1), jnp.int32)
    chosen = lambda: [best(score, pos, jnp.full((2, 3), budget)) for budget in range(11)]
    by_bits = chosen()
    with jax.disable_jit():
        np.testing.assert_array_equal(best(score, pos, jnp.full((2, 3), 4)), by_bits[4])
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))
    np.testing.assert_array_equal(chosen(), by_bits)


@pytest.mark.parametrize("n", slow_but([33, 36, 39], 39))
def test_chunks_of_protected_tokens_come_first(n):
    """A window of 17 tokens lies in three or four chunks of 8, of which a budget of 17 pays for three."""
    for tokens in kept(methods.chunkkv(methods.snapkv(17, window=17), size=8), n):
        assert {*range(n - 17, n)} <= {*tokens}
        assert len(tokens) <= 17 + 8 - 1


@pytest.mark.slow
def test_chunks_after_heads_of_different_budgets():
    """The head that holds most decides how many chunks fit."""
    ada = replace(methods.ada_snapkv(16, window=4, alpha=1.0), layout=Layout())
    both = kvjax.chain(ada, methods.chunkkv(methods.snapkv(12, window=4), size=4))
    assert len({len(tokens) for tokens in kept(ada)}) == 2
    assert all(len(tokens) <= 12 + 4 - 1 for tokens in kept(both))
    assert all({*range(T - 4, T)} <= {*tokens} for tokens in kept(both))


def first_chunks_and_others(kv, stats, ctx):
    return jnp.where((kv.pos < 16) | (kv.pos % 8 == 0), 1.0, 0.0) - kv.pos.astype(jnp.float32) / 1e3


def test_chunks_of_a_cache_with_holes():
    """Two full chunks and three single tokens: a share of the chunks may be far more than a share of the tokens."""
    scattered = kvjax.from_fn(first_chunks_and_others, 19)
    chunks = replace(scattered, budget=8, select=Chunks(8))
    assert kept(scattered)[0] == [*range(16), 16, 24, 32]
    assert kept(kvjax.chain(scattered, chunks))[0] == list(range(8))


@pytest.mark.slow
def test_a_share_of_chunks():
    """A quarter of eight chunks, of which the last is short; 9 of 39 tokens are less than that."""
    make = lambda budget: methods.chunkkv(methods.snapkv(budget, window=2), size=5)
    assert (len(kept(make(0.25), 39)[0]), len(kept(make(9), 39)[0])) == (9, 4)


@pytest.mark.slow
def test_a_share_of_chunks_as_released_code_rounds_it():
    """15 chunks of 102 tokens: 15 * (1 - 0.8) is below 3 in binary fractions; a fifth of them is 3."""
    arrays = tensors.qkv(1, T=102, B=1)
    chunks = lambda policy: np.unique(np.nonzero(np.asarray(kvjax.evict_layer(policy, *arrays).live[0, 0]))[0] // 7)
    assert len(chunks(kvpress.kvpress_chunkkv(methods.knorm(kvpress.kept(0.8)), size=7))) == int(15 * (1 - 0.8)) == 2
    assert len(chunks(methods.chunkkv(methods.knorm(0.2), size=7))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.25, 16])
def test_chunks_of_a_prompt_in_blocks(shallow, budget):
    """A share is one of the prompt, not of what is left of it after every block."""
    policy = methods.chunkkv(methods.snapkv(budget, window=4), size=4)
    _, state = kvjax.prefill(*shallow, tensors.token_ids(1, 64), policy=policy, max_new_tokens=0, block=16)
    assert (np.asarray(state.layers[0].num_live) == 16).all()


def test_chunks_are_of_the_prompt():
    with pytest.raises(ValueError, match=r"chunks are of the prompt; use Schedule\(\), which does not evict while"):
        tensors.replay(methods.chunkkv(methods.h2o(8), size=4), TENSORS, T - 1)


UNEVEN = jnp.asarray([9, 0, 0, 0, 2, 2, 2, 2, 1, 1, 1, 0, 0.5, 0.1])  # entropies of chunks of 4: 0, 1, 0.79, 0.65
uneven = lambda kv, stats, ctx: UNEVEN[jnp.clip(kv.pos, 0, 13)]


@pytest.mark.parametrize(
    ("budget", "recent", "wanted"),
    slow_but(
        [
            (7, 0, [0, 4, 5, 6, 7, 9, 10]),
            (12, 0, [0, *range(3, 14)]),  # what is left goes to one of the equal rest
            (5, 2, [0, 6, 7, 12, 13]),  # the window is the best chunk
        ],
        (7, 0, [0, 4, 5, 6, 7, 9, 10]),
    ),
)
def test_a_good_chunk_of_uneven_scores_keeps_its_best_token(budget, recent, wanted):
    base = kvjax.from_fn(uneven, budget, recent=recent)
    assert kept(methods.entropy_chunkkv(base, size=4, rescue=1), 14) == [wanted] * 2


def test_a_chunk_is_not_rescued_whole():
    with pytest.raises(ValueError, match="rescue=4 tokens of a chunk of size=4 are all of it; give rescue less than"):
        methods.entropy_chunkkv(methods.knorm(8), size=4)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(replace(methods.knorm(0.1), select=PerChunk(5, 0.1)), marks=pytest.mark.slow),
        pytest.param(replace(methods.knorm(4), select=PerChunk(5)), marks=pytest.mark.slow),
        methods.finch(0.1, window=1, chunk=10),
    ],
    ids=["share", "tokens", "finch"],
)
def test_chunks_whose_share_is_less_than_a_token_keep_one_as_far_as_the_budget_goes(policy):
    """40 tokens of which 4 may stay: 8 chunks of 5, or 4 of 10."""
    for tokens in kept(policy):
        assert len(tokens) == len({i // policy.select.size for i in tokens}) == 4


@pytest.mark.parametrize("among", ["rest", "all"])
@pytest.mark.parametrize("random", slow_but([3, 10], 10))
def test_no_more_is_drawn_than_protection_leaves(among, random):
    """A random share of all that is not protected is NaCl's ablation without proxies."""
    make = lambda random: replace(
        papers.nacl_drawn(methods.nacl(10, recent=3, proxies=6, random=random), among=among), sinks=2
    )
    for tokens in kept(make(random)):
        assert {0, 1, T - 3, T - 2, T - 1} <= {*tokens}
        assert len(tokens) == 10 or (among == "all" and len(tokens) < 10)
    assert kept(make(5)) == kept(make(10))


def test_places_beside_wide_values_are_drawn_in_proportion_to_attention():
    """Of 12 tokens the first, the last 2 and the 2 of the widest values stay, and one more, drawn 512 times."""
    q, k, v = (x[:, :1, :12] for x in ARRAYS)
    x = np.tril(np.exp(np.asarray(q[0, 0], np.float64) @ np.asarray(k[0, 0], np.float64).T / np.sqrt(q.shape[-1])))
    share = (x / x.sum(-1, keepdims=True))[-2:].sum(0)
    widest = 1 + np.argsort(np.ptp(np.asarray(v[0, 0]), axis=-1)[1:10])[-2:]
    policy = methods.vase(6, values=3, window=2, kernel=1, sinks=1)
    many = (jnp.repeat(x, 512, axis=0) for x in (q, k, v))
    heads = [head for row in tensors.live_positions(kvjax.evict_layer(policy, *many)) for head in row]
    assert all({0, *widest, 10, 11} <= {*head} and len(head) == 6 for head in heads)
    drawn = np.bincount([({*head} - {0, *widest, 10, 11}).pop() for head in heads], minlength=12) / 512
    share[[0, *widest, 10, 11]] = 0
    share /= share.sum()
    assert (np.abs(drawn - share) <= 4 * np.sqrt(share * (1 - share) / 512)).all()


def test_the_draw_beside_wide_values_is_of_what_other_recent_tokens_leave():
    """Of 10 tokens 2 stay as the last, 3 by their values, the first among them, and 5 are drawn."""
    made = kvjax.protect(methods.vase(10, values=3, window=6, kernel=1, sinks=1), recent=2)
    rows = [kvjax.evict_layer(made, *ARRAYS, key=jax.random.key(seed)) for seed in range(24)]
    heads = [row[0][0] for row in map(tensors.live_positions, rows)]
    assert {len(head) for head in heads} == {10}
    assert len(set.intersection(*({*head} for head in heads))) == 5


@pytest.mark.parametrize(("worth", "wanted"), [("best", [3, 4, 5]), ("mean", [9, 10, 11]), ("newest", [6, 7, 8])])
def test_whole_pages_stay_by_their_worth(worth, wanted):
    """Of pages of 3 tokens a budget of 8 holds that of the first, that of the last, and one more; one of 5, those."""
    numbers = jnp.asarray([0, 0, 0, 9, 0, 0, 5, 0, 5, 4, 4, 4, 0], jnp.float32)
    policy = kvjax.from_fn(lambda kv, stats, ctx: numbers[kv.pos], 8, sinks=1, recent=1, select=Pages(3, worth))
    for budget, stay in ((8, [0, 1, 2, *wanted, 12]), (5, [0, 1, 2, 12])):
        found = kvjax.evict_layer(replace(policy, budget=budget), *(x[:, :, :13] for x in ARRAYS))
        assert tensors.live_positions(found)[0] == [stay] * 2


# ------------------------------------------------------------------------------------------------ while decoding


@pytest.mark.slow
def test_what_is_dropped_at_once_is_not_protected():
    """The last 10 of 12 tokens stay, although half of the budget would be dropped."""
    seen = tensors.replay(methods.scissorhands(12, history=20), TENSORS, 20)
    assert all({*range(n - 10, n)} <= {*tokens} for n, step in enumerate(seen.live, 20) for tokens in step[0])
    assert {len(tokens) for step in seen.live for tokens in step[0]} == {10, 11, 12}


@pytest.mark.slow
def test_what_a_sliding_window_hides_goes_first():
    """A budget is not spent on what no row to come can read; the other layer knows no window."""
    config = models.ModelConfig(61, 32, 48, 2, 4, 2, 8, sliding_window=(16, None))
    model = models.LanguageModel(config)
    params, ids = jax.jit(model.init)(jax.random.key(0)), np.asarray(tensors.token_ids(1, 30))
    read = lambda budget: kvjax.prefill(model, params, ids[:, :24], policy=methods.h2o(budget), max_new_tokens=6)[1]
    state = read(8)
    _, after = kvjax.feed(model, params, ids[:, 24:], state)
    for n, now in ((24, state), (30, after)):
        assert all(min(head) > n - 16 for head in tensors.live_positions(now.layers[0])[0])
    assert any(min(head) <= 8 for head in tensors.live_positions(state.layers[1])[0])
    assert tensors.live_positions(read(16).layers[0])[0] == [[*range(8, 24)]] * 2  # all that the last row read


@pytest.mark.slow
def test_rows_that_vote_in_blocks_are_those_of_the_last(shallow):
    """The last rows of the last block vote, as if what is left were the prompt; with all rows it is another policy."""
    few = methods.ahakv(8, recent=4)
    many = papers.with_rows(methods.ahakv(8, recent=4), last=None)
    ids = tensors.token_ids(1, 24)
    read = lambda policy, block: tensors.live_positions(
        kvjax.prefill(*shallow, ids, policy=policy, max_new_tokens=0, block=block)[1].layers[0]
    )
    assert read(few, 24) == read(few, None)
    assert read(few, 4) != read(many, 4)
