"""Learned functions: scores of features and of hidden states, DuoAttention's gates, probes of a model."""

import copy
import dataclasses
import functools
import math
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Evict, evict_layer, make_plan, methods, models
from kvjax.contract import LayerInfo, Layout, Value
from kvjax.learning import kvzap
from kvjax.learning.gates import distance, gated, penalty
from kvjax.learning.probes import fit_centres, fit_filters, fit_queries, head_importance, observed
from kvjax.models.embedded import EMBEDDED
from kvjax.models.scorer import TrainedHead
from kvjax.observe import Reread, votes
from kvjax.pallas_kernels import Logits
from kvjax.run.state import Prompts
from kvjax.run.steps import decode_step, prefill
from kvjax.scores.learned import FrozenArrays, HiddenHeads, Learned, SinkGates, apply_heads
from tests.float64 import VOCAB, G, K, L, Wide, central, relative
from tests.kept import SIZES
from tests.tensors import live_positions, qkv

pytestmark = pytest.mark.usefixtures("as_users_run_it")

T, LENGTHS = 12, np.array([12, 9])
TOKENS = np.random.default_rng(2).integers(0, VOCAB, (2, T)).astype(np.int32)
ROOT = pathlib.Path(__file__).parents[1]


# ------------------------------------------------------------------------------------------------------------ scores


class Pick(Value):
    """A function that gives one of its features."""

    index: int

    def __call__(self, features, layer):
        return features[..., self.index]


@pytest.mark.parametrize("index", [0, 9, 16, 17, 18, 20])
def test_features_of_a_learned_score(index):
    """Keys, values, votes of the last rows, pooled votes, mean attention, age: what stays is best by each."""
    q, k, v = map(np.asarray, qkv(T=T))
    kv = evict_layer(Evict(Learned(Pick(index), 3, 3), 5), q, k, v)
    for row, head in np.ndindex(2, K):
        x = k[row, head] @ q[row, 2 * head : 2 * head + 2].swapaxes(1, 2) * 8**-0.5  # "G S T"
        p = np.where(np.arange(T)[:, None] <= np.arange(T), np.exp(x), 0)
        p = (p / p.sum(1, keepdims=True)).mean(0)
        votes, age = p[:, -3:].sum(-1), T - np.arange(T)
        pooled = np.max([np.pad(votes, 1)[i : i + T] for i in range(3)], 0)
        features = {0: k[row, head, :, 0], 9: v[row, head, :, 1], 16: votes, 17: pooled, 18: p.sum(-1) / age, 20: age}
        best = sorted(range(T), key=lambda i: (round(float(features[index][i]), 5), i))[-5:]
        assert live_positions(kv)[row][head] == sorted(best)


def function(seed=0, layers=3, width=6):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return HiddenHeads({"out": f(layers, width, K), "out_bias": f(layers, K)})


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_kvzap_keeps_what_its_function_says(threshold):
    hidden, zap = np.random.default_rng(1).normal(size=(2, T, 6)).astype(np.float32), function()
    policy = methods.kvzap(7, zap, threshold=threshold, recent=2)
    kv = evict_layer(policy, *qkv(T=T), lengths=LENGTHS, num_layers=3, layer=1, hidden=hidden)
    for row, head in np.ndindex(2, K):
        n = LENGTHS[row]
        score = (hidden[row, T - n :] @ zap.weights["out"][1] + zap.weights["out_bias"][1])[:, head]
        free = [i for i in np.argsort(score[: n - 2])[::-1] if threshold is None or score[i] >= threshold]
        assert live_positions(kv)[row][head] == sorted([*free[:5], n - 2, n - 1])


