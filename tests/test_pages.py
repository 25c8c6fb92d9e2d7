"""Numbers of committed pages, three of each drawn at random, made again from the committed records by plain code."""

import collections
import csv
import gzip
import itertools
import json
import math
import pathlib
import random
import re
import shutil
import statistics
import tomllib

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from kvjax.experiments import findings, replication
from kvjax.experiments.board import PARTS
from kvjax.experiments.core import readme, report_markdown, sources, stats, table, views
from tests.runs import ROOT

STORED = ROOT / "experiments" / "bench_results"


def records(folder):
    return list(csv.DictReader(gzip.decompress((folder / "scores.csv.gz").read_bytes()).decode().splitlines()))


def cells(folder, name):
    """The cells of a page's tables."""
    return [*readme.rows(folder / name)]


def compared(claim, values, full, likely):
    """Both sides of a claim: `values` of a policy and budget, and the full cache's, by example; log-likelihoods?"""
    a, b = claim["a"], claim.get("b", [])
    pairs = list(zip(a, b)) if len(a) == len(b) else [(x, y) for x in a for y in b or [None]]  # noqa: B905
    kind, share, budgets = claim.get("kind", "better"), claim.get("share", 1.0), claim["budgets"]
    if kind == "small":
        gain = lambda budget: [
            x - y for p, q in pairs for x, y in zip(values(p, budget), values(q, budget), strict=True)
        ]
        return gain(min(budgets)), gain(max(budgets))
    other = {
        "better": lambda q, budget: values(q, budget),
        "not_worse": lambda q, budget: [y - math.log(1.02) if likely else max(y - 0.02, 0) for y in values(q, budget)],
        "keeps": lambda q, budget: [y + math.log(share) if likely else share * y for y in full],
    }[kind]
    every = [pair for p, q in pairs for b in budgets for pair in zip(values(p, b), other(q, b), strict=True)]
    return tuple(zip(*every, strict=True))


def tries(folder):
    """Rows of a page of claims, and a function from a row to its claim and both sides by pair, budget and example."""
    known = {c["says"]: c for each in tomllib.loads(
        (ROOT / "experiments" / "papers" / "claims.toml").read_text()).values() for c in each}  # fmt: skip
    parts, of = {part.title: name for name, part in PARTS.items()}, {}
    for x in records(folder):
        sign = -1 if x["part"] == "perplexity" else 1
        own = of.setdefault((x["model"], x["part"], x["method"], x["budget"]), {})
        own[x["task"], int(x["index"])] = sign * float(x["value"])

    def sides(row):
        claim, model, part = known[row[0]], row[2], parts.get(row[3])
        if claim.get("kind") == "early":
            (shares,) = json.loads((folder / f"early-{model}.json").read_text()).values()
            return claim, (shares, [0.5] * len(shares))
        by = lambda name, budget: [x for _, x in sorted(of[model, part, name, str(budget)].items())]
        return claim, compared(claim, by, by("full", "1.0"), part == "perplexity")

    return [r for r in cells(folder, "replication.md") if r[0] in known], sides


CLAIMS = [STORED / "replication", STORED / "replication" / "perplexity"]


@pytest.mark.parametrize("folder", CLAIMS, ids=lambda f: f.name)
def test_claims_are_what_the_records_say(folder):
    """Of scores, perplexities and where kept tokens stand, and the numbers of words in the title."""
    every, sides = tries(folder)
    count = collections.Counter(r[-1] for r in every)
    said = "{holds} hold, {not so here} not so here, {undecided} undecided, {untestable here} untestable here"
    said = said.format_map(count)
    assert (folder / "replication.md").read_text().splitlines()[0].endswith(said)
    is_early = lambda row: row[3] == "where kept tokens stand"
    for row in [*filter(is_early, every), *random.sample([r for r in every if not is_early(r)], 3)]:
        claim, both = sides(row)
        both, likely = [*map(statistics.mean, both)], folder.name == "perplexity" and not is_early(row)
        wanted = both[0] - both[1]
        if claim.get("kind") != "small":
            rounded = [math.exp(-x) if likely else 100 * x for x in both]
            np.testing.assert_allclose([float(x) for x in row[4].split(" to ")], rounded, atol=0.0501)
        mean, low, high = (float(x) for x in re.sub(r"[^-+.0-9 ]", "", row[5]).split())
        assert abs(mean - (math.exp(wanted) if likely else 100 * wanted)) <= (0.000501 if likely else 0.0501), row
        assert low <= mean <= high
        assert {"holds": low > likely, "not so here": high < likely}.get(row[7], True)


