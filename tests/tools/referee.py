"""Recomputes what committed pages say from the committed records, by code that shares nothing with the project's.

    python -m tests.tools.referee                     # half a minute
    python -m tests.tools.referee --root DIRECTORY    # of a copy of the project

Prints a line for each cell that differs from what the records give by more than its rounding, then how many numbers of
how many pages were compared, and exits 1 if any differs. Records have six digits, newer ones nine, and scores of boards
and claims are taken as the fractions that these are of. Where a page draws, this draws the same: from sorted values,
with the seed 0.

It imports neither `kvjax` nor other tests. Left out are, of boards, tokens written and the measures of answers but
`edit_similarity`, which no record has; where fewer than 6 contexts differ the ends of a difference's interval, but for
which side of 0 they are on; of long outputs how far answers are right, and ends of how long they are; of the main job
what is said of outputs, costs and the table by budget; of learned budgets what is said of Theorem 4 and of heads, and
their `summary.md`; and what was measured once: speed, `stream`, other files.
"""

import argparse
import difflib
import fractions
import functools
import itertools
import json
import math
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?")
PARTS = {
    "one value, asked in the prompt": "in_prompt", "one value, asked after compression": "after_compression",
    "several values, asked in the prompt": "several_values", "the next 64 tokens": "perplexity",
    "48 tokens as the full cache writes": "continuation", "a summary as the full cache writes": "summary",
    "two instructions": "two_instructions", "three quarters of a text, read token by token": "streaming",
    "256 tokens as the full cache writes": "long_continuation",
}  # fmt: skip
HINDSIGHT = (
    "snapkv ada_snapkv pyramidkv ada_pyramid defensivekv cake lava h2o tova mas roco nacl keyformer ahakv "
    "expected_attention keydiff knorm compactor curdkv random window criticalkv"
).split()  # the policies of its records, before the masks
MASKS = ["hindsight (head)", "hindsight (layer)", "hindsight (model)"]
Said = tuple[str, str, Any, str]
"""Where something stands, what stands there, and what the records give: words, or numbers with their format."""


def same(shown: str, made: Any, form: str) -> bool:
    """Whether a cell says what was made, rounded: the fifth digit of records is not certain."""
    if isinstance(made, str):
        return shown == made
    rounded = [{float(f"{x * near:{form}}") for near in (1 - 1e-5, 1, 1 + 1e-5)} for x in np.ravel(made)]
    found = [float(x.replace(",", "")) for x in NUMBER.findall(shown)]
    return len(found) == len(rounded) and all(x in near for x, near in zip(found, rounded, strict=True))


# --- statistics ---


def together(x: Any, contexts: Any = None) -> np.ndarray:
    """Sums and counts of what shares a context, "2 U", sorted; each alone if none are given."""
    of: dict[Any, list[float]] = {}
    for value, context in zip(x, range(len(x)) if contexts is None else contexts, strict=True):
        of.setdefault(context, []).append(float(value))
    return np.array(sorted((math.fsum(own), len(own)) for own in of.values())).T


def student(x: Any, contexts: Any = None) -> np.ndarray:
    """A mean and its interval."""
    sums, counts = together(x, contexts)
    off = (sums - np.mean(x) * counts) / counts.mean()
    return np.mean(x) + np.array([0, -1, 1]) * scipy.stats.t.ppf(0.975, len(off) - 1) * scipy.stats.sem(off)


def score(x: Any, contexts: Any = None) -> np.ndarray:
    """The mean of scores in [0, 1] and its interval: Wilson's of right and wrong, otherwise the BCa bootstrap's.

    Student's of fewer than 20 contexts.
    """
    (sums, counts), mean, alone = together(x, contexts), np.mean(x), len({*contexts}) == len(x) if contexts else True
    wilson = lambda won: [*scipy.stats.binomtest(won, len(sums)).proportion_ci(method="wilson")]
    if alone and np.isin(x, (0, 1)).all():
        return np.array([mean, *wilson(int(np.sum(x)))])
    if np.ptp(sums / counts) < 1e-12:
        return mean + wilson(0)[1] * np.array([0, -mean, 1 - mean])
    if len(sums) < 20:
        return np.clip(student(x, contexts), 0, 1)
    ratio = lambda a, b, axis=-1: a.sum(axis) / b.sum(axis)
    of = {"paired": True, "vectorized": True, "n_resamples": 9_999, "rng": np.random.default_rng(0)}
    return np.array([mean, *scipy.stats.bootstrap((sums, counts), ratio, **of).confidence_interval])


def mcnemar(won: Any, lost: Any) -> Any:
    """How often fair coins fall at least so unevenly."""
    return np.minimum(2 * scipy.stats.binom.cdf(np.minimum(won, lost), won + lost, 0.5), 1)


