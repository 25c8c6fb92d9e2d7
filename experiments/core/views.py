"""What a page of results shows: of every setting tables, pictures, and what each number was made from."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jinja2
import pandas as pd

from kvjax.configs.experiment import label
from kvjax.experiments.core import table
from kvjax.experiments.core.page import Cell, Name, Table, cell, crossed, difference, scored
from kvjax.experiments.core.records import read_manifest
from kvjax.experiments.core.sources import Found, Run
from kvjax.experiments.core.table import AVERAGE, NUMBER, has_budget, is_full

MARK: Final = "kvjax experiments/report.py"
"""What a page says of who made it, and what shows that it may be replaced."""
COSTS: Final = (
    "Slots and bytes are for one sequence; live tokens are means over layers and heads after the prompt. Bytes needed "
    "leave out what slots are rounded up by, fitted ones what stays empty once the prompt is read. Prefill time is for "
    "one sequence of a batch, and known where policies read them by themselves (--reads each); decode speed is for the "
    "whole batch. Both are medians over batches, with intervals between order statistics that hold the median in 95 %; "
    "of fewer than 6 batches the smallest and the largest stand there. Peaks are what compiled programs take for one "
    "batch: arguments (with parameters), results, temporaries."
)

OUTPUTS: Final = (
    "Of answers that may have 128 tokens or more. Ended by itself: before its tokens were used up. Compressed to: what "
    "zlib leaves of the text of its last 256 tokens, little where a text goes round in circles. Repeated: of all runs "
    "of four tokens those that stood in the answer before. Live tokens are those of a head, at the peak and on average "
    "over the answer. Evictions: tokens after which some head held fewer than one more. Milliseconds a token are those "
    "of one sequence, at the speed of the whole batch. The full cache's own answers are read token by token under each "
    "policy: how likely they are, as a perplexity."
)

Number = dict[str, Any]
Columns = dict[str, Callable[[Number], Cell]]
_ALIKE = {"equal": "same", "equal up to": "prefix", "similarity": "edit_similarity"}  # measures of `table.agreement`
_SAMPLE_BYTES = 600_000  # of samples that are within the page, about
_LONGEST = 200  # letters of an output


@dataclasses.dataclass
class View:
    """One setting.

    Attributes:
      name: model, protocol, and what else tells it from other settings.
      tasks: columns, the average first.
      lines: (method, budget, number by task), the full cache first, then the largest budget, then the best.
      rows: its examples.
      prompts: what they were asked in.
    """

    name: str
    tasks: list[str]
    lines: list[tuple[str, str, dict[str, Number]]]
    rows: pd.DataFrame
    prompts: str

    @property
    def numbers(self) -> list[Number]:
        """All numbers, by task."""
        return [of[task] for task in self.tasks for _, _, of in self.lines if task in of]

    @property
    def places(self) -> dict[tuple[str, str], float | None]:
        """What budgets are sorted by, as shares of the prompt, by method and budget."""
        return {(m, b): next(iter(of.values()))["place"] for m, b, of in self.lines}

    @property
    def average(self) -> str:
        """What averages are over, and by which metrics."""
        found = next((c for c in self.numbers if c["task"] == AVERAGE), None)
        if found is None:
            return ""
        by = f", which are scored by different metrics: {found['metrics']}" if "," in found["metrics"] else ""
        return f"The average is over {words(found['parts'])}{by}."


def kept_whole(numbers: Sequence[Mapping[Any, Any]]) -> dict[tuple[str, str], str]:
    """Of how many prompts every token was kept, such as "2 of 8", by method and budget, where that is any."""
    counts: dict[tuple[str, str], list[int]] = {}
    for c in numbers:
        known = c.get("kept_whole") is not None and c["kept_whole"] == c["kept_whole"]
        if known and c["task"] != AVERAGE and has_budget(c["budget"]) and not is_full(c["method"]):
            kept, of = counts.setdefault((c["method"], c["budget"]), [0, 0])
            counts[c["method"], c["budget"]] = [kept + int(c["kept_whole"]), of + c["n"]]
    return {name: f"{kept} of {of}" for name, (kept, of) in counts.items() if kept}


def whole(numbers: Sequence[Mapping[Any, Any]]) -> str:
    """Which budgets are none for some prompts, so that scores under them are the full cache's."""
    named = [f"{m} at {b} ({kept})" for (m, b), kept in kept_whole(numbers).items()]
    if not named:
        return ""
    return (
        f"Prompts of which every token was kept, as with the full cache: {', '.join(named)}. The budget is larger, "
        "or less than what the policy must keep of so short a prompt (its window), or it evicts later."
    )