def test_a_gate_weighs_its_token_against_sinks():
    """By the formula of the paper, in 64 bits; gates of other shapes are refused."""
    gates, hidden = SIZES.gates, np.random.default_rng(1).normal(size=(2, 5, SIZES.D))
    w = {name: np.asarray(x[1], np.float64) for name, x in gates.weights.items()}
    heads = lambda x, name: x / np.sqrt((x**2).mean() + 1e-6) * w[name]
    found = gates(jnp.asarray(hidden, jnp.float32), 1)
    for b, t, head in np.ndindex(found.shape):
        x, each = hidden[b, t], []
        k = heads((w["k_proj.weight"] @ x).reshape(SIZES.K, 3)[head], "k_norm.weight")
        for g, raw in enumerate((w["q_proj.weight"] @ x + w["q_proj.bias"]).reshape(SIZES.K, -1, 3)[head]):
            q = heads(raw, "q_norm.weight")
            own = q @ k / math.sqrt(3) + w["b"][head, 0, g]
            each.append(1 / (1 + sum(math.exp(q @ sink / math.sqrt(3) - own) for sink in w["k_base"][head, 0])))
        assert float(found[b, t, head]) == pytest.approx(np.mean(each), rel=1e-5)
    words = r"'q_norm.weight': \(3, 4\).* these go together: .*'q_norm.weight': \(3, 3\)"
    with pytest.raises(ValueError, match=words):
        SinkGates({**gates.weights, "q_norm.weight": np.ones((3, 4), "f")})


@pytest.mark.slow
def test_blocks_do_not_matter_where_a_threshold_decides(wide):
    """In the first layer, whose hidden states depend on the token alone."""
    model, params = wide
    policy = methods.kvzap(60, function(layers=L, width=12), threshold=0.2, recent=4)
    how = {"policy": policy, "lengths": LENGTHS, "max_new_tokens": 1}
    with jax.enable_x64(True):
        each = [prefill(model, params, TOKENS, block=block, **how)[1].layers[0] for block in (None, 5)]
    assert live_positions(each[0]) == live_positions(each[1])
    assert int(each[0].num_live.sum()) < K * LENGTHS.sum()  # something goes


