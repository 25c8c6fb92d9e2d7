"""The papers' figures: arrays against float64 numpy and against the policies themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, methods, models
from kvjax.experiments.papers import adakv, ahakv, attention, base, positions, roco, sparsity
from kvjax.experiments.papers.attention import Layer, capture, fold_rows
from kvjax.experiments.papers.base import Prompts, interval
from kvjax.methods.released import papers
from kvjax.models.gpt2 import GPT2Config
from kvjax.models.mpt import MPTConfig
from kvjax.observe import Rows
from kvjax.pallas_kernels import Logits
from kvjax.pallas_kernels.columns import ROUNDING
from tests.tensors import live_positions, qkv, token_ids

SIZES = {"vocab_size": 61, "embed_dim": 16, "mlp_dim": 24, "num_layers": 3, "num_query_heads": 2, "num_kv_heads": 2}
BIAS = jnp.arange(2 * 4 * 23).reshape(2, 4, 23) % 7 / 2
CONFIGS = {
    "alibi": MPTConfig(**SIZES, head_dim=8, activation="gelu", tie_embeddings=True, steepest=2.0),
    "learned": GPT2Config(**SIZES, head_dim=8, activation="gelu", max_position=48),
}


@pytest.fixture(scope="module", params=["rotary"])
def prompts(request, tiny):
    """Prompts of 24 tokens for the small model, or for one that tells positions otherwise."""
    model, params = tiny
    if request.param != "rotary":
        model = models.LanguageModel(CONFIGS[request.param])
        params = jax.tree.map(lambda x: 2 * x, jax.jit(model.init)(jax.random.key(3)))
    return Prompts(model, params, np.asarray(token_ids(2, 24, seed=3)))


@pytest.fixture(scope="module")
def layers(prompts):
    """What every layer attends with."""
    return capture(prompts)


@pytest.fixture(scope="module")
def p(layers):
    """The attention matrices, one a layer."""
    return [matrix(layer) for layer in layers]


def logits(layer):
    """Scaled logits "B N T T" with -inf where a row does not see a key."""
    q, k = (np.asarray(x, np.float64) for x in (layer.q, layer.k))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    x = np.einsum("bnth,bnsh->bnts", q, k) * (layer.logits.scale or q.shape[-1] ** -0.5)
    if (cap := layer.logits.softcap) is not None:
        x = cap * np.tanh(x / cap)
    rows, keys = np.indices(x.shape[-2:])
    if layer.bias is not None:
        x = x + np.asarray(layer.bias, np.float64)[:, :, None]
    seen = (keys <= rows) & (rows - keys < (layer.logits.window or 10**9))
    return np.where(seen, x, -np.inf)


def matrix(layer, multiplier=None):
    """Attention probabilities "B N T T"."""
    x = logits(layer)
    if multiplier is not None:
        x = np.where(np.isfinite(x), np.where(np.isfinite(x), x, 0) * np.asarray(multiplier)[:, None], -np.inf)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def grouped(p, num_kv_heads=2):
    """The mean over the query heads of every kv head."""
    B, N, *rest = p.shape
    return p.reshape(B, num_kv_heads, N // num_kv_heads, *rest).mean(2)


# --- rows ---


@pytest.mark.exhaustive
@pytest.mark.parametrize("prompts", ["rotary", *CONFIGS], indirect=True)
def test_captured_layers_attend_as_the_model_does(prompts, p):
    """Column sums of the captured matrices are those that the model measures when it reads the prompt."""
    model, params, tokens = prompts
    state = kvjax.start(model, policy=methods.h2o(8), lengths=[24, 24], max_new_tokens=0)
    _, _, stats = kvjax.forward(model, params, tokens, state)
    for i, here in enumerate(p):
        np.testing.assert_allclose(stats.of(i)[Rows()], grouped(here).sum(2), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"logits": Logits(0.3, window=5), "bias": BIAS}, {"logits": Logits(0.3, 1.5)}], ids=", ".join
)
def test_rows_and_folds_are_those_of_the_matrix(options):
    """The last block of a fold is filled up; what the filling gives must not show."""
    q, k, v = qkv(5, T=23)
    layer, rows = Layer(q, k, v, jnp.zeros((4, 8, 3)), **options), jnp.asarray([0, 3, 4, 17, 22])
    visit = lambda total, p, here: (total + p.sum(2), (here, jnp.moveaxis(p, 2, 0)))
    total, (here, p) = fold_rows(layer, visit, jnp.zeros((2, 4, 23)), block=8)
    assert here.tolist() == [*range(23)]
    np.testing.assert_allclose(np.moveaxis(np.asarray(p), 0, 2), matrix(layer), atol=1e-5)
    np.testing.assert_allclose(total, matrix(layer).sum(2), atol=1e-4)
    factor = np.linspace(0.5, 2, 23)
    p = attention.matrix(layer, rows, jnp.asarray(factor[rows], jnp.float32))
    np.testing.assert_allclose(p, matrix(layer, factor)[:, :, rows], atol=1e-5)


def test_a_model_without_output_projection_is_refused(tiny):
    model, params = tiny

    class Silent(models.LanguageModel):
        def block(self, layer, params, x, cache, attend):
            quiet = lambda *given, out_proj=None, **how: attend(*given, **how)
            return super().block(layer, params, x, cache, quiet)

    with pytest.raises(ValueError, match="the model passes no out_proj"):
        capture(Prompts(Silent(model.config), params, np.zeros((1, 4), np.int32)))


def test_interval():
    np.testing.assert_allclose(interval(np.array([[1.0, 2.0, 3.0]])), [[2.0], [4.302653 / np.sqrt(3)]], rtol=1e-6)
    assert interval(np.ones((2, 1)))[1].tolist() == [0.0, 0.0]


# --- RoCo ---


def best(score, num):
    """The `num` largest, among equals the later ones."""
    return set(sorted(range(len(score)), key=lambda j: (score[j], j))[-num:])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("prompts", "measure"),
    [("rotary", 0), ("rotary", 1), ("rotary", 2), ("rotary", 3), ("alibi", 0), ("learned", 3)],
    indirect=["prompts"],
)
def test_importance_jaccard_is_that_of_the_policies(prompts, p, measure):
    """The policy itself, decoding token by token, against sets chosen from the full cache's attention."""
    (model, params, tokens), T, budget = prompts, 24, 7
    summed = methods.h2o(budget, recent=0), methods.aqas(budget, recent=0)
    policy = (*summed, papers.tova_by_head(budget), methods.mas(budget))[measure]
    found = roco.importance_jaccard(prompts, shares=(0.3, 0.5))
    assert found.budgets.tolist() == [7, 12]

    step = jax.jit(lambda token, state: kvjax.decode_step(model, params, token, state))
    _, state = kvjax.prefill(model, params, tokens[:, :1], policy=policy, max_new_tokens=T)
    similarity = np.zeros((T, 3, 2, 2))
    for t in range(1, T):
        _, state = step(jnp.asarray(tokens[:, t]), state)
        held = [live_positions(layer) for layer in state.layers]
        for i, b, h in np.ndindex(3, 2, 2):
            rows = grouped(p[i])[b, h, : t + 1, : t + 1]
            above = (rows > (1 + ROUNDING * 2.0**-23) / np.arange(1, t + 2)[:, None]).sum(0)
            count = np.arange(t + 1, 0, -1)
            wanted = best([rows.sum(0), above, rows[-1], rows.sum(0) / count][measure], budget)
            similarity[t, i, b, h] = len(wanted & {*held[i][b][h]}) / len(wanted | {*held[i][b][h]})
    np.testing.assert_allclose(found.similarity[measure, 0], similarity[budget:].mean((0, 3)), rtol=1e-6)


