"""Where papers and released code disagree, D-27 to D-38, D-40 and D-47: AhaKV, Keyformer, FastGen, padding.

The setting is that of `test_disagreements.py`.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.methods import variants
from kvjax.methods.parts import OverBatch
from kvjax.methods.profile import FastGen
from kvjax.scores.attention import Faded
from tests import tensors
from tests.one_layer import (
    BUDGET,
    IN_PROMPT,
    PROMPT,
    H,
    K,
    M,
    N,
    differs,
    history,
    layer,
    moments,
    noise,
    prompt_score,
    reads,
    v,
)
from tests.references.policies import Layer, accumulating, best, keep, pool, replay
from tests.tensors import live_positions

pytestmark = pytest.mark.exhaustive  # minutes of compilation

RECENT = 3
NORM = (np.asarray(v[0], np.float64) ** 2).sum(-1)  # "K M"


def ahakv(
    budget=BUDGET,
    *,
    rows=RECENT,
    apply="raw",
    floor=None,
    count="position",
    kernel=7,
    target="value_norm",
    each_step=False,
):
    """SG-softmax of the last rows, the prompt's part times a prior of value norms; steps add their rows to it.

    Args:
      budget, rows: as in `methods.ahakv`; apply, floor, count: as in `EntropyScaled`.
      kernel: of the pooling; None for no prior.
      target: what is pooled.
      each_step: whether what steps add is multiplied by a prior over live tokens.
    """
    pooled = lambda x: np.stack([pool(one, kernel, "avg") for one in x])

    def attend(i, live):
        seen = i + 1 if count == "position" else min(i + 1, len(live[0]))
        factor = np.sqrt(2 * np.log(max(seen / budget, 1))) / (H**0.5 if apply == "scaled" else 1)
        factor = factor if floor is None else max(factor, floor)
        return layer.rows(i, live, factor=factor if seen > budget else 1)

    def with_prior(score):
        norm = NORM[:, :PROMPT] if target == "score" else pooled(NORM[:, :PROMPT])
        result = score.copy()
        result[:, :PROMPT] *= norm / norm.max(1, keepdims=True)
        result[:, :PROMPT] = result[:, :PROMPT] if target == "value_norm" else pooled(result[:, :PROMPT])
        return result

    score = np.zeros((K, M))

    def over_live(new, live):
        for g, tokens in enumerate(map(sorted, live)):
            norm = pool(NORM[g][tokens], kernel, "avg")
            new[g][tokens] *= norm / norm.max()
        return new

    def step(i, p, live):
        nonlocal score
        new = layer.group(p) * (i >= PROMPT - rows)
        score = score + (over_live(new, live) if each_step and i >= PROMPT else new)
        score = with_prior(score) if i == PROMPT - 1 and kernel is not None else score
        return [
            keep(score[g], live[g], i + 1, budget, recent=RECENT) if len(live[g]) > budget else live[g]
            for g in range(K)
        ]

    return replay(layer, PROMPT, step, attend=attend)


make_ahakv = functools.partial(methods.ahakv, BUDGET, recent=RECENT)


def test_d27_d30_d31_d32_the_defaults():
    assert history(make_ahakv()) == ahakv()


def test_d27_one_row_more():
    differs(variants.ahakv_equation_5(BUDGET, recent=RECENT), make_ahakv(), ahakv(rows=RECENT + 1))


def test_d28_lambda_on_scaled_products():
    differs(variants.ahakv_gain(BUDGET, recent=RECENT, apply="scaled"), make_ahakv(), ahakv(apply="scaled"))


def test_d29_rows_that_see_no_more_than_the_budget():
    """Below k the model's softmax; just above it rows are flatter than that, unless a floor is set."""
    close = functools.partial(methods.ahakv, 12, recent=RECENT)
    assert history(close()) == ahakv(12)
    assert history(variants.ahakv_gain(12, recent=RECENT, floor=1.0)) == ahakv(12, floor=1.0)
    bare = lambda policy: prompt_score(dataclasses.replace(policy, score=Faded(policy.score.of)))
    plain = bare(variants.ahakv_without("gain", 12, recent=RECENT))
    floored = bare(variants.ahakv_gain(12, recent=RECENT, floor=1.0))
    flat = bare(methods.ahakv(12, recent=RECENT))
    np.testing.assert_allclose(floored, plain, atol=1e-6)
    assert np.abs(flat - plain).max() > 0.01
    short = bare(methods.ahakv(PROMPT, recent=RECENT))
    np.testing.assert_allclose(short, plain, atol=1e-6)


@pytest.mark.parametrize("options", [{"kernel": 3}, {"target": "score"}, {"target": "both"}], ids=str)
def test_d30_what_is_pooled(options):
    policy = variants.ahakv_prior(BUDGET, recent=RECENT, **options)
    assert history(policy) == ahakv(**options)
    assert np.abs(prompt_score(policy) - prompt_score(make_ahakv())).max() > 0.01


