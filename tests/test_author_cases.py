"""The calls of `golden/peers.csv` keep what authors' code kept when `golden/authors.json` was recorded."""

import collections
import json
import pathlib
import re

import pytest

from tests import recorded

RECORDED = json.loads((pathlib.Path(__file__).parent / "golden" / "authors.json").read_text())
ROWS = recorded.rows("authors")


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_the_same_tokens(row):
    for cases in recorded.batches(RECORDED["authors"][row.name]):
        policy = recorded.make_policy(row.policy, cases[0])
        if "more" not in cases[0] and row.block is None:
            recorded.check_prompts(policy, cases, row.check)
            continue
        for case, heads in zip(cases, recorded.replay(policy, cases, row.block).live[-1], strict=True):
            for ours, theirs in zip(heads, case["kept"][0], strict=True):
                recorded.compare(ours, theirs, row.check)


def test_what_is_recorded_is_in_the_table():
    assert [row.name for row in ROWS] == list(RECORDED["authors"])


def test_the_page_names_commits_and_counts_cases():
    sections = re.split(r"(?m)^(?=\| \w[^|]*/)", recorded.PAGE.read_text())[1:]
    counted = collections.Counter()
    for row in ROWS:
        counted[row.name.partition(",")[0]] += len(RECORDED["authors"][row.name])
    for name, source in RECORDED["about"]["repositories"].items():
        repository, commit = source.split()
        (section,) = (x for x in sections if x.startswith(f"| {repository} | `{commit[:10]}` |"))
        assert sum(map(int, re.findall(r"(\d+) (?:same|within|as many)", section))) == counted[name], name
