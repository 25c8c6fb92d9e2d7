"""The five papers' tables and figures: what each shows, with which settings, and the numbers that the papers print.

Read from `entries.toml` and `tables/*.csv`. In a CSV file "-" is a number that the paper's text does not have, an empty
cell one that its table does not have, and the budget "?" one that its text does not state.
"""

import contextlib
import csv
import dataclasses
import difflib
import math
import pathlib
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, get_args

from kvjax.experiments.papers.methods import METHODS, Budget, Method

Kind = Literal["scores", "speed", "drawn", "settings", "drawing"]
Reference = Literal["answers", "full cache"]
Runner = Literal["harness", "rows", "text", "speed"]

FOLDER: Final = pathlib.Path(__file__).parent
MEAN: Final = "mean"  # the metric of a column that is the mean of others
LONGBENCH: Final = "longbench"  # the metric of a column whose data sets have their own


@dataclasses.dataclass(frozen=True)
class Model:
    """A paper's model.

    Attributes:
      title: as papers name it.
      preset: its name in `models.PRESETS`; None where no repository is certain.
      layers, width, kv_heads: its shape, by which a checkpoint is known to be of the size that the paper ran. The shape
        does not tell fine-tuned weights from others.
    """

    title: str
    preset: str | None
    layers: int
    width: int
    kv_heads: int


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What prompts are made of. Words and examples of LongBench's English sets are Ada-KV's Table 3.

    Attributes:
      title: as papers name it.
      runner: "rows" are prompts with answers, generated for; "text" is predicted; "harness" is a task of lm-eval that
        ranks given answers; "speed" is made of any tokens.
      examples: how many the papers ran; None where their text does not say.
      words: average words of a prompt, where the text says; tokens of one that is timed.
      new_tokens: tokens to generate.
      batch: sequences that are timed together.
      hub: where it is on the hub.
      task: its name in lm-eval.
      metric: LongBench's metric of it.
      stop: a string that ends an answer.
      first_line: whether only the first line of an answer is scored.
    """

    title: str
    runner: Runner
    examples: int | None
    words: int | None
    new_tokens: int
    batch: int
    hub: str | None
    task: str | None
    metric: str | None
    stop: str | None
    first_line: bool


@dataclasses.dataclass(frozen=True)
class Column:
    """What is measured.

    Attributes:
      title: as in the paper's header; no two of an entry are equal.
      metric: how outputs are scored; `MEAN` for the mean of other columns, `LONGBENCH` for that of each data set.
      shots: examples before the question.
      data: names of data sets; the column is the mean of their scores, each set counting once.
      of: the titles of the columns of which this one is the mean, each weighing as many data sets as it holds.
    """

    title: str
    metric: str
    shots: int = 0
    data: tuple[str, ...] = ()
    of: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
      model: a name in `MODELS`.
      method: a name in the entry's methods.
      budget: live tokens a kv head (int), a share of the prompt (float); None where the text does not say.
      values: a number for every column; None where the text has none, nan where the table has no such cell.
      off: why the printed mean is not that of the printed numbers, where it is not.
    """

    model: str
    method: str
    budget: Budget | None
    values: tuple[float | None, ...]
    off: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One table or figure of a paper.

    Attributes:
      paper, label: such as "ada-kv" and "table2".
      shows: one line.
      place: where it stands in the paper, and what of it the text has.
      kind: "scores" are made by running cells, "speed" by timing them; "drawn" is drawn by `experiments/figures.py`;
        "settings" states settings and "drawing" explains, and nothing is to be run.
      methods: by name.
      columns, rows: the table; values are None where the paper only draws them.
      settings: (what, value) pairs.
      reference: what outputs are compared with: the data's "answers", or the output of the "full cache".
      template: whether prompts stand in their model's template (`models.PRESETS`).
      beams: hypotheses of the beam search that generates, 1 for greedy generation.
      figures: names of `kvjax.experiments.papers.FIGURES` that draw the entry or a part of it.
      claims: (what, number, place) of numbers that stand in the running text.
      notes: what a reader should know before comparing.
    """

    paper: str
    label: str
    shows: str
    place: str
    kind: Kind
    methods: dict[str, Method] = dataclasses.field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    reference: Reference = "answers"
    template: bool = False
    beams: int = 1
    figures: tuple[str, ...] = ()
    claims: tuple[tuple[str, float, str], ...] = ()
    notes: str = ""

    @property
    def name(self) -> str:
        """Such as "ada-kv/table2"."""
        return f"{self.paper}/{self.label}"

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        return self.kind not in ("settings", "drawing")

    @property
    def models(self) -> tuple[str, ...]:
        """Names of its models, each once, in the table's order."""
        return tuple(dict.fromkeys(r.model for r in self.rows))

    @property
    def data(self) -> tuple[str, ...]:
        """Names of its data sets, each once."""
        return tuple(dict.fromkeys(d for c in self.columns for d in c.data))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what is measured, each once."""
        return tuple(dict.fromkeys(c.metric for c in self.columns if c.metric != MEAN))

    @property
    def published(self) -> int:
        """How many numbers of the paper are recorded."""
        return sum(v is not None and v == v for r in self.rows for v in r.values) + len(self.claims)

    def measured(self, model: str) -> tuple[Column, ...]:
        """The columns that a model's rows have, without means of others."""
        cells = [i for r in self.rows if r.model == model for i, v in enumerate(r.values) if v is None or v == v]
        return tuple(c for i, c in enumerate(self.columns) if i in cells and c.metric != MEAN)