def test_words_of_claims_are_those_of_all_flips_of_signs():
    """Of 32 examples, by sums of either half, after Holm's correction for all claims of a model."""
    (rows, sides), signs = tries(CLAIMS[1]), 2.0 * np.indices((2,) * 16).reshape(16, -1).T - 1
    for model in {row[2] for row in rows}:
        raw, own = [], [row for row in rows if row[2] == model]
        for row in own:
            x, y = (np.reshape(side, (-1, 32)).sum(0) for side in sides(row)[1])
            one, other = (signs @ half for half in np.split(x - y, 2))
            other, reached = np.sort(other), abs((x - y).sum()) - 1e-9
            beyond = 2**16 - np.searchsorted(other, reached - one) + np.searchsorted(other, -reached - one, "right")
            raw.append(beyond.sum() / 2**32)
        holm = 0.0
        for rank, k in enumerate(np.argsort(raw)):
            holm = max(holm, (len(raw) - rank) * raw[k])
            assert own[k][7] == "untestable here" or (own[k][7] == "undecided") == (holm > 0.05), (own[k], holm)


BOARDS = pytest.mark.parametrize("folder", sorted((STORED / "board").iterdir()), ids=lambda f: f.name)


def rows_of(folder):
    """Rows of a board's tables, each with its part and share, or nothing of the tables of what has no budget."""
    titles, part, share = {part.title: name for name, part in PARTS.items()}, None, ""
    for line in (folder / "board.md").read_text().splitlines():
        if line.startswith("## "):
            title, _, at = line.removeprefix("## ").rpartition(", ")
            part, share = titles.get(title[0].lower() + title[1:]), at.removesuffix(" % of the bytes")
        elif part and line.startswith("| ") and not line.startswith("| method |"):
            yield part, share if share[0].isdigit() else "", *(x.strip() for x in line.strip("| ").split(" | "))


def lines_of(folder):
    """A function from a row's part, share and name to its records."""
    of = collections.defaultdict(list)
    for x in records(folder):
        of[x["part"], x["method"], x["budget"]].append(x)
    named = lambda name: ("full", "1.0") if name == "full" else (*name.split(" ", 1),)
    asked = lambda share, name: (name, f"bytes-{float(share) / 100:g}") if share else ()
    return lambda part, share, name: of.get((part, *asked(share, name))) or of[(part, *named(name))]


@BOARDS
def test_boards_are_what_the_records_say(folder):
    """A score or perplexity with its interval, and the bytes of the cache."""
    lines = lines_of(folder)
    for part, share, name, shown, *sizes in random.sample([*rows_of(folder)], 3):
        full, own = lines(part, "", "full"), lines(part, share, name)
        by_task = collections.defaultdict(list)
        for x in own:
            by_task[x["task"]].append(float(x["value"]))
        mean = statistics.mean(map(statistics.mean, by_task.values()))
        wanted = math.exp(mean) if part == "perplexity" else 100 * mean
        value, *ends = (float(x) for x in shown.replace("[", "").replace("]", "").replace(",", "").split())
        assert abs(value - wanted) <= 0.0501, (part, share, name)
        assert ends[0] <= value <= ends[1]
        n, known = len(own), None
        if part == "perplexity":
            values, contexts = [float(x["value"]) for x in own], {x["context"] for x in own}
            half = scipy.stats.t.ppf(0.975, n - 1) * statistics.stdev(values) / math.sqrt(n)
            known = [math.exp(mean + x) for x in (-half, half)] if len(contexts) == n else None
        elif {x["value"] for x in own} <= {"0", "1"}:
            z = statistics.NormalDist().inv_cdf(0.975)
            half = z * math.sqrt(mean * (1 - mean) / n + (z / (2 * n)) ** 2)
            known = [100 * (mean + z**2 / (2 * n) + x) / (1 + z**2 / n) for x in (-half, half)]
        assert known is None or np.allclose(ends, known, atol=0.0501), (part, share, name)
        most = lambda lines, column: max(float(x[column]) for x in lines)  # the longest prompts'
        for size, column in zip(sizes, ("kv_bytes", "kv_bytes_needed"), strict=False):
            ratio = 100 * most(own, column) / most(full, "kv_bytes")
            assert float(size.removesuffix("%")) == pytest.approx(ratio, abs=0.0501), (part, share, name)


