"""What is written in `kvjax/methods/peers.md` keeps what kvpress kept when `golden/peers.json` was recorded."""

import dataclasses
import json
import math
import pathlib
import re

import numpy as np
import pytest

import kvjax
from kvjax import methods
from tests import helpers, recorded

RECORDED = json.loads((pathlib.Path(__file__).parent / "golden" / "peers.json").read_text())


ROWS = recorded.rows("kvpress")


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_the_same_tokens(row):
    for cases in recorded.batches(RECORDED["presses"][row.name]):
        policy = recorded.make_policy(row.policy, cases[0])
        if not {"more", "keys", "values", "channels"} & set(cases[0]) and row.block is None:
            recorded.check_prompts(policy, cases, row.check)
            continue
        seen = recorded.replay(policy, cases, row.block)
        for i, case in enumerate(cases):
            for head, ours in enumerate(seen.live[-1][i]):
                recorded.compare(ours, case["kept"][0][head], row.check)
        stored_as_recorded(seen.kv, cases)


def stored_as_recorded(kv, cases):
    """Keys that were turned, and channels that were zeroed."""
    if "keys" in cases[0]:
        kv = kv.turned(recorded.ROPE)
        for i, case in enumerate(cases):
            for head, sums in enumerate(case["keys"][0]):
                order = [slot for slot in np.argsort(kv.pos[i, head]) if kv.pos[i, head, slot] >= 0]
                np.testing.assert_allclose(kv.k[i, head, np.array(order)].sum(-1), sums, atol=2e-3)
    if "channels" in cases[0]:
        stay = np.asarray((kv.k != 0).any(2))
        assert [[recorded.tokens_of(head) for head in case["channels"][0]] for case in cases] == [
            [np.nonzero(head)[0].tolist() for head in row] for row in stay
        ]


def test_cam_is_not_every_nth_step_below_its_target():
    """From 47 tokens to 64 with 61 at most: there 62 lose one, and two follow; here the 16th step leaves 61."""
    cases = RECORDED["presses"]["CAMPress(KnormPress(), compression_interval=4, target_size=61)"]
    assert [len(recorded.tokens_of(head)) for head in cases[0]["kept"][0]] == [63, 63]
    policy = kvjax.when(dataclasses.replace(kvjax.every(4), prefill=False), methods.knorm(61))
    assert [len(head) for head in recorded.generate(policy, cases)[0]] == [62, 62]


def test_every_press_has_a_row():
    written = {name for press, _, _ in recorded.table("kvpress") for name in re.findall(r"\b\w+Press\b", press)}
    assert written == set(RECORDED["about"]["classes"])


def test_what_is_recorded_is_in_the_table():
    rows = [press.strip("`") for press, _, _ in recorded.table("kvpress")]
    assert len(rows) == len(set(rows))
    lacking = [press for press, here, _ in recorded.table("kvpress") if here == "-"]
    for press in RECORDED["presses"]:
        assert press in rows or any(f"{name.strip('`')}(" in press for name in lacking), press
    assert {row.name for row in ROWS} <= set(RECORDED["presses"])


def test_the_rows_of_others_are_policies():
    given = {"c": 64, "L": 4, "floor": 0.2, "prefix": 8, "table": np.arange(1.0, 17.0).reshape(4, 4)}
    names = given | {"kvjax": kvjax, "methods": methods, "dataclasses": dataclasses, "math": math}
    for _, here, _ in recorded.table("theirs"):
        if here != "-":
            policy = eval(re.match(r"`([^`]*)`", here)[1], names)
            rules = policy.at(helpers.site(T=256, layer=2, num_layers=4)).spec
            assert rules.target[-1] > 0