def test_the_hidden_layer_is_one_of_exact_gelus():
    rng = np.random.default_rng(0)
    shapes = {"in": (2, 6, 5), "in_bias": (2, 5), "out": (2, 5, 3), "out_bias": (2, 3)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    hidden = rng.normal(size=(1, 4, 6)).astype(np.float32)
    x = hidden[0] @ weights["in"][1] + weights["in_bias"][1]
    x = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    wanted = x @ weights["out"][1] + weights["out_bias"][1]
    np.testing.assert_allclose(apply_heads(weights, jnp.asarray(hidden), 1)[0], wanted, rtol=1e-4, atol=1e-5)
    assert HiddenHeads(weights) == HiddenHeads(FrozenArrays(weights))
    assert hash(HiddenHeads(weights)) == hash(HiddenHeads(FrozenArrays(weights)))
    assert HiddenHeads(weights).sizes == (2, 6, 3)


def test_committed_functions_load_and_are_for_their_models():
    """KVzap's file and the learned scorer's, as the library before this one wrote them."""
    model = models.load(EMBEDDED)[0]
    with np.load(ROOT / "models" / "tiny_retriever" / "kvzap.npz") as file:
        zap = HiddenHeads(dict(file))
    head = TrainedHead.load(ROOT / "experiments" / "bench_results" / "learned_scorer" / "head.npz")
    plan = functools.partial(make_plan, model.config, lengths=np.array([40]), width=40, max_new_tokens=1)
    for policy in (methods.kvzap(32, zap, recent=4), Evict(Learned(head), 32, recent=16)):
        assert set(plan(policy).capacities) == {40}
        assert hash(policy) == hash(policy)
    config = Wide().config
    with pytest.raises(
        ValueError, match=r"is for 4 layers and hidden states of .* numbers, but layer 0 has 12; fit one"
    ):
        make_plan(config, methods.kvzap(8, zap, recent=2), np.array([9]), 9, 1)
    with pytest.raises(ValueError, match=r"this head was trained for 4 layers of .* train one for this model"):
        make_plan(config, Evict(Learned(head), 8), np.array([9]), 9, 1)


def test_a_head_for_other_layers_is_refused():
    zap = function(layers=1, width=12)
    with pytest.raises(ValueError, match="is for 1 layers and hidden states of 12 numbers, but layer 1 has 12"):
        make_plan(Wide().config, methods.kvzap(8, zap, recent=2), np.array([9]), 9, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: HiddenHeads({"out": np.zeros((3, 8, 2), "f")}),
            r"has the weights \['out'\]; give \('out', 'out_bias'",
        ),
        (
            lambda: HiddenHeads({"out": np.zeros((3, 8, 2), "f"), "out_bias": np.zeros((3, 1), "f")}),
            "which do not follow one another",
        ),
        (
            lambda: HiddenHeads({"out": np.full((1, 1, 1), np.inf, "f"), "out_bias": np.zeros((1, 1), "f")}),
            "'out' of float32 that are no finite floats",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_function(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_a_function_is_fitted_to_what_it_can_say():
    """A linear one to linear numbers; one with a hidden layer to what no linear one says."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, 512, 4)).astype(np.float32)
    linear = np.einsum("lmd,ldk->lmk", hidden, rng.normal(size=(2, 4, 3))).astype(np.float32)
    found, losses = kvzap.fit(hidden, linear, steps=300, rate=0.05)
    assert losses[-1] < 1e-3 * losses[0]
    np.testing.assert_allclose(found(jnp.asarray(hidden[1:]), 1)[0], linear[1], atol=0.2)
    best = {
        n: kvzap.fit(hidden, np.abs(hidden[..., :1]), units=n, steps=300, rate=0.05)[1][-50:].mean() for n in (None, 16)
    }
    assert best[16] < 0.2 * best[None]


@pytest.mark.slow
def test_examples_are_the_scores_of_kvzip_plus_behind_the_sinks(wide):
    """Of rows of different lengths, the tokens of each in order: those of the best scores are what KVzip+ keeps."""
    model, params = wide
    replay = Reread((1,), (2,), chunk=5, sinks=2, plus=True)
    with jax.enable_x64(True):
        hidden, wanted = kvzap.examples(model, params, TOKENS, replay=replay, lengths=LENGTHS, sinks=2)
        policy = dataclasses.replace(methods.kvzip(5, replay), layout=Layout())
        kv = prefill(model, params, TOKENS, policy=policy, lengths=LENGTHS, max_new_tokens=1)[1].layers[0]
        with pytest.raises(ValueError, match="texts of up to 3 tokens have none behind the first 4; give longer ones"):
            kvzap.examples(model, params, TOKENS[:, :3], replay=replay)
    assert (hidden.shape, wanted.shape) == ((L, 10 + 7, 12), (L, 10 + 7, K))
    np.testing.assert_allclose(hidden[0, :10], params["embedding"][TOKENS[0, 2:]], rtol=1e-6)
    for row, scores in enumerate(np.split(wanted[0], [10])):
        best = np.sort(scores.reshape(-1))[-K * 3]
        for head in range(K):
            assert live_positions(kv)[row][head] == [0, 1, *(2 + np.nonzero(scores[:, head] >= best)[0])]


@pytest.mark.exhaustive
def test_fitted_to_the_embedded_model_it_says_what_kvzip_plus_keeps(embedded):
    """Of other texts than it was fitted to: far more of it than by chance."""
    model, params, _ = embedded
    texts, replay = np.random.default_rng(0).integers(4, 389, (24, 128), np.int32), Reread((3, 38), (3, 32), plus=True)
    hidden, wanted = kvzap.examples(model, params, texts[:20], replay=replay)
    found, losses = kvzap.fit(hidden, wanted, units=32, steps=1500)
    assert losses[-100:].mean() < 0.7 * losses[:20].mean()
    held, scores = kvzap.examples(model, params, texts[20:], replay=replay)
    said = np.stack([found(jnp.asarray(held[i : i + 1]), i)[0] for i in range(len(held))])
    best = [np.argsort(np.argsort(x, axis=1), axis=1) >= x.shape[1] * 3 // 4 for x in (said, scores)]
    assert (best[0] & best[1]).sum() / best[1].sum() > 0.5  # a quarter by chance


# ------------------------------------------------------------------------------------------------ DuoAttention's gates


def states(model, params, ids):
    """Logits as a function of attention: they are as good to compare as hidden states."""
    return lambda attend: model(params, ids, attend=attend)


@pytest.mark.parametrize(
    "how",
    [{}, {"window": 6, "softcap": 0.8, "scale": 0.3}, {"slopes": np.array([0.5, 0.3, 0.2, 0.1], np.float32)}],
    ids=str,
)
def test_a_gate_mixes_what_two_loops_read(how):
    """Of a padded row too, whose sinks are its own first tokens."""
    q, k, v = (x[:, :, :8] for x in qkv(3, T=T))
    pos = jnp.asarray([np.arange(8), np.maximum(np.arange(8) - 3, -1)], jnp.int32)
    gates = jnp.asarray([[0.0, 0.0], [0.25, 1.0]])
    attend = gated(gates, pos, sinks=1, recent=3)
    found = np.asarray(attend(None, q, k, v, layer=1, rotate=lambda x, _: x, logits=Logits(**how))[0])
    scale, softcap, slopes = how.get("scale", 8**-0.5), how.get("softcap"), how.get("slopes", (0.0,) * 4)
    for b, n, t in np.ndindex(2, 4, 8):
        at, keys = int(pos[b, t]), np.asarray(pos[b])
        x = np.asarray(k[b, n // 2] @ q[b, n, t], np.float64) * scale
        x = (x if softcap is None else softcap * np.tanh(x / softcap)) - slopes[n] * (at - keys)
        sees = (keys >= 0) & (keys <= at) & (at - keys < how.get("window", 99))
        out = []
        for shown in (sees, sees & ((keys < 1) | (at - keys < 3))):
            p = np.where(shown, np.exp(x - x[shown].max()), 0.0) if shown.any() else np.zeros(8)
            out.append(p @ np.asarray(v[b, n // 2]) / max(p.sum(), 1e-9))
        gate = float(gates[1, n // 2])
        np.testing.assert_allclose(found[b, n, t], gate * out[0] + (1 - gate) * out[1], atol=1e-5)


def test_gradients_of_gates_are_differences(wide):
    model, params = wide
    with jax.enable_x64(True):
        pos = jnp.broadcast_to(jnp.arange(T), (2, T))
        counts = jnp.arange(2 * T).reshape(2, T) % 3 > 0
        hidden = states(model, params, TOKENS)
        loss = jax.jit(lambda g: distance(hidden, g, pos, counts, sinks=1, recent=3) + penalty(g))
        gates = np.random.default_rng(0).uniform(0.2, 0.8, (L, K))
        assert relative(jax.grad(loss)(jnp.asarray(gates)), central(loss, gates)) < 1e-6
        assert float(loss(jnp.ones((L, K)))) == pytest.approx(0.05)
        assert float(penalty(jnp.full((L, K), -0.5), 0.4)) == pytest.approx(0.2)


@pytest.mark.slow
def test_the_policy_reads_what_closed_and_open_gates_read(wide):
    """Token by token, where gates are 0 or 1."""
    model, params = wide
    gates = np.array([[1.0, 0.0], [0.0, 1.0]])
    with jax.enable_x64(True):
        policy = methods.duo_attention(gates, sinks=1, recent=3)
        pos = jnp.broadcast_to(jnp.arange(T), (2, T))
        wanted = states(model, params, TOKENS)(gated(jnp.asarray(gates), pos, sinks=1, recent=3))
        logits, state = prefill(model, params, TOKENS[:, :1], policy=policy, max_new_tokens=T - 1)
        step, found = jax.jit(lambda t, s: decode_step(model, params, t, s)), [logits]
        for t in range(1, T):
            logits, state = step(TOKENS[:, t], state)
            found.append(logits)
        np.testing.assert_allclose(np.stack(found, 1), wanted, atol=1e-6)


def test_heads_of_the_smallest_gates_stream():
    def streams(share):
        policy = methods.duo_attention([[0.9, 0.2], [0.2, 0.7], [0.4, 0.2]], streaming=share, sinks=1, recent=3)
        infos = [LayerInfo(i, 3, 4, 2, 8, 40, 4) for i in range(3)]
        return [int(policy.at(i, 3).sizes(info, np.array([40])).total[0]) < 80 for i, info in enumerate(infos)]

    assert streams(0.34) == [True, True, False]
    assert streams(0.5) == [True, True, True]
    assert streams(0.0) == [False] * 3
    with pytest.raises(ValueError, match="give one between 0 and 1 for every layer and kv head"):
        methods.duo_attention([[1.5]])


# ------------------------------------------------------------------------------------------------------------ probes


def queries_of(model, params):
    """Positions of padded prompts, and for every layer the queries before and after rotation."""
    pos, seen = jnp.asarray(np.maximum(np.arange(T)[None] - (T - LENGTHS)[:, None], -1)), []
    attend = gated(jnp.ones((L, K)), pos, sinks=0, recent=1)

    def keep(cache, q, k, v, *, layer, rotate, **rest):
        seen.append([np.asarray(x) for x in (q, rotate(q, pos[:, None]))])
        return attend(cache, q, k, v, layer=layer, rotate=rotate)

    model(params, jnp.where(pos >= 0, TOKENS, 0), attend=keep)
    return np.asarray(pos), seen


def test_filters_and_moments_of_queries(wide):
    model, params = wide
    with jax.enable_x64(True):
        pos, layers = queries_of(model, params)
        filters = fit_filters(model, params, TOKENS, lengths=LENGTHS)["filters"]
        moments = fit_queries(model, params, TOKENS, lengths=LENGTHS, sinks=2)
        centres = fit_centres(model, params, TOKENS, lengths=LENGTHS)
        with pytest.raises(
            ValueError, match="texts of up to 12 tokens have none behind the first 12; give longer ones"
        ):
            fit_queries(model, params, TOKENS, sinks=12)
    for layer, (raw, q) in enumerate(layers):
        directions = []
        for n in range(K * G):
            rows = q[:, n][pos >= 0]
            u = np.linalg.svd(rows)[2][0]
            directions.append(-u if (rows @ u).sum() > 0 else u)
            rows = raw[:, n][pos >= 0]
            np.testing.assert_allclose(centres["mean"][layer, n], rows.mean(0), atol=1e-5)
            size = np.tile(np.hypot(rows[:, :3], rows[:, 3:]).mean(0), 2)
            np.testing.assert_allclose(centres["length"][layer, n], size, atol=1e-5)
            rows = raw[:, n][pos >= 2]
            np.testing.assert_allclose(moments["mean"][layer, n], rows.mean(0), atol=1e-5)
            np.testing.assert_allclose(moments["covariance"][layer, n], np.cov(rows.T, bias=True), atol=1e-4)
        np.testing.assert_allclose(filters[layer], np.reshape(directions, (K, G, -1)).mean(1), atol=1e-4)


WANTED, ANSWERS = np.zeros((2, T), bool), np.array([3, 2])
WANTED[0, 2:5] = WANTED[1, 5:9] = True


def test_heads_that_look_at_what_answers_are_read_from(wide):
    model, params = wide
    with jax.enable_x64(True):
        found = head_importance(model, params, TOKENS, WANTED, ANSWERS, lengths=LENGTHS)
        rows = [x[votes(T)] for x in observed(model, params, Prompts(TOKENS, LENGTHS), votes(T))]
    expected = np.zeros((L, K * G))
    for layer, p in enumerate(map(np.asarray, rows)):
        for row, mask in enumerate(WANTED):
            for head in range(K * G):
                for at in range(T - 1 - ANSWERS[row], T - 1):
                    best = np.argsort(-p[row, head, at], kind="stable")[: mask.sum()]
                    expected[layer, head] += sum(p[row, head, at, j] for j in best if mask[j]) / mask.sum()
    expected = expected.reshape(L, K, -1).mean(-1)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"answers": np.array([0, 2])}, "answers of 0 to 2 tokens"),
        ({"answers": np.array([3, 9])}, "answers of 3 to 9 tokens at the end of prompts of 9 to 12"),
        ({"wanted": np.zeros((2, T), bool)}, "nothing is wanted in 2 of 2 prompts"),
        ({"wanted": np.zeros((2, 3), bool)}, "wanted must be booleans"),
    ],
)
def test_what_cannot_be_asked_is_refused(wide, given, message):
    model, params = wide
    with jax.enable_x64(True), pytest.raises(ValueError, match=message):
        head_importance(model, params, TOKENS, **({"wanted": WANTED, "answers": ANSWERS} | given), lengths=LENGTHS)


def test_a_policy_is_printed_with_its_arrays_digest():
    """Runs are told apart by what a policy prints: other filters of equal shape are another policy."""
    filters = np.zeros((2, 2, 8), np.float32)
    one, same, other = (repr(methods.q_filters(4, x)) for x in (filters, filters.copy(), filters + 1))
    assert one == same
    assert one != other


def test_frozen_arrays_are_values():
    one = FrozenArrays({"x": np.arange(3.0), "y": np.ones((2, 2))})
    assert one == FrozenArrays({"y": np.ones((2, 2)), "x": np.arange(3.0)})
    assert one not in (FrozenArrays({"x": np.arange(3.0)}), FrozenArrays({"x": np.arange(3), "y": np.ones((2, 2))}))
    for same in (one, copy.deepcopy(one), pickle.loads(pickle.dumps(one)), FrozenArrays(dict(one))):
        assert {same} == {one}
        with pytest.raises(ValueError, match="read-only"):
            same["x"][0] = 1