def number(text: str) -> Budget:
    """A budget as it is written: an int is a number of tokens, a float a share of the prompt.

    Raises:
      ValueError: neither.
    """
    return float(text) if set(text) & set(".eE") else int(text)


@contextlib.contextmanager
def _at(where: str) -> Iterator[None]:
    """Errors of what is read say where it stands."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{where}: {e}") from e


def _table(path: pathlib.Path, names: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a CSV file by the names of its columns, each with its file and line; "off" may stand last."""
    with _at(str(path)), path.open(newline="", encoding="utf-8") as file:
        lines, names = csv.reader(file), [*names]
        header = next(lines, [])
        if header not in (names, [*names, "off"]):
            raise ValueError(f"line 1 must be {','.join(names)}, not {','.join(header)}")
        for values in lines:
            if len(values) != len(header):
                raise ValueError(f"line {lines.line_num} has {len(values)} values for {len(header)} columns")
            yield f"{path}, line {lines.line_num}", dict(zip(header, values, strict=True))


def _among(what: str, name: Any, known: Iterable[str]) -> Any:
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return name


def read_models(folder: pathlib.Path = FOLDER) -> dict[str, Model]:
    """The papers' models, by name.

    Raises:
      ValueError: a line that is no model's.
    """
    found = {}
    for where, x in _table(folder / "tables/models.csv", ("model", "title", "preset", "layers", "width", "kv_heads")):
        with _at(where):
            layers, width, kv_heads = int(x["layers"]), int(x["width"]), int(x["kv_heads"])
            found[x["model"]] = Model(x["title"], x["preset"] or None, layers, width, kv_heads)
    return found


def read_data(folder: pathlib.Path = FOLDER) -> dict[str, DataSet]:
    """The papers' data sets, by name.

    Raises:
      ValueError: a line that is no data set's.
    """
    found = {}
    for where, x in _table(folder / "tables/data.csv", ["data", *(f.name for f in dataclasses.fields(DataSet))]):
        with _at(where):
            whole = lambda name, x=x: int(x[name]) if x[name] else None
            found[x["data"]] = DataSet(
                title=x["title"],
                runner=_among("runner", x["runner"], get_args(Runner)),
                examples=whole("examples"),
                words=whole("words"),
                new_tokens=whole("new_tokens") or 0,
                batch=whole("batch") or 1,
                hub=x["hub"] or None,
                task=x["task"] or None,
                metric=x["metric"] or None,
                stop=x["stop"].replace("\\n", "\n") or None,
                first_line=x["first_line"] == "yes",
            )
    return found


MODELS: Final = read_models()
DATA: Final = read_data()


def _read_columns(folder: pathlib.Path) -> dict[str, tuple[Column, ...]]:
    """Columns by the names that entries have for them; a mean is that of all before it."""
    found: dict[str, tuple[Column, ...]] = {}
    for where, x in _table(folder / "tables/columns.csv", ("columns", "title", "metric", "shots", "data")):
        with _at(where):
            before = found.get(x["columns"], ())
            data = tuple(_among("data set", d, DATA) for d in x["data"].split())
            of = tuple(c.title for c in before) if x["metric"] == MEAN else ()
            found[x["columns"]] = (*before, Column(x["title"], x["metric"], int(x["shots"] or 0), data, of))
    return found