def flips(d: np.ndarray) -> float:
    """In which share of all flips of signs the sum is at least as large, in size.

    Of multiples of one number by the sums of all flips; of others up to 40 by sums of either half, and of more as if
    they were multiples of a hundred thousandth of their sum.
    """
    d, reached = d[d != 0], abs(d.sum()) - 1e-9 * np.abs(d).sum()
    unit = np.abs(d).min(initial=1.0)
    multiples = np.abs(d).sum() < 1e5 * unit and np.allclose(d / unit, np.rint(d / unit), atol=1e-6)
    if len(d) > 40 or multiples:
        unit = unit if multiples else np.abs(d).sum() / 1e5
        steps, ways = np.rint(np.abs(d) / unit).astype(int), np.ones(1)
        for step in steps:
            ways = (np.pad(ways, (0, 2 * step)) + np.pad(ways, (2 * step, 0))) / 2
        return min(2 * ways[math.ceil(steps.sum() + reached / unit - 1e-6) :].sum(), 1.0)
    both = lambda sums, x: np.concatenate([sums - x, sums + x])
    one, other = (np.sort(functools.reduce(both, half, np.zeros(1))) for half in (d[::2], d[1::2]))
    short = np.searchsorted(other, reached - one[::-1]).sum()
    return min(2 * (1 - short / 2.0 ** len(d)), 1.0)


def holm(p: Any) -> np.ndarray:
    """p-values that allow for each other."""
    p, order = np.array(p), np.argsort(p)
    p[order] = np.maximum.accumulate(np.minimum(np.arange(len(p), 0, -1) * p[order], 1))
    return p


def word(p: float, difference: float, better: str = "better", worse: str = "worse") -> str:
    """What a p-value allows to say."""
    return "undecided" if p > 0.05 + 1e-12 else better if difference > 0 else worse


def decided(every: Any) -> list[tuple[float, float, float, float]]:
    """Of two sides, "P N", and the contexts of N: mean difference, least found, p before and after Holm's correction.

    Least found: the difference that a test finds in 80 % of samples.
    """
    found = []
    for x, y, contexts in every:
        d, alone = np.round((x - y).mean(0), 12), len({*contexts}) == len(contexts)
        sums, counts = together(d, contexts)
        plain = alone and len(x) == 1 and np.isin([x, y], (0, 1)).all()
        p = mcnemar((d > 0).sum(), (d < 0).sum()) if plain else flips(np.round(sums, 12))
        quantiles = scipy.stats.t.ppf([1 - 0.025 / len(every), 0.8], len(sums) - 1)
        found.append((d.mean(), quantiles.sum() * scipy.stats.sem((sums - d.mean() * counts) / counts.mean()), p))
    return [(*each, p) for each, p in zip(found, holm([p for *_, p in found]), strict=True)]


def tango(won: int, lost: int, n: int) -> list[float]:
    """Ends of the score interval of a difference of shares of the same rows, by maximising the likelihood."""

    def excess(delta: float) -> float:
        """How far the difference is from `delta`, in standard errors, beyond the normal's 97.5 % quantile."""
        tied = lambda q: -scipy.special.xlogy([won, lost, n - won - lost], [q + delta, q, 1 - 2 * q - delta]).sum()
        bounds = max(0.0, -delta), (1 - delta) / 2
        q = scipy.optimize.minimize_scalar(tied, bounds=bounds, method="bounded", options={"xatol": 1e-9}).x
        error = math.sqrt(max(2 * q + delta - delta**2, 1e-18) / n)
        return abs((won - lost) / n - delta) / error - scipy.stats.norm.ppf(0.975)

    ends = []
    for edge in (-1 + 1e-9, 1 - 1e-9):
        near, far = (won - lost) / n, edge
        for _ in range(20):
            middle = (near + far) / 2
            near, far = (near, middle) if excess(middle) > 0 else (middle, far)
        ends.append(far)
    return ends


def not_ruled_out(x: np.ndarray, y: np.ndarray, contexts: Any) -> np.ndarray | None:
    """Between what the low and the high end of a mean difference's interval lie, "2 2"; None if fewer than 6 differ.

    Of right and wrong answers Tango's, else between means over random subsets of contexts.
    """
    d = np.round((x - y).mean(0), 12)
    sums, counts = together(d, contexts)
    if (sums != 0).sum() < 6:
        return None
    if len(x) == 1 and len({*contexts}) == len(contexts) and np.isin([x, y], (0, 1)).all():
        return np.repeat(tango(int((d > 0).sum()), int((d < 0).sum()), len(d)), 2).reshape(2, 2)
    chosen = np.random.default_rng(1).random((8_000, len(sums))) < 0.5
    near = (0.019, 0.031, 0.969, 0.981)  # of means that are drawn, the ends vary as much
    return np.quantile(chosen @ sums / np.maximum(chosen @ counts, 1), near).reshape(2, 2)


def agrees(
    shown: str, p: float, none: float, x: np.ndarray, y: np.ndarray, contexts: Any, scaled: Any, form: str
) -> str:
    """What is shown, where its interval is the one of the differences, and as their test says; or what is wrong.

    none: the difference that is none, which the interval holds where a test leaves that open. scaled: what makes a
    difference of the mean one.
    """
    value, low, high = map(float, NUMBER.findall(shown))
    if not (low <= value <= high and (low <= none <= high if p > 0.05 else not low < none < high)):
        return f"an interval that p = {p:.2g} contradicts"
    found = not_ruled_out(x, y, contexts)
    off = 0.6 * 10.0 ** -int(form[1])
    for ends, side, shows in zip(found, (min, max), (low, high), strict=True) if found is not None else ():
        least, most = (side(scaled(end), none) if p > 0.05 else scaled(end) for end in ends)
        if not (least - off <= shows <= most + off or (shows == none and p <= 0.05)):
            return f"an interval whose end is from {least:{form}} to {most:{form}}"
    return shown


# --- pages ---


