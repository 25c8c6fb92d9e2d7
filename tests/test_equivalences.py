"""Limits in which one method becomes another (E38, and more): on raw tensors, and decoding with a model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.scoring.scores import Accumulated, LayerMean, Pooled, Window
from kvjax.scoring.stats import EntropyScaled
from tests import helpers

BUDGET, WINDOW = 10, 4
PROMPT, STEPS, LENGTHS = 24, 10, (24, 17)
after_prompt = functools.partial(kvjax.when, kvjax.after_prefill())
snapkv = functools.partial(methods.snapkv, BUDGET, window_size=WINDOW, kernel_size=3)
plain_snapkv = methods.snapkv(BUDGET, window_size=WINDOW, kernel_size=1)
ada_snapkv = functools.partial(methods.ada_snapkv, BUDGET, window_size=WINDOW, kernel_size=3)
pyramidkv = functools.partial(methods.pyramidkv, BUDGET, beta=1.0, window_size=WINDOW, kernel_size=3)
nacl = functools.partial(methods.nacl, BUDGET, protect=0, random=0)
ahakv = functools.partial(methods.ahakv, BUDGET, recent=WINDOW, step_gain_softmax=False, value_prior=False)
h2o = methods.h2o(BUDGET)
key_attention = methods.key_attention(BUDGET)
window = methods.window(BUDGET)


def votes(**kwargs):
    """The last rows' attention, summed."""
    rows = kvjax.Observe(kvjax.LastRows(WINDOW), **kwargs)
    return kvjax.Evict(Accumulated(rows), BUDGET, protect=kvjax.Protect(recent=WINDOW))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two policies that keep the same tokens.

    Attributes:
      name: for test ids.
      one, other: the policies.
      quick: decoded with a model in the default run too.
      reads: a step reads the same tokens, too; otherwise the two evict at other moments of a step.
    """

    name: str
    one: kvjax.Policy
    other: kvjax.Policy
    quick: bool = False
    reads: bool = True

    def __repr__(self):
        return self.name


PAIRS = (
    # NaCl: proxies are all rows, or the last one alone.
    Pair("nacl_of_all_rows_is_h2o", nacl(proxies=1.0), after_prompt(methods.h2o(BUDGET, recent=0))),
    Pair(
        "nacl_of_the_last_row_is_tova_by_head",
        nacl(proxies=1, decode_every=1),
        methods.tova(BUDGET, head_mode="per_kv_head"),
    ),
    Pair("nacl_of_the_last_row_is_tova", nacl(proxies=1, decode_every=1, head_mode="layer"), methods.tova(BUDGET)),
    Pair(
        "nacl_of_random_tokens_is_random",
        methods.nacl(BUDGET, protect=1, proxies=1, random=BUDGET, random_distribution="uniform"),
        after_prompt(methods.random(BUDGET)),
    ),
    # H2O: other accumulations without what makes them other.
    Pair(
        "keyformer_without_noise_is_h2o",
        methods.keyformer(BUDGET, recent=5, noise="none", tau=(1.0, 1.0)),
        h2o,
    ),
    Pair("h2o_without_recent_is_key_attention", methods.h2o(BUDGET, recent=0), key_attention, quick=True),
    Pair(
        "ahakv_without_its_parts_is_h2o",
        methods.ahakv(BUDGET, recent=5, recent_accumulation=False, step_gain_softmax=False, value_prior=False),
        h2o,
    ),
    Pair(
        "sums_that_decay_by_nothing_are_h2o",
        methods.scissorhands(BUDGET, recent=5, drop=0, element="p"),
        h2o,
    ),
    Pair(
        "all_rows_of_history_are_aqas",
        methods.scissorhands(BUDGET, history=PROMPT + STEPS, recent=5, drop=0),
        methods.aqas(BUDGET),
    ),
    Pair(
        "roco_of_protected_positions_is_mas",
        methods.roco(BUDGET, scope=3, protect_last=3),
        methods.mas(BUDGET, recent=3),
    ),
    # SnapKV: sums of the window's rows.
    Pair("snapkv_without_pooling_is_the_window_sum", plain_snapkv, votes()),
    Pair(
        "and_a_score_of_prompt_rows",
        plain_snapkv,
        kvjax.Evict(Window(WINDOW), BUDGET, protect=kvjax.Protect(recent=WINDOW)),
    ),
    Pair("ahakv_without_scale_and_prior_is_snapkv", after_prompt(ahakv()), plain_snapkv),
    Pair("rows_below_k_have_the_usual_scale", votes(softmax=EntropyScaled(1000)), plain_snapkv),
    Pair(
        "snapkv_of_one_row_is_tova",
        methods.snapkv(BUDGET, window_size=1, kernel_size=1),
        after_prompt(methods.tova(BUDGET, head_mode="per_kv_head", protect_last=1)),
    ),
    Pair("critical_without_a_second_stage", methods.criticalkv(BUDGET, base=snapkv(), first_stage=1.0), snapkv()),
    Pair(
        "chunks_of_one_token",
        methods.chunkkv(BUDGET, base=plain_snapkv, chunk_size=1),
        dataclasses.replace(plain_snapkv, score=LayerMean(plain_snapkv.score)),
    ),
    Pair("pooling_by_one", dataclasses.replace(plain_snapkv, score=Pooled(Window(WINDOW), "avg", 1)), plain_snapkv),
    # Allocation that divides evenly.
    Pair("pyramid_of_beta_1_is_snapkv", pyramidkv(), snapkv()),
    Pair("factory_pyramid_of_beta_1", pyramidkv(preset="pyramid_factory"), snapkv()),
    Pair("kvpress_pyramid_of_beta_1", pyramidkv(preset="pyramid_kvpress"), snapkv()),
    Pair("ada_of_alpha_0_is_snapkv", ada_snapkv(alpha=0.0), snapkv(), quick=True),
    Pair("ada_of_alpha_0_in_a_dense_cache", ada_snapkv(alpha=0.0, storage="dense"), snapkv()),
    Pair("ada_of_alpha_0_rounded_half_even", ada_snapkv(alpha=0.0, rounding="half_even"), snapkv()),
    Pair("a_floor_that_is_everything", ada_snapkv(alpha=1.0, safeguard="floor_then_global"), snapkv()),
    Pair("ada_that_skips_all_layers", ada_snapkv(alpha=1.0, skip_layers=3), snapkv()),
    Pair(
        "ada_pyramid_of_both_is_snapkv",
        methods.ada_pyramid(BUDGET, alpha=0.0, beta=1.0, window_size=WINDOW, kernel_size=3),
        snapkv(),
    ),
    Pair("adaptive_h2o_of_alpha_0", dataclasses.replace(h2o, heads=kvjax.Adaptive(0.0), storage="pool"), h2o),
    Pair(
        "equal_tables",
        dataclasses.replace(h2o, heads=kvjax.HeadTable([[2, 2]] * 3), layers=kvjax.LayerTable((5, 5, 5))),
        h2o,
    ),
    # Recency.
    Pair("h2o_of_recent_tokens_is_window", methods.h2o(BUDGET, recent=BUDGET), window),
    Pair(
        "streaming_without_sinks_is_window",
        methods.streaming_llm(BUDGET, sinks=0, positions="original"),
        window,
        reads=False,
    ),
    Pair(
        "streaming_is_window_with_sinks",
        methods.streaming_llm(BUDGET, sinks=2, positions="original"),
        methods.window(BUDGET, sinks=2),
        reads=False,
    ),
    Pair("dilation_0_is_window", methods.dilated_window(BUDGET, dilation=0), window),
    Pair("anchored_dilation_0_is_window", methods.dilated_window(BUDGET, dilation=0, mode="anchored"), window),
    Pair(
        "lagkv_of_a_short_text", methods.lagkv(BUDGET, lag=64, sinks=2), after_prompt(methods.window(BUDGET, sinks=2))
    ),
    # Full.
    Pair(
        "fastgen_that_recovers_everything",
        methods.fastgen(special_ids=[0], punctuation_ids=[1], recovery_ratio=1.0),
        methods.full(),
    ),
    Pair("a_budget_for_everything", methods.roco(PROMPT + STEPS + 20), methods.full()),
    # The algebra.
    Pair("chained_with_itself", kvjax.chain(snapkv(), snapkv()), snapkv()),
    Pair("one_policy_for_all_layers", kvjax.partition({0: h2o}, (0, 0, 0)), h2o),
    Pair("layers_that_share_positions", kvjax.shared_layers(window), window),
    Pair("as_soon_as_over_by_one", kvjax.when(kvjax.when_over(1), h2o), h2o),
)
pairs = pytest.mark.parametrize("pair", PAIRS, ids=repr)
decoded_pairs = pytest.mark.parametrize(
    "pair", [pytest.param(p, marks=() if p.quick else pytest.mark.slow) for p in PAIRS], ids=repr
)


@pairs
def test_e38_the_same_tokens_of_a_prompt(pair):
    q, k, v = helpers.qkv(11, T=PROMPT)
    tokens, out_proj = helpers.token_ids(2, PROMPT), jnp.ones((4, 8, 8))

    def keep(policy):
        selection = kvjax.evict_layer(
            policy, q, k, v, lengths=np.array(LENGTHS), tokens=tokens, out_proj=out_proj, layer=1, num_layers=3
        )
        return np.asarray(selection.keep)

    np.testing.assert_array_equal(keep(pair.one), keep(pair.other))


@pytest.fixture(scope="module")
def decoded(tiny):
    """`policy -> (live positions after every step, logits)`; each policy runs once."""
    model, params = tiny
    rng = np.random.default_rng(4)
    prompt, text = (jnp.asarray(rng.integers(0, 61, (2, n)), jnp.int32) for n in (PROMPT, STEPS))

    @functools.cache
    def run(policy):
        plan = kvjax.make_plan(model.config, policy, prompt_len=PROMPT, max_new_tokens=STEPS, lengths=np.array(LENGTHS))

        @jax.jit
        def read(params, prompt, text):
            _, state = kvjax.prefill(model, params, prompt, plan, lengths=jnp.asarray(LENGTHS))

            def step(state, token):
                logits, state = kvjax.decode_step(model, params, token, state)
                return state, (logits, [kv.head_pos for kv in state.layers])

            return [kv.head_pos for kv in state.layers], jax.lax.scan(step, state, text.T)[1]

        first, (logits, later) = read(params, prompt, text)
        layers = [np.concatenate([np.asarray(a)[None], b]) for a, b in zip(first, map(np.asarray, later), strict=True)]
        alive = [[[[sorted(h[h >= 0].tolist()) for h in row] for row in at] for at in layer] for layer in layers]
        return alive, np.asarray(logits)

    return run


@decoded_pairs
def test_e38_the_same_tokens_while_decoding(decoded, pair):
    one, other = decoded(pair.one), decoded(pair.other)
    assert one[0] == other[0]
    if pair.reads:
        np.testing.assert_allclose(one[1], other[1], atol=1e-4 * np.abs(one[1]).max())


def test_e38_has_all_of_its_limits(examples):
    """Those of the file under the names that they have here."""
    names = {
        "nacl_all_rows_is_h2o": "nacl_of_all_rows_is_h2o",
        "nacl_last_row_is_tova": "nacl_of_the_last_row_is_tova",
        "snapkv_kernel1_is_window_sum": "snapkv_without_pooling_is_the_window_sum",
        "ahakv_reduces_to_snapkv_order": "ahakv_without_scale_and_prior_is_snapkv",
        "pyramid_beta1_is_uniform": "pyramid_of_beta_1_is_snapkv",
        "keyformer_no_noise_tau1_is_h2o": "keyformer_without_noise_is_h2o",
    }
    assert examples["E38"]["expected"] == dict.fromkeys(names, True)
    assert set(names.values()) <= {pair.name for pair in PAIRS}


def test_the_pairs_are_of_different_policies():
    assert [pair.name for pair in PAIRS if pair.one == pair.other] == ["h2o_without_recent_is_key_attention"]
    q, k, v = helpers.qkv(11, T=PROMPT)
    kept = lambda policy: str(kvjax.evict_layer(policy, q, k, v).keep.tolist())
    assert len({kept(p) for p in (h2o, key_attention, window, snapkv(), plain_snapkv, methods.tova(BUDGET))}) == 6


def test_means_of_equal_counts_have_the_order_of_sums():
    """Rows from position n - w on: every earlier token is seen by w of them."""
    q, k, v = helpers.qkv(11, T=PROMPT)
    mas = methods.mas(BUDGET, ignore_prefix=PROMPT - WINDOW, recent=WINDOW)
    means, sums = (kvjax.evict_layer(p, q, k, v) for p in (mas, plain_snapkv))
    np.testing.assert_array_equal(means.keep, sums.keep)
    np.testing.assert_allclose(means.score[:, :, :-WINDOW] * WINDOW, sums.score[:, :, :-WINDOW], atol=1e-5)


def test_a_prior_of_equal_norms_says_nothing():
    q, k, v = helpers.qkv(11, T=PROMPT)
    v = v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    make = functools.partial(methods.ahakv, BUDGET, recent=WINDOW, pool_kernel=1)
    with_prior, without = (kvjax.evict_layer(make(value_prior=on), q, k, v) for on in (True, False))
    np.testing.assert_array_equal(with_prior.keep, without.keep)


def test_sets_of_query_heads_are_sets_of_copied_kv_heads():
    q, k, v = helpers.qkv(11, T=PROMPT)
    copied = lambda x: jnp.repeat(x, 2, axis=1)
    for policy in (h2o, methods.roco(BUDGET), snapkv(), methods.tova(BUDGET)):
        apart = kvjax.evict_layer(dataclasses.replace(policy, granularity="query_head"), q, k, v)
        np.testing.assert_array_equal(apart.keep, kvjax.evict_layer(policy, q, copied(k), copied(v)).keep)
        both = [dataclasses.replace(policy, granularity=g) for g in ("query_head", "kv_head")]
        one_each = [kvjax.evict_layer(p, q[:, ::2], k, v).keep for p in both]
        np.testing.assert_array_equal(*one_each)


def test_every_row_gives_one_in_all():
    """Column sums total the number of rows, in the prompt and while decoding, as long as nothing is evicted."""
    q, k, v = helpers.qkv(11, B=1, T=PROMPT)
    for policy in (
        methods.h2o(PROMPT),
        methods.keyformer(PROMPT),
        methods.ahakv(PROMPT, recent=WINDOW, value_prior=False),
    ):
        seen = helpers.replay(policy, q, k, v, PROMPT - 6)
        rows = PROMPT if policy.score.of.rows == kvjax.AllRows() else WINDOW + 6
        np.testing.assert_allclose(seen.kv.memory[0].score.sum(-1), rows, rtol=1e-5)
