"""Committed pages are what the experiments' own functions make of the committed records."""

import dataclasses
import gzip
import json
import math
import pathlib
import random
import re
import statistics
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from kvjax.experiments import board, findings, replication
from kvjax.experiments.core import stats, table
from tests.runs import ROOT

STORED = ROOT / "experiments" / "bench_results"


def scores(folder):
    return pd.read_csv(folder / "scores.csv.gz", dtype={"budget": str})


@pytest.mark.parametrize(
    "folder", [STORED / "replication", STORED / "replication" / "perplexity"], ids=lambda f: f.name
)
def test_claims_are_decided_again(folder):
    """All of the page but its second paragraph, which names a text that is not here."""
    every, made = replication.claims(), []
    for model, rows in scores(folder).groupby("model", sort=False):
        ((part, rows),) = rows.sort_values(["task", "index"]).groupby("part")
        each = {key: own["value"].to_numpy() for key, own in rows.groupby(["method", "budget"])}
        full = rows[rows["method"] == "full"]
        contexts = [*zip(full["task"], full["context"], strict=True)]
        measured = replication.Scores(each, part == "perplexity", contexts)
        own = [(c, model, part, *measured.decided(c)) for c in every if c.kind != "early"]
        (shares,) = json.loads((folder / f"early-{model}.json").read_text()).values()
        compared = stats.compare(shares, [0.5] * len(shares)), 1.0, f"{100 * np.mean(shares):.1f} to 50.0"
        own += [(c, model, part, *compared) for c in every if c.kind == "early"]
        words = stats.adjusted([row[3] for row in own])
        made += [(*row[:3], c, *row[4:]) for row, c in zip(own, words, strict=True)]
    made.sort(key=lambda row: every.index(row[0]))
    first, _, _, *rest = replication.page(made, replication.Replication()).splitlines()
    title, _, _, *committed = (folder / "replication.md").read_text().splitlines()
    assert [first, *rest] == [title, *committed]


BOARDS = sorted((STORED / "board").iterdir())


def shown(folder, of=tuple(board.PARTS), some=None):
    """A table of some parts of a board, drawn at random, as it is committed and made anew, or some methods of it.

    Without how many tokens were written, which no record holds, nor every page.
    """
    rows = scores(folder)
    asked = rows[rows["part"].isin(of) & rows["budget"].str.startswith("bytes-")]
    part, budget = random.choice([*asked.groupby(["part", "budget"]).groups])
    rows = rows[(rows["part"] == part) & ((rows["budget"] == budget) | ~rows["budget"].str.startswith("bytes-"))]
    if some is not None:
        names = random.sample(sorted({*rows[rows["budget"] == budget]["method"]}), some)
        rows = rows[rows["method"].isin([*names, "full"])]
    kind = "nll" if part == "perplexity" else "score"
    value = rows["value"] if kind == "nll" else [float(Fraction(x).limit_denominator(300)) for x in rows["value"]]
    whole = rows[rows["method"] == "full"].set_index(["task", "index"])["live"].rename("prompt_tokens")
    known = {"setting": "", "run": "", "variant": "", "policy": "", "averaged": True, "question": 0, "tokens": 1}
    lines = rows.assign(**known, **{kind: value}).join(whole, on=["task", "index"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "judged", lambda *_: table.lines(lines.to_dict("records")))
        found, _ = board.measured(dataclasses.replace(board.PARTS[part], beside_full=False), [])
    share = float(budget.removeprefix("bytes-"))
    title = f"## {found.part.title.capitalize()}, {100 * share:.4g} % of the bytes\n\n"
    page = (folder / "board.md").read_text().split(title)[1].split("\n\n")[0].splitlines()
    made = board.table(found, share).without("tokens written").markdown()
    head, _, *rows = [line.strip("| ").split(" | ") for line in page]
    at = [i for i, title in enumerate(head) if title != "tokens written"]
    return [line.strip("| ").split(" | ") for line in made[2:]], [[row[i] for i in at] for row in rows]


@pytest.mark.parametrize("folder", BOARDS, ids=lambda f: f.name)
def test_boards_are_what_the_records_say(folder):
    """Scores or perplexities with their intervals, bytes and live tokens of three methods, but for the last digit."""
    made, page = shown(folder, some=3)
    numbers = lambda row: [float(x) for cell in row[1:5] for x in re.findall(r"[\d.]+", cell)]
    known = {row[0]: numbers(row) for row in page}
    for row in made:
        np.testing.assert_allclose(numbers(row), known[row[0]], atol=0.101, err_msg=row[0])


def test_a_table_of_a_board_is_made_again():
    """All of it, with who is better than whom, of whichever model, where records have every digit."""
    whole = ("in_prompt", "after_compression", "perplexity")
    made, page = shown(random.choice([f for f in BOARDS if {*scores(f)["part"]} & {*whole}]), whole)
    assert made == page


@pytest.mark.parametrize("file", sorted((STORED / "findings").glob("*.npz")), ids=lambda f: f.stem)
def test_findings_are_made_again(file):
    with np.load(file) as data:
        kl, options = data["kl"].astype(float), json.loads(str(data["options"]))
    del options["contents"]
    text = options["text"] and pathlib.Path(options["text"])
    own = findings.Findings(**options | {"budget": tuple(options["budget"]), "text": text})
    page, _ = getattr(findings, own.name)(own, kl)
    assert page == file.with_suffix(".md").read_text()


@pytest.mark.parametrize("name", ["summary", "unseen"])
def test_learned_scores_lose_what_the_records_say(name):
    """The loss, and how much less it is than SnapKV's on the same prompts, with Student-t intervals."""
    folder, of = STORED / "learned_scorer", {}
    samples = folder / ("samples.jsonl.gz" if name == "summary" else "unseen.jsonl.gz")
    for x in map(json.loads, gzip.decompress(samples.read_bytes()).splitlines()):
        of.setdefault((x["budget"], x["method"]), {})[x["task"], x["index"]] = x["loss"]
    for row in random.sample(json.loads((folder / f"{name}.json").read_text())["rows"], 3):
        new = {"learned from": (False,), "unseen": (True,)}.get(row.get("tasks"), (False, True))
        own, other = (of[row["budget"], method] for method in (row["method"], "snapkv"))
        keys = [key for key in own if (key[0] in ("key_value", "perplexity")) in new]
        assert len(keys) == row["prompts"]
        less = [other[key] - own[key] for key in keys]
        for what, values in (("loss", [own[key] for key in keys]), ("less", less)):
            low, high = (row["low"], row["high"]) if what == "loss" else (row["less_low"], row["less_high"])
            mean = statistics.mean(values)
            half = scipy.stats.t.ppf(0.975, len(keys) - 1) * statistics.stdev(values) / math.sqrt(len(keys))
            assert (row[what], low, high) == pytest.approx((mean, mean - half, mean + half), abs=1e-6)