@BOARDS
def test_p_values_of_boards_are_what_the_records_say(folder):
    """McNemar's, of one table of answers that are right or wrong, after Holm's correction for all its pairs."""
    lines, tables = lines_of(folder), collections.defaultdict(dict)
    for part, share, name, *cells in rows_of(folder):
        if share:
            tables[part, share][name] = cells[-1]
    right = lambda at, name: [x["value"] for x in sorted(lines(*at, name), key=lambda x: (x["task"], int(x["index"])))]
    plain = {at: of for at, of in tables.items() if all({*right(at, name)} <= {"0", "1"} for name in of)}
    for at in random.sample([*plain], min(1, len(plain))):
        p, values = {}, {name: right(at, name) for name in plain[at]}
        for a, b in itertools.combinations(values, 2):
            won, lost = (
                sum(pair == which for pair in zip(values[a], values[b], strict=True))
                for which in (("1", "0"), ("0", "1"))
            )
            few, of = min(won, lost), won + lost
            p[a, b] = min(1.0, 2 * sum(math.comb(of, i) for i in range(few + 1)) / 2**of)
        holm = 0.0
        for rank, pair in enumerate(sorted(p, key=p.get)):
            holm = p[pair] = max(holm, min(1.0, (len(p) - rank) * p[pair]))
        best, *others = plain[at]
        for name in random.sample(others, 3):
            shown, word = plain[at][name].removeprefix("p = ").split(", ")
            assert float(shown) == pytest.approx(p[best, name], rel=0.051), (at, name)
            assert (word == "worse") == (p[best, name] < 0.05), (at, name)


@BOARDS
def test_p_values_of_partial_scores_are_those_of_flipped_signs(folder):
    """Of one table of perplexities or of parts of answers: 200,000 flips of what examples of a context differ by."""
    lines, tables, rng = lines_of(folder), collections.defaultdict(dict), np.random.default_rng(0)
    for part, share, name, *cells in rows_of(folder):
        if share:
            tables[part, share][name] = cells[-1]
    order = lambda x: (x["task"], int(x["index"]))
    of = lambda at, name: sorted(lines(*at, name), key=order)
    partial = [at for at, own in tables.items() if {x["value"] for name in own for x in of(at, name)} - {"0", "1"}]
    for at in random.sample(partial, min(1, len(partial))):
        best, *others = names = [*tables[at]]
        values = np.array([[float(x["value"]) for x in of(at, name)] for name in names])
        _, unit = np.unique([(x["task"], x["context"]) for x in of(at, best)], axis=0, return_inverse=True)
        pairs = [*itertools.combinations(range(len(names)), 2)]
        differ = np.array([np.bincount(unit, values[i] - values[j]) for i, j in pairs])
        beyond, reached = np.zeros(len(pairs)), np.abs(differ.sum(1)) - 1e-9
        for _ in range(10):
            beyond += (np.abs(differ @ rng.choice([-1.0, 1.0], (differ.shape[1], 20_000))) >= reached[:, None]).sum(1)
        raw, adjusted, holm = beyond / 200_000, {}, 0.0
        for rank, k in enumerate(np.argsort(raw)):
            holm = adjusted[pairs[k]] = max(holm, min(1.0, (len(pairs) - rank) * raw[k]))
        for j in random.sample(range(1, len(names)), min(3, len(others))):
            shown, word = tables[at][names[j]].removeprefix("p = ").split(", ")
            often = raw[pairs.index((0, j))] > 5e-4  # enough of the flips to say how often
            assert (
                float(shown) == pytest.approx(adjusted[0, j], rel=0.35) if often else float(shown) < 1e-3 * len(pairs)
            )
            assert (word == "worse") == (float(shown) < 0.05), (at, names[j])


@pytest.mark.parametrize("file", sorted((STORED / "findings").glob("to_hindsight-*.npz")), ids=lambda f: f.stem)
def test_divergences_are_what_the_records_say(file):
    """Of a policy, and of the best method beside the best mask, each with its Student-t interval of logarithms."""
    with np.load(file) as data:
        kl, options = np.log(np.maximum(data["kl"].astype(float), 1e-9)), json.loads(str(data["options"]))
    names = [name for (name,) in findings.published()] + [f"hindsight ({x})" for x in ("head", "layer", "model")]
    of = dict(zip(names, kl, strict=True))
    page = cells(file.parent, f"{file.stem}.md")
    head = next(i for i, row in enumerate(page) if row[0] == "policy")
    budgets = [f"{100 * b:.4g} %" for b in options["budget"]]
    assert page[head][1:] == budgets

    def check(shown, logs, digits):
        mean = statistics.mean(logs)
        half = scipy.stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        found = [float(x) for x in re.findall(r"[\d.]+", shown)]
        assert np.allclose(found, np.exp([mean, mean - half, mean + half]), rtol=digits), shown

    for name, *row in random.sample(page[head + 1 :], 3):
        for shown, logs in zip(row, of[name], strict=True):
            check(shown, logs.tolist(), 0.06)  # two digits of the ends
    for at, best, mask, shown in page[head - len(budgets) : head]:
        k = budgets.index(at)
        assert best == min((n for n in names if "hindsight" not in n), key=lambda n, k=k: of[n][k].mean())
        check(shown, (of[best][k] - of[mask][k]).tolist(), 0.002)


