"""Options with named values refuse others, and say which exist."""

import dataclasses
import inspect

import numpy as np
import pytest

import kvjax
from kvjax import methods

REFUSED = [
    (methods.h2o, {"prefill": "greedy"}, r"prefill='greedy' is not one of \('oneshot', 'stepwise_mask'\)"),
    (methods.h2o, {"compat": "hh"}, r"compat='hh' is not one of \(None, 'h2o_hh_mask'\)"),
    (methods.h2o, {"prefill": "stepwise_mask", "compat": "h2o_hh_mask"}, "two simulations; give one"),
    (methods.ahakv, {"sg_k": "prompt"}, r"sg_k='prompt' is not one of \('budget', 'selected'\)"),
    (methods.scissorhands, {"element": "p2"}, r"element='p2' is not one of \('above', 'p'\)"),
    (methods.scissorhands, {"decay": 0.9}, "decay=0.9 belongs to element='p'"),
    (methods.nacl, {"decode_rows": "all"}, r"decode_rows='all' is not one of \('row', 'interval'\)"),
    (methods.nacl, {"decode_rows": "interval"}, "give decode_every="),
    (methods.nacl, {"head_mode": "heads"}, r"head_mode='heads' is not one of \('headwise', 'layer', 'global'\)"),
    (methods.window, {"scope": "prompt"}, r"scope='prompt' is not one of \('all', 'generated'\)"),
    (methods.dilated_window, {"mode": "fixed"}, r"mode='fixed' is not one of \('mask', 'anchored'\)"),
    (methods.dilated_window, {"dilation": -1}, r"dilation=-1.: a dilation is whole and not negative"),
    (methods.pyramidkv, {"preset": "paper"}, r"preset='paper' is not one of \(None, 'pyramid_factory'"),
    (methods.snapkv, {"softmax_over": "window"}, r"softmax_over='window' is not one of \('all', 'outside_window'\)"),
    (methods.r_kv, {"softmax_over": "window"}, r"softmax_over='window' is not one of \('all', 'outside_window'\)"),
    (methods.snapkv, {"pool_before_rows": True, "pooling": "avg"}, "use pooling='max'"),
    (methods.nacl, {"min_len": -5}, "min_len=-5: must be a whole number of at least 0"),
    (methods.nacl, {"random_temperature": float("nan")}, "temperature=nan.: must be positive"),
    (methods.expected_attention, {"horizon": 0}, "at least one position lies ahead"),
    (methods.keyformer, {"damping": float("nan")}, "damping=nan.: a factor of sums is finite"),
    (methods.keyformer, {"tau": (1.0, float("nan"))}, "temperatures must be positive"),
    (methods.keyformer, {"tau_delta": -0.5}, "a step below 0 ends at temperatures that are negative"),
    (methods.pyramidkv, {"beta": float("nan")}, "beta=nan.: beta must be at least 1"),
    (methods.criticalkv, {"first_stage": 2.0}, r"first=2.0.: .* a share of the budget in \[0, 1\]"),
    (methods.scissorhands, {"element": "p", "decay": -1.0}, "decay=-1.0.: a factor of sums is finite, not negative"),
    (methods.scissorhands, {"drop": 65}, "a budget of 64 tokens cannot drop 65 at once"),
    (methods.ahakv, {"sg_floor": -1.0}, "floor=-1.0.: a lower bound of a factor is finite, not negative"),
    (methods.snapkv, {"kernel_size": -1}, "kernel=-1.: a kernel is odd, or it shifts the scores; use 1"),
    (methods.random, {"random_mode": "block"}, r"random_mode='block' is not one of \('independent', 'run'\)"),
]


@pytest.mark.parametrize(("method", "options", "message"), REFUSED)
def test_methods_refuse(method, options, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(method)(64, **options)  # without run-time type checking, which would speak first


def test_every_importance_pairs_with_every_mode():
    for importance in ("roco", "mas", "h2o", "tova", "recency", "random"):
        for mode in ("encoding", "decoding", "encoding_decoding"):
            kvjax.make_plan(
                _Config(), methods.easykv(importance, 24, mode=mode, stride=4), prompt_len=60, max_new_tokens=8
            )


class _Config:
    """Sizes of a model."""

    num_layers, num_query_heads, num_kv_heads, head_dim, vocab_size = 2, 4, 2, 8, 61
    dtype, additive_rotation = "float32", True

    def window(self, layer):
        return None


def test_a_profile_needs_the_whole_prompt(shallow):
    model, params = shallow
    policy = methods.fastgen(special_ids=[0], punctuation_ids=[1])
    tokens = np.zeros((1, 12), np.int32)
    for wrapped in (policy, kvjax.chain(policy, methods.window(8)), kvjax.partition({"f": policy}, "f")):
        with pytest.raises(ValueError, match="looks at the whole prompt at once, but block=5 reads 12 tokens in parts"):
            kvjax.generate(model, params, tokens, policy=wrapped, max_new_tokens=2, block=5)
    whole, parts = (
        kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=2, block=block) for block in (None, 12)
    )
    np.testing.assert_array_equal(whole.tokens, parts.tokens)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (methods.fastgen(special_ids=[0], punctuation_ids=[1]), "sums attention statistics over them, but .* is none"),
        (methods.expected_attention(8), "sums attention statistics over them, but .* is none"),
        (methods.pyramidkv(8, window_size=2), "layer 1 has 2 tokens and layer 0 has 14"),
    ],
)
def test_shared_layers_refuse(policy, message):
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(_Config(), kvjax.shared_layers(policy), prompt_len=60, max_new_tokens=8)