def read_entries(folder: pathlib.Path = FOLDER) -> dict[str, Entry]:
    """All tables and figures, by names such as "ada-kv/table2".

    Raises:
      ValueError: what cannot be read or does not fit together, with its file and line.
    """
    path = folder / "entries.toml"
    with _at(str(path)):
        text = path.read_text(encoding="utf-8")
        papers = tomllib.loads(text)
        settings = papers.pop("settings")
    lines = {line.partition("#")[0].strip(): i for i, line in enumerate(text.splitlines(), 1)}
    columns, found, unread = _read_columns(folder), {}, {*(folder / "tables").glob("*-*.csv")}
    for paper, labels in papers.items():
        for label, given in labels.items():
            file = folder / f"tables/{paper}-{label}.csv"
            where = f"{path}, line {lines.get(f'[{paper}.{label}]', '?')}"
            with _at(where):
                entry = _entry(paper, label, given, settings, columns)
                drawn = [(where, row) for row in _drawn(entry, given.get("grid", []))]
            rows = [*_printed(entry, file)] if file in unread else drawn
            unread.discard(file)
            keys = set()
            for at, row in rows:
                with _at(at):
                    _among("model", row.model, MODELS)
                    _among("method", row.method, entry.methods)
                    key = row.model, row.method, row.budget
                    if key in keys:
                        raise ValueError(f"{row.model}, {row.method} at {row.budget} stands here a second time")
                    keys.add(key)
            if bool(rows) != bool(entry.columns):
                raise ValueError(f"{where}: {entry.name} has columns, but no grid and no {file.name}, or the reverse")
            found[entry.name] = dataclasses.replace(entry, rows=tuple(row for _, row in rows))
    if unread:
        raise ValueError(f"{min(unread)} is the table of no entry in {path}")
    return found


def _entry(paper: str, label: str, given: dict[str, Any], settings: dict[str, Any], columns: Any) -> Entry:
    """An entry without its rows."""
    options: dict[str, Any] = {k: v for k, v in given.items() if k != "grid"}
    methods = [METHODS[_among("set of methods", m, METHODS)] for m in given.get("methods", [])]
    options["methods"] = {name: method for each in methods for name, method in each.items()}
    options["columns"] = tuple(c for n in given.get("columns", []) for c in columns[_among("column", n, columns)])
    titles = [c.title for c in options["columns"]]
    if len(set(titles)) < len(titles):
        raise ValueError(f"two columns have one title: {', '.join(titles)}")
    named = lambda text: [text] if ": " in text else settings[_among("setting", text, settings)]
    texts = [line for text in given.get("settings", []) for line in named(text)]
    options["settings"] = tuple(tuple(line.split(": ", 1)) for line in texts)
    options["figures"] = tuple(given.get("figures", []))
    options["claims"] = tuple((str(what), float(value), str(place)) for what, value, place in given.get("claims", []))
    entry = Entry(paper, label, **options)
    _among("kind", entry.kind, get_args(Kind))
    _among("reference", entry.reference, get_args(Reference))
    return entry


def _drawn(entry: Entry, grids: list[dict[str, Any]]) -> list[Row]:
    """Rows of a figure without numbers in the text: the full cache, and every method at every budget."""
    blank = (None,) * len(entry.columns)
    rows = [
        Row(model, method, budget, blank)
        for grid in grids
        for model in grid["models"]
        for method, budget in [("full", 1.0), *((m, b) for b in grid["budgets"] for m in grid["methods"])]
    ]
    return [*dict.fromkeys(rows)]


def _printed(entry: Entry, file: pathlib.Path) -> Iterator[tuple[str, Row]]:
    """Rows of a table, each with its file and line."""
    titles = [c.title for c in entry.columns]
    signs = {"-": None, "": math.nan}
    for where, x in _table(file, ["model", "method", "budget", *titles]):
        with _at(where):
            values = tuple(signs[x[t]] if x[t] in signs else float(x[t]) for t in titles)
            budget = None if x["budget"] == "?" else number(x["budget"])
            yield where, Row(x["model"], x["method"], budget, values, x.get("off", ""))


ENTRIES: Final = read_entries()


def find(name: str) -> Entry:
    """The entry of a name such as "ada-kv/table2".

    Raises:
      ValueError: an unknown name, with those of its paper, or with the papers there are.
    """
    if name in ENTRIES:
        return ENTRIES[name]
    paper, _, label = name.partition("/")
    labels = [e.label for e in ENTRIES.values() if e.paper == paper]
    if labels:
        raise ValueError(f"{paper} has no entry {label!r}; there are {', '.join(labels)}")
    papers = sorted({e.paper for e in ENTRIES.values()})
    near = difflib.get_close_matches(name, ENTRIES, n=1, cutoff=0.6)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no entry {name!r}; the papers are {', '.join(papers)}, as in ada-kv/table2{meant}")