def tables(page: pathlib.Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Of every table the last line before it, and its rows by the titles of columns."""
    before, rows = "", list[list[str]]()
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line[2:-2].replace("\\", "").replace("*", "").split(" | "))
        elif rows:
            yield before, [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
            rows = []
        if not line.startswith("|"):
            before = line or before


def title(page: pathlib.Path) -> str:
    """A page's first line."""
    return page.read_text().partition("\n")[0]


def records(file: pathlib.Path, *by: str) -> dict[Any, pd.DataFrame]:
    """Groups of what a file holds, each in the same order of tasks and examples."""
    if file.name == "scores.csv.gz":
        found = pd.read_csv(file, dtype={"budget": str, "value": float})
        given = ~found["part"].isin(("perplexity", "streaming"))
        as_fraction = lambda x: float(fractions.Fraction(x).limit_denominator(500))
        found["value"] = found["value"].where(~given, found["value"].map(as_fraction))
    else:
        columns = file.with_name("samples.json.xz")
        found = pd.read_json(file if file.exists() else columns, lines=file.exists(), dtype=False, precise_float=True)
    ordered = found.sort_values(["task", "index"], kind="stable")
    return {key: own.set_index(["task", "index"]) for key, own in ordered.groupby([*by])}


def pairs(values: np.ndarray, contexts: list[Any], shown: list[str]) -> list[tuple[str, str, str]]:
    """How many others each row is better and worse than, after Holm's correction for all; and it beside the first.

    contexts: of each column. shown: what the page says of each row beside the first, to which p may be near.
    """
    first, second = np.triu_indices(len(values), 1)
    plain = np.isin(values, (0, 1)).all() and len({*contexts}) == len(contexts)
    shared = pd.factorize(np.array(contexts))[0][:, None] == np.arange(len({*contexts}))
    d, others = values[first] - values[second], len(values) - 1
    d = d if plain else np.round(d @ shared, 12)
    p = holm(mcnemar((d > 0).sum(1), (d < 0).sum(1)) if plain else [*map(flips, d)])
    sign = np.where(p > 0.05 + 1e-12, 0, np.sign(d.sum(1)))
    count = lambda side: np.bincount(first, sign == side, others + 1) + np.bincount(second, sign == -side, others + 1)
    told = []
    for x, y, said in zip(p[:others], sign[:others], shown[1:], strict=True):
        word, near = "worse" if y else "undecided", re.match(r"p = (\S+), ", said)
        same = near and abs(float(near[1]) - x) <= 0.05 * x  # of many contexts p is not known to all of its digits
        told.append(f"p = {near[1] if same else f'{x:.2g}'}, {word}")
    return [*zip(*([f"{x:.0f}" for x in count(side)] for side in (1, -1)), ["the best", *told], strict=True)]


def rated(own: pd.DataFrame, full: pd.DataFrame) -> float:
    """What outputs score by their references, as the page's metric does, or beside the full cache's."""

    def one(metric: str, output: str, references: list[str], theirs: str) -> float:
        if metric in ("contains", "contains_all"):
            held = [x.lower() in output.lower() for x in references]
            return np.mean(held) if metric == "contains_all" else float(any(held))
        if metric == "values_in_place":
            text, wanted, *others = (" ".join(x.split()) for x in (output, *references))
            return np.mean([text.startswith(wanted), *(x in text for x in others)])
        if not output.strip() or not theirs.strip():
            return float(not output.strip() and not theirs.strip())
        return difflib.SequenceMatcher(None, output.split(), theirs.split(), autojunk=False).ratio()

    each = zip(
        own["metric"], *(x.map(json.loads) for x in (own["output"], full["references"], full["output"])), strict=True
    )
    return float(np.mean([np.mean([one(metric, *x) for x in zip(*asked, strict=True)]) for metric, *asked in each]))


def asked(page: pathlib.Path, said: str, full: pd.DataFrame) -> Iterator[Said]:
    """Tokens of a part's prompts, all of which the full cache holds, and how many examples share a context."""
    (line,) = [x for x in page.read_text().splitlines() if x.startswith(f"{said}: Prompts have")] or [""]
    if tokens := re.match(r".*?have ([\d,]+ to [\d,]+ tokens, [\d,]+)", line):
        yield f"{said}, tokens", tokens[1], [full["live"].min(), full["live"].max(), full["live"].mean()], ".0f"
    if shared := re.search(r"\d+ examples have \d+ contexts", line):
        yield f"{said}, contexts", shared[0], [len(full), full["context"].nunique()], ".0f"


def board(page: pathlib.Path) -> Iterator[Said]:
    """Scores or perplexities, bytes and live tokens; and of all pairs at a share of bytes what tests say."""
    of, level = records(page.with_name("scores.csv.gz"), "part", "method", "budget"), {}
    for said, part in PARTS.items():
        if (part, "full", "1.0") in of:
            yield from asked(page, said[0].upper() + said[1:], of[part, "full", "1.0"])
    for heading, rows in tables(page):
        said, share = re.findall(r"## (.+?)(?:, (\S+) % of the bytes|, the full cache.*|: how far.*)$", heading)[0]
        said = said[0].lower() + said[1:]
        part, policies = PARTS[said], []
        likely, full = part in ("perplexity", "streaming"), of[part, "full", "1.0"]
        for row in rows:
            name, *label = row["method"].split(" ", 1)
            at = float(share or row.get("bytes", "0").removesuffix(" %")) / 100
            own = of[part, name, *(label or ["1.0" if name == "full" else f"bytes-{at:g}"])]
            contexts = own["context"].tolist()
            shared = contexts if len({*contexts}) < len(contexts) else None
            value = np.exp(student(own["value"], shared)) if likely else 100 * score(own["value"], shared)
            if "output" in own and not likely:
                yield f"{heading}, {row['method']}, outputs", f"{own['value'].mean():.4f}", rated(own, full), ".4f"
            taken, needed = (100 * own[x].max() / full["kv_bytes"].max() for x in ("kv_bytes", "kv_bytes_needed"))
            made = {"score, % or perplexity": value, "edit_similarity": value, "bytes of full": taken, "needed": needed}
            made["live of prompt"] = 100 * (own["live"] / full["live"]).mean()
            for column, kind in (("at equal live tokens", "live"), ("by its own setting", "own")):
                if row.get(column):
                    other = of[part, name, f"{kind}-{at:g}"]["value"]
                    made[column] = np.exp(student(other, shared)) if likely else 100 * score(other, shared)
            for column in made.keys() & row.keys():
                yield f"{heading}, {row['method']}, {column}", row[column], made[column], ".1f"
            policies.append(own["value"].to_numpy() * (-1 if likely else 1))
        if share:
            last = [*rows[0]][-1]
            cells, means = pairs(np.array(policies), contexts, [row[last] for row in rows]), np.mean(policies, 1)
            best = rows[0 if means[0] > means.max() - 1e-9 else means.argmax()]["method"]
            yield f"{heading}, the best", last, f"beside {best}", ""
            for row, own in zip(rows, cells, strict=True):
                for column, made in zip(("better than", "worse than", last), own, strict=True):
                    yield f"{heading}, {row['method']}, {column}", row[column], made, ""
            level.setdefault(float(share), {})[said] = sum("worse" not in own[2] for own in cells), len(rows)
    at = min(level, key=lambda share: abs(share - 25))
    each = ", ".join(f"{n} by {said}" for said, (n, _) in level[at].items())
    most = max(n for _, n in level[at].values())
    yield "title", title(page), f"# Of {most} methods at {at:g} % of the bytes, not worse than the best: {each}", ""


def sides(claim: dict[str, Any], of: Any, likely: bool, early: np.ndarray) -> tuple[Any, Any, bool, bool]:
    """Both sides of a claim, "P N", whether these are log-likelihoods, and whether an answer could decide it.

    P: pairs of policies and budgets. early: "1 N", the share of what is kept that is of the beginning.
    """
    a, b, kind, budgets = claim["a"], claim.get("b", ["full"]), claim.get("kind", "better"), claim["budgets"]
    if kind == "early":
        return early, np.full_like(early, 0.5), False, True
    named = [*zip(a, b, strict=True)] if len(a) == len(b) else [*itertools.product(a, b)]
    x, y = (np.array([[of(pair[side], budget) for budget in budgets] for pair in named]) for side in (0, 1))
    means, full = np.array([x.mean(-1), y.mean(-1)]), of("full", 1.0).mean()
    limit = not likely and (means.max() < 0.02 or (means.min() > full - 0.02 and means.max() < full + 0.04))
    differ = bool((abs(x - y) > 1e-6).any())
    testable = (likely or full >= 0.02) if kind == "keeps" else not limit and differ
    if kind == "small":
        small, large = ((x - y)[:, budgets.index(at(budgets))] for at in (min, max))
        return small, large, likely, testable
    if kind == "keeps":
        y = y + math.log(claim["share"]) if likely else y * claim["share"]
    elif kind == "not_worse":
        y = y - math.log(1.02) if likely else np.maximum(y - 0.02, 0)
    return x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1]), likely, testable


