"""The new core keeps what the old library keeps: of raw tensors, as recorded; of a model's, side by side."""

import json

import numpy as np
import pytest

import kvjax
from kvjax.core.drivers import generation, single
from tests import kept_raw
from tests.kept import digest
from tests.kept_cases import CASES, Sizes

RECORDED = json.loads(kept_raw.GOLDEN.read_text())
QUICK = {  # rows of distinct mechanisms
    *("full", "h2o", "mas_sinks", "roco", "tova", "tova_by_head", "keyformer", "ahakv", "scissorhands", "r_kv"),
    *("streaming_llm", "random", "keydiff", "lagkv", "curdkv", "expected_attention", "capkv", "q_filters"),
    *("kvzap_threshold", "snapkv", "pyramidkv", "ada_half", "criticalkv", "chunkkv", "simlayerkv", "cake"),
    *("layer_defensivekv", "nacl", "finch_chunks", "duo_attention", "fastgen", "random_run", "nacl_headbug"),
    *("snapkv_text", "ada_released_normalized", "ada_skip", "kvpress_pyramidkv", "kvpress_chunk", "head_table"),
    *("easykv_encoding_roco", "from_fn_observing", "many_then_few", "partition_heads", "shared_layers"),
}
ON_A_MODEL = ("h2o", "ada_snapkv", "streaming_llm", "keyformer", "snapkv_then_tova", "quest")
SHOWN_BY_DECODING = (  # or by layers that compete: what a prompt's one layer does not tell from other rows
    *(
        "h2o_next_step_mask",
        "h2o_every_4",
        "h2o_adaptive",
        "h2o_pooled",
        "h2o_rerotated",
        "tova_when_over_3",
        "keydiff_every_step",
    ),
    *("scissorhands_by_position", "scissorhands_factory", "keyformer_released", "keyformer_damped", "keyformer_mask"),
    *("ahakv_cache", "ahakv_prior_each_step", "r_kv", "random_shared", "nacl_interval", "window_of_generated", "think"),
    *("fastgen", "quest_by_query_head", "kvpress_decoding", "kvpress_cam", "kvpress_think", "dilated_window"),
    *("easykv_decoding_roco", "easykv_both_roco", "cake", "lava", "layer_defensivekv", "across_layers_preference"),
    *("across_layers_entropy", "across_layers_top_scores", "shared_layers", "nacl_global", "partition_heads"),
)


def _rows(names, quick):
    rows = []
    for name in names:
        marks = [] if name in quick else [pytest.mark.slow, pytest.mark.exhaustive]
        rows.append(pytest.param(name, marks=marks))
    return rows


def test_every_row_is_recorded():
    assert list(RECORDED) == list(CASES)
    assert all(RECORDED.values())
    assert set(CASES) >= QUICK


def _live(policy, *arrays, **more):
    kv = single.evict_layer(policy, *arrays, **more)
    return np.where(np.asarray(kv.live), np.asarray(kv.pos), -1)


@pytest.mark.parametrize("case", _rows(CASES, QUICK))
def test_keeps_what_was_recorded(case):
    make = CASES[case][1]
    found = {b: kept_raw.kept(_live, case, make(json.loads(b), kept_raw.SIZES)) for b in RECORDED[case]}
    assert found == RECORDED[case]


@pytest.mark.parametrize("case", _rows((*ON_A_MODEL, *SHOWN_BY_DECODING), ON_A_MODEL))
def test_keeps_and_generates_what_the_old_library_does(case, embedded):
    model, params, _ = embedded
    c, lengths = model.config, np.array([24, 17], np.int32)
    tokens = np.random.default_rng(0).integers(3, c.vocab_size, (2, 24)).astype(np.int32)
    tokens[1, :7] = 0
    policies = [
        make(10, Sizes(c.num_layers, c.num_query_heads, c.num_kv_heads, c.head_dim, c.embed_dim))
        for make in CASES[case]
    ]
    how = {"lengths": lengths, "max_new_tokens": 8, "eos_ids": (), "buckets": False}
    was, now = (
        f(model, params, tokens, policy=p, **how)
        for f, p in zip((kvjax.generate, generation.generate), policies, strict=True)
    )
    np.testing.assert_array_equal(now.tokens, was.tokens)
    for i, (before, after) in enumerate(zip(was.state.layers, now.state.layers, strict=True)):
        assert digest(after.head_pos) == digest(before.head_pos), f"layer {i}"
