"""The five papers' tables and figures: what each shows, with which settings, and the numbers that the papers print.

Read from `catalogue.toml`, `entries.toml` and `tables/*.csv`, whose lines are what is run, planned and published. In a
CSV file "-" is a number that the paper's text does not have, as where a figure only draws it, an empty cell one that
its table does not have, and the budget "?" one that its text does not state.
"""

import csv
import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, get_args

from kvjax.configs.loading import unknown
from kvjax.experiments.papers.methods import METHODS, Budget, Method, at, each, toml
from kvjax.models import ModelConfig
from kvjax.models.presets import PLACE, PRESETS

Reference = Literal["answers", "full cache"]
Runner = Literal["harness", "rows", "text", "stream", "needle", "speed", "planned"]

FOLDER: Final = pathlib.Path(__file__).parent
MEAN: Final = "mean"  # the metric of a column that is the mean of others
GEOMETRIC: Final = "geometric mean"  # the same
LONGBENCH: Final = "longbench"  # the metric of a column whose data sets have their own


@dataclasses.dataclass(frozen=True)
class Model:
    """A paper's model.

    Attributes:
      title: as papers name it.
      preset: its name in `models.PRESETS`; None where no repository is certain.
      layers, width, kv_heads: its shape, by which a checkpoint is known to be of the size that the paper ran. The shape
        does not tell fine-tuned weights from others.
      billions, positions: of parameters, and of tokens that it reads.
      head_dim, query_heads: of attention; as many heads as its width holds if None.
      template: of its prompts, where it has no preset that says so.
    """

    title: str
    layers: int
    width: int
    kv_heads: int
    billions: float
    positions: int
    head_dim: int = 128
    query_heads: int | None = None
    preset: str | None = None
    template: str = PLACE

    @property
    def place(self) -> str:
        """The template that its prompts stand in."""
        return self.template if self.preset is None else PRESETS[self.preset].template

    def shapes(self, config: Any) -> bool:
        """Whether a config has its layers, width and kv heads."""
        return (config.num_layers, config.embed_dim, config.num_kv_heads) == (self.layers, self.width, self.kv_heads)

    @property
    def config(self) -> ModelConfig:
        """Its shape in bfloat16, as far as caches know it: without a vocabulary."""
        heads = self.query_heads or self.width // self.head_dim, self.kv_heads
        return ModelConfig(1, self.width, 4 * self.width, self.layers, *heads, self.head_dim, dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What prompts are made of.

    Attributes:
      title: as papers name it.
      runner: "rows" are prompts with answers, generated for; "text" is predicted at its end, a "stream"
        token by token as it is read; a "needle" is hidden in text; "harness" is a task of lm-eval that ranks given
        answers; "speed" is made of any tokens; "planned" is of any tokens, whose cache is planned alone.
      examples: how many the papers ran; None where their text does not say.
      words: average words of a prompt, where they are known; tokens of one that is timed or planned.
      new_tokens: tokens to generate.
      batch: sequences that are timed or planned together.
      hub: where it is on the hub.
      fields: of a row there, that of the text and that of the answer, if it has one.
      prompt: what is asked about the text of such a row.
      question: its only row, where the paper prints it.
      task: its name in lm-eval.
      metric: LongBench's metric of it.
      stop: a string that ends an answer.
      first_line: whether only the first line of an answer is scored.
    """

    title: str
    runner: Runner
    examples: int | None = None
    words: int | None = None
    new_tokens: int = 0
    batch: int = 1
    hub: str | None = None
    fields: Sequence[str] = ()
    prompt: str = PLACE
    question: str = ""
    task: str | None = None
    metric: str | None = None
    stop: str | None = None
    first_line: bool = False

    def __post_init__(self):
        _among("runner", self.runner, get_args(Runner))


@dataclasses.dataclass(frozen=True)
class Column:
    """What is measured.

    Attributes:
      title: as in the paper's header; no two of an entry are equal.
      metric: how outputs are scored; `MEAN` or `GEOMETRIC` for a mean of other columns, `LONGBENCH` for that of each
        data set.
      shots: examples before the question.
      data: names of data sets; the column is the mean of their scores, each set counting once.
      of: the titles of the columns of which this one is the mean, each weighing as many data sets as it holds.
    """

    title: str
    metric: str
    shots: int = 0
    data: tuple[str, ...] = ()
    of: tuple[str, ...] = ()

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Of every data set its task, as lines name it, and its metric."""
        own = lambda name: (DATA[name].metric or "") if self.metric == LONGBENCH else self.metric
        return [(task_of(name, self.shots), own(name)) for name in self.data]


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
      methods: by name.
      columns, rows: the table; values are None where the paper only draws them.
      settings: such as "alpha: 0.5".
      reference: what outputs are compared with: the data's "answers", or the output of the "full cache".
      template: whether prompts stand in their model's template (`models.PRESETS`).
      beams: hypotheses of the beam search that generates, 1 for greedy generation.
      layers, budgets: those that its `figures` draw; where there are none, what they are made for.
      figures: names of `kvjax.experiments.papers.FIGURES` that draw the entry or a part of it.
      nothing: what the entry is where there is nothing to run: "settings", or "an illustration".
      claims: (what, number, place) of numbers that stand in the running text.
      notes: what a reader should know before comparing.
    """

    paper: str
    label: str
    shows: str
    place: str
    methods: dict[str, Method] = dataclasses.field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()
    settings: tuple[str, ...] = ()
    reference: Reference = "answers"
    template: bool = False
    beams: int = 1
    layers: tuple[int, ...] = ()
    budgets: tuple[Budget, ...] = ()
    figures: tuple[str, ...] = ()
    nothing: str = ""
    claims: tuple[tuple[str, float, str], ...] = ()
    notes: str = ""

    def __post_init__(self):
        _among("reference", self.reference, get_args(Reference))

    @property
    def name(self) -> str:
        """Such as "ada-kv/table2"."""
        return f"{self.paper}/{self.label}"

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        return not self.nothing

    @property
    def drawn(self) -> bool:
        """Whether it measures nothing, and is drawn by `experiments/figures.py`."""
        return self.runs and not self.rows

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
        return tuple(dict.fromkeys(c.metric for c in self.columns if not c.of))

    @property
    def published(self) -> int:
        """How many numbers of the paper are recorded."""
        return sum(v is not None and v == v for r in self.rows for v in r.values) + len(self.claims)

    def measured(self, model: str) -> tuple[Column, ...]:
        """The columns that a model's rows have, without means of others."""
        cells = [i for r in self.rows if r.model == model for i, v in enumerate(r.values) if v is None or v == v]
        return tuple(c for i, c in enumerate(self.columns) if i in cells and not c.of)


def _among(what: str, name: Any, known: Iterable[Any]) -> Any:
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return name


def read_catalogue(
    folder: pathlib.Path = FOLDER,
) -> tuple[dict[str, Model], dict[str, DataSet], dict[str, tuple[Column, ...]]]:
    """Models, data sets and tuples of columns, by name; a column that is a mean is that of all before it.

    Raises:
      ValueError: what cannot be read, with where it stands.
    """
    path = folder / "catalogue.toml"
    given = toml(path)
    data = each(f"{path}, ", given["data"], lambda _, fields: DataSet(**fields))

    def columns(_: str, several: list[dict[str, Any]]) -> tuple[Column, ...]:
        made: list[Column] = []
        for fields in several:
            sets = tuple(_among("data set", d, data) for d in fields.pop("data", ()))
            of = tuple(c.title for c in made) if fields["metric"] in (MEAN, GEOMETRIC) else ()
            made.append(Column(**fields, data=sets, of=of))
        return (*made,)

    models = each(f"{path}, ", given["models"], lambda _, fields: Model(**fields))
    return models, data, each(f"{path}, ", given["columns"], columns)


MODELS, DATA, _COLUMNS = read_catalogue()


def task_of(name: str, shots: int) -> str:
    """How lines name a data set: with how many examples stand before the question, for texts if there are any."""
    return f"{name} {shots}-shot" if DATA[name].runner == "harness" or shots else name


def data_of(task: str) -> DataSet:
    """The data set of a task that lines name."""
    return DATA[task.split(" ")[0]]


def read_entries(folder: pathlib.Path = FOLDER) -> dict[str, Entry]:
    """All tables and figures, by names such as "ada-kv/table2".

    Raises:
      ValueError: what cannot be read or does not fit together, with where it stands.
    """
    path, tables = folder / "entries.toml", {*(folder / "tables").glob("*.csv")}
    papers = toml(path)
    settings, found = papers.pop("settings"), dict[str, Entry]()
    for paper, labels in papers.items():

        def entry(label: str, given: dict[str, Any], paper: str = paper) -> Entry:
            file = folder / f"tables/{paper}-{label}.csv"
            made = _entry(paper, label, given, settings)
            tables.discard(file if made.columns else path)
            return dataclasses.replace(made, rows=_printed(file, made)) if made.columns else made

        found |= {e.name: e for e in each(f"{path}, {paper}.", labels, entry).values()}
    if tables:
        raise ValueError(f"{min(tables)} is the table of no entry in {path}, or of one without columns")
    return found


def _entry(paper: str, label: str, given: dict[str, Any], settings: dict[str, Any]) -> Entry:
    """An entry without its rows."""
    methods = [METHODS[_among("set of methods", m, METHODS)] for m in given.pop("methods", [])]
    columns = [_COLUMNS[_among("column", n, _COLUMNS)] for n in given.pop("columns", [])]
    named = lambda text: [text] if ": " in text else settings[_among("setting", text, settings)]
    given |= {name: (*given.get(name, ()),) for name in ("figures", "layers", "budgets")}
    return Entry(
        paper,
        label,
        methods={name: method for each in methods for name, method in each.items()},
        columns=tuple(c for each in columns for c in each),
        settings=tuple(line for text in given.pop("settings", []) for line in named(text)),
        claims=tuple((what, float(value), place) for what, value, place in given.pop("claims", [])),
        **given,
    )


def _printed(file: pathlib.Path, entry: Entry) -> tuple[Row, ...]:
    """The rows of a table; a budget that is an int is a number of tokens, a float a share."""
    titles, signs, rows = [c.title for c in entry.columns], {"-": None, "": math.nan}, {}
    wanted = ["model", "method", "budget", *titles]
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        head = [*(reader.fieldnames or ())]
        if head not in (wanted, [*wanted, "off"]):
            raise ValueError(f"{file.name}, line 1 must be {','.join(wanted)}, not {','.join(head)}")
        for x in reader:
            with at(f"{file.name}, line {reader.line_num}"):
                if None in x or None in x.values():
                    raise ValueError(f"a row must have {len(head)} values")
                values = tuple(signs[x[t]] if x[t] in signs else float(x[t]) for t in titles)
                budget = None if x["budget"] == "?" else (float if set(x["budget"]) & set(".eE") else int)(x["budget"])
                key = _among("model", x["model"], MODELS), _among("method", x["method"], entry.methods), budget
                if key in rows:
                    raise ValueError(f"{key[0]}, {key[1]} at {budget} stands here a second time")
                rows[key] = Row(*key, values, x.get("off", ""))
    return (*rows.values(),)


ENTRIES: Final = read_entries()


def find(name: str) -> Entry:
    """The entry of a name such as "ada-kv/table2".

    Raises:
      ValueError: an unknown name, with those of its paper, or with the papers there are.
    """
    paper, _, label = name.partition("/")
    labels = {e.label: e for e in ENTRIES.values() if e.paper == paper}
    if not labels:
        raise unknown("paper", paper, dict.fromkeys(e.paper for e in ENTRIES.values()), "see --list")
    if label not in labels:
        raise unknown(f"entry of {paper}", label, labels, "see --list")
    return labels[label]
