"""The claims of the five papers, one by one, on models that run here: holds, not so here, undecided or untestable.

    python experiments/replication.py
    python experiments/replication.py --models embedded --parts several_values perplexity

Claims stand in `experiments/papers/claims.toml`, in the order of the papers' abstracts; none is left out because it
fails. Policies have each paper's settings. A prompt is read once for all of them. Each model and part is a run of the
main job in `results/replication/runs/`, so that what was interrupted goes on. Written beside them: `replication.md`,
`claims.png`, and `scores.csv.gz`, a row a policy and example, from which all numbers of the page are.
"""

import collections
import dataclasses
import json
import math
import pathlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import kvjax
from kvjax import Policy, methods, models
from kvjax.configs.experiment import Experiment, check_distinct, check_whole, label
from kvjax.experiments.board import PARTS, Board, Part, judged, mark
from kvjax.experiments.core import job, stats
from kvjax.experiments.core.command import as_command, check_output, parsed, write_json, write_page
from kvjax.experiments.core.page import Table, difference, markdown
from kvjax.experiments.core.setup import build, find_builders, text_digest
from kvjax.experiments.papers.base import canvas, message, style
from kvjax.experiments.papers.methods import METHODS
from kvjax.models import pad_left
from kvjax.models.embedded import INCLUDED

CLAIMS: Final = pathlib.Path(__file__).parent / "papers" / "claims.toml"
PAPERS: Final = {
    "nacl": "NaCl (arXiv 2408.03675)", "roco": "RoCo (arXiv 2402.06262)", "ada-kv": "Ada-KV (arXiv 2407.11550)",
    "ahakv": "AhaKV (arXiv 2506.03762)", "keyformer": "Keyformer (arXiv 2403.09054)",
}  # fmt: skip
MARGIN: Final = 0.02
"""Less than which a loss is none, of scores in [0, 1] or as a share of the perplexity."""
Kind = Literal["better", "keeps", "not_worse", "small", "early"]
UNTESTABLE: Final = "untestable here"
WORDS: Final = {"better": "holds", "worse": "not so here", "undecided": "undecided"}


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement of a paper.

    Attributes:
      paper: whose it is.
      says, where: the statement in words of this project, and where it is made.
      a, b: policies, "group/name" of `experiments.papers.methods`; `b` beside each of `a`, or pair by pair.
      budgets: shares of the prompt.
      kind: how it is decided; see `claims.toml`.
      share: of the full cache's score, for "keeps".
    """

    paper: str
    says: str
    where: str
    a: tuple[str, ...]
    budgets: tuple[float, ...]
    b: tuple[str, ...] = ()
    kind: Kind = "better"
    share: float = 1.0

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Which policies stand beside which."""
        if len(self.a) == len(self.b):
            return [*zip(self.a, self.b, strict=True)]
        return [(a, b) for a in self.a for b in self.b or ("full",)]


def claims() -> list[Claim]:
    """All claims, by paper."""
    found: dict[str, list[dict[str, Any]]] = tomllib.loads(CLAIMS.read_text())
    fixed: Any = lambda x: tuple(x) if isinstance(x, list) else x
    return [Claim(paper, **{k: fixed(x) for k, x in given.items()}) for paper, each in found.items() for given in each]