def test_the_prior_at_every_step():
    differs(variants.ahakv_prior(BUDGET, recent=RECENT, each_step=True), make_ahakv(), ahakv(each_step=True))


def test_d31_selection_without_the_prior():
    differs(variants.ahakv_without("prior", BUDGET, recent=RECENT), make_ahakv(), ahakv(kernel=None))


def test_d32_counting_live_tokens():
    """ln(i / k) is then near 0 in decoding, and rows near uniform."""
    differs(variants.ahakv_gain(BUDGET, recent=RECENT, seen="cache"), make_ahakv(), ahakv(count="cache"))


# --- Keyformer ---


def temperature(i, tau=(1.0, 2.0), delta=None):
    delta = (tau[1] - tau[0]) / (M - PROMPT) if delta is None else delta
    return tau[0] + delta * max(i - PROMPT + 1, 0)


def keyformer(per="call", delta=None, final=None):
    attend = lambda i, live: layer.rows(i, live, noise=noise(i, per), factor=1 / temperature(i, delta=delta))
    return replay(layer, PROMPT, accumulating(layer, BUDGET, recent=RECENT, final=final), attend=attend)


make_keyformer = functools.partial(methods.keyformer, BUDGET, recent=RECENT)
drawn = functools.partial(variants.keyformer_drawn, BUDGET, recent=RECENT)


@pytest.fixture(autouse=True)
def _noise_of_each_head(monkeypatch):
    """Lets `Layer.row` take the noise of its own head from "N M"."""
    row = Layer.row

    def with_noise(self, head, i, keys, *, noise=None, **kwargs):
        return row(self, head, i, keys, noise=None if noise is None else noise[head], **kwargs)

    monkeypatch.setattr(Layer, "row", with_noise)


def test_d33_noise_for_every_call_or_for_every_key():
    assert history(make_keyformer()) == keyformer()
    differs(drawn(per="key"), make_keyformer(), keyformer("key"))


@pytest.mark.parametrize("delta", [None, 0.01, 6.0])
def test_d34_the_step_of_the_temperature(delta):
    """(end - init) / T, or a number: 0.01 in the released configuration."""
    scores = []
    policy = variants.keyformer_released(BUDGET, recent=RECENT, tau_delta=delta) if delta else make_keyformer()
    plain = keyformer(delta=delta, final=lambda i, total: scores.append(total) or total)
    assert history(policy) == plain
    kv = moments(policy).kv
    for g, pos in enumerate(np.asarray(kv.pos[0])):
        live = pos >= 0
        np.testing.assert_allclose(kv.memory.score[0, g][live], scores[-1][g][pos[live]], atol=1e-5)
    if delta is not None:
        assert np.abs(kv.memory.score - moments(make_keyformer()).kv.memory.score).max() > 0.01


def test_d35_one_score_for_all_layers(tiny):
    """The sum of what all layers measured decides for all of them."""
    model, params = tiny
    policy = make_keyformer()
    tokens = np.random.default_rng(2).integers(0, 61, (1, PROMPT)).astype(np.int32)
    shared = kvjax.shared_layers(policy)
    state = kvjax.start(model, policy=shared, lengths=[PROMPT], max_new_tokens=4)
    _, state, stats = kvjax.forward(model, params, tokens, state)
    total = sum(np.asarray(one[0][0], np.float64) for one in stats.layers)
    wanted = [keep(total[g], range(PROMPT), PROMPT, BUDGET, recent=RECENT) for g in range(2)]
    after = shared(state, stats)
    assert [live_positions(one)[0] for one in after.layers] == [wanted] * 3
    state = kvjax.start(model, policy=policy, lengths=[PROMPT], max_new_tokens=4)
    apart = policy(*kvjax.forward(model, params, tokens, state)[1:])
    assert [live_positions(one)[0] for one in apart.layers] != [wanted] * 3


def test_d36_one_score_for_the_batch():
    q2, k2, v2 = tensors.qkv(8, B=2, N=N, K=K, T=M, H=H, sharpness=2.0)
    rows = [Layer(q2[b], k2[b]) for b in range(2)]
    total, live, wanted = np.zeros((K, M)), [[set()] * K] * 2, []
    for i in range(M):
        live = [[{*tokens, i} for tokens in row] for row in live]
        total = total + sum(one.group(one.rows(i, held)) for one, held in zip(rows, live, strict=True))
        if i >= PROMPT - 1:
            live = [[keep(total[g], row[g], i + 1, BUDGET, recent=RECENT) for g in range(K)] for row in live]
            wanted.append([[list(tokens) for tokens in row] for row in live])
    plain = drawn(noise="none", tau=(1.0, 1.0))
    of = lambda policy, rows: tensors.replay(policy, [{"q": q2[rows], "k": k2[rows], "v": v2[rows]}], PROMPT).live
    everything = slice(None)
    assert of(dataclasses.replace(plain, score=OverBatch(plain.score.of)), everything) == wanted
    apart = of(plain, everything)
    assert apart != wanted
    for b in range(2):
        alone = of(plain, slice(b, b + 1))
        assert [step[b] for step in apart] == [step[0] for step in alone]


