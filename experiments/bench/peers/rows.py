"""What is measured beside what, and what is aimed at: the rows of the table."""

import csv
import dataclasses
import fnmatch
import functools
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from kvjax.experiments.bench.peers.checkpoints import Model

Side = Literal["kvjax", "peer"]
Kind = Literal["prefill", "decode", "first", "load"]

_FILE = pathlib.Path(__file__).with_name("goals.csv")
GOALS = {row["row"]: float(row["goal"]) for row in csv.DictReader(_FILE.read_text().splitlines())}
"""What rows should be: at least so many times as fast, or at most so many times as much. Others have no goal."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker runs.

    Attributes:
      side: whose worker.
      kind: "prefill" reads a prompt; "decode" decodes `steps` tokens after one; "first" is a whole process that does
        both; "load" is one that loads.
      what: of kvjax the policy's name, "full" for none; of the peers the press's, "transformers" for none.
      how: of kvjax "evict"; "measure" for a prefill that measures what the policy asks for and keeps everything;
        "steps" for decoding by a call of `decode_step` a token; of the peers how attention is computed ("sdpa",
        "eager"); of a first run "cold", or "kept" with programs from an earlier process.
      length, batch, steps: tokens of the prompt, sequences, tokens decoded.
      budget: live tokens, a share of the prompt if below 1.
    """

    side: Side
    kind: Kind
    what: str
    how: str
    length: int
    batch: int = 1
    steps: int = 0
    budget: float = 1.0

    @property
    def of(self) -> str:
        """The library."""
        return "kvjax" if self.side == "kvjax" else "transformers" if self.what == "transformers" else "kvpress"

    @property
    def label(self) -> str:
        """What tables call it."""
        what = "full cache" if self.what == "full" else self.what
        return what + (f" ({self.how})" if self.how in ("measure", "steps", "eager") else "")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      model, name: by which it is run alone, or with others by what stands before a slash.
      text: what it says.
      ours, beside: kvjax's job, and what it is compared with.
      ratio: "speed" is how many times as fast kvjax is, "cost" how many times as much it takes.
      measure: seconds of a token, a prompt or a process; bytes that a process held at its "peak", parameters among
        them; or those of one run "beyond" what the process held before and what stays.
      less: jobs of both whose measure is subtracted, for what something adds.
      late: whether it comes after the main rows of all models.
    """

    model: str
    name: str
    text: str
    ours: Job
    beside: Job
    ratio: Literal["speed", "cost"] = "speed"
    measure: Literal["seconds", "peak", "beyond"] = "seconds"
    less: tuple[Job, ...] = ()
    late: bool = False

    @property
    def key(self) -> str:
        """The name among all models' rows."""
        return f"{self.model}/{self.name}"

    @property
    def goal(self) -> float | None:
        """What its ratio should reach, or stay below."""
        return GOALS.get(self.key)

    @property
    def prompt(self) -> tuple[object, ...]:
        """What rows share whose jobs go on from the same prompt."""
        return self.model, self.ours.kind in ("first", "load"), self.ours.what, self.ours.length, self.ours.budget

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All that must be measured for it."""
        return (self.ours, self.beside, *self.less)


PRESSES = {
    "pyramidkv": "PyramidKVPress",
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "expected_attention": "ExpectedAttentionPress",
    "lagkv": "LagKVPress",
    "chunkkv": "ChunkKVPress",
    "criticalkv": "CriticalKVPress",
    "h2o": "ObservedAttentionPress",
    "tova": "TOVAPress",
    "streaming_llm": "StreamingLLMPress",
    "random": "RandomPress",
}
"""kvjax's methods and the press of each; others stand beside SnapKVPress, and AdaKVPress, half as fast, by itself."""
_STEPWISE = ("tova", "h2o", "keyformer", "roco", "random")  # those that evict at every step


def bound(ratio: str) -> str:
    """On which side of its goal a ratio of a kind should be."""
    return "at least" if ratio == "speed" else "at most"


def make_rows(model: Model) -> list[Row]:
    """All rows of a model, in the order of the table."""
    return [row for part in (_full, _budgeted, _inside, _whole) for row in part(model)]


def choose(rows: Iterable[Row], only: Sequence[str]) -> list[Row]:
    """The rows of some names, with or without the model's, which may hold wildcards or be the first part of one.

    Raises:
      ValueError: a name that is no row's.
    """
    rows = list(rows)
    fits = lambda row, name: any(fnmatch.fnmatchcase(x, name) or x.startswith(f"{name}/") for x in (row.key, row.name))
    for name in only:
        if not any(fits(row, name) for row in rows):
            raise ValueError(f"--only {name} is no row; there are {', '.join(row.key for row in rows)}")
    return [row for row in rows if not only or any(fits(row, name) for name in only)]