@pytest.mark.exhaustive
def test_chance_is_that_of_random_sets(prompts):
    found = roco.importance_jaccard(prompts, shares=(0.5,))
    rng, draws = np.random.default_rng(0), []
    for n in np.repeat(np.arange(13, 25), 401):
        a, b = (set(rng.permutation(n)[:12].tolist()) for _ in range(2))
        draws.append(len(a & b) / len(a | b))
    assert abs(np.mean(draws) - found.chance[0]) < 0.02


@pytest.mark.parametrize(
    ("figure", "options", "message"),
    [
        (roco.importance_jaccard, {"shares": (0.01, 1.0)}, r"budgets of \[0, 24\] tokens must lie between 1 and 23"),
        (roco.attention_by_age, {"skip": 12}, "prompts of 24 tokens leave none between the first 12 and the half"),
        (roco.scope_size, {"continuation": 23}, "24 tokens less a continuation of 23 leave 1 to evict"),
        (sparsity.attention_mass, {}, "the second half of 24 tokens has 12 rows, not 64"),
        (ahakv.attention_entropy, {"budget": 24}, "budget=24: rows of a prompt of 24 tokens must exceed it"),
        (adakv.head_concentration, {}, "a window of 32 of 24 tokens leaves none before it"),
        (adakv.loss_bound, {"budgets": (0.01,)}, r"budgets of \[0\] tokens must lie between 1 and 24"),
    ],
)
def test_prompts_that_are_too_short_are_refused(figure, options, message):
    with pytest.raises(ValueError, match=message):
        figure(Prompts(None, None, np.zeros((2, 24), np.int32)), **options)


