"""Allocation of budgets over layers and heads, against plain formulations written for the tests."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.sizes.allocation import (
    Adaptive,
    FloorPyramid,
    HeadTable,
    InclusivePyramid,
    LayerTable,
    Pyramid,
    UniformHeads,
    apportion,
)
from tests import helpers


def ones(*shape):
    return jnp.ones(shape, bool)


def allocate(heads, score, average, *, candidates=None, protected=0, layer=0, num_layers=3, most=None):
    """Budgets "K" of one sequence, and the cap."""
    score = jnp.asarray(score, jnp.float32)[None]
    K, S = score.shape[1:]
    site = helpers.site(K=K, layer=layer, num_layers=num_layers, T=S)
    candidates = ones(1, K, S) if candidates is None else jnp.asarray(candidates)[None]
    most = average + protected if most is None else most
    shares = heads.heads(
        score, candidates, jnp.asarray([average], jnp.int32), most, site, jnp.asarray([protected], jnp.int32)
    )
    cap = heads.cap(np.array([average]), np.array([S]), site, np.array([protected]))
    return np.asarray(shares)[0], int(cap[0])


# --- heads, plainly ---


def plain_own(score, candidates, total):
    """How many of the `total` best of the layer are each head's: sort all (score, head) pairs."""
    pairs = [(score[k, s], k) for k in range(len(score)) for s in np.nonzero(candidates[k])[0]]
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))
    return np.bincount([k for _, k in pairs[:total]], minlength=len(score))


def plain_normalized(score, candidates, average):
    result = np.zeros_like(score)
    for k in range(len(score)):
        row = np.sort(score[k][candidates[k]])[::-1]
        result[k] = score[k] * (row[:average].sum() / row.sum())
    return result


def plain_floor_then_global(score, candidates, average, protected, alpha):
    """Protected tokens stand above all others, take part in each head's safe set, and in the layer's total."""
    floor = max(int((average + protected) * alpha), int(alpha > 0))
    kept = np.zeros(len(score), int)
    rest = []
    for k in range(len(score)):
        row = [math.inf] * protected + sorted(score[k][candidates[k]], reverse=True)
        kept[k] = max(floor, protected)
        rest += [(s, k) for s in row[kept[k] :]]
    rest.sort(key=lambda pair: (-pair[0], pair[1]))
    for _, k in rest[: len(score) * (average + protected) - kept.sum()]:
        kept[k] += 1
    return kept - protected