def turns(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in the order in which they are measured, those of a model together, with all that go on from their prompts.

    First comes what has a goal, of all models, then the other main rows, then late ones.
    """
    turn: dict[tuple[object, ...], int] = {}
    for row in rows:
        own = 2 if row.late else int(row.goal is None)
        turn[row.prompt] = min(turn.get(row.prompt, own), own)
    found: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        found.setdefault((turn[row.prompt], row.model), []).append(row)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


def short(tokens: int) -> str:
    """A number of tokens as rows' names have it."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _job(m: Model, name: str, kind: Kind = "decode", budget: float | None = None, n: int = 0, how: str = "") -> Job:
    """A job of a method or press, which have a budget, or of neither; the second prompt if no other length is given."""
    side: Side = "kvjax" if name.islower() and name != "transformers" else "peer"
    # ObservedAttentionPress needs eager attention to read a prompt.
    how = how or ("evict" if side == "kvjax" else "eager" if name == "ObservedAttentionPress" else "sdpa")
    budget = budget or (1.0 if name in ("full", "transformers") else m.budget)
    return Job(side, kind, name, how, n or m.lengths[1], steps=m.steps, budget=budget)


def _full(m: Model) -> Iterator[Row]:
    row = functools.partial(Row, m.name)
    for i, n in enumerate(m.lengths):
        ours, theirs = (_job(m, name, "prefill", n=n) for name in ("full", "transformers"))
        yield row(f"prefill/{short(n)}", f"prefill, {n:,} tokens", ours, theirs, late=i > 1)
        for batch in (1, m.batch) if i < 2 else ():
            loop, other = (dataclasses.replace(job, kind="decode", batch=batch) for job in (ours, theirs))
            text = f"decoding after {n:,} tokens, full cache"
            yield row(f"full/{batch}x{short(n)}", text + (f", batch {batch}" if batch > 1 else ""), loop, other)
            if batch == 1 and i == 0:
                by_steps = dataclasses.replace(loop, how="steps")
                yield row(f"steps/{short(n)}", f"{text}, by `decode_step`", by_steps, other)


def _budgeted(m: Model) -> Iterator[Row]:
    row, job = functools.partial(Row, m.name), functools.partial(_job, m)
    for name in (*m.methods, *m.more):
        press = PRESSES.get(name, "SnapKVPress")
        text = f"decoding at {m.budget:.0%} of {m.lengths[1]:,} tokens, {name}"
        yield row(f"decode/{name}", text, job(name), job(press), late=name in m.more)
        if name == "ada_snapkv":
            yield row(f"counterpart/{name}", f"{text} and its own press", job(name), job("AdaKVPress"))


def _inside(m: Model) -> Iterator[Row]:
    """Where kvjax is put beside itself, and what a prefill's statistics add to memory."""
    if not m.inside:
        return
    row, job = functools.partial(Row, m.name), functools.partial(_job, m)
    for name in ("h2o", "nacl", "keyformer"):
        measured, plain = (job(what, "prefill", n=m.lengths[2], how="measure") for what in (name, "full"))
        text = f"prefill, {m.lengths[2]:,} tokens, with the statistics of {name}, of that without"
        yield row(f"statistics/{name}", text, measured, plain, "cost")
    live = int(m.lengths[1] * m.budget)
    append = job("snapkv", budget=live - m.steps // 2)  # on average as many live tokens while it grows
    for name in _STEPWISE:
        text = f"evicting at every step at {live:,} live tokens, of the speed of appending alone: {name}"
        yield row(f"step/{name}", text, job(name, budget=live), append)
    for n in m.lengths[1:3]:
        adds, without = ("h2o", "ObservedAttentionPress"), ("full", "transformers")
        ours, press, *less = (job(name, "prefill", n=n) for name in (*adds, *without))
        text = f"what H2O adds to the peak of a prefill of {n:,} tokens, of what ObservedAttentionPress adds"
        yield row(f"memory/{short(n)}", text, ours, press, "cost", "beyond", tuple(less), late=True)
    text = f"decoding after {m.lengths[1]:,} tokens with half of the key channels"
    yield row("counterpart/think", text, job("think", budget=0.5), job("ThinKPress", budget=0.5), late=True)


def _whole(m: Model) -> Iterator[Row]:
    row, (what, n, new) = functools.partial(Row, m.name), m.first
    job = lambda name, how="": dataclasses.replace(_job(m, name, "first", n=n, how=how), steps=new)
    cold, kept, full = job(what, "cold"), job(what, "kept"), job("transformers")
    text = f"first answer, {n:,} tokens read and {new} generated, "
    yield row("first/cold", text + "nothing compiled before", cold, full)
    yield row("first/kept", text + "programs kept from an earlier process", kept, full)
    if what != "full":
        yield row("first/kvpress", text + "nothing compiled before", cold, job("SnapKVPress"))
    yield row("peak", "peak memory of that process, of transformers'", cold, full, "cost", "peak")
    ours, theirs = (dataclasses.replace(job, kind="load", length=0, steps=0) for job in (cold, full))
    yield row("load", "loading, until each number has been read once", ours, theirs)