def test_attention_by_age(prompts, p):
    found = roco.attention_by_age(prompts, skip=2)
    assert found.ages.tolist() == [*range(1, 13)]
    for i, here in enumerate(p):
        received = np.stack([grouped(here)[..., j : j + 12, j] for j in range(2, 12)])  # "T B K A"
        mean, std = (np.stack([f(received[..., :a], -1) for a in found.ages], -1) for f in (np.mean, np.std))
        np.testing.assert_allclose(found.mean[i], mean.mean((0, 1, 2)), rtol=1e-4)
        np.testing.assert_allclose(found.std[i], std.mean((0, 1, 2)), rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(found.peaked[i], [(std.argmax(-1) < a).mean() for a in found.ages], atol=0.03)
        assert found.peaked[i, -1] == pytest.approx(1)


@pytest.mark.exhaustive
def test_scope_size_is_what_the_drivers_measure(prompts):
    """Prefill, eviction and decoding by the drivers, against the figure's one prompt for all scopes."""
    model, params, tokens = prompts
    found = roco.scope_size(prompts, shares=(0.5,), sizes=(0.0, 0.5), continuation=8)
    assert (found.length, found.budgets.tolist()) == (16, [8])
    full = log_p(model, params, tokens, methods.full())
    for kind in (0, 1):
        evicted = log_p(model, params, tokens, roco.scoped(8, 4, by_deviation=bool(kind)))
        divergence = (np.exp(full) * (full - evicted)).sum(-1).mean(-1)
        agreement = (full.argmax(-1) == evicted.argmax(-1)).mean(-1)
        np.testing.assert_allclose(found.divergence[kind, 0, 1], divergence, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(found.agreement[kind, 0, 1], agreement)
    np.testing.assert_array_equal(found.divergence[0, :, 0], found.divergence[1, :, 0])  # nothing protected by either
    reading = analysis.read(model, params, tokens[:, :16], tokens[:, 16:])
    mass = np.stack([np.asarray(x.mass, np.float64).reshape(-1, 2, 2, 16).mean(2) for x in reading.later])
    keep = np.argsort(np.argsort(-mass, axis=-1), axis=-1) < 8
    evicted = jax.nn.log_softmax(reading.logits_after(model, params, jnp.asarray(keep)))
    divergence = (np.exp(full) * (full - evicted)).sum(-1).mean(-1)
    np.testing.assert_allclose(found.hindsight[0], divergence, rtol=1e-3, atol=1e-5)


def log_p(model, params, tokens, policy):
    """Log-probabilities after each of the last 8 tokens, read one by one into an evicted cache."""
    _, state = kvjax.prefill(model, params, tokens[:, :16], policy=policy, max_new_tokens=8)
    return np.asarray(jax.nn.log_softmax(kvjax.feed(model, params, tokens[:, 16:], state)[0]), np.float64)


# --- positions ---


@pytest.mark.exhaustive
def test_survival_is_what_heads_keep_together(prompts):
    found = positions.token_survival(prompts, budgets=(0.25, 0.5))
    for c, budget in enumerate((6, 12)):
        keep, _ = positions.decide(prompts, budget, found.methods)
        for m, b in np.ndindex(len(keep), 2):
            heads = [{t for head in layer[b] for t in np.flatnonzero(head)} for layer in keep[m]]
            assert found.in_a_head[m, c, b] == pytest.approx(np.mean([len(x) for x in heads]) / 24)
            assert found.in_a_layer[m, c, b] == pytest.approx(len(set.union(*heads)) / 24)
    np.testing.assert_allclose(positions.if_independent(np.array([0.2, 0.5]), 2), [0.36, 0.75])


def test_retained_positions_are_those_of_prefill(prompts):
    model, params, tokens = prompts
    found = positions.retained_positions(prompts, share=0.5, slices=4)
    assert found.budget == 12
    for name, policy in (("H2O", methods.h2o(12)), ("NaCl", methods.nacl(12))):
        _, state = kvjax.prefill(model, params, tokens, policy=policy, max_new_tokens=1)
        live = [live_positions(layer) for layer in state.layers]
        held = np.array([[[np.isin(np.arange(24), head) for head in row] for row in layer] for layer in live])
        i = found.methods.index(name)
        np.testing.assert_array_equal(found.kept[i], held[:, 0].reshape(-1, 24))
        expected = held.reshape(3, 2, 2, 4, 6).mean((0, 2, 4)).T
        np.testing.assert_allclose(found.profile[i], expected)
        chosen = held[..., :18]  # 24 less half of the budget
        np.testing.assert_allclose(found.late[i], chosen[..., 9:].sum((0, 2, 3)) / chosen.sum((0, 2, 3)))


def test_by_slice():
    assert base.by_slice(np.arange(5.0), 2).tolist() == [1.0, 3.5]
    with pytest.raises(ValueError, match="5 tokens cannot be cut into 6 slices"):
        base.by_slice(np.arange(5.0), 6)


def ahakv_scores(layers, budget, recent, n):
    """AhaKV's scores of the first `n` tokens, without and with the value prior."""
    seen = np.arange(1, layers[0].q.shape[2] + 1)
    gain = np.where(seen > budget, np.sqrt(2 * np.log(np.maximum(seen / budget, 1))), 1)
    plain = np.stack([grouped(matrix(x, gain))[:, :, n - recent : n, :n].sum(2) for x in layers])
    norms = np.stack([(np.asarray(x.v, np.float64) ** 2).sum(-1)[..., :n] for x in layers])
    padded = np.pad(norms, [(0, 0)] * 3 + [(3, 3)])
    pooled = np.stack([padded[..., j : j + n] for j in range(7)]).mean(0)
    return plain, plain * pooled / pooled.max(-1, keepdims=True)


@pytest.mark.exhaustive
def test_value_prior(prompts, layers):
    found = positions.value_prior(prompts, share=0.5)
    for i, score in enumerate(ahakv_scores(layers, 12, 6, 24)):
        score = score / score.max(-1, keepdims=True)
        above = np.stack([(score > t).mean((0, 2, 3)) for t in found.thresholds])
        np.testing.assert_allclose(found.above[i], above, atol=0.011)  # one token of 96 in rounding


@pytest.mark.slow
def test_scores_by_step_are_of_the_text_so_far(tiny):
    """All rows, the newest, and the last quarter: at a budget of a quarter, 19 % of the text vote (NaCl's Table 4)."""
    model, params = tiny
    tokens = np.asarray(token_ids(2, 20, seed=3))
    found = positions.scores_by_step(Prompts(model, params, tokens), share=0.25, steps=(0, 2, 4), slices=4)
    assert (found.steps.tolist(), found.budget) == ([0, 2, 4], 5)
    text = tokens
    for _ in range(4):
        state = kvjax.start(model, policy=methods.full(), lengths=[text.shape[1]] * 2, max_new_tokens=0)
        newest = kvjax.forward(model, params, text, state)[0].argmax(-1)
        text = np.concatenate([text, np.asarray(newest)[:, None].astype(text.dtype)], axis=1)
    layers = capture(Prompts(model, params, text))
    p = [matrix(layer) for layer in layers]
    for m, n in enumerate((20, 22, 24)):
        rows = np.stack([grouped(x[:, :, :n, :n]) for x in p])  # "L B K T T"
        asked = np.interp(100 * 5 / n, (20, 30), (20, 21.5))
        voting = int(asked * n / 100)
        newest = np.broadcast_to(rows[:, :, :, -1].mean(2, keepdims=True), (3, 2, 2, n))
        ahakv = ahakv_scores(layers, 5, 2, n)[1]
        for i, score in enumerate((rows.sum(3), newest, rows[:, :, :, -voting:].sum(3), ahakv)):
            parts = np.array_split(score / score.mean(-1, keepdims=True), 4, axis=-1)
            wanted = [part.mean(-1).mean((0, 2)) for part in parts]
            np.testing.assert_allclose(found.score[i, m], wanted, rtol=1e-4)


@pytest.mark.slow
def test_score_distributions_are_over_what_prefill_keeps(prompts, p):
    """A row divides what it gives by what it gives to the tokens that are left, its own and later ones among them."""
    model, params, tokens = prompts
    found = positions.score_distributions(prompts, share=0.5, rows=3)
    assert (found.length, found.budget) == (21, 10)
    full = np.stack([here[:, :, 21:, :21].mean(2) for here in p])
    for m, policy in enumerate((methods.full(), methods.streaming_llm(10), methods.h2o(10), methods.keyformer(10))):
        _, state = kvjax.prefill(model, params, tokens[:, :21], policy=policy, max_new_tokens=1)
        rows = np.stack([here[:, :, 21:] for here in p])
        stay = np.zeros((3, 2, 4, 21), bool)
        for i, b, n in np.ndindex(3, 2, 4):
            stay[i, b, n, live_positions(state.layers[i])[b][n // 2]] = True
        rows[..., :21] *= stay[..., None, :]
        means = (rows / rows.sum(-1, keepdims=True)).mean(3)[..., :21]
        np.testing.assert_allclose(found.score[m], -np.sort(-means, -1).mean((0, 2)).T, rtol=1e-4, atol=1e-7)
        for b in range(2):
            gain = (means / full)[:, b][stay[:, b]]
            np.testing.assert_allclose(found.factor[m, :, b], np.quantile(gain, (0.1, 0.5, 0.9)), rtol=1e-4)


# --- sparsity, mass, heat maps ---


def test_attention_by_length_is_that_of_the_newest_row(prompts, p):
    found = sparsity.attention_by_length(prompts, lengths=3, slices=3)
    assert found.lengths.tolist() == [6, 12, 24]
    for m, n in enumerate((6, 12, 24)):
        rows = np.stack([here[:, :, n - 1, :n] for here in p])
        np.testing.assert_allclose(found.attention[m], rows.reshape(3, 2, 4, 3, -1).mean((0, 2, 4)).T, rtol=1e-4)
        np.testing.assert_allclose(found.spread[m], np.prod(rows**-rows, -1).mean((0, 2)), rtol=1e-4)


def test_attention_sparsity(prompts, p):
    found = sparsity.attention_sparsity(prompts, thresholds=(0.02, 0.3), of_maximum=(0.001, 0.25))
    for i, here in enumerate(p):
        below = [[(here[:, :, t, : t + 1] < x).mean() for t in range(24)] for x in (0.02, 0.3)]
        np.testing.assert_allclose(found.sparsity[i], below, atol=1e-6)
        rows = [here[:, :, t, : t + 1] for t in range(12, 24)]
        relative = [np.mean([(r <= x * r.max(-1, keepdims=True)).mean() for r in rows]) for x in (0.001, 0.25)]
        np.testing.assert_allclose(found.relative[i], relative, atol=1e-6)


def test_attention_mass(prompts, p):
    found = sparsity.attention_mass(prompts, num_rows=12)
    for i, here in enumerate(p):
        rows = here[:, :, 12:, :12] / here[:, :, 12:, :12].sum(-1, keepdims=True)
        by_row = np.cumsum(np.sort(rows, -1)[..., ::-1], -1).mean((0, 1, 2))
        by_set = np.cumsum(np.sort(rows.mean(2), -1)[..., ::-1], -1).mean((0, 1))
        np.testing.assert_allclose(found.by_row[i], [0, *by_row], atol=1e-5)
        np.testing.assert_allclose(found.by_set[i], [0, *by_set], atol=1e-5)
    assert (found.by_set <= found.by_row + 1e-6).all()


def test_attention_heatmaps(prompts, p):
    found = sparsity.attention_heatmaps(prompts, layers=(2, 0), heads=3, num_rows=9)
    assert (found.layers.tolist(), found.heads.tolist()) == ([2, 0], [0, 2, 3])
    for i, layer in enumerate(found.layers):
        np.testing.assert_allclose(found.p[i], p[layer][0, found.heads, 15:], atol=1e-5)


# --- AhaKV ---


def test_attention_entropy(prompts, p, layers):
    found = ahakv.attention_entropy(prompts, budget=6, num_rows=1000)
    assert found.rows.tolist() == list(range(1, 24))
    seen = np.arange(1, 25)
    gain = np.where(seen > 6, np.sqrt(2 * np.log(np.maximum(seen / 6, 1))), 1)
    entropy = lambda p: -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1).mean((0, 1))[1:]
    for i, here in enumerate(p):
        np.testing.assert_allclose(found.entropy[i], entropy(here), atol=1e-5)
        np.testing.assert_allclose(found.corrected[i], entropy(matrix(layers[i], gain)), atol=1e-5)
        x = logits(layers[i])
        variance = [x[:, :, t, : t + 1].var(-1).mean() for t in range(1, 24)]
        np.testing.assert_allclose(found.logit_variance[i], variance, rtol=1e-4)
        np.testing.assert_allclose(found.measured_variance[i], np.log(seen[1:]) - found.logit_variance[i] / 2)
    np.testing.assert_allclose(found.as_printed, np.log(seen[1:]) - 4)  # head_dim 8
    np.testing.assert_allclose(found.scaled, np.log(seen[1:]) - 0.5)
    assert found.target == pytest.approx(np.log(6))


def test_the_predictions_hold_for_normal_queries_and_keys():
    """What Eq. 8 to 12 assume: entropy ln i - 1/2 for the softmax, ln k under SG-softmax."""
    keys = jax.random.split(jax.random.key(0), 2)
    q, k = (jax.random.normal(key, (2, 4, 2048, 32)) for key in keys)
    q = q * jnp.sqrt(32 / jnp.square(q).sum(-1, keepdims=True))  # so that every row's logits have variance 1
    rows = np.array([511, 1023, 2047])
    gain = np.sqrt(2 * np.log((rows + 1) / 256))
    layer = Layer(q, k, k, jnp.zeros((4, 32, 1)))
    entropy, corrected, variance = ahakv._entropies(layer, jnp.asarray(rows), jnp.asarray(gain, jnp.float32))
    np.testing.assert_allclose(entropy, np.log(rows + 1) - 0.5, atol=0.08)
    np.testing.assert_allclose(corrected, np.log(256), atol=0.1)
    np.testing.assert_allclose(variance, 1, atol=0.15)


def test_scores_decline_by_the_parts_of_equation_4(prompts, p):
    found = ahakv.score_decline(prompts, slices=23)
    for i, here in enumerate(p):
        here = here.mean(1)
        score, own = here.sum(1), np.diagonal(here, axis1=1, axis2=2)[:, :-1]
        later = np.array([(here[:, j + 1 :, j + 1] - here[:, j + 1 :, j]).sum(1) for j in range(23)]).T
        np.testing.assert_allclose(found.own[i], own.T, atol=1e-5)
        np.testing.assert_allclose(found.later[i], later.T, atol=1e-4)
        np.testing.assert_allclose(found.score[i, 1:], score[:, 2:].T, atol=1e-4)  # the first slice has two tokens
        np.testing.assert_allclose(np.diff(score), later - own, atol=1e-6)


# --- Keyformer, Equation 8 ---


def test_the_mean_of_rows_with_gumbel_noise_has_more_entropy(prompts, p):
    """Their share of a row's tokens is that of exponentials; by hand for a row of two tokens."""
    found = sparsity.gumbel_entropy(prompts, draws=400, num_rows=5)
    entropy = lambda p: -(p * np.log(np.maximum(p, 1e-30))).sum(-1)
    for i, here in enumerate(p):
        np.testing.assert_allclose(found.plain[i], entropy(here[:, :, found.rows]).mean(1).T, atol=1e-4)
    e = np.random.default_rng(0).exponential(size=(2, 40_000))
    ratio = here[:, :, 1, :1, None] / here[:, :, 1, 1:2, None] * e[1] / e[0]
    share = (ratio / (1 + ratio))[:, :, 0]
    both = np.stack([share, 1 - share], -1)
    assert found.rows[0] == 1
    np.testing.assert_allclose(found.expected[-1, 0], entropy(both.mean(2)).mean(1), atol=0.02)
    np.testing.assert_allclose(found.drawn[-1, 0], entropy(both).mean((1, 2)), atol=0.03)
    assert (found.expected > found.drawn).all()


# --- Ada-KV ---


def test_head_concentration(prompts, p):
    found = adakv.head_concentration(prompts, window=4)
    for i, here in enumerate(p):
        weights = here[:, :, -4:, :20].sum(2)
        weights = np.sort(weights / weights.sum(-1, keepdims=True), -1)[..., ::-1]
        np.testing.assert_allclose(found.held[i], np.cumsum(weights, -1).mean(0), atol=1e-5)
    one = adakv.head_concentration(prompts, window=4, layers=(2,))
    assert (one.layers, one.held.tolist()) == ((2,), found.held[2:].tolist())
    with pytest.raises(ValueError, match=r"layers=\(8,\): the model has layers 0 to 2; give --layers of these"):
        adakv.head_concentration(prompts, window=4, layers=(8,))


def test_loss_bound(prompts, p, layers):
    found = adakv.loss_bound(prompts, budgets=(0.25, 12))
    assert found.budgets.tolist() == [6, 12]
    for i, (here, layer) in enumerate(zip(p, layers, strict=True)):
        v = np.repeat(np.asarray(layer.v, np.float64), 2, axis=1)
        projected = np.einsum("bnsh,nhd->bnsd", v, np.asarray(layer.out_proj, np.float64))
        for b in range(2):
            row = here[b, :, -1]  # "N T"
            weights = row.reshape(2, 2, 24).sum(1)
            largest = np.abs(projected[b]).sum(-1).max()
            y = np.einsum("ns,nsd->d", row, projected[b])
            np.testing.assert_allclose(found.output[i, b], np.abs(y).sum(), rtol=1e-4)
            for r, budget in enumerate((6, 12)):
                uniform = [best(w, budget) for w in weights]
                won = best(weights.reshape(-1), 2 * budget)
                adaptive = [{j % 24 for j in won if j // 24 == h} for h in range(2)]
                for kind, kept in enumerate((uniform, adaptive)):
                    mask = np.array([[j in kept[n // 2] for j in range(24)] for n in range(4)])
                    held = (row * mask).sum(-1)
                    y_hat = np.einsum("ns,nsd->d", row * mask / held[:, None], projected[b])
                    bound = 2 * largest * (1 - held).sum()  # what is lost is a difference, in float32
                    np.testing.assert_allclose(found.bound[kind, r, i, b], bound, rtol=1e-4, atol=1e-4)
                    np.testing.assert_allclose(found.loss[kind, r, i, b], np.abs(y - y_hat).sum(), rtol=1e-3, atol=3e-5)
    assert (found.bound[1] <= found.bound[0] + 1e-4).all()  # Theorem 4
    assert (found.loss <= found.bound + 1e-4).all()


def test_adaptive_budgets_leave_no_head_empty():
    """A head with little attention keeps its largest, for the loss is not defined without."""
    weights = jnp.asarray([[[0.9, 0.8, 0.7, 0.6], [0.01, 0.04, 0.02, 0.03]]])
    assert adakv.adaptive(weights, jnp.int32(2))[0].tolist() == [[True, True, True, False], [False, True, False, False]]