def peaked(seed, K, S):
    """Non-negative rows with very different concentration, like softmax rows; float32 so that ties are the same."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(K, S)) * rng.uniform(0.2, 4.0, (K, 1))
    p = np.exp(x - x.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True)).astype(np.float32)


CASES = [(seed, K, S, average) for seed, (K, S, average) in enumerate([(2, 20, 5), (3, 17, 8), (4, 12, 3), (1, 9, 4)])]
grid = pytest.mark.parametrize(("seed", "K", "S", "average"), CASES)


@grid
@pytest.mark.parametrize("normalize", [False, True])
def test_competition_is_the_global_top_k(seed, K, S, average, normalize):
    score = peaked(seed, K, S)
    candidates = np.random.default_rng(seed).random((K, S)) < 0.9
    shares, cap = allocate(Adaptive(1.0, math.inf, normalize=normalize), score, average, candidates=candidates)
    competing = plain_normalized(score, candidates, average) if normalize else score
    assert shares.tolist() == plain_own(competing, candidates, K * average).tolist()
    assert shares.max() <= cap <= K * average


def test_normalizing_moves_budget_to_concentrated_heads():
    """Worked out by hand: head 0 has 0.9 of its sum in its best two, head 1 has 0.4."""
    score = [[0.45, 0.45, 0.05, 0.05, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]]
    assert allocate(Adaptive(1.0), score, 2)[0].tolist() == [2, 2]
    score = [[0.45, 0.45, 0.15, 0.03, 0.02], [0.25, 0.25, 0.25, 0.25, 0.25]]
    # Masses: 0.9 / 1.1 and 0.5 / 1.25, so head 0 competes with 0.123 for its third, head 1 with 0.1.
    assert allocate(Adaptive(1.0), score, 2)[0].tolist() == [2, 2]
    assert allocate(Adaptive(1.0, normalize=True), score, 2)[0].tolist() == [3, 1]


def test_normalizing_without_mass():
    """A head whose scores are all zero neither divides by zero nor takes part."""
    score = [[0.0, 0.0, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]]
    assert allocate(Adaptive(1.0, normalize=True), score, 2)[0].tolist() == [0, 4]


@grid
@pytest.mark.parametrize("protected", [0, 3])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.7, 1.0])
def test_floor_then_global(seed, K, S, average, protected, alpha):
    score = peaked(seed, K, S)
    heads = Adaptive(alpha, math.inf, safeguard="floor_then_global")
    shares, cap = allocate(heads, score, average, protected=protected)
    assert shares.tolist() == plain_floor_then_global(score, np.ones((K, S), bool), average, protected, alpha).tolist()
    assert shares.sum() == K * average
    assert shares.max() <= cap
    safe = max(max(int((average + protected) * alpha), int(alpha > 0)) - protected, 0)
    assert shares.min() >= safe
    assert cap <= max(K * average - (K - 1) * safe, 0)


@pytest.mark.parametrize(("alpha", "budget", "safe"), [(0.7, 90, 62), (0.29, 100, 28), (0.58, 50, 28), (0.2, 3, 1)])
def test_the_safe_tokens_are_the_truncated_product(alpha, budget, safe):
    """As in kvpress: 0.7 * 90 is a little less than 63. One token at least is safe."""
    k = jnp.broadcast_to(jnp.asarray([1.0, 2.0])[None, :, None, None], (1, 2, 200, 4))  # head 0 wins what is not safe
    policy = dataclasses.replace(methods.knorm(budget), heads=Adaptive(alpha, math.inf, safeguard="floor_then_global"))
    assert kvjax.evict_layer(policy, k, k, k).keep.sum(-1).tolist() == [[2 * budget - safe, safe]]


@pytest.mark.parametrize(
    "division",
    [
        {"heads": Adaptive(0.2, math.inf, safeguard="floor_then_global")},
        {"heads": Adaptive(0.9, math.inf)},
        {"heads": Adaptive(0.9, math.inf, rounding="half_even")},
        {"heads": HeadTable([[100, 1, 1, 1]] * 4)},
        {"layers": Pyramid()},
        {"layers": FloorPyramid()},
        {"layers": InclusivePyramid()},
        {"layers": LayerTable([100, 1, 1, 1])},
    ],
    ids=repr,
)
@pytest.mark.parametrize("budget", [1, 2, 0.2])
def test_no_division_leaves_a_head_without_a_token(division, budget):
    """Nothing is protected, and all but one head, or layer, has next to no share."""
    k = jnp.broadcast_to(jnp.asarray([1.0, 2.0, 3.0, 4.0])[None, :, None, None], (1, 4, 12, 4))
    policy = dataclasses.replace(methods.knorm(budget), **division)
    kept = np.array([kvjax.evict_layer(policy, k, k, k, layer=i, num_layers=4).keep.sum(-1) for i in range(4)])
    assert kept.min() >= 1
    assert kept.sum() >= 4 * 4 * max(int(budget if isinstance(budget, int) else 12 * budget), 1)


@grid
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_half_even_rounds_every_head_for_itself(seed, K, S, average, alpha):
    score = peaked(seed, K, S)
    shares, cap = allocate(Adaptive(alpha, math.inf, rounding="half_even"), score, average)
    own = plain_own(score, np.ones((K, S), bool), K * average)
    uniform = math.floor(average * (1 - alpha) + 1e-9)
    assert shares.tolist() == [round(round(alpha * int(x), 6) + uniform) for x in own]
    assert shares.max() <= cap
    assert abs(shares.sum() - K * average) <= 1.5 * K


def test_half_even_drifts_and_cap_covers_it():
    """Worked out by hand, with and without drift, and cut by `max_ratio` without passing it on."""
    up = [[0.9, 0.8, 0.7, 0.0], [0.6, 0.0, 0.0, 0.0]]
    assert allocate(Adaptive(0.5, rounding="half_even"), up, 2)[0].tolist() == [2, 2]  # 2.5 and 1.5
    shares, cap = allocate(Adaptive(0.5, rounding="half_even"), np.repeat([[1.0], [0.0]], 8, axis=1), 3)
    # 6 and 0 of 6, halved, and int(1.5) = 1: 4 and 1, one less than the layer's 6
    assert shares.tolist() == [4, 1]
    assert cap == 5  # ceil(3 * (0.5 + 0.5 * 2))
    assert allocate(Adaptive(0.5, 1.25, rounding="half_even"), np.repeat([[1.0], [0.0]], 8, axis=1), 4)[0].tolist() == [
        5,
        2,
    ]


@grid
@pytest.mark.parametrize("rounding", ["largest_remainder", "half_even"])
def test_no_head_gets_more_than_exists(seed, K, S, average, rounding):
    score = peaked(seed, K, S)
    candidates = np.ones((K, S), bool)
    candidates[0, 2:] = False
    shares, _ = allocate(Adaptive(0.5, math.inf, rounding=rounding), score, average, candidates=candidates)
    if candidates.sum() > K * average:
        assert shares[0] <= (2 if rounding == "half_even" else max(2, average))
    if rounding == "largest_remainder":
        assert shares.sum() == K * average


@pytest.mark.parametrize("safeguard", ["blend", "floor_then_global"])
@pytest.mark.parametrize("rounding", ["largest_remainder", "half_even"])
def test_a_budget_that_holds_every_candidate_takes_none(safeguard, rounding):
    score = peaked(3, 2, 10)
    candidates = np.ones((2, 10), bool)
    candidates[0, 3:] = False
    heads = Adaptive(0.5, math.inf, safeguard=safeguard, rounding=rounding)
    shares, _ = allocate(heads, score, 7, candidates=candidates)
    assert (shares >= candidates.sum(1)).all()


@pytest.mark.parametrize("average", [0, 1])
def test_budgets_that_hold_nothing_but_the_window(average):
    for heads in (
        Adaptive(0.5, math.inf),
        Adaptive(0.5, normalize=True, safeguard="floor_then_global"),
        Adaptive(1.0, rounding="half_even"),
    ):
        shares, cap = allocate(heads, peaked(0, 2, 6), average, protected=3)
        assert shares.sum() == 2 * average
        assert shares.max() <= cap


def test_equal_remainders_go_to_the_head_with_the_best_score():
    """3 and 1 of 4, blended with 2: 2.5 and 1.5, however heads are numbered."""
    score = np.array([[5.0, 4.0, 3.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    assert allocate(Adaptive(0.5, math.inf), score, 2)[0].tolist() == [2, 2]
    assert allocate(Adaptive(0.5, math.inf), score[::-1], 2)[0].tolist() == [2, 2]
    score[0, 0] = 10.0
    assert allocate(Adaptive(0.5, math.inf), score, 2)[0].tolist() == [3, 1]
    assert allocate(Adaptive(0.5, math.inf), score[::-1], 2)[0].tolist() == [1, 3]


def test_ties_between_heads_go_to_the_lower_index():
    equal = np.full((3, 5), 0.2)
    for heads in (Adaptive(1.0, math.inf), Adaptive(1.0, math.inf, normalize=True)):
        assert allocate(heads, equal, 2)[0].tolist() == [5, 1, 0]
    safe = Adaptive(0.5, math.inf, safeguard="floor_then_global")
    assert allocate(safe, equal, 2)[0].tolist() == [4, 1, 1]  # one each, then three more for the first
    assert allocate(Adaptive(0.5, math.inf), equal, 2)[0].tolist() == [4, 1, 1]  # 3.5, 1.5 and 1


def test_skipped_layers_are_uniform():
    score, heads = peaked(1, 3, 20), Adaptive(1.0, math.inf, skip_layers=2)
    for layer in (0, 1):
        shares, cap = allocate(heads, score, 4, layer=layer)
        assert shares.tolist() == [4, 4, 4]
        assert cap == 4
    shares, cap = allocate(heads, score, 4, layer=2)
    assert shares.tolist() == allocate(Adaptive(1.0, math.inf), score, 4)[0].tolist() != [4, 4, 4]
    assert cap == 12


@pytest.mark.parametrize(
    "heads",
    [
        Adaptive(0.4, normalize=True),
        Adaptive(0.6, safeguard="floor_then_global"),
        Adaptive(0.4, rounding="half_even"),
        HeadTable([[1, 2], [1, 1], [1, 1]]),
    ],
    ids=str,
)
def test_rows_and_padding_are_independent(heads):
    """A batch, padded and with budgets of its own in every row, gets what its rows get alone."""
    K, S, lengths, averages = 2, 24, (24, 15), (7, 4)
    scores = [peaked(5 + row, K, n) for row, n in enumerate(lengths)]
    padded = np.stack([np.pad(s, ((0, 0), (S - s.shape[1], 0)), constant_values=9.0) for s in scores])
    candidates = jnp.asarray(np.arange(S)[None] >= S - np.array(lengths)[:, None])[:, None].repeat(K, 1)
    together = jax.jit(heads.heads, static_argnums=(3, 4))(
        jnp.asarray(padded),
        candidates,
        jnp.asarray(averages, jnp.int32),
        12,
        helpers.site(K=K),
        jnp.asarray([2, 5], jnp.int32),
    )
    for row, (score, average, protected) in enumerate(zip(scores, averages, (2, 5), strict=True)):
        assert together[row].tolist() == allocate(heads, score, average, protected=protected)[0].tolist()


# --- tables ---


def plain_largest_remainder(shares, limit, first=None):
    """Largest remainders where no share exceeds the limit; of equal ones, those that are first, then by index."""
    first = [0] * len(shares) if first is None else first
    whole = [math.floor(s + 1e-9) for s in shares]
    order = sorted(range(len(shares)), key=lambda i: (-(shares[i] - whole[i]), -first[i], i))
    for i in order[: round(sum(shares)) - sum(whole)]:
        whole[i] += 1
    assert max(whole) <= limit
    return whole


@pytest.mark.parametrize(
    ("weights", "average"), [((1, 2, 5, 4), 10), ((0.1, 0.25, 0.65), 7), ((3,), 5), ((1, 0, 2), 9)]
)
def test_layer_table(weights, average):
    table = LayerTable(weights)
    L = len(weights)
    plain = plain_largest_remainder([average * L * w / sum(weights) for w in weights], 100)
    assert table.layers(np.array([average]), np.array([100]), L).tolist() == [plain]
    assert sum(plain) == L * average
    scaled = LayerTable([w * 7 for w in weights])
    assert scaled.layers(np.array([average]), np.array([100]), L).tolist() == [plain]


def test_layer_table_within_what_exists():
    table = LayerTable((8.0, 1.0, 3.0))
    assert table.layers(np.array([6]), np.array([100]), 3).tolist() == [[12, 2, 4]]  # 12, 1.5 and 4.5: a tie
    assert table.layers(np.array([6]), np.array([10]), 3).tolist() == [[10, 2, 6]]  # 2 more as 1 to 3
    assert table.layers(np.array([6]), np.array([6]), 3).tolist() == [[6, 6, 6]]


@pytest.mark.parametrize(("row", "average"), [((1, 2, 5), 10), ((0.1, 0.9), 7), ((1, 1, 1, 1), 3), ((1, 0), 4)])
def test_head_table(row, average):
    K = len(row)
    table = HeadTable([[1] * K, row])
    shares, cap = allocate(table, np.zeros((K, 60)), average, layer=1, num_layers=2)
    assert shares.tolist() == plain_largest_remainder([average * K * w / sum(row) for w in row], 60)
    assert shares.sum() == K * average
    assert shares.max() <= cap == math.ceil(average * K * max(row) / sum(row) - 1e-9)
    uniform, cap = allocate(table, np.zeros((K, 60)), average, layer=0, num_layers=2)
    assert uniform.tolist() == [average] * K
    assert cap == average


def test_head_table_within_what_exists():
    table = HeadTable([[3, 1]])
    assert allocate(table, np.zeros((2, 12)), 10, num_layers=1)[0].tolist() == [12, 8]
    assert allocate(table, np.zeros((2, 12)), 10, num_layers=1)[1] == 12
    candidates = np.ones((2, 40), bool)
    candidates[0, 11:] = False
    assert allocate(table, np.zeros((2, 40)), 10, candidates=candidates, num_layers=1)[0].tolist() == [11, 9]


def test_swapping_the_rows_of_a_head_table_swaps_heads():
    q, k, v = helpers.qkv(3)
    policy = lambda row: dataclasses.replace(methods.h2o(10, recent=4), heads=HeadTable([row]))
    plain = kvjax.evict_layer(policy((1, 3)), q, k, v)
    swapped_q = q.reshape(2, 2, 2, *q.shape[2:])[:, ::-1].reshape(q.shape)
    swapped = kvjax.evict_layer(policy((3, 1)), swapped_q, k[:, ::-1], v[:, ::-1])
    np.testing.assert_array_equal(plain.keep, swapped.keep[:, ::-1])
    assert plain.budgets.tolist() == [[7, 13]] * 2  # 4 protected, 6 on average beside them


def test_tables_are_values_that_json_can_carry():
    for table in (LayerTable(np.array([1.0, 2.5])), HeadTable(np.array([[1, 2], [3, 4]]))):
        assert hash(table) == hash(type(table)(table.weights))
        assert type(table)(**json.loads(json.dumps(dataclasses.asdict(table)))) == table
    assert LayerTable([1, 2]).weights == (1.0, 2.0)
    assert HeadTable([[1, 2], [0, 3]]).weights == ((1.0, 2.0), (0.0, 3.0))


def test_both_tables_follow_one_table_of_the_model(tiny):
    config = tiny[0].config
    table = np.array([[4.0, 1.0], [2.0, 2.0], [1.0, 2.0]])
    policy = kvjax.Evict(kvjax.scoring.scores.Accumulated(), 8, layers=LayerTable(table.sum(1)), heads=HeadTable(table))
    plan = kvjax.make_plan(config, policy, prompt_len=40, max_new_tokens=4, lengths=[40])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, 40)))
    _, state = kvjax.prefill(tiny[0], tiny[1], tokens, plan)
    assert np.asarray(state.num_live)[0].tolist() == (table / table.sum() * 8 * 6).tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": LayerTable((1, 2))}, "LayerTable has 2 weights, but the model has 3 layers; give one a layer"),
        (
            {"heads": HeadTable([[1, 2]])},
            "HeadTable has weights of 1 layers, but the model has 3; give one row a layer",
        ),
        (
            {"heads": HeadTable([[1, 2], [1, 2, 3], [1, 1]])},
            "HeadTable has 3 weights in layer 1, which has 2 heads; give one a head",
        ),
        (
            {"heads": HeadTable([[1, 1]] * 3), "granularity": "query_head"},
            "HeadTable has 2 weights in layer 0, which has 4 heads; give one a head",
        ),
    ],
    ids=str,
)
def test_tables_of_another_model(tiny, fields, message):
    policy = dataclasses.replace(methods.snapkv(8, window_size=2), **fields)
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(tiny[0].config, policy, prompt_len=20, max_new_tokens=2)
    q, k, v = helpers.qkv()
    with pytest.raises(ValueError, match=message):
        kvjax.evict_layer(policy, q, k, v, layer=1 if "layer 1" in message else 0, num_layers=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adaptive(max_ratio=math.nan), "max_ratio=nan"),
        (lambda: Adaptive(safeguard="floor"), r"safeguard='floor' is not one of \('blend', 'floor_then_global'\)"),
        (lambda: Adaptive(rounding="int"), r"rounding='int' is not one of \('largest_remainder', 'half_even'\)"),
        (lambda: Adaptive(skip_layers=-1), "skip_layers=-1"),
        (lambda: FloorPyramid(0.9), r"FloorPyramid\(beta=0.9\): beta must be at least 1"),
        (lambda: InclusivePyramid(0.0), r"InclusivePyramid\(beta=0.0\): beta must be at least 1"),
        (lambda: LayerTable(()), "one at least is positive"),
        (lambda: LayerTable((0.0, 0.0)), "one at least is positive"),
        (lambda: LayerTable((1.0, -1.0, 3.0)), "none is negative"),
        (lambda: HeadTable([[1.0, 1.0], [1.0, math.inf]]), "HeadTable, layer 1: weights are finite"),
        (lambda: methods.pyramidkv(64, preset="factory"), r"preset='factory' is not one of \(None, 'pyramid_factory'"),
        (lambda: methods.ada_snapkv(64, softmax_over="window"), "softmax_over='window' is not one of"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_e19_complete(examples):
    e = examples["E19"]
    A, base, expected = e["inputs"]["A"], e["params"]["base_per_head"], e["expected"]
    heads = lambda **kwargs: allocate(Adaptive(**kwargs), A, base)[0].tolist()
    own = plain_own(np.asarray(A), np.ones((3, 5), bool), e["params"]["total"])
    assert heads(alpha=1.0) == own.tolist() == expected["raw"]
    assert (0.5 * own + 0.5 * base).tolist() == expected["paper_alpha0_5"]
    assert heads(alpha=0.5) == expected["kvjax_alpha0_5_exact"]
    assert heads(alpha=0.8, rounding="half_even") == expected["code_floor0_2"]
    assert sum(heads(alpha=0.8, rounding="half_even")) == expected["code_floor0_2_total"]
    assert heads(alpha=0.5, safeguard="floor_then_global") == expected["kvpress_alpha0_5"]
    assert heads(alpha=0.0) == expected["uniform"]


def test_e20_complete(examples):
    e = examples["E20"]
    own, base, alpha = e["inputs"]["raw"], e["params"]["base"], 1 - e["params"]["floor"]
    score = np.zeros((3, 30))
    for k, count in enumerate(own):
        score[k, :count] = np.linspace(1.0, 0.5, count)
    assert allocate(Adaptive(1.0), score, base)[0].tolist() == own
    shares, cap = allocate(Adaptive(alpha, rounding="half_even"), score, base)
    assert shares.tolist() == e["expected"]["rounded_half_even"]
    assert shares.sum() == e["expected"]["total"] == e["expected"]["wanted"] + 1
    assert shares.max() <= cap
    exact, _ = allocate(Adaptive(alpha), score, base)
    assert exact.tolist() == e["expected"]["kvjax_exact"]
    assert exact.sum() == e["expected"]["wanted"]
    blend = np.asarray(e["expected"]["blend"])
    assert apportion(blend, np.array(30)).tolist() == e["expected"]["kvjax_exact"]


# --- in policies ---


def plain_ada_layer(p, w, kernel, heads, budget):
    """Kept positions of every head from attention "K T T": mean of the last rows, max pool, allocate, top k."""
    K, T, _ = p.shape
    votes = p[:, T - w :, : T - w].mean(1)
    half = kernel // 2
    pooled = np.stack([votes[:, max(j - half, 0) : j + half + 1].max(1) for j in range(T - w)], axis=1)
    shares = heads(pooled, budget - w)
    kept = []
    for k in range(K):
        order = sorted(range(T - w), key=lambda j: (-pooled[k, j], -j))
        kept.append([*sorted(order[: shares[k]]), *range(T - w, T)])
    return kept


def test_ada_snapkv_options_on_attention():
    """From the attention matrix to kept positions."""
    q, k, v = helpers.qkv(8, B=1, N=3, K=3, T=30, sharpness=2.5)
    logits = np.einsum("nih,njh->nij", np.asarray(q[0], np.float64), np.asarray(k[0], np.float64)) / np.sqrt(8)
    logits = np.where(np.tril(np.ones((30, 30), bool)), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    everything = lambda s: np.ones(s.shape, bool)
    whole = lambda s, b: plain_largest_remainder(list(0.5 * plain_own(s, everything(s), 3 * b) + 0.5 * b), 99, s.max(1))
    plain = {
        "normalize": lambda s, b: whole(plain_normalized(s, everything(s), b), b),
        "floor": lambda s, b: plain_floor_then_global(s, everything(s), b, 4, 0.5),
        "half_even": lambda s, b: [round(0.5 * int(x) + b // 2) for x in plain_own(s, everything(s), 3 * b)],
        "skip": lambda s, b: [b] * 3,
    }
    options = {
        "normalize": {"normalize": True},
        "floor": {"safeguard": "floor_then_global"},
        "half_even": {"rounding": "half_even"},
        "skip": {"skip_layers": 1},
    }
    seen = set()
    for name, kwargs in options.items():
        policy = methods.ada_snapkv(13, window_size=4, kernel_size=3, max_ratio=math.inf, **kwargs)
        keep = kvjax.evict_layer(policy, q, k, v)
        kept = [helpers.kept(keep, head=i) for i in range(3)]
        assert kept == plain_ada_layer(p, 4, 3, plain[name], 13), name
        seen.add(str(kept))
    assert len(seen) > 2, "options that change nothing here would not be tested"


def test_methods_pass_their_options_on():
    options = {"normalize": True, "safeguard": "floor_then_global", "rounding": "half_even", "skip_layers": 2}
    window = {
        "window_size": 4,
        "kernel_size": 3,
        "pool_before_rows": True,
        "softmax_over": "outside_window",
        "granularity": "query_head",
    }
    heads = Adaptive(0.3, 2.0, **options)
    snapkv = methods.snapkv(16, **window)
    common = {"alpha": 0.3, "max_ratio": 2.0, **options, **window}
    assert methods.ada_snapkv(16, **common) == dataclasses.replace(snapkv, heads=heads, storage="pool")
    for preset, layers in (
        (None, Pyramid(3.0)),
        ("pyramid_factory", FloorPyramid(3.0)),
        ("pyramid_adakv", FloorPyramid(3.0, uniform_branch=False)),
        ("pyramid_kvpress", InclusivePyramid(3.0)),
    ):
        pyramid = dataclasses.replace(snapkv, layers=layers)
        assert methods.pyramidkv(16, beta=3.0, preset=preset, **window) == pyramid
        ada = methods.ada_pyramid(16, beta=3.0, preset=preset, **common)
        assert ada == dataclasses.replace(pyramid, heads=heads, storage="pool")
    assert isinstance(methods.pyramidkv(16).heads, UniformHeads)