def claims(page: pathlib.Path, every: dict[str, Any]) -> Iterator[Said]:
    """Means, differences, what could have been found, and words after Holm's correction for all tries."""
    known = {claim["says"]: claim for each in every.values() for claim in each}
    rows = [row for _, each in tables(page) for row in each]
    stored = records(page.with_name("scores.csv.gz"), "part", "model", "method", "budget")
    (part,), words = {key[0] for key in stored}, []
    likely, sign = part == "perplexity", -1 if part == "perplexity" else 1

    def of(model: str, name: str, budget: float) -> np.ndarray:
        """What a policy scores, or log-likelihoods."""
        return sign * stored[part, model, name, "1.0" if name == "full" else str(budget)]["value"].to_numpy()

    found = []
    for row in rows:
        claim, context = known[row["claim"]], stored[part, row["model"], "full", "1.0"]["context"]
        told = {"share": [], "context": context}
        if claim.get("kind") == "early":
            (told,) = json.loads((page.parent / f"early-{row['model']}.json").read_text()).values()
        own = sides(claim, functools.partial(of, row["model"]), likely, np.array([told["share"]]))
        found.append((*own, [*told["context"]]))
    tested = decided([(x, y, which) for x, y, *_, which in found])
    for row, (x, y, ratio, testable, told), (mean, least, raw, p) in zip(rows, found, tested, strict=True):
        where, scaled = f"{row['claim']}, {row['model']}", np.exp if ratio else lambda x: 100 * np.array(x)
        means = [] if known[row["claim"]].get("kind") == "small" else np.array([x.mean(), y.mean()])
        words.append(word(p, mean, "holds", "not so here") if testable else "untestable here")
        form = ".3f" if ratio else ".1f"
        yield f"{where}, means", row["means"], scaled(np.negative(means) if ratio else means), ".1f"
        yield f"{where}, difference", row["difference"].partition(" [")[0], scaled(mean), form
        sided = agrees(row["difference"], raw, scaled(0), x, y, tuple(told), scaled, form)
        yield f"{where}, interval", row["difference"], sided, ""
        yield f"{where}, least", row["least"], scaled([least] if least else []), form
        yield f"{where}, word", row["word"], words[-1], ""
    each = ", ".join(f"{words.count(said)} {said}" for said in ("holds", "not so here", "undecided", "untestable here"))
    tried = {row["claim"] for row in rows}  # a page has all claims of a paper, or none
    count = sum(len(own) for own in every.values() if any(claim["says"] in tried for claim in own))
    yield "title", title(page), f"# Of {len(rows)} tries of {count} claims {each.replace('holds', 'hold')}", ""