def views(numbers: pd.DataFrame, found: Found) -> list[View]:
    """The settings in the order in which they were found; numbers know the `best` of a budget, and their `anchor`."""
    made, settings = [], [json.loads(s) for s in numbers["setting"].unique()]
    place, quality = numbers.get("place"), numbers["value"].where(numbers["kind"] != "nll", -numbers["value"])
    other = ~numbers["method"].map(is_full) & (numbers["kind"] != "given")
    of = quality.where(other).groupby([numbers[c] for c in ("setting", "budget", "task")])
    best = (quality == of.transform("max")) & (of.transform("min") < of.transform("max")) & other
    ranked = numbers.assign(best=best, quality=quality, anchor=[f"c{i}" for i in range(len(numbers))], place=place)
    for setting, own in ranked.groupby("setting", sort=False):
        tasks = sorted(own["task"].unique(), key=lambda task: task != AVERAGE)
        of_policy: dict[tuple[str, str], dict[str, Number]] = {}
        for c in sorted(table.records(own), key=lambda c: c["task"] != AVERAGE):
            known = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in c.items()}
            of_policy.setdefault((c["method"], c["budget"]), {})[c["task"]] = known
        lines = [(m, b, of) for (m, b), of in sorted(of_policy.items(), key=lambda item: _rank(item[1]))]
        rows = table.examples(found.lines[found.lines["setting"] == setting])
        name, runs = _name(json.loads(str(setting)), settings), {run.name: run for run in found.runs}
        made.append(View(name, tasks, lines, rows, prompts(rows, runs)))
    return made


def prompts(rows: pd.DataFrame, runs: Mapping[str, Run]) -> str:
    """Tokens of prompts as they came out, how they were asked and of which text, and how many share theirs."""
    full = rows[rows["method"].map(is_full)].dropna(subset=["prompt_tokens"])
    if full.empty:
        return ""
    tokens, run = full["prompt_tokens"], runs[full["run"].iloc[0]]
    said = f"Prompts have {tokens.min():,.0f} to {tokens.max():,.0f} tokens, {tokens.mean():,.0f} on average"
    how = {"chat": "within the model's chat template", "raw": "in plain text"}.get(str(run.setup.get("template")))
    said += f"; questions are asked {how}" if how and (full["kind"] != "nll").any() else ""
    said += f"; the text is {run.text}" if run.text else ""
    examples, contexts = len(full), full["context"].nunique()
    if contexts < examples:
        said += f"; {examples} examples have {contexts} contexts, which intervals and tests draw whole"
    return f"{said}."


def devices(runs: Sequence[Run]) -> str:
    """How many questions of finished runs were answered on which device, with which version of JAX."""
    count = collections.Counter[str]()
    for run in runs:
        made = read_manifest(run.manifest.parent)["made"]
        total = 0 if run.lines is None else run.lines.read_bytes().count(b"\n")
        starts = [each.get("after_lines", 0) for each in made]
        for each, start, end in zip(made, starts, [*starts[1:], total], strict=True):
            device, version = each["device"], each["versions"]["jax"]
            kind = f"{device['cpus']} cores" if device["platform"] == "cpu" else device["kind"]
            count[f"{kind} with jax {version}"] += end - start
    return f"Questions were answered on {', '.join(f'{kind} ({n:,})' for kind, n in count.items())}."


def _rank(of: dict[str, Number]) -> tuple[bool, float, float]:
    """The full cache, then the largest budget, then the best number."""
    first = of.get(AVERAGE) or next(iter(of.values()))
    return not is_full(first["method"]), -(first["place"] or 0.0), -first["quality"]


