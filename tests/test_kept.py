"""What every row of the table keeps is what the library before this one kept: of drawn tensors, and of a model."""

import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax import methods
from tests import kept
from tests.cases import CASES
from tests.marks import marks
from tests.table import MAKE, SMOKE, Case

RECORDED = {"raw": kept.recorded("raw"), "embedded": kept.expected("embedded")}
QUICK = {  # rows of distinct mechanisms
    *("full", "h2o", "mas_sinks", "roco", "tova", "tova_by_head", "keyformer", "ahakv", "scissorhands", "r_kv"),
    *("streaming_llm", "random", "keydiff", "lagkv", "curdkv", "expected_attention", "capkv", "q_filters"),
    *("kvzap_threshold", "snapkv", "pyramidkv", "ada_half", "criticalkv", "chunkkv", "simlayerkv", "cake"),
    *("layer_defensivekv", "nacl", "finch_chunks", "duo_attention", "fastgen", "random_run", "nacl_headbug"),
    *("snapkv_text", "ada_released_normalized", "ada_skip", "kvpress_pyramidkv", "kvpress_chunk", "head_table"),
    *("easykv_encoding_roco", "from_fn_observing", "many_then_few", "partition_heads", "shared_layers"),
}
ON_A_MODEL = ("h2o", "ada_snapkv", "streaming_llm", "keyformer", "snapkv_then_tova", "quest", "fastgen_pooled", "kvzip")


def rows(names, quick, smoke=SMOKE):
    return pytest.mark.parametrize("case", [pytest.param(name, marks=marks(name, quick, smoke)) for name in names])


def test_every_row_is_recorded():
    assert list(RECORDED["raw"]) == list(CASES)
    assert all(RECORDED["raw"].values())


def test_every_row_is_recorded_on_a_model(on_embedded):
    assert {key.partition(" ")[0] for key in RECORDED["embedded"]} == set(on_embedded[-1])


def test_rows_that_are_to_differ_do():
    for name, rows_of_model in kept.recorded("different").items():
        before = kept.recorded(name)
        assert all(row["reason"] and row["kept"] != before[key] for key, row in rows_of_model.items())


@rows(CASES, QUICK)
def test_keeps_what_was_recorded(case):
    found = {b: kept.of_tensors(case, CASES[case](json.loads(b), kept.SIZES)) for b in RECORDED["raw"][case]}
    assert found == RECORDED["raw"][case]


MODES = "disable_jit", "checking_leaks", "debug_nans", "enable_x64"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@rows(MAKE, ("h2o", "keyformer", "lagkv", "compactor", "random_run", "cake", "attention_matching"))
def test_keeps_the_same_however_jax_is_debugged(as_users_run_it, case, mode):
    policy, budget = Case(case).policy, str(Case(case).budget)
    wanted = RECORDED["raw"].get(case, {}).get(budget) or kept.of_tensors(case, policy)
    with getattr(jax, mode)():
        assert kept.of_tensors(case, policy) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_generates_the_same_however_jax_is_debugged(as_users_run_it, shallow, mode):
    run = lambda: kvjax.generate(*shallow, np.arange(8)[None], policy=methods.h2o(6), max_new_tokens=2).tokens
    wanted = run()
    with getattr(jax, mode)():
        np.testing.assert_array_equal(run(), wanted)


@pytest.fixture(scope="module")
def on_embedded():
    return kept.embedded()


@rows(dict.fromkeys(key.partition(" ")[0] for key in RECORDED["embedded"]), ON_A_MODEL, {"h2o", "kvzip"})
def test_keeps_what_was_recorded_on_a_model(on_embedded, case):
    """After a padded prompt and after 16 steps, in every layer; and the likeliest tokens."""
    *read, counts, policies = on_embedded
    wanted = {b: RECORDED["embedded"].get(f"{case} {b}") for b in counts}
    found = {b: x and kept.of_model(*read, policies[case](b)) for b, x in wanted.items()}
    assert found == wanted