def divergences(page: pathlib.Path) -> tuple[np.ndarray, list[str]]:
    """Logarithms, "policies budgets prompts", and the budgets."""
    with np.load(page.with_suffix(".npz")) as data:
        logs = np.log(np.maximum(data["kl"].astype(float), 1e-9))
        return logs, [f"{100 * b:.4g} %" for b in json.loads(str(data["options"]))["budget"]]


def to_hindsight(page: pathlib.Path) -> Iterator[Said]:
    """The divergence of every policy, and the best method's beside that of the best mask."""
    logs, budgets = divergences(page)
    (_, best), (_, every) = tables(page)
    for row, (k, at) in itertools.product(every, enumerate(budgets)):
        mean, *ends = np.exp(student(logs[[*HINDSIGHT, *MASKS].index(row["policy"]), k]))
        value, _, interval = row[at].partition(" ")
        yield f"{row['policy']}, {at}", value, mean, ".3g"
        yield f"{row['policy']}, {at}", interval, ends, ".2g"
    ratios, of, n = [], len(HINDSIGHT), np.arange(logs.shape[-1])
    for k, (row, at) in enumerate(zip(best, budgets, strict=True)):
        i, j = logs[:of, k].mean(1).argmin(), logs[of:, k].mean(1).argmin()
        beside = np.zeros(len(n))
        for own, other in ((n[::2], n[1::2]), (n[1::2], n[::2])):  # the best of the others, measured on these
            method, mask = (x[:, other].mean(1).argmin() for x in (logs[:of, k], logs[of:, k]))
            beside[own] = logs[method, k, own] - logs[of + mask, k, own]
        ratios.append(np.exp(student(beside)))
        *named, times = row.values()
        yield f"best, {at}", ", ".join(named), f"{at}, {HINDSIGHT[i]}, {MASKS[j]}", ""
        yield f"best, {at}", times, ratios[-1], ".2f"
    yield "title", title(page), [end(mean for mean, *_ in ratios) for end in (min, max)], ".1f"


def shares(cells: np.ndarray) -> list[float]:
    """Of the variance between cells, "S P D", what each factor explains alone, and what none does."""
    if cells.max() - cells.min() < 1e-9:
        return [0.0] * 4
    effects = [((cells.mean(others) - cells.mean()) ** 2).mean() / cells.var() for others in ((1, 2), (0, 2), (0, 1))]
    return [*effects, 1 - sum(effects)]


def what_decides(page: pathlib.Path) -> Iterator[Said]:
    """What each factor explains, with intervals of prompts that are drawn again; and divergences of its levels."""
    logs, budgets = divergences(page)
    found = [*tables(page)]
    explained, levels = (
        [t for t in found if next(iter(t[1][0])).startswith("variance") == is_one] for is_one in (True, False)
    )
    crossed, largest = logs.reshape(*(len(rows) for _, rows in levels), *logs.shape[1:]), {}
    names = [next(iter(row.values())) for row in levels[0][1]]
    among = names, [x for x in names if x not in ("random", "key norm")], ["accumulated", "mean", "votes", "expected"]
    for k, at in enumerate(budgets):
        cells, n = crossed[..., k, :], logs.shape[-1]
        for (_, rows), chosen in zip(explained, among, strict=True):
            own, rng = cells[[names.index(x) for x in names if x in chosen]], np.random.default_rng(0)
            again = [shares(own[..., rng.integers(n, size=n)].mean(-1)) for _ in range(1000)]
            ends = np.array([shares(own.mean(-1)), *np.quantile(again, (0.025, 0.975), axis=0)])
            for row, made in zip(rows, 100 * ends.T, strict=True):
                yield f"{next(iter(row.values()))} of {len(chosen)}, {at}", row[at], made, ".1f"
            if chosen == names:
                largest[next(iter(rows[int(ends[0, :3].argmax())].values()))] = at
        for axis, (_, rows) in enumerate(levels):
            for row, own in zip(rows, np.moveaxis(cells, axis, 0), strict=True):
                yield f"{next(iter(row.values()))}, {at}", row[at], np.exp(student(own.mean((0, 1)))), ".3f"
    said = f"most is the {next(iter(largest))}" if len(largest) == 1 else "depends on the budget"
    yield "title", title(page), f"# What decides {said}", ""