def _name(setting: dict[str, str], settings: Sequence[dict[str, str]]) -> str:
    """Model, protocol, and the details in which a setting differs from others of the same two."""
    alike = [s for s in settings if all(s[k] == setting[k] for k in ("model", "protocol"))]
    keys = dict.fromkeys(k for s in alike for k in s)
    differing = [k for k in keys if k in setting and len({s.get(k) for s in alike}) > 1]
    return ", ".join([setting["model"], _protocol(setting), *(f"{words(k)} {setting[k]}" for k in differing)])


def _protocol(setting: dict[str, str]) -> str:
    known = {"in_prompt": "question in the prompt", "after_compression": "question after compression"}
    return known.get(setting["protocol"], words(setting["protocol"]))


def options(found: Found) -> list[str]:
    """The methods whose options are not all the defaults of `kvjax.methods`, as they would be called."""
    return list(dict.fromkeys(f"{m}({given})" for run in found.runs for m, given in run.options.items()))


# --- tables ---


def scores(view: View) -> Table:
    """A row a method and budget, with every task's number, and the most keys and values that any of them took."""
    kept, rows = kept_whole(view.numbers), []
    for name, at, of in view.lines:
        first, said = next(iter(of.values())), kept.get((name, at))
        live = measure(first, "live", scale=100, alone=f" % ({said} prompts kept whole)" if said else " %")
        numbers = [_linked(of[t], scored(of[t])) if t in of else "" for t in view.tasks]
        most = max((c["kv_of_full"] for c in of.values() if c.get("kv_of_full") is not None), default=None)
        rows.append([Name(name), Name(at), *numbers, live, share({"kv_of_full": most}, "kv_of_full")])
    columns = "live of prompt", "KV of full, at most"
    return Table(["method", "budget", *(Name(words(t)) for t in view.tasks), *columns], rows)


def compared(view: View) -> Table:
    """Every number beside the full cache's on the same rows, and how far outputs are the full cache's."""
    numbers = [c for c in view.numbers if c.get("verdict") is not None]
    alike = _ALIKE if any(c.get("same") is not None for c in numbers) else {}
    columns: Columns = {
        "number": lambda c: _linked(c, Cell(scored(c)).value),
        "difference": lambda c: Cell(beside(c), c["difference"]),
        "p": lambda c: Cell(probability(c), c["p"], note=f"{c['test']}, of {c['compared']:.0f} comparisons"),
        "verdict": lambda c: Cell(c["verdict"], kind=c["verdict"]),
        "rows": lambda c: Cell(str(c["n"]), c["n"]),
    }
    return _table(numbers, columns | {title: functools.partial(share, name=name) for title, name in alike.items()})


def costs(view: View) -> Table:
    """What every number cost, but averages."""
    kib, mib = {"form": ",.0f", "scale": 2**-10}, {"form": ",.1f", "scale": 2**-20}
    columns: Columns = {
        "live tokens a head": lambda c: measure(c, "live_tokens"),
        "slots": lambda c: measure(c, "slots", ",.0f"),
        "KV KiB needed": lambda c: measure(c, "kv_bytes_needed", **kib),
        "KV KiB fitted": lambda c: measure(c, "kv_bytes_fitted", **kib),
        "KV KiB": lambda c: measure(c, "kv_bytes", **kib),
        "KV of full": lambda c: share(c, "kv_of_full"),
        "other state KiB": lambda c: measure(c, "state_bytes", **kib),
        "prefill ms": lambda c: timed(c, "prefill_seconds", ",.1f", 1000),
        "decode tokens/s": lambda c: timed(c, "decode_tokens_per_second", ",.0f"),
        "prefill peak MiB": lambda c: measure(c, "prefill_peak_bytes", **mib),
        "decode peak MiB": lambda c: measure(c, "decode_peak_bytes", **mib),
    }
    numbers = [c for c in view.numbers if c.get("slots") is not None and c["task"] != AVERAGE]
    for name, title in (("kv_bytes_fitted", "KV KiB fitted"), ("state_bytes", "other state KiB")):
        if all(c.get(name) is None for c in numbers):  # of runs that did not measure it
            del columns[title]
    return _table(numbers, columns)