SHARED = kvjax.shared_layers(methods.h2o(8))
MIXED = kvjax.partition({"a": methods.h2o(8), "b": methods.tova(8)}, "ab")
POOLED = methods.ada_snapkv(8, window_size=4)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            kvjax.chain(SHARED, methods.window(8)),
            "in layer 0 makes one decision for all 2 layers; share the composition",
        ),
        (kvjax.partition({"a": methods.full(), "b": SHARED}, "ab"), "in layer 1 makes one decision for all 2 layers"),
        (kvjax.shared_layers(MIXED), "the same policy in all of them, but layer 1 has .*LastRow.* and layer 0 has .*"),
        (
            kvjax.chain(POOLED, methods.think()),
            "drop different channels, so .* cannot share a pool; use storage='dense'",
        ),
        (kvjax.chain(POOLED, kvjax.soften(methods.h2o(8), 1.0)), "have gates, so their keys cannot share a pool"),
        (
            kvjax.chain(kvjax.soften(methods.h2o(8), 1.0), methods.tova(4)),
            r"soften the chain instead of 1 of its 2 members: soften\(chain",
        ),
        (kvjax.chain(methods.think(), methods.h2o(8), methods.think(0.25)), "2 members of a chain drop key channels"),
        (
            kvjax.chain(methods.h2o(8, prefill="stepwise_mask"), methods.dilated_window(8)),
            r"want it over \['live', 'visible'\] slots",
        ),
        (kvjax.chain(methods.think(), methods.streaming_llm(8)), r"want \['compact', 'original'\]"),
    ],
)
def test_compositions_are_refused_before_tracing(policy, message):
    with pytest.raises(ValueError, match=message):
        kvjax.make_plan(_Config(), policy, prompt_len=60, max_new_tokens=8)


@pytest.mark.parametrize("options", [{"prefill": "stepwise_mask"}, {"compat": "h2o_hh_mask"}])
def test_simulations_have_no_other_schedule(options):
    with pytest.raises(ValueError, match=r"decides at every row .* so Schedule\(every=4\) cannot apply"):
        kvjax.when(kvjax.every(4), methods.h2o(8, **options))


def test_channels_are_dropped_once():
    with pytest.raises(ValueError, match="channels are dropped once, after the prompt, so Schedule"):
        kvjax.when(kvjax.every(4), kvjax.chain(methods.h2o(8), methods.think()))


def test_a_run_is_the_same_in_all_heads():
    run = methods.random(8, random_mode="run")
    with pytest.raises(ValueError, match="keeps the same tokens in all heads, but HeadTable"):
        dataclasses.replace(run, heads=kvjax.HeadTable(((1.0, 3.0),)))


def test_a_prompt_has_one_id_a_token():
    q = np.zeros((1, 2, 6, 4), np.float32)
    evict_layer = inspect.unwrap(kvjax.evict_layer)  # as a user has it, without the shapes that tests check
    with pytest.raises(ValueError, match=r"tokens have the shape \(1, 5\), but the prompts are 1 of width 6"):
        evict_layer(methods.h2o(4), q, q, q, tokens=np.zeros((1, 5), np.int32))
    with pytest.raises(ValueError, match="must agree in batch, length and head_dim"):
        evict_layer(methods.h2o(4), q, q[:, :, 1:], q)


def test_readings_are_refused_before_tracing(tiny):
    """No parameters are looked at."""
    model, _ = tiny
    tokens = np.zeros((1, 12), np.int32)
    stepwise = methods.h2o(6, prefill="stepwise_mask")
    for generate in (kvjax.generate, kvjax.generate_beams):
        with pytest.raises(ValueError, match="block=None reads 12 tokens otherwise than one by one"):
            generate(model, None, tokens, policy=stepwise, max_new_tokens=2)


@pytest.mark.parametrize(
    "policy",
    [
        methods.keyformer(10, recent=3),
        pytest.param(methods.random(10), marks=pytest.mark.slow),
        methods.dilated_window(10),
    ],
)
def test_shared_layers_decide_once(tiny, policy):
    """All layers hold the same tokens, after the prompt and while decoding, and read what the policy shows."""
    model, params = tiny
    tokens = np.random.default_rng(1).integers(0, 61, (2, 24))
    run = kvjax.generate(model, params, tokens, policy=kvjax.shared_layers(policy), max_new_tokens=6)
    for layer in run.state.layers[1:]:
        np.testing.assert_array_equal(np.sort(layer.pos, -1), np.sort(run.state.layers[0].pos, -1))
    if policy.mask is not None:
        apart = kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=6)
        np.testing.assert_array_equal(run.tokens, apart.tokens)


def test_nacl_global_decides_once_for_all_heads_and_layers(tiny):
    """By scores averaged over heads and summed over layers, and with one draw."""
    model, params = tiny
    tokens = np.random.default_rng(2).integers(0, 61, (2, 24))
    runs = {
        mode: kvjax.generate(
            model,
            params,
            tokens,
            policy=methods.nacl(9, protect=1, proxies=4, random=4, head_mode=mode),
            max_new_tokens=2,
        )
        for mode in ("headwise", "layer", "global")
    }
    kept = {m: np.stack([np.sort(x.pos, -1) for x in run.state.layers], 1) for m, run in runs.items()}  # "B L K S"
    assert (kept["global"] == kept["global"][:, :1, :1]).all()
    assert (kept["layer"] == kept["layer"][:, :, :1]).all()
    assert (kept["layer"] != kept["layer"][:, :1]).any()
    assert (kept["headwise"] != kept["headwise"][:, :, :1]).any()
    assert (kept["global"][0] != kept["global"][1]).any()