def lost(page: pathlib.Path) -> Iterator[Said]:
    """Which answers hold the value, and in how many heads and layers its tokens are live."""
    with np.load(page.with_suffix(".npz")) as data:
        of, options = dict(data), json.loads(str(data["options"]))
    value, budgets, means = of["part"] == 2, options["budget"], []
    begun, left = np.cumsum(value, 0), np.cumsum(value[::-1], 0)[::-1]
    kinds = {"live of the value, %": value, "first token": value & (begun == 1), "last token": value & (left == 1)}
    kinds["its key"] = of["part"] == 1
    by_context = lambda x: [np.mean(np.round(x, 9)[of["context"] == c]) for c in np.unique(of["context"])]
    for (_, rows), (k, share) in zip(tables(page), enumerate(budgets), strict=True):
        for row in rows:
            c = options["methods"].index(row["method"]) * len(budgets) + k
            live, where = of["live"][c], f"{row['method']}, {share}"
            each = {x: (live.mean((0, 1)) * kind).sum(0) / kind.sum(0) for x, kind in kinds.items()}
            each["beside it"] = of["near"][c].mean(0)
            right = [x in output for x, output in zip(of["value"], of["output"][c], strict=True)]
            each["answers right, %"] = 1.0 * np.array(right)
            layers = np.sum([(layer >= value).all(1).any(0) for layer in live], 0)
            made = len(live) * score(by_context(layers / len(live)))
            yield f"{where}, layers", row["layers with the whole value"], made, ".1f"
            for column, x in each.items():
                yield f"{where}, {column}", row[column], 100 * score(by_context(x)), ".1f"
            means += (
                [[x.mean() for x in (each["answers right, %"], layers, each["live of the value, %"])]] if k == 0 else []
            )
    right, *others = np.transpose(means)
    yield "title", title(page), [scipy.stats.spearmanr(right, x).statistic for x in others], ".2f"


def long_outputs(page: pathlib.Path) -> Iterator[Said]:
    """Which final steps are right, by the answers; what decides that, and how likely the full cache's answers are."""
    found = pd.read_csv(page.with_suffix(".csv.gz"), dtype={"budget": str}).sort_values(["task", "index"])
    steps = lambda text: [" ".join(step.split()) for step in text.split(";")]
    rows = {key: own.set_index(["task", "index"]) for key, own in found.groupby(["method", "budget"], sort=False)}
    (full,) = (own for (method, _), own in rows.items() if method == "full")
    wanted = [json.loads(x)[0][0] for x in full["references"]]
    given = lambda own: [json.loads(x)[0] for x in own["output"]]
    tasks, every = np.array([task for task, _ in full.index]), [*tables(page)]
    last_step = lambda own: [float(steps(a)[-1] == steps(b)[-1]) for a, b in zip(given(own), wanted, strict=True)]
    works = "steps before the first wrong one, %" in every[0][1][0]
    right = lambda own: np.array(last_step(own) if works else own["value"], float)
    cells = [tuple(name.split(", ")) for name, _ in rows if name != "full"]
    methods, prompts, intervals = ([*dict.fromkeys(x)] for x in zip(*cells, strict=True))
    budgets = [*dict.fromkeys(budget for name, budget in rows if name != "full")]
    of = lambda read, b: np.array([read(rows[", ".join(x), b]) for x in itertools.product(methods, prompts, intervals)])
    likely = lambda own: own["own_nll"].to_numpy(float)
    for row in every[0][1]:
        own = full.loc[[row["task"]]]
        yield (
            f"full, {row['task']}",
            row["final step right, %" if works else "score, %"],
            100 * score(right(full)[tasks == row["task"]]),
            ".1f",
        )
        yield f"full, {row['task']}, ended", row["ended by itself, %"], 100 * score(own["ended"]), ".1f"
        yield f"full, {row['task']}, written", row["tokens written"].partition(" [")[0], own["written"].mean(), ".1f"
    shape = len(methods), len(prompts), len(intervals), -1
    measured = {
        "answers right" if works else "scores": lambda b: of(right, b),
        "likelihood": lambda b: likely(full) - of(likely, b),
    }
    for name, of_budget in measured.items():
        (shown,) = (t for before, t in every if before == f"Variance explained, {name}, %:")
        for b in budgets:
            x, rng = of_budget(b).reshape(shape), np.random.default_rng(0)
            n = x.shape[-1]
            again = [shares(x[..., rng.integers(n, size=n)].mean(-1)) for _ in range(1000)]
            ends = np.array([shares(x.mean(-1)), *np.quantile(again, (0.025, 0.975), axis=0)])
            for row, made in zip(shown, 100 * ends.T, strict=True):
                yield f"{next(iter(row.values()))} of {name}, {b}", row[b], made, ".1f"
            if b == budgets[0] and (name == "answers right" or not works):  # of the last measure, where none is right
                most = ("the method", "whether the prompt stays", "how often it evicts")[int(ends[0, :3].argmax())]
    yield "title", title(page), f"# While the model writes, what decides most is {most}", ""
    for before, rows_after in every:
        if before == "Variance explained, after a prefill, %:":
            (record,) = re.findall(r"--prefill \S*?([\w-]+)\.npz", page.read_text())
            (_, wanted_rows), *_ = tables(page.with_name(f"{record}.md"))
            for row, made in zip(rows_after, wanted_rows, strict=True):
                for (column, said), there in zip([*row.items()][1:], [*made.values()][1:], strict=True):
                    yield f"after a prefill, {column}", said, [float(x) for x in NUMBER.findall(there)], ".1f"
    key = lambda row, n: f"{row['method']}, prompt {row['prompt']}, every {n}"
    shown = [t for before, t in every if ", beside the control" in before]
    by_task, looks = ([t for before, t in every if before.startswith(x)] for x in ("Of each task", "How answers look"))
    for b, own, each, seen in zip(budgets, shown, by_task, looks, strict=True):
        pairs = [(row, n.removeprefix("every ")) for row in own for n in intervals]
        compared = [x for x in pairs if (x[0]["method"], x[0]["prompt"]) != ("random", "stays")]
        of_row = lambda row, n, b=b: right(rows[key(row, n), b])
        control = {n: of_row({"method": "random", "prompt": "stays"}, n) for _, n in pairs}
        tested = decided([(of_row(*x)[None], control[x[1]][None], range(len(full))) for x in compared])
        for row, n in pairs:
            yield f"{key(row, n)}, {b}", row[f"every {n}"], 100 * score(of_row(row, n)), ".1f"
            yield (
                f"{key(row, n)}, {b}, NLL",
                row[f"perplexity, {n}"],
                np.exp(likely(rows[key(row, n), b]).mean()),
                ".3f",
            )
        for (row, n), (mean, *_, p) in zip(compared, tested, strict=True):
            said = row[f"beside the control, {n}"]
            yield f"{key(row, n)}, {b}, word", said.partition(",")[0], word(p, mean), ""
            yield f"{key(row, n)}, {b}, p", said.partition("= ")[2], p, ".2g"
        last = intervals[-1].removeprefix("every ")
        for row in each:
            name = next(iter(row.values()))
            x = right(full) if name == "full" else of_row({"method": name, "prompt": "stays"}, last)
            for task in dict.fromkeys(tasks):
                yield f"{name}, {task}, {b}", row[task], 100 * score(x[tasks == task]), ".1f"
        for row in seen:
            own = pd.concat([rows[key(row, n.removeprefix("every ")), b] for n in intervals])
            shares_of = {"ended by itself": "ended", "compressed to": "compressed", "repeated": "repeated"}
            for column, of_record in shares_of.items():
                yield f"{key(row, '')}, {column}", row[f"{column}, %"], 100 * own[of_record].mean(), ".1f"
            for column, of_record in (("tokens written", "written"), ("live on average", "mean_live")):
                yield f"{key(row, '')}, {column}", row[column], own[of_record].mean(), ".1f"
            yield f"{key(row, '')}, evictions", row["evictions"], own["evictions"].mean(), ".1f"