def outputs(view: View) -> Table:
    """What is told of long answers, but averages."""
    columns: Columns = {
        "tokens written": lambda c: measure(c, "written"),
        "ended by itself": lambda c: share(c, "ended"),
        "compressed to": lambda c: share(c, "compressed"),
        "repeated": lambda c: share(c, "repeated"),
        "most live of a head": lambda c: measure(c, "most_live", ",.0f"),
        "live on average": lambda c: measure(c, "mean_live"),
        "evictions": lambda c: measure(c, "evictions"),
        "ms a token": lambda c: timed(_seconds(c), "seconds", ",.2f", 1000),
        "perplexity of the full cache's": lambda c: measure(c, "own_nll", ".3f"),
    }
    numbers = [c for c in view.numbers if c.get("written") is not None and c["task"] != AVERAGE]
    if all(c.get("own_nll") is None for c in numbers):
        del columns["perplexity of the full cache's"]
    return _table(numbers, columns)


def _seconds(c: Number) -> Number:
    """With `seconds`, of a token of a whole batch, in place of tokens a second."""
    speed = [c.get(f"decode_tokens_per_second{end}") for end in ("", "_high", "_low")]
    return c | {f"seconds{end}": x and 1 / x for end, x in zip(("", "_low", "_high"), speed, strict=True)}


def _table(numbers: Sequence[Number], columns: Columns) -> Table:
    """A row a number, behind its names."""
    names = [[Name(c["method"]), Name(c["budget"]), Name(words(c["task"]))] for c in numbers]
    rows = [[*own, *(of(c) for of in columns.values())] for own, c in zip(names, numbers, strict=True)]
    return Table(["method", "budget", "task", *columns], rows)


def _linked(c: Number, text: str) -> Cell:
    return Cell(text, c["value"], c["anchor"], f"{c['n']} rows", bold=c["best"])


def measure(c: Number, name: str, form: str = ".1f", scale: float = 1, alone: str = "") -> Cell:
    """A measure with its interval, as far as they are known, or with what is said where there is no interval."""
    ends = (c.get(name + end) for end in ("", "_low", "_high"))
    text = cell(*(x if x is None else scale * x for x in ends), form=form)
    return Cell(text if "[" in text or not text else text + alone, c.get(name))


def share(c: Number, name: str) -> Cell:
    """A measure in percent."""
    return measure(c, name, scale=100, alone=" %")


def timed(c: Number, name: str, form: str, scale: float = 1) -> Cell:
    """A median over batches, and of how many; one batch has no interval."""
    found = measure(c, name, form, scale)
    if not found.text:
        return found
    several = c["timed_batches"] > 1
    text = f"{found.text} of {c['timed_batches']:.0f}" if several else f"{found.value} (one batch)"
    return dataclasses.replace(found, text=text)


def beside(c: Number) -> str:
    """The difference to the full cache: points of a score, or the ratio of perplexities, above 1 where it is worse."""
    value, low, high = (c[name] for name in ("difference", "difference_low", "difference_high"))
    likely = c["kind"] == "nll"  # of these it is the full cache's less the method's
    return difference(likely, -value, -high, -low) if likely else difference(likely, value, low, high)


def probability(c: Number) -> str:
    """A p-value."""
    return "< 0.001" if c["p"] < 0.001 else f"{c['p']:.3f}"


def budget(name: str) -> str:
    """A label of a budget in words."""
    if not has_budget(name):
        return name
    return f"{100 * float(name):.4g} %" if "." in name else f"{int(name):,} tokens"


def method(name: str) -> str:
    """A method's name."""
    return "full cache" if name == "full" else name


def words(name: str) -> str:
    """A name without underscores."""
    return name.replace("_", " ")


# --- the page ---