@pytest.mark.parametrize("file", sorted((STORED / "findings").glob("what_decides-*.npz")), ids=lambda f: f.stem)
def test_what_decides_is_what_the_records_say(file):
    """The share of variance of each factor, and the divergence at each of its levels, with a budget's in one column."""
    with np.load(file) as data:
        kl = np.log(np.maximum(data["kl"].astype(float), 1e-9))
    tables, factors = {}, ("score", "protection", "division")
    for row in cells(file.parent, f"{file.stem}.md"):
        if row[1].endswith(" %"):  # the head of a table
            own = tables[row[0]] = []
        else:
            own.append(row)
    names = [[row[0] for row in tables[factor]] for factor in factors]
    policies = [*itertools.product(*names)]
    for column in random.sample(range(kl.shape[1]), min(3, kl.shape[1])):
        cell = {of: statistics.mean(kl[i, column]) for i, of in enumerate(policies)}
        middle = statistics.mean(cell.values())
        total = sum((x - middle) ** 2 for x in cell.values())
        for axis, factor in enumerate(factors):
            at = {level: statistics.mean(x for of, x in cell.items() if of[axis] == level) for level in names[axis]}
            share = sum((at[of[axis]] - middle) ** 2 for of in cell) / total
            (shown,) = (row[1 + column] for row in tables["variance explained, %"] if row[0] == factor)
            assert abs(float(shown.split(" ")[0]) - 100 * share) <= 0.0501, (factor, column)
            level = random.choice(tables[factor])
            assert abs(float(level[1 + column].split(" ")[0]) - math.exp(at[level[0]])) <= 0.000501, level


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


# Whole pages, by the functions that made them.


@pytest.mark.parametrize(
    "folder", [STORED / "replication", STORED / "replication" / "perplexity"], ids=lambda f: f.name
)
def test_claims_are_decided_again(folder):
    """All of the page but its second paragraph, which names a text that is not here."""
    every, made = replication.claims(), []
    for model, rows in pd.read_csv(folder / "scores.csv.gz", dtype={"budget": str}).groupby("model", sort=False):
        ((part, rows),) = rows.sort_values(["task", "index"]).groupby("part")
        each = {key: own["value"].to_numpy() for key, own in rows.groupby(["method", "budget"])}
        full = rows[rows["method"] == "full"]
        contexts = [*zip(full["task"], full["context"], strict=True)]
        measured = replication.Scores(each, part == "perplexity", contexts)
        own = [replication.Row(c, model, part, *measured.decided(c)) for c in every if c.kind != "early"]
        (shares,) = json.loads((folder / f"early-{model}.json").read_text()).values()
        compared = stats.compare(shares, [0.5] * len(shares)), 1.0, f"{100 * np.mean(shares):.1f} to 50.0"
        own += [replication.Row(c, model, part, *compared) for c in every if c.kind == "early"]
        words = stats.adjusted([row.comparison for row in own])
        made += [row._replace(comparison=c) for row, c in zip(own, words, strict=True)]
    made.sort(key=lambda row: every.index(row.claim))
    first, _, _, *rest = replication.page(made, replication.Replication()).splitlines()
    title, _, _, *committed = (folder / "replication.md").read_text().splitlines()
    assert [first, *rest] == [title, *committed]


def test_the_page_of_the_main_job_is_made_again(tmp_path):
    """All but its list of runs."""
    run = tmp_path / "main_job"
    run.mkdir()
    (run / "samples.jsonl").write_bytes(gzip.decompress((STORED / "main_job" / "samples.jsonl.gz").read_bytes()))
    shutil.copy(STORED / "main_job" / "manifest.json", run)
    found = sources.read([run])
    text = report_markdown.text(views.views(table.numbers(found.lines), found), found, STORED, "")
    assert text.partition("## Runs")[0].strip() == (STORED / "main_job" / "report.md").read_text().strip()


@pytest.mark.parametrize("file", sorted((STORED / "findings").glob("*.npz")), ids=lambda f: f.stem)
def test_findings_are_made_again(file):
    with np.load(file) as data:
        kl, options = data["kl"].astype(float), json.loads(str(data["options"]))
    del options["contents"]
    text = options["text"] and pathlib.Path(options["text"])
    own = findings.Findings(**options | {"budget": tuple(options["budget"]), "text": text})
    page, _ = getattr(findings, own.name)(own, kl)
    assert page == file.with_suffix(".md").read_text()