def reasoner(page: pathlib.Path) -> Iterator[Said]:
    """How many last steps are right, by the answers."""
    found, ((_, rows),) = pd.read_csv(page.with_suffix(".csv.gz")), tables(page)
    last = lambda text: text.split(";")[-1].split()
    right = [last(a) == last(json.loads(b)[0]) for a, b in zip(found["output"], found["references"], strict=True)]
    for row in rows:
        own = found["answer"] == int(row["tokens of an answer"].replace(",", ""))
        for name, shown in [*row.items()][1:]:
            chosen = own & ((name == "average") | (found["task"] == name.replace(" ", "_")))
            yield f"{row['tokens of an answer']}, {name}", shown, 100 * score(np.array(right, float)[chosen]), ".1f"


def answers(page: pathlib.Path) -> Iterator[Said]:
    """Scores of methods and of presses on the same prompts, their places, and how many answers are the same."""
    of, ((_, rows),) = pd.read_csv(page.with_name("scores.csv.gz")), tables(page)
    means = of.groupby("method")[["ours", "theirs"]].mean()
    places = means.rank(ascending=False)
    tau = scipy.stats.kendalltau(means["ours"], means["theirs"]).statistic
    yield "title", title(page), [len(means), of.groupby(["task", "index"]).ngroups, tau], ".2f"
    for row in rows:
        own, where = of[of["method"] == row["method"]], row["method"]
        for column, place, side in (("kvjax", "place", "ours"), ("kvpress", "its place", "theirs")):
            made = 100 * score(own[side], own["context"].tolist())
            yield f"{where}, {column}", row[f"{column}, %"], made, ".1f"
            yield f"{where}, {place}", row[place], places.loc[where, side], ".1f"
        less = 100 * (own["ours"] - own["theirs"]).mean()
        yield f"{where}, difference", row["difference"].partition(" [")[0], less, ".1f"
        both = *(own[side].to_numpy()[None] for side in ("ours", "theirs")), [*own["context"]]
        ((_, _, p, _),) = decided([both])
        ends = agrees(row["difference"], p, 0.0, *both, lambda d: 100 * d, ".1f")
        yield f"{where}, interval", row["difference"], ends, ""
        equal = own["our_output"].fillna("") == own["their_output"].fillna("")
        yield f"{where}, same", row["same answers"], 100 * equal.mean(), ".0f"
        yield f"{where}, of prompt", row["of prompt"], 100 * own["share"].iloc[0], ".1f"