@dataclasses.dataclass(frozen=True)
class Replication:
    """What to run.

    Attributes:
      models: names of models, or checkpoints.
      papers: whose claims are tried.
      parts: what is asked, of `experiments/board.py`.
      examples: of each task.
      length: tokens of a prompt.
      batch_size: prompts that run together.
      template: how an instruct model is asked: in a "chat" or in "raw" text; "auto" in a chat where it has a template.
      seed: of examples and draws; with several, each task has its examples anew for each of them.
      text: a file of text for models that do not come with the project, in place of the project's.
      dtype: of the parameters, activations and KV cache of these models.
      output: where runs and results go.
    """

    models: tuple[str, ...] = ("embedded", "varied", "smollm2-135m-instruct")
    papers: tuple[str, ...] = tuple(PAPERS)
    parts: tuple[str, ...] = ("in_prompt",)
    examples: int = 32
    length: int = 1024
    batch_size: int = 16
    template: Literal["auto", "chat", "raw"] = "auto"
    seed: int | tuple[int, ...] = 0
    text: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    output: pathlib.Path = pathlib.Path("results/replication")

    def __post_init__(self):
        check_whole(1, examples=self.examples, length=self.length)
        check_distinct("models", self.models)
        check_distinct("parts", self.parts)
        check_distinct("papers", self.papers)
        if unknown := [paper for paper in self.papers if paper not in PAPERS]:
            raise ValueError(f"no claims are known of {unknown[0]!r}; there are {', '.join(PAPERS)}")
        if self.text is not None and not {*self.models} - {*INCLUDED}:
            raise ValueError(f"no model reads {self.text}: {' and '.join(self.models)} have a language of their own")
        for model in self.models:
            self.board(model)

    def board(self, model: str) -> Board:
        """The sizes of a model's runs."""
        same = ("parts", "examples", "length", "batch_size", "template", "seed")
        others: dict[str, Any] = {} if model in INCLUDED else {"text": self.text, "dtype": self.dtype}
        return Board(model, **others, **{name: getattr(self, name) for name in same})


def policies(every: Sequence[Claim]) -> dict[str, dict[float, Policy]]:
    """The policies that claims are about, by name and budget."""
    found: dict[str, dict[float, Policy]] = {}
    for claim in every:
        for name in (*claim.a, *claim.b):
            group, _, method = name.partition("/")
            found.setdefault(name, {}).update({b: METHODS[group][method].make(b) for b in claim.budgets})
    return found


def experiment(made: Mapping[str, Mapping[float, Policy]], setup: Any) -> tuple[Experiment, dict[tuple[str, str], str]]:
    """All policies on one set of prompts, each once; and by name and budget the name that it has there."""
    called: dict[Policy, str] = {}
    of: dict[tuple[str, str], str] = {}
    own: dict[str, list[tuple[float, Policy]]] = {}
    for name, each in made.items():
        for budget, policy in each.items():
            if policy not in called:
                called[policy] = name.replace("/", "-")
                own.setdefault(called[policy], []).append((budget, policy))
            of[name, label(budget)] = called[policy]
    beside = tuple(Experiment(name, tuple(each), setup) for name, each in own.items())
    return Experiment("full", ((1.0, methods.full()),), setup, beside=beside), of


