"""Numbers of the READMEs from the committed results: `python experiments/report.py --readme` writes them.

A part of a README that stands between `<!-- numbers: NAME -->` and `<!-- end -->` has the numbers that `VIEWS[NAME]`
gives: rows, of which a table has those whose first cells it already has, or numbers, which replace those of a sentence
or below the titles of a table in their order.
"""

import itertools
import json
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from kvjax.experiments.bench.peers import report as peers
from kvjax.experiments.core import page, stats

HERE = pathlib.Path(__file__).resolve().parents[1]
STORED, ON_GPUS = HERE / "bench_results", HERE / "gpu_results"
PAGES = ("README.md", "experiments/README.md", "experiments/FINDINGS.md")
PAGES += tuple(f"experiments/bench_results/{x}/README.md" for x in ("board", "replication", "learned_budget", "peers"))
PAGES += ("kvjax/README.md", "models/README.md", "pallas_kernels/README.md")
_PART = re.compile(r"(<!-- numbers: (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
_SMOLLM2 = "smollm2-135m-instruct"
_NAMES = {"full": "full cache", "snapkv": "SnapKV", "ada_snapkv": "Ada-SnapKV"}
_NAMES |= {"streaming_llm": "StreamingLLM", "h2o": "H2O"}


def changed() -> dict[pathlib.Path, str]:
    """The READMEs whose numbers are not those of the committed results, as they should be."""
    pages = {path: path.read_text() for path in (HERE.parent / name for name in PAGES)}
    new = {path: _PART.sub(lambda m: m[1] + _filled(m[2], m[3]) + m[4], text) for path, text in pages.items()}
    return {path: text for path, text in new.items() if text != pages[path]}


def _filled(name: str, part: str) -> str:
    found = [*VIEWS[name]()]
    if isinstance(found[0], tuple):
        lines = part.split("\n")  # an empty one, the titles, the rule, the rows, an empty one
        shown = {line.split(" | ")[0].strip("| ") for line in lines[3:-1]}
        if unknown := shown - {cells[0] for cells in found}:
            raise ValueError(f"{name} has no rows {sorted(unknown)}, which the README shows")
        return "\n".join([*lines[:3], *(f"| {' | '.join(cells)} |" for cells in found if cells[0] in shown), ""])
    head, rule, body = part.rpartition("---|\n")
    if len(found) != len(_NUMBER.findall(body)):
        raise ValueError(f"{name} has the {len(found)} numbers {found}, which are to fill the README's {body!r}")
    return head + rule + _NUMBER.sub(lambda _: found.pop(0), body)


def _read(*path: str) -> Any:
    return json.loads(STORED.joinpath(*path).read_bytes())


def rows(file: pathlib.Path, title: str = "") -> Iterator[list[str]]:
    """Cells of the rows of a page's tables that stand under a title."""
    here = ""
    for text in file.read_text().splitlines():
        here = text if text.startswith("#") else here
        if text.startswith("| ") and title in here:
            yield [cell.strip() for cell in text.strip("| ").split(" | ")]


def _percent(row: Mapping[str, float], value: str = "loss", low: str = "low", high: str = "high") -> str:
    return page.percent(row[value], row[low], row[high])


def _main_job() -> Iterator[Any]:
    every = [cells for cells in rows(STORED / "main_job" / "report.md", "question") if cells[-1].endswith("%")]
    for method, budget, average, *_, perplexity, _, kv in every:
        plain = [cell.replace("*", "") for cell in (average, perplexity)]
        yield _NAMES.get(method, method), f"{100 * float(budget):g} %", plain[0], plain[1].partition(" ")[0], kv


def _boards() -> Iterator[Any]:
    real, prompt, after = _SMOLLM2, "in the prompt", "after compression"
    shown = [("embedded", prompt, 25), ("embedded", prompt, 6.25)]
    shown += itertools.product([f"{real}-chat"], [prompt], (50, 25))
    shown += [("gemma-3-270m-passages", prompt, 25), *itertools.product([f"{real}-after"], [after], (50, 25))]
    shown += [("gemma-3-270m-after", after, 50)]
    columns = []
    for model, asked, share in shown:
        table = rows(STORED / "board" / model / "board.md", f"One value, asked {asked}, {share} % of the bytes")
        columns.append({name: score for name, score, *_ in table})
    for name in columns[2]:
        yield name, *(column.get(name, "") for column in columns)


_TWO: Final = "embedded-seeds", "varied-seeds"
"""Boards of the project's two models, of three seeds each."""


def _yardsticks() -> Iterator[Any]:
    part, columns = "One value, asked in the prompt", []
    for board in _TWO:
        tables = (f"{part}, 25 % of the bytes", f"{part}, the full cache and what has no budget")
        found = [row for table in tables for row in rows(STORED / "board" / board / "board.md", table)]
        columns.append({name: score for name, score, *_ in found})
    for name, score in columns[0].items():
        yield name.removeprefix("variants."), score, columns[1][name]


def _orders() -> list[str]:
    """How far orders of methods agree (Kendall's tau): of two seeds, least and most on each model; of the models."""
    found, means = [], []
    for board in _TWO:
        lines = pd.read_csv(STORED / "board" / board / "scores.csv.gz")
        lines = lines[lines["method"] != "full"]
        seeds = lines["index"] // (lines["index"].max() // 3 + 1)
        each = lines.groupby(["method", seeds])["value"].mean().unstack()
        taus = [each[a].corr(each[b], method="kendall") for a, b in itertools.combinations(each, 2)]
        found += [f"{end(taus):.2f}" for end in (min, max)]
        means.append(lines.groupby("method")["value"].mean())
    return [*found, f"{means[0].corr(means[1], method='kendall'):.2f}"]


def _digits() -> list[str]:
    """How many answers have the first, second and fourth digit right, in percent, where votes are not pooled."""
    found = []
    for board in _TWO:
        lines = pd.read_csv(STORED / "board" / board / "scores.csv.gz").set_index(["task", "index"])
        wanted = lines[lines["method"] == "full"]["references"].map(json.loads)
        said = lines[lines["method"] == "variants.unpooled"]["output"].map(json.loads)
        both = [(a[0].split(), b[0][0].split()) for a, b in zip(said, wanted[said.index], strict=True)]
        found += [f"{100 * sum(a[i : i + 1] == b[i : i + 1] for a, b in both) / len(both):.0f}" for i in (0, 1, 3)]
    return found


def _gates() -> Iterator[Any]:
    full, *rest = _read("duo_gates.json")["retrieval"]
    for share in dict.fromkeys(row["streaming_heads"] for row in rest):
        of = {row["policy"]: row for row in rest if row["streaming_heads"] == share}
        scores = (f"{100 * of[policy]['score']:.1f}" for policy in ("learned", "random", "snapkv"))
        yield f"{100 * share:g} %", f"{100 * of['learned']['slots'] / full['slots']:.0f} %", *scores


def _by_budget(*path: str) -> dict[str, dict[str, Any]]:
    """Rows of a summary, by method and, where it has them apart, tasks."""
    found: dict[str, dict[str, Any]] = {}
    for row in _read(*path)["rows"]:
        found.setdefault(f"{100 * float(row['budget']):g} %", {})[row["method"] + row.get("tasks", "")] = row
    return found


def _learned_scorer() -> Iterator[Any]:
    for budget, of in _by_budget("learned_scorer", "summary.json").items():
        each = [of[method] for method in ("learned", "snapkv", "future")]
        kept = (f"{100 * row['kept_attention']:.0f} %" for row in each)
        yield budget, *(_percent(row) for row in each), *kept


def _unseen() -> Iterator[Any]:
    for budget, of in _by_budget("learned_scorer", "unseen.json").items():
        each = (of[f"learned{tasks}"] for tasks in ("learned from", "unseen"))
        yield budget, *(_percent(row, "less", "less_low", "less_high") for row in each)


def _learned_budget() -> Iterator[Any]:
    for budget, of in _by_budget("learned_budget", "summary.json").items():
        methods = ("learned", "uniform", "pyramid", "ada_static", "ada", "hindsight")
        yield budget, *(_percent(of[method]) for method in methods)


def _curves() -> Iterator[str]:
    for of in _read("curves.json")["kinds"]:
        yield from (f"{of['seconds']:.1f}", f"{of['one_call_seconds']:.2f}", f"{of['ratio']:.1f}")
        yield from (f"{of[f'{which}first_cpu_seconds']:.0f}" for which in ("", "one_call_"))
        yield f"{of['first_ratio']:.1f}"


def _stream() -> Iterator[Any]:
    for name, row in _read("stream", "stream.json")["rows"].items():
        first, *later = row["marks"]
        yield name, f"{first['median_us']:.1f}", *(f"{mark['ratio']:.3f}" for mark in later)


def _peers() -> Iterator[Any]:
    for cells in peers.short(_read("peers", "peers.json")).rows:
        yield tuple(map(str, cells))


def _loading() -> Iterator[str]:
    for of in _read("loading.json")["loading"].values():
        yield f"{of['kvjax']['size'] / 1e9:.2f}"
        for key in ("ready", "read", "processor", "peak"):
            ours, theirs = (x[key] / (x["size"] if key == "peak" else 1) for x in (of["kvjax"], of["transformers"]))
            yield from (f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.{1 if ours / theirs < 9.95 else 0}f}")


def _compiling() -> Iterator[str]:
    for programs in _read("compiling.json")["compiling"].values():
        for seconds in programs.values():
            yield from (f"{x:.1f}" for x in seconds.values())


def _on_gpus(section: str, *files: str) -> list[Any]:
    every = [row for file in files for row in json.loads((ON_GPUS / "h200" / file).read_text())["rows"]]
    return [row for row in every if row["section"] == section]


def _kernels() -> Iterator[Any]:
    for row in _on_gpus("timings", "timings.json"):
        if row["n"] == 32768:
            part = f"{row['of_floor']:.2f}" if "of_floor" in row else ""
            yield row["name"], f"{row['ms']:.{3 if row['ms'] < 1 else 1}f}", part


def _models_on_gpus() -> Iterator[Any]:
    for row in _on_gpus("end_to_end", "timings.json", "layers_8.json"):
        if row["ok"]:
            speed, peak = f"{row['decode_tokens_s']:.0f}", f"{row['peak_bytes'] / 1e9:.1f}"
            yield row["name"], f"{row['prefill_s']:.2f}", speed, peak


def _beside_kvpress() -> Iterator[Any]:
    for row in _on_gpus("end_to_end", "beside_kvpress.json"):
        if row["ok"]:
            sizes = f"{row['cache_bytes'] / 1e6:,.0f}", f"{row['peak_bytes'] / 1e9:.1f}"
            yield row["name"], f"{row['prefill_s']:.3f}", f"{row['decode_tokens_s']:,.0f}", *sizes


RETRIEVED: Final = (
    "replication.md",
    "smollm2-135m-instruct/replication.md",
    "smollm2-135m-instruct-ada-kv/replication.md",
    "gemma-3-270m/replication.md",
)
LIKELY: Final = ("perplexity/replication.md",)
"""Pages of papers' claims, by retrieval and by likelihood."""


def claims(pages: Sequence[str]) -> list[str]:
    """How many tries of papers' claims pages have, and how many have which word."""
    found = [cells[-1] for page in pages for cells in rows(STORED / "replication" / page)]
    count = [found.count(word) for word in ("holds", "not so here", "undecided", "untestable here")]
    return [str(n) for n in (sum(count), *count)]


def _beside_each() -> Iterator[Any]:
    """Papers' methods beside each policy that they are to score more than: by retrieval and by likelihood."""
    every = tomllib.loads((HERE / "papers" / "claims.toml").read_text())
    for paper, likely in (("nacl", ""), ("roco", ""), ("ahakv", "-ahakv-keyformer")):
        (claim,) = (x for x in every[paper] if len(x.get("b", ())) > 2)
        of = [_scores(f"{_SMOLLM2}{name}", claim["budgets"]) for name in ("", f"-perplexity{likely}")]
        for other in claim["b"]:
            cells = []
            for scores, test in zip(of, (stats.compare, stats.compare_perplexity), strict=True):
                own, beside = (scores.loc[name] for name in (*claim["a"], other))
                c = test(own["value"].tolist(), beside["value"].tolist(), own["context"].tolist())
                cells.append(page.difference(bool(cells), c.difference, c.low, c.high))
            names = (name.partition("/")[2] for name in (*claim["a"], other))
            yield *(_NAMES.get(name, name) for name in names), *cells


def _scores(name: str, budgets: Sequence[float]) -> pd.DataFrame:
    """By method and example the mean over budgets of what a replication's records hold."""
    found = pd.read_csv(STORED / "replication" / name / "scores.csv.gz")
    found = found[found["budget"].astype(float).isin(budgets)]
    by = found.groupby(["method", "task", "index"])
    return by.agg(value=("value", "mean"), context=("context", "first"))


_TABLES = (
    _main_job,
    _boards,
    _yardsticks,
    _gates,
    _learned_scorer,
    _unseen,
    _learned_budget,
    _curves,
    _stream,
    _peers,
    _loading,
)
_GPUS = (_kernels, _models_on_gpus, _beside_kvpress)
VIEWS: dict[str, Callable[[], Any]] = {
    view.__name__.strip("_").replace("_", "-"): view for view in (*_TABLES, _beside_each, _compiling, *_GPUS)
}
VIEWS["claims"] = lambda: claims(RETRIEVED)
VIEWS |= {"orders": _orders, "digits": _digits}
VIEWS["claims-by-likelihood"] = lambda: claims(LIKELY)
_IN_PASSAGES = ("", "-ahakv-keyformer", "-ada-kv")
VIEWS["claims-in-passages"] = lambda: claims(
    [f"{_SMOLLM2}-perplexity{papers}/replication.md" for papers in _IN_PASSAGES]
)