def test_d37_a_key_set_that_is_frozen_after_the_prompt():
    """The mask of the released simulation: what leaves the recent window can never become a key token."""
    score = sum(
        layer.group(layer.rows(i, [range(i + 1)] * K, noise=noise(i), factor=1 / temperature(i))) for i in range(PROMPT)
    )
    keys = [best(score[g], BUDGET - RECENT, range(PROMPT - RECENT)) for g in range(K)]
    wanted = [[sorted({*keys[g], *range(i + 1 - RECENT, i + 1)}) for g in range(K)] for i in range(PROMPT, M)]
    mask = variants.keyformer_mask(BUDGET, recent=RECENT)
    assert reads(mask) == wanted
    assert moments(mask, reads=True).live[-1][0] == [list(range(M))] * K, "a mask frees nothing"
    default = reads(make_keyformer())
    assert all(i - RECENT in tokens for i, row in enumerate(default, PROMPT) for tokens in row)
    chosen = {j for row in default for tokens in row for j in tokens} - {j for row in wanted for g in row for j in g}
    assert chosen - set(range(PROMPT - RECENT)), "the algorithm lets generated tokens become key tokens"


def test_d38_constant_noise_changes_nothing():
    constant, none = drawn(noise="constant"), drawn(noise="none")
    np.testing.assert_allclose(prompt_score(constant), prompt_score(none), atol=1e-6)
    assert history(constant) == history(none)
    assert np.abs(prompt_score(none) - prompt_score(make_keyformer())).max() > 0.01


# --- all, FastGen ---


@pytest.mark.parametrize("policy", [methods.h2o(0.5), methods.pyramidkv(0.5, window=2), methods.random(0.5)])
def test_d40_a_padded_row_is_the_row_alone(policy):
    lengths = np.array([PROMPT, 11])
    q2, k2, v2 = tensors.qkv(8, B=2, N=N, K=K, T=M, H=H, sharpness=2.0)
    params = {"q": q2, "k": k2, "v": v2}
    keys = jax.random.split(jax.random.key(3), 2)
    both = tensors.replay(policy, [params], PROMPT, lengths=lengths, key=keys).live
    for b, n in enumerate(lengths.tolist()):
        cut = [{name: x[b : b + 1, :, PROMPT - n :] for name, x in params.items()}]
        alone = tensors.replay(policy, cut, n, key=keys[b : b + 1]).live
        assert [step[b] for step in both] == [step[0] for step in alone]


@pytest.mark.parametrize("recovery_ratio", [0.6, 0.75, 0.9])
def test_d47_what_counts_as_recovered(recovery_ratio):
    """The mass on kept keys, or the share of entries that renormalising hardly changes."""
    ids = np.arange(PROMPT) % 7
    p = layer.group(layer.prompt(PROMPT))
    size, chosen = int(0.3 * PROMPT), {"mass": [], "elementwise": []}
    visible = np.tril(np.ones((PROMPT, PROMPT), bool))
    distance = np.arange(PROMPT)[:, None] - np.arange(PROMPT)
    for g in range(K):
        special, mark = ids < 1, (ids >= 1) & (ids < 3)
        frequent = np.isin(np.arange(PROMPT), best(p[g].sum(0), size, range(PROMPT)))
        columns = [special, special | mark, special | mark | frequent]
        masks = [visible & c[None] for c in columns] + [visible & (columns[2][None] | (distance < size))]
        for recovery, strategies in chosen.items():
            enough = []
            for mask in masks:
                kept = np.where(mask, p[g], 0)
                total = kept.sum(1, keepdims=True)
                after = kept / np.where(total > 0, total, 1)
                unchanged = (np.abs(after - p[g]) < 1e-4) & visible & (total > 0)
                value = total.mean() if recovery == "mass" else unchanged.sum() / visible.sum()
                enough.append(value >= recovery_ratio)
            strategies.append(enough.index(True) if any(enough) else len(masks))
    for recovery, wanted in chosen.items():
        options = {"frequent": 0.3, "local": 0.3, "recovery": recovery_ratio}
        columns = lambda kind: tuple(np.flatnonzero(kind).tolist())  # which are the ids of `Tensors`
        by = "mass" if recovery == "mass" else "entries"
        policy = FastGen(columns(special), columns(mark), by=by, **options)
        assert tensors.evicted(policy, IN_PROMPT)[0][0].memory[2][0].tolist() == wanted
    assert chosen["mass"] != chosen["elementwise"]