# --- what was measured ---


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of one model and part.

    Attributes:
      values: scores in [0, 1] of every policy and budget, or negative log-likelihoods, by example.
      likelihoods: whether they are these.
      contexts: of each example.
    """

    values: Mapping[tuple[str, str], np.ndarray]
    likelihoods: bool
    contexts: Sequence[Any]

    def testable(self, claim: Claim) -> bool:
        """Whether an answer could have decided a claim: not where policies answer all alike, or are all at a limit.

        Scores are at a limit where all are below `MARGIN`, or from one below the full cache's to two above it.
        """
        of = lambda name, budget: self.values[name, label(budget)]
        each = [(of(a, x), of(b, x)) for a, b in claim.pairs for x in claim.budgets if claim.kind != "keeps"]
        means, full = [v.mean() for pair in each for v in pair], self.values["full", "1.0"].mean()
        if not each:
            return self.likelihoods or full >= MARGIN
        at_limit = max(means) < MARGIN or (min(means) > full - MARGIN and max(means) < full + 2 * MARGIN)
        return any((abs(a - b) > 1e-6).any() for a, b in each) and (self.likelihoods or not at_limit)

    def decided(self, claim: Claim) -> tuple[stats.Comparison, float, str, bool]:
        """How a claim comes out, what its difference is multiplied by, both means but of gains, and `testable`."""
        of = lambda name, budget: self.values[name, label(budget)]
        full = self.values["full", "1.0"]
        every = [(a, b, budget) for a, b in claim.pairs for budget in claim.budgets]
        if claim.kind == "small":
            gain = lambda budget: np.concatenate([of(a, budget) - of(b, budget) for a, b in claim.pairs])
            x, y = gain(min(claim.budgets)), gain(max(claim.budgets))
            scaled = (x, y, 1.0) if self.likelihoods else ((1 + x) / 2, (1 + y) / 2, 2.0)
            return *self._compared(*scaled), "", self.testable(claim)
        x = np.concatenate([of(a, budget) for a, _, budget in every])
        y = np.concatenate([full if claim.kind == "keeps" else of(b, budget) for _, b, budget in every])
        if claim.kind == "keeps":
            y = y - math.log(claim.share) if self.likelihoods else y * claim.share
        elif claim.kind == "not_worse":
            y = y + math.log1p(MARGIN) if self.likelihoods else np.maximum(y - MARGIN, 0)
        means = (math.exp(v.mean()) if self.likelihoods else 100 * v.mean() for v in (x, y))
        return *self._compared(x, y), "{:.1f} to {:.1f}".format(*means), self.testable(claim)

    def _compared(self, x: np.ndarray, y: np.ndarray, scale: float = 1.0) -> tuple[stats.Comparison, float]:
        compare = stats.COMPARE["nll" if self.likelihoods else "score"]
        return compare(x.tolist(), y.tolist(), [*self.contexts] * (len(x) // len(self.contexts))), scale


def scores_of(part: Part, directory: pathlib.Path, of: Mapping[tuple[str, str], str]) -> tuple[Scores, Any, str]:
    """What a finished run has found, its rows as pandas' DataFrame, by the claims' names; and what prompts were."""
    import pandas as pd

    from kvjax.experiments.core import table  # imports pandas, which takes longer than --help should

    lines, prompts, _ = judged(part, [directory])
    rows = table.examples(lines).merge(table.answers(lines), how="left").sort_values(["task", "index"])
    there = {(str(m), str(b)): own for (m, b), own in rows.groupby(["method", "budget"], sort=False)}
    first = there["full", "1.0"]
    each = {("full", "1.0"): first} | {(name, b): there[own, b].assign(method=name) for (name, b), own in of.items()}
    contexts = first["context"].tolist()
    values = {key: own["value"].to_numpy() for key, own in each.items()}
    return Scores(values, bool((first["kind"] == "nll").all()), contexts), pd.concat(each.values()), prompts


def early(model: Any, params: Any, prompts: Sequence[Sequence[int]], policy: Any, recent: int = 32) -> list[float]:
    """Of each prompt, which share of what a policy keeps is of its first half; its last `recent` tokens aside.

    Layers that read a window alone can hold nothing of a first half that it does not reach, and do not count.
    """
    whole = [i for i, window in enumerate(model.config.windows) if window is None]
    shares = []
    for i in range(0, len(prompts), 8):
        tokens, lengths = pad_left(prompts[i : i + 8])
        _, state = kvjax.prefill(model, params, tokens, policy=policy, max_new_tokens=1, lengths=lengths)
        held = np.stack([np.asarray(state.layers[i].head_pos).reshape(len(lengths), -1) for i in whole], 1)
        for own, n in zip(held, lengths, strict=True):
            older = own[(own >= 0) & (own < n - recent)]
            shares.append(float((older < (n - recent) / 2).mean()))
    return shares


# --- the page ---


class Row(NamedTuple):
    """A claim tried on a model by a part.

    Attributes:
      comparison: both sides.
      scale: what differences are multiplied by.
      means: of both sides.
      testable: whether an answer could have decided it.
    """

    claim: Claim
    model: str
    part: str
    comparison: stats.Comparison
    scale: float
    means: str
    testable: bool = True

    @property
    def word(self) -> str:
        """Holds, not so here, undecided, or untestable here."""
        return WORDS[self.comparison.verdict] if self.testable else UNTESTABLE

    @property
    def is_ratio(self) -> bool:
        """Whether differences are ratios of perplexities."""
        return self.part == "perplexity" and self.claim.kind != "early"

    @property
    def difference(self) -> str:
        """The difference with its interval: points of a score, or the ratio of perplexities."""
        c = self.comparison
        return difference(self.is_ratio, *(self.scale * x for x in (c.difference, c.low, c.high)))

    @property
    def least(self) -> str:
        """The least difference that the test would have found."""
        least = self.scale * self.comparison.least
        found = f"\N{MULTIPLICATION SIGN}{math.exp(least):.3f}" if self.is_ratio else f"{100 * least:.1f}"
        return found if least > 0 else ""

    @property
    def measured(self) -> str:
        """By what it was tried."""
        return _POSITIONS if self.claim.kind == "early" else PARTS[self.part].title


_POSITIONS: Final = "where kept tokens stand"


def page(rows: Sequence[Row], options: Replication, prompts: Mapping[str, str] | None = None) -> str:
    """`replication.md`; `prompts` says what they were by model and part."""
    count = {w: sum(row.word == w for row in rows) for w in (*WORDS.values(), UNTESTABLE)}
    each = ", ".join(f"{n} {'hold' if w == 'holds' else w}" for w, n in count.items())
    tests = ", ".join(f"{n} by {x}" for x, n in collections.Counter(row.comparison.test for row in rows).items())
    text = f", text {pathlib.PurePath(options.text).name}" if options.text else ""
    blocks: list[str | Table] = [
        f"Prompts of up to {options.length:,} tokens, {options.examples} examples a task; models "
        f"{', '.join(options.models)} (those that are not the project's in {options.dtype}{text}); policies with each "
        "paper's settings, each evicting from the whole prompt at once, at shares of it. Differences are points of "
        "the score, of perplexities the other's over the method's, above 1 where the method is better; with 95 % "
        f"intervals. A word is by a paired test on the same examples ({tests}), adjusted for all tries on this page "
        "(Holm). Intervals are Tango's beside McNemar's test, else they hold what sign flips do not rule out, or are "
        "Student's where these can decide nothing. For a claim to keep a share of the full cache's score, the "
        f"difference is to that share; for one never to lose, to {100 * MARGIN:.0f} points or percent less; for the "
        "gain at small budgets, between gains at the smallest and the largest; for the beginning, between the share "
        "of what is kept there and a half. Least: the difference that such a test finds in 80 % of samples. "
        f"Untestable: no answer differs, or all scores are below {100 * MARGIN:.0f} points, or from "
        f"{100 * MARGIN:.0f} points below the full cache's to {200 * MARGIN:.0f} above it.",
        *(f"{name}: {said}" for name, said in (prompts or {}).items()),
        "![The claims with intervals](claims.png)",
    ]
    head = "claim", "where", "model", "measured by", "means", "difference", "least", "word"
    for paper in options.papers:
        of_paper = [(r.claim, r) for r in rows if r.claim.paper == paper]
        cells = [(c.says, c.where, r.model, r.measured, r.means, r.difference, r.least, r.word) for c, r in of_paper]
        blocks += [f"## {PAPERS[paper]}", Table(head, cells)]
    return markdown(f"Of {len(rows)} tries of {len({r.claim for r in rows})} claims {each}", *blocks)


def plot(rows: Sequence[Row]) -> Figure:
    """Every claim's difference with its interval, a panel a part, a mark a model; filled where the word is not open."""
    every = [*dict.fromkeys(row.claim for row in rows)][::-1]
    panels, names = sorted({row.measured for row in rows}), [*dict.fromkeys(row.model for row in rows)]
    aside = dict(zip(names, np.linspace(0.26, -0.26, len(names)) if len(names) > 1 else [0.0], strict=True))
    width = 4.4 + 6.0 / len(panels)  # names of claims, and of models, stand aside
    figure, (grid,) = canvas(len(panels), width=width, height=0.42 * len(every) + 1.5, sharey=True)
    for axes, panel in zip(grid, panels, strict=True):
        axes.axvline(0, color="0.4", linewidth=1)
        for row in (row for row in rows if row.measured == panel):
            c, place = row.comparison, every.index(row.claim) + aside[row.model]
            ends = [100 * row.scale * x for x in (c.difference, c.low, c.high)]
            hollow = row.word in ("undecided", UNTESTABLE)
            mark(axes, names.index(row.model), place, ends, hollow, markersize=5)
        for i, model in enumerate(names):
            axes.plot([], [], label=model, **{**style(i), "linestyle": "none"})
        axes.set_title(panel, fontsize="medium")
        units = {PARTS["perplexity"].title: "100 x log of perplexities' ratio", _POSITIONS: "points of share"}
        axes.set_xlabel(units.get(panel, "points of the score"))
        labels = [f"{PAPERS[c.paper].split()[0]}: {c.says}" for c in every]
        axes.set_yticks(range(len(every)), labels, fontsize="x-small")
        axes.set_ylim(-0.7, len(every) - 0.3)
    grid[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    about = "right of 0: as claimed; hollow: undecided or untestable"
    return message(figure, "The papers' claims on models that run here", about)


def run(options: Replication, command: list[str]) -> None:
    """Runs what is missing, decides, and writes."""
    check_output(options.output / "claims.png")
    every = [claim for claim in claims() if claim.paper in options.papers]
    rows, tables, prompts = list[Row](), [], dict[str, str]()
    for name in options.models:
        own: list[Row] = []
        for part in options.parts:
            setup = options.board(name).setup(PARTS[part])
            of_part, called = experiment(policies([c for c in every if c.kind != "early"]), setup)
            directory = options.output / "runs" / f"{pathlib.PurePath(name).name}-{part}"
            job.run(of_part, directory, command)
            scores, found, prompts[f"{name}, {PARTS[part].title}"] = scores_of(PARTS[part], directory, called)
            tables.append(found.assign(model=name, part=part)[["model", "part", *_COLUMNS]])
            own += [Row(c, name, part, *scores.decided(c)) for c in every if c.kind != "early"]
        rows += [*own, *_early(options, name, [c for c in every if c.kind == "early"])]
    each = stats.adjusted([row.comparison for row in rows])
    rows = [row._replace(comparison=c) for row, c in zip(rows, each, strict=True)]
    rows.sort(key=lambda row: every.index(row.claim))
    write_page(options.output, "replication", page(rows, options, prompts), {"claims": plot(rows)}, tables)


_COLUMNS = ["method", "budget", "task", "index", "context", "value", "metric", "output", "references"]


def _early(options: Replication, name: str, every: Sequence[Claim]) -> list[Row]:
    """Claims on where kept tokens stand, by the prompts of the first part; shares are kept in `early-MODEL.json`."""
    part, file = options.parts[0], options.output / f"early-{pathlib.PurePath(name).name}.json"
    known = json.loads(file.read_bytes()) if file.exists() else {}
    setup, found = options.board(name).setup(PARTS[part]), []
    text = f"text {text_digest(setup.text)}" if setup.text else "the project's text"
    prompts = f"{part}, {options.examples} examples of {options.length} tokens of {text}, {options.template}"
    prompts += f", seed {options.seed}"
    for claim in every:
        asked = f"{claim.says} ({prompts})"
        if not isinstance(known.get(asked), dict):  # older ones do not say what prompts share
            model, params = models.load(setup.source, dtype=setup.dtype)
            made, _ = build(setup, find_builders(setup), models.load_tokenizer(setup.source), model.config)
            (policy,) = policies([claim])[claim.a[0]].values()
            own = [dict(p.example.meta).get("same_context", f"{p.example.task}/{p.example.index}") for p in made]
            known[asked] = {"share": early(model, params, [p.tokens for p in made], policy), "context": own}
            write_json(file, known)
        shares, contexts = known[asked]["share"], known[asked]["context"]
        means = f"{100 * np.mean(shares):.1f} to 50.0"
        compared = stats.compare(shares, [0.5] * len(shares), contexts)
        found.append(Row(claim, name, part, compared, 1.0, means))
    return found


@as_command
def main(argv: Sequence[str]) -> None:
    """Parses and runs."""
    run(parsed(Replication, argv, "replication", __doc__), [sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