def html(
    shown: Sequence[View],
    pictures: Sequence[dict[str, list[tuple[str, str]]]],
    found: Found,
    output: pathlib.Path,
    command: str,
    most: int,
) -> str:
    """The page.

    Args:
      shown: the settings.
      pictures: (title, address) of what is drawn of each, by its kind.
      found: where numbers are from.
      output: where the page will be, which its links start from.
      command: what made it.
      most: lines of every number that are within the page, at most; the others are linked.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True, trim_blocks=True,
        undefined=jinja2.StrictUndefined, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {f.__name__: f for f in (scored, beside, probability, budget, method, words)}
    count = sum(len(view.numbers) for view in shown)
    fitting = max(0, min(most, _SAMPLE_BYTES // (300 * max(count, 1))))
    of = found.lines.groupby([*NUMBER], sort=False)
    where: dict[Any, dict[str, str]] = {}
    for (*key, run), numbers in found.lines.groupby([*NUMBER, "run"], sort=False)["line"]:
        where.setdefault(tuple(key), {})[run] = _ranges(numbers.tolist())
    samples: dict[Any, list[dict[str, Any]]] = {}
    for line in table.records(of.head(fitting)):
        samples.setdefault(tuple(line[k] for k in NUMBER), []).append(_sample(line))
    policies = found.lines.groupby(["setting", "method", "budget"])["policy"].first().to_dict()
    return environment.get_template("page.html.jinja").render(
        mark=MARK, command=command, views=[*zip(shown, pictures, strict=True)], found=found, options=options(found),
        runs={run.name: run for run in found.runs}, papers=[*map(_paper, found.papers)], policy=policies, where=where,
        samples=samples, key=lambda c: tuple(c[k] for k in NUMBER), link=lambda path: link(path, output),
        about_costs=COSTS, average=AVERAGE, is_full=is_full, whole=whole, scores=scores, compared=compared, costs=costs,
        about_outputs=OUTPUTS, outputs=outputs,
    )  # fmt: skip


def link(path: pathlib.Path, directory: pathlib.Path) -> str:
    """A relative address of a path for a page in a directory."""
    relative = os.path.relpath(path.resolve(), directory.resolve())
    return urllib.parse.quote(pathlib.PurePath(relative).as_posix())


def _ranges(numbers: Sequence[int]) -> str:
    """Whole numbers as text: "1-3, 7"."""
    ordered = sorted(set(numbers))
    runs = [[n for _, n in group] for _, group in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _sample(line: dict[str, Any]) -> dict[str, Any]:
    """A line as it is shown: its number, value, where it asks, and the output beside the references."""
    known = {k: line[k] for k in ("doc", "depth", "length", "prompt_tokens") if isinstance(line.get(k), int | float)}
    value = f"{line['nll']:.3f} nats" if math.isnan(line["score"]) else f"{100 * line['score']:.0f} %"
    return {
        "number": line["line"],
        "value": value,
        "meta": ", ".join(f"{words(k)} {v:.4g}" for k, v in known.items() if not math.isnan(v)),
        "output": _cut(line["output"]) if isinstance(line["output"], str) else None,
        "references": _cut(line["references"]),
    }


def _cut(found: Any) -> str:
    """Text in one line, cut where it is long."""
    texts = found if isinstance(found, list | tuple) else [found] if isinstance(found, str) else []
    text = " ".join(" | ".join(map(str, texts)).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _paper(paper: tuple[pathlib.Path, dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a paper's table, ours and theirs, as methods by columns."""
    directory, content = paper
    needed = {"method", "budget", "column", "ours"}
    numbers = [n for n in content["numbers"] if isinstance(n, dict) and needed <= set(n)]

    def both(n: Mapping[str, Any]) -> str:
        low, high = (n.get(end) if n.get("low") != n.get("high") else None for end in ("low", "high"))
        theirs = cell(n.get("theirs"), form=".4g")
        return (cell(n["ours"], low, high, ".4g") or "-") + (f" ({theirs})" if theirs else "")

    named = lambda method, budget: (Name(method), Name("" if budget is None else label(budget)))
    table = crossed(numbers, list(dict.fromkeys(n["column"] for n in numbers)), named, both)
    return {"directory": directory, "content": content, "table": table}
