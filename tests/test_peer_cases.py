"""The calls of `golden/peers.csv` keep what kvpress and authors' code kept when they were recorded; a page says so."""

import collections
import json
import pathlib
import re

import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.methods.released import kvpress
from kvjax.models import ModelConfig
from tests import recorded
from tests.tensors import live_positions

GOLDEN = pathlib.Path(__file__).parent / "golden"
RECORDED, AUTHORS = (json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("peers", "authors"))
CASES = RECORDED["presses"] | AUTHORS["authors"]
ROWS, AUTHORS_ROWS = recorded.rows("kvpress"), recorded.rows("authors")


QUICK = ("SnapKVPress", "PyramidKVPress(r, w", "KnormPress", "HeadKV", "cakekv")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row.name.startswith(QUICK) else pytest.mark.slow) for row in ROWS + AUTHORS_ROWS],
    ids=repr,
)
def test_the_same_tokens(row):
    for cases in recorded.batches(CASES[row.name]):
        policy = recorded.make_policy(row.policy, cases[0])
        if row.name.startswith("KVCompose") or (
            not {"more", "keys", "values", "channels"} & set(cases[0]) and row.block is None
        ):
            recorded.check_prompts(policy, cases, row.check)
            continue
        seen = recorded.replay(policy, cases, row.block)
        each = [live_positions(kv) for kv in seen.state.layers]
        for i, case in enumerate(cases):
            for live, kept in zip(each, case["kept"], strict=True):
                for ours, theirs in zip(live[i], kept, strict=True):
                    recorded.compare(ours, theirs, row.check)
        stored_as_recorded(seen.kv.view(), cases, merged="merging" in row.policy)


def stored_as_recorded(kv, cases, *, merged):
    """Keys that were turned, values that were merged, and channels that were zeroed."""
    stored = {"keys": kv.keys(recorded.ROPE)} if "keys" in cases[0] else {}
    stored |= {"values": kv.v} if merged else {}
    for name, x in stored.items():
        for i, case in enumerate(cases):
            for head, sums in enumerate(case[name][0]):
                order = [slot for slot in np.argsort(kv.pos[i, head]) if kv.pos[i, head, slot] >= 0]
                np.testing.assert_allclose(x[i, head, np.array(order)].sum(-1), sums, atol=2e-3)
    if "channels" in cases[0]:
        stay = np.asarray((kv.k != 0).any(2))
        assert [[recorded.tokens_of(head) for head in case["channels"][0]] for case in cases] == [
            [np.nonzero(head)[0].tolist() for head in row] for row in stay
        ]


@pytest.mark.slow
def test_cam_is_not_every_nth_step_below_its_target():
    """From 47 tokens to 64 with 61 at most: there 62 lose one, and two follow; here the 16th step leaves 61."""
    cases = RECORDED["presses"]["CAMPress(KnormPress(), compression_interval=4, target_size=61)"]
    assert [len(recorded.tokens_of(head)) for head in cases[0]["kept"][0]] == [63, 63]
    policy = kvpress.kvpress_decoding(methods.knorm(61), interval=4)
    assert [len(head) for head in live_positions(recorded.replay(policy, cases, None).kv)[0]] == [62, 62]


def test_every_press_has_a_line():
    written = {name for line in recorded.table("kvpress") for name in re.findall(r"\b\w+Press\b", line["theirs"])}
    assert written == set(RECORDED["about"]["classes"])


def test_what_is_recorded_is_in_the_table():
    presses = [line["theirs"] for line in recorded.table("kvpress")]
    assert len(presses) == len(set(presses))
    lacking = [line["theirs"] for line in recorded.table("kvpress") if not line["here"]]
    for press in RECORDED["presses"]:
        assert press in presses or any(f"{name.partition('(')[0]}(" in press for name in lacking), press
    assert {row.name for row in ROWS} <= set(RECORDED["presses"])
    assert [row.name for row in AUTHORS_ROWS] == list(AUTHORS["authors"])


def test_the_page_has_every_press_and_counts_its_cases():
    cases = collections.Counter()
    for row in ROWS:
        press = re.search(r"\w+Press", row.name)[0]
        cases[press, "as many" if row.check == "counts" else "same"] += len(RECORDED["presses"][row.name])
    lines = [line.strip("| ").split(" | ") for line in recorded.PAGE.read_text().splitlines() if line.startswith("| `")]
    page = {name: here for first, _, here, *_ in lines for name in re.findall(r"(?:^|, )`(\w+)", first)}
    assert {*page} == {*RECORDED["about"]["classes"]}
    for press, here in page.items():
        for number, kind in re.findall(r"(\d+) (same|as many)", here):
            assert cases[press, kind] == int(number), press


def test_the_page_names_commits_and_counts_cases_of_authors():
    sections = re.split(r"(?m)^(?=\| \w[^|]*/)", recorded.PAGE.read_text())[1:]
    counted = collections.Counter()
    for row in AUTHORS_ROWS:
        counted[row.name.partition(",")[0]] += len(AUTHORS["authors"][row.name])
    for name, source in AUTHORS["about"]["repositories"].items():
        repository, commit = source.split()
        (section,) = (x for x in sections if x.startswith(f"| {repository} | `{commit[:10]}` |"))
        assert sum(map(int, re.findall(r"(\d+) (?:same|within|as many)", section))) == counted[name], name


def test_what_the_page_calls_are_policies():
    """Where it needs what a user brings, this is brought."""
    given = {"a": methods.knorm(8), "score": lambda kv, stats, ctx: kv.pos, "ratios": (0.5, 0.25), "r": 0.5}
    given |= {"gates": np.eye(4, 2), "filters": np.ones((4, 2, 8)), "importance": np.ones((4, 4)), "L": 4, "c": 64}
    given |= {"mean": np.ones((4, 4, 8)), "covariance": np.ones((4, 4, 8, 8)), "function": lambda x, layer: x}
    given |= {"curves": np.full((99, 4, 4), 0.5), "centres": dict.fromkeys(("mean", "length"), np.ones((4, 4, 8)))}
    modules = "dataclasses|kvjax|methods|papers|factory|kvpress|easykv|parts"
    for call in re.findall(rf"`((?:{modules})\.\w+\(.*?\))`", recorded.PAGE.read_text()):
        names = recorded.NAMES | given | {"b": methods.tova(8) if "chain" in call else kvpress.kept(0.5)}
        if call != "kvpress.kept(r)":
            assert isinstance(eval(call, names), kvjax.Policy), call


def test_code_that_was_not_run_has_policies():
    config = ModelConfig(
        vocab_size=8, embed_dim=8, mlp_dim=8, num_layers=4, num_query_heads=4, num_kv_heads=4, head_dim=8
    )
    for line in recorded.table("theirs"):
        if line["here"]:
            policy = eval(line["here"], recorded.NAMES | {"c": 64})
            assert min(kvjax.make_plan(config, policy, np.array([256]), 256, 1).capacities) > 0