def learned(page: pathlib.Path) -> Iterator[Said]:
    """Losses on held-out prompts, and how much less they are than another's on the same."""
    scorer, name = page.parent.name == "learned_scorer", "unseen" if page.stem == "unseen" else "samples"
    of, rows = records(page.with_name(f"{name}.jsonl.gz"), "budget", "method"), json.loads(page.read_text())["rows"]
    for row in rows:
        own, other = of[row["budget"], row["method"]], of[row["budget"], "snapkv" if scorer else "learned"]
        if "tasks" in row:
            new = own.index.get_level_values("task").isin(("key_value", "perplexity")) == (row["tasks"] == "unseen")
            own, other = own[new], other[new]
        less = (own["loss"] - other["loss"]) * (-1 if scorer else 1)
        (_, low, high), (*_, highest) = student(own["loss"]), student(other["loss"])
        made = {"prompts": len(own), "low": low, "high": high, "disjoint": float(low > highest)}
        made |= {"layers": np.mean(own["layers"].tolist(), 0)} if "layers" in own else {}
        each = {x: own[x] for x in ("loss", "live", "lost", "regret", "kept_attention") if x in own}
        for name, x in (each | {"less": less, "ahead": less, "learned_wins": 1.0 * (less > 0)}).items():
            made |= zip((name, f"{name}_low", f"{name}_high"), student(x), strict=True)
        for name in made.keys() & row.keys():
            shown = " ".join(f"{x:.4g}" for x in 1.0 * np.ravel(row[name]))
            yield f"{row['budget']} {row['method']} {name}", shown, made[name], ".4g"


def main_job(page: pathlib.Path) -> Iterator[Said]:
    """Scores and perplexities, what is left, and tests beside the full cache."""
    of = records(page.with_name("samples.jsonl.gz"), "task", "method", "budget")
    (_, every), _, (_, compared), _ = tables(page)

    def lines_of(task: str, row: dict[str, str]) -> tuple[pd.DataFrame, np.ndarray]:
        """Lines of a policy, and its scores or log-likelihoods: "1 N"."""
        tasks = {key[0] for key in of if key[0] != "perplexity"} if task == "average" else {task.replace(" ", "_")}
        own = pd.concat([of[x, row["method"], row["budget"]] for x in sorted(tasks)])
        return own, (-own["nll"] if task == "perplexity" else own["score"]).to_numpy()[None]

    for row in every:
        where = f"{row['method']} {row['budget']}"
        for task in [*row][2:-2]:
            (x,) = lines_of(task, row)[1]
            made, form = (np.exp(student(-x)), ".2f") if task == "perplexity" else (100 * score(x), ".1f")
            yield f"{where}, {task}", row[task], made, form
        own = lines_of("average", row)[0]
        yield f"{where}, live", row["live of prompt"], 100 * (own["live"] / own["prompt_tokens"]).mean(), ".1f"
        tasks = [task for task in [*row][2:-2] if task != "average"]
        both = ([lines_of(task, x)[0]["kv_bytes"].max() for task in tasks] for x in (row, every[0]))
        yield f"{where}, KV", row["KV of full, at most"], 100 * max(x / y for x, y in zip(*both, strict=True)), ".1f"
    for task, rows in itertools.groupby(compared, lambda row: row["task"]):
        own, likely = [*rows], task == "perplexity"
        both = [(lines_of(task, row)[1], lines_of(task, every[0])[1]) for row in own]
        tested = decided([(x, y, range(x.shape[1])) for x, y in both])
        for row, (x, y), (mean, _, raw, p) in zip(own, both, tested, strict=True):
            where = f"{row['method']} {row['budget']}, {task}"
            made, form = (np.exp(-mean), ".3f") if likely else (100 * mean, ".1f")
            yield f"{where}, difference", row["difference"].partition(" [")[0], made, form
            given, scaled = ((y, x), np.exp) if likely else ((x, y), lambda d: 100 * d)
            ends = agrees(row["difference"], raw, float(likely), *given, range(x.shape[1]), scaled, form)
            yield f"{where}, interval", row["difference"], ends, ""
            yield f"{where}, p", row["p"], "< 0.001" if p < 0.001 else p, ".3f"
            yield f"{where}, verdict", row["verdict"], word(p, mean), ""
            yield f"{where}, rows", row["rows"], str(x.size), ""


def pages(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, Iterator[Said]]]:
    """Every page, and what it says."""
    every = tomllib.loads((root / "experiments" / "papers" / "claims.toml").read_text())
    kinds = {
        "board/*/board.md": board, "replication/**/replication.md": functools.partial(claims, every=every),
        "findings/to_hindsight-*.md": to_hindsight, "findings/what_decides-*.md": what_decides,
        "findings/lost-*.md": lost, "findings/long_outputs-*.md": long_outputs,
        "findings/reasoner.md": reasoner, "peers/answers/answers.md": answers,
        "learned_*/summary.json": learned, "learned_scorer/unseen.json": learned, "main_job/report.md": main_job,
    }  # fmt: skip
    for pattern, said in kinds.items():
        yield from ((page, said(page)) for page in sorted((root / "experiments/bench_results").glob(pattern)))


def main(arguments: list[str] | None = None) -> int:
    """Prints what differs; 1 if anything does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the project, or a copy of its experiments")
    root = parser.parse_args(arguments).root
    every = [(page, *said) for page, each in pages(root) for said in each]
    differ = [said for said in every if not same(*said[2:])]
    for page, where, shown, made, _ in differ:
        found = made if isinstance(made, str) else ", ".join(f"{x:.6g}" for x in np.ravel(made))
        print(f"{page.relative_to(root)}: {where}: {shown!r} is {found!r} by the records")
    numbers = sum(np.size(made) for *_, made, _ in every)
    print(f"{numbers} numbers of {len({page for page, *_ in every})} pages: {len(differ)} differ")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
