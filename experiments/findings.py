"""Four questions to all methods: what decides, how far the best is from hindsight, what is lost, and long outputs.

    python experiments/findings.py what_decides --model smollm2-135m-instruct --text book.txt
    python experiments/findings.py to_hindsight --model smollm2-135m-instruct --text book.txt
    python experiments/findings.py lost --model smollm2-135m-instruct --text book.txt
    python experiments/findings.py long_outputs

The first two let every policy evict from the same reading of each prompt, and read the tokens that follow with what is
left: what is measured is how far the model's next-token distribution diverges from the full cache's
(`kvjax.analysis.curves`). `what_decides` crosses scores, tokens that always stay and divisions of the budget, and says
what share of the variance of log divergences, between means over prompts, each of them explains. `to_hindsight` sets
published methods beside the masks that keep what the continuation attends to most. `lost` asks for one value, as the
board does, and traces in which layers and heads the fact is live when the answer begins. `long_outputs` evicts while
long answers are written, and crosses methods with whether the prompt stays and how often they evict. Written to
`results/findings/`: a page, its picture, and `NAME-MODEL.npz`, what was measured of every policy, budget and prompt,
to which batches of prompts are added as they end.
"""

import dataclasses
import io
import itertools
import json
import pathlib
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import jax
import numpy as np
import scipy  # its parts are imported when they are first used
import tyro
from jaxtyping import Float
from matplotlib.figure import Figure
from tqdm import tqdm

import kvjax
from kvjax import Evict, Policy, configs, methods, models
from kvjax.analysis import Interval, curves, interval
from kvjax.budgets import STEP, Pyramid, Schedule
from kvjax.configs.experiment import Budget, Setup, check_distinct, check_whole
from kvjax.experiments.board import PARTS, PROTECTED
from kvjax.experiments.core import stats
from kvjax.experiments.core.command import as_command, check_output, parsed, write_page
from kvjax.experiments.core.page import Table, cell, markdown, percent
from kvjax.experiments.core.setup import Run, text_digest
from kvjax.experiments.papers import long_outputs, prompts
from kvjax.experiments.papers.base import message
from kvjax.experiments.papers.long_outputs import LongOutputs
from kvjax.experiments.papers.lost import BESIDE, KEY, VALUE, Record, ends, live_of, map_of, traced, whole
from kvjax.models.embedded import INCLUDED
from kvjax.models.written import write_bytes
from kvjax.scores.attention import Mean, Votes
from kvjax.scores.blends import Pooled

Make = Callable[[Budget], Policy]
Divergences = Float[np.ndarray, "P M B"]
FACTORS: Final = ("score", "protection", "division")
SCORES: Final[dict[str, Any]] = {
    name: make(64).score
    for name, make in {
        "accumulated": methods.h2o, "mean": methods.mas, "last row": methods.tova, "votes": methods.snapkv,
        "expected": methods.expected_attention, "key difference": methods.keydiff, "key norm": methods.knorm,
        "random": methods.random,
    }.items()
}  # fmt: skip
AMONG: Final = {
    "8 scores": (*SCORES,), "without random and key norm": tuple(x for x in SCORES if x not in ("random", "key norm")),
    "of the 4 in use": ("accumulated", "mean", "votes", "expected"),
}  # fmt: skip
"""Scores among which variance is explained; what nobody would choose adds to it."""
PROTECTIONS: Final = {"none": (0, 0), "first 4": (4, 0), "last 16": (0, 16), "both": (4, 16)}
DIVISIONS: Final[dict[str, dict[str, Any]]] = {
    "even": {}, "heads compete": {"heads": kvjax.Adaptive(0.5)}, "pyramid": {"layers": Pyramid()},
}  # fmt: skip

VARIANTS: Final[dict[str, Make]] = {
    "random_protected": lambda b: kvjax.protect(methods.random(b), sinks=PROTECTED[0], recent=PROTECTED[1]),
    "roco, last 64 stay": lambda b: kvjax.protect(methods.roco(b), sinks=0, recent=64),
    "mas, last 64 stay": lambda b: kvjax.protect(methods.mas(b), sinks=0, recent=64),
    "mas, of the last 64 rows": lambda b: Evict(Votes(64), b, 0, 64),
    "mas, best of 7 neighbours": lambda b: Evict(Pooled(Mean(), "max", 7), b, 0, 64, when=STEP),
}
"""Policies that tell why RoCo and its mean attention (MAS) lose facts, and a control."""
TRACED: Final = (
    "random", "streaming_llm", "h2o", "tova", "snapkv", "ada_snapkv", "nacl", "roco", "mas", "ahakv", "keyformer",
    "kvzip", "chunkkv", "defensivekv", *VARIANTS,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Findings:
    """What to measure.

    Attributes:
      name: which question.
      model: "embedded" or "varied" for a model that comes with the project, or a checkpoint.
      text: a text file to read prompts from; the project's own held-out text if None.
      prompts: how many.
      length: tokens of a prompt.
      follow: tokens behind it.
      budget: shares of the prompt, below 1.
      batch_size: prompts that are read together.
      dtype: of parameters and activations.
      output: where results go.
    """

    name: Annotated[Literal["what_decides", "to_hindsight", "lost", "long_outputs"], tyro.conf.Positional]
    model: str = "embedded"
    text: pathlib.Path | None = None
    prompts: int = 24
    length: int = 1024
    follow: int = 32
    budget: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625)
    batch_size: int = 4
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    output: pathlib.Path = pathlib.Path("results/findings")

    def __post_init__(self):
        if self.name in ("lost", "long_outputs") and not isinstance(self, Lost):
            raise ValueError(f"name={self.name!r} has options of its own, those of Lost or LongOutputs")
        check_whole(1, **{name: getattr(self, name) for name in ("length", "follow", "batch_size")})
        check_whole(2, prompts=self.prompts)
        check_distinct("budget", [f"{100 * share:.4g} %" for share in self.budget])
        if not all(0 < share < 1 for share in self.budget):
            raise ValueError(f"budget {self.budget} must be shares of the prompt above 0 and below 1")


@dataclasses.dataclass(frozen=True)
class Lost(Findings):
    """What to trace.

    Attributes:
      name: the question.
      methods: configs, and names of `VARIANTS`.
      prompts: of each task in which the board asks for one value.
      follow: tokens of an answer, at most.
    """

    name: Annotated[Literal["lost"], tyro.conf.Positional] = "lost"
    methods: tuple[str, ...] = TRACED
    prompts: int = 32
    follow: int = 16
    budget: tuple[float, ...] = (0.5, 0.25)

    @property
    def setup(self) -> Setup:
        """Of the prompts."""
        part, text = PARTS["in_prompt"], None if self.text is None else str(self.text)
        tasks = part.own if self.model in INCLUDED else part.others
        asked: dict[str, Any] = {"tasks": tasks, "examples": self.prompts, "text": text}
        asked |= {name: getattr(self, name) for name in ("model", "length", "batch_size", "dtype")}
        return Setup(**asked, answer=self.follow, baselines=())

    @property
    def policies(self) -> list[Run]:
        """Every method at every budget."""
        find = lambda name, share: configs.find(name)[1](budget=(share,), setup=self.setup).policies[0][1]
        made = lambda name, share: VARIANTS[name](share) if name in VARIANTS else find(name, share)
        return [(name, f"{share:g}", made(name, share)) for name in self.methods for share in self.budget]


def crossed() -> dict[tuple[str, str, str], Make]:
    """A policy for every score, protection and division."""

    def make(score: str, protection: str, division: str) -> Make:
        first, last = PROTECTIONS[protection]
        return lambda budget: Evict(SCORES[score], budget, first, last, **DIVISIONS[division])

    return {names: make(*names) for names in itertools.product(SCORES, PROTECTIONS, DIVISIONS)}


def published() -> dict[tuple[str], Make]:
    """The methods that evict once from a prompt, with a window of 16 where they have one."""
    once = lambda make: lambda b: kvjax.when(Schedule(), make(b))
    windowed = ("snapkv", "ada_snapkv", "pyramidkv", "ada_pyramid", "defensivekv", "cake", "lava")
    found: dict[str, Make] = {name: lambda b, f=getattr(methods, name): f(b, window=16) for name in windowed}
    for name in ("h2o", "tova", "mas", "roco", "nacl", "keyformer", "ahakv"):
        found[name] = once(getattr(methods, name))
    for name in ("expected_attention", "keydiff", "knorm", "compactor", "curdkv", "random", "window"):
        found[name] = getattr(methods, name)
    found["criticalkv"] = lambda b: methods.criticalkv(methods.ada_snapkv(b, window=16))
    return {(name,): make for name, make in found.items()}


def measured(
    options: Findings, policies: Mapping[Any, Make], oracles: Sequence[Any], first: int = 0
) -> Iterator[Divergences]:
    """Divergences of every policy and budget, batch by batch from a prompt on; the oracles' last."""
    source, size = options.model, {"count": options.prompts, "length": options.length + options.follow}
    tokenizer = models.load_tokenizer(source)
    if options.text is None:
        ids = prompts.from_project(tokenizer, **size)
    else:
        ids = prompts.from_file(tokenizer, options.text, **size)
    model, params = models.load(source, dtype=options.dtype)
    named = {", ".join(name): make for name, make in policies.items()}
    for i in tqdm(range(first, len(ids), options.batch_size), unit="batch"):
        batch = ids[i : i + options.batch_size]
        cut = batch[:, : options.length], batch[:, options.length :]
        key = jax.random.fold_in(jax.random.key(0), i)
        found = curves(model, params, *cut, named, options.budget, key=key, oracles=oracles)
        most = np.maximum(np.array(options.budget) * options.length, 1)
        if (over := found.values("live").max(-1) > most + 1).any():
            name = found.policies[int(over.any(1).argmax())]
            raise ValueError(
                f"{name} keeps more than a budget of {most[over.any(0)].min():.0f} tokens, as so few cannot hold what "
                "always stays; raise --length, or the smallest --budget"
            )
        yield found.values("kl")


# --- variance explained ---


def explained(kl: Divergences, among: Collection[str]) -> dict[str, Interval]:
    """What share of the variance of mean log divergences each of `FACTORS` explains, "P" in the order of `crossed`.

    Args:
      kl: the divergences.
      among: the scores that count.
    """
    logs = _logs(kl).reshape(len(SCORES), len(PROTECTIONS), len(DIVISIONS), -1)[[x in among for x in SCORES]]
    return stats.explained(logs, FACTORS)


# --- pages ---


def what_decides(options: Findings, kl: Divergences) -> tuple[str, Figure]:
    """The page and the picture of the factorial."""
    cells, head = [*crossed()], [f"{100 * b:.4g} %" for b in options.budget]
    among = {f"variance explained, {name}, %": [explained(kl[:, m], of) for m in range(len(head))]
             for name, of in AMONG.items()}  # fmt: skip
    found = next(iter(among.values()))
    largest = {max(FACTORS, key=lambda f: of[f].mean) for of in found}
    title = f"What decides most is the {largest.pop()}" if len(largest) == 1 else "What decides depends on the budget"
    tables: list[str | Table] = [
        Table((what, *head), [(name, *(percent(*of[name]) for of in each)) for name in found[0]])
        for what, each in among.items()
    ]
    for axis, factor in enumerate(FACTORS):
        levels = {cell[axis]: [other[axis] == cell[axis] for other in cells] for cell in cells}
        rows = [(level, *_shown(_logs(kl[of]).mean(0), ".3f")) for level, of in levels.items()]
        tables += [f"Divergence in nats by {factor}, over all of the others:", Table((factor, *head), rows)]
    drawn = {name: [Interval(*(100 * x for x in of[name])) for of in found] for name in found[0]}
    figure = _picture(options, title, drawn, "variance explained, % (95 % interval)")
    figure.axes[0].set_ylim(-3, 103)
    return _page(options, title, f"{len(cells)} policies a budget", *tables), figure


def to_hindsight(options: Findings, kl: Divergences) -> tuple[str, Figure]:
    """The page and the picture of published methods beside hindsight."""
    names = [*(name for (name,) in published()), *(f"hindsight ({x})" for x in _ORACLES)]
    logs, first = _logs(kl), len(names) - len(_ORACLES)
    best, oracle = logs[:first].mean(-1).argmin(0), first + logs[first:].mean(-1).argmin(0)
    ratios = of_best(logs[:first]) - of_best(logs[first:])
    ends = dict.fromkeys(f"{end(x.mean for x in _typical(ratios)):.1f}" for end in (min, max))
    title = f"The best method's divergence is {' to '.join(ends)} times hindsight's"
    head, order = [f"{100 * b:.4g} %" for b in options.budget], np.argsort(logs.mean((1, 2)))
    rows = zip(head, (names[i] for i in best), (names[i] for i in oracle), _shown(ratios, ".2f"), strict=True)
    tables = [
        Table(("at", "best method", "best in hindsight", "times its divergence"), [*rows]),
        "Times its divergence: the best of each half of the prompts, measured on the other half.",
        "Divergence in nats:",
        Table(("policy", *head), [(names[p], *_shown(logs[p], ".3g", ".2g")) for p in order]),
    ]
    drawn = [p for p in order if p in oracle or p in best or names[p] == "random"]
    shown = {names[p]: _typical(logs[p]) for p in drawn}
    figure = _picture(options, title, shown, "divergence, nats (95 % interval)")
    figure.axes[0].set_yscale("log")
    return _page(options, title, f"{first} methods", *tables), figure


def lost(options: Lost, record: Record) -> tuple[str, Figure]:
    """The page and the picture of what is live of facts."""
    contexts, scores, sizes, num = record["context"].tolist(), record["score"], record["length"], len(options.budget)
    (first, last), num_layers = ends(record), record["live"].shape[1]
    shares = live_of(record, VALUE).mean(1), first, last, live_of(record, KEY).mean(1), record["near"].mean(1)
    mean = lambda x: stats.interval(np.round(x, 9).tolist(), contexts)  # the bootstrap tells equal sums by their noise
    layers, tables = whole(record), list[str | Table]()
    head = "method", "answers right, %", "live of the value, %", "first token", "last token", "its key", "beside it"
    for i, share in enumerate(options.budget):
        rows = []
        for c in sorted(range(i, len(scores), num), key=lambda c: (-scores[c].mean(), -layers[c].mean())):
            of = cell(*(num_layers * x for x in mean(layers[c] / num_layers)))
            rows.append((options.methods[c // num], *(percent(*mean(x[c])) for x in (scores, *shares)), of))
        tables += [f"{100 * share:.4g} % of the prompt stays:", Table((*head, "layers with the whole value"), rows)]
    first_share = scores[::num].mean(1), layers[::num].mean(1), shares[0][::num].mean(1)
    title = "Methods find as much, or keep as much, as each other"
    if all(np.ptp(x) > 0 for x in first_share):
        held, live = (scipy.stats.spearmanr(first_share[0], x).statistic for x in first_share[1:])
        title = (
            f"Methods find what they keep whole: scores' rank correlation is {held:.2f} with the layers that have the "
            f"whole value, {live:.2f} with the share of it that is live"
        )
    what = (
        f"so many of each of {', '.join(options.setup.task_names)}, {sizes.min():,} to {sizes.max():,} tokens long "
        f"(mean {sizes.mean():,.1f}), in {len({*contexts})} passages, over which intervals are, in a chat where there "
        "is a template. Live is the share of (layer, head, token) when the answer begins, beside it that of the "
        f"{BESIDE} tokens on either side of the fact; a layer has the whole value where one of its heads does"
    )
    figure = message(map_of(record, options.methods, options.budget), title, f"{options.model}, {len(sizes)} prompts")
    return _page(options, title, what, *tables, over="Means"), figure


def of_best(logs: Float[np.ndarray, "P M B"]) -> Float[np.ndarray, "M B"]:
    """The best policy of every budget: of each second prompt that which is best on the others, and the other way."""
    found, even = np.empty(logs.shape[1:]), np.arange(logs.shape[-1]) % 2 == 0
    for here in (even, ~even):
        best = logs[..., ~here].mean(-1).argmin(0)
        found[:, here] = logs[best, np.arange(len(best))][:, here]
    return found


def _typical(logs: Float[np.ndarray, "M B"]) -> list[Interval]:
    """Geometric means over prompts at every budget, with 95 % intervals."""
    return [Interval(*ends) for ends in zip(*map(np.exp, interval(logs)), strict=True)]


def _shown(logs: Float[np.ndarray, "M B"], form: str, ends: str | None = None) -> list[str]:
    return [cell(*x, form=form, ends=ends) for x in _typical(logs)]


def _picture(options: Findings, title: str, found: Mapping[str, Sequence[Interval]], ylabel: str) -> Figure:
    points = {name: dict(zip(options.budget, each, strict=True)) for name, each in found.items()}
    figure = kvjax.plot.budget_curve(points, ylabel=ylabel, several=False)
    return message(figure, title, f"{options.model}, {options.prompts} prompts of {options.length:,} tokens")


def _logs(kl: Divergences) -> Divergences:
    """Logarithms of divergences, which are 1e-9 nats at least."""
    return np.log(np.maximum(kl, 1e-9))


_ORACLES: Final = ("head", "layer", "model")


def _page(options: Findings, title: str, what: str, *tables: str | Table, over: str = "Geometric means") -> str:
    """Markdown of what was measured, and how it is measured again."""
    text = "the project's text" if options.text is None else options.text.name
    words = ["experiments/findings.py", options.name]
    for field in dataclasses.fields(options)[1:]:
        value = getattr(options, field.name)
        if field.name != "output" and value != field.default:
            shown = value if isinstance(value, tuple) else (text if field.name == "text" else value,)
            words += [f"--{field.name.replace('_', '-')}", *map(str, shown)]
    about = (
        f"Model {options.model} in {options.dtype}, {options.prompts} prompts of {options.length:,} tokens of {text}; "
        f"the next {options.follow} are read with what is left; {what}. {over} over prompts, with 95 % "
        f"intervals. By `python {shlex.join(words)}`."
    )
    return markdown(title, about, f"![{title}]({_stem(options)}.png)", *tables)


def _stem(options: Findings) -> str:
    """What files are called."""
    return f"{options.name}-{pathlib.PurePath(options.model).name}"


def run(options: Findings) -> None:
    """Measures what is missing, and writes."""
    stem = _stem(options)
    check_output(options.output / f"{stem}.png")
    sizes = {name: value for name, value in dataclasses.asdict(options).items() if name != "output"}
    text = None if options.text is None else str(options.text)
    contents = {"text": text_digest(text), "model": models.fingerprint(options.model)}
    stored, asked = options.output / f"{stem}.npz", json.dumps(sizes | {"contents": contents}, default=str)
    crossing, record = options.name == "what_decides", _stored(stored, asked)
    done = next(iter(record.values())).shape[-1] if record else 0
    if done == options.prompts * (len(options.setup.task_names) if isinstance(options, Lost) else 1):
        print(f"{stored} is complete")
    else:
        policies, oracles = (crossed(), ()) if crossing else (published(), _ORACLES)
        kl = ({"kl": x.astype(np.float32)} for x in measured(options, policies, oracles, done))
        for found in traced(options.setup, options.policies, done) if isinstance(options, Lost) else kl:
            record = {name: np.concatenate([record[name], x], -1) if record else x for name, x in found.items()}
            content = io.BytesIO()
            kept: dict[str, Any] = record | {"options": asked}
            np.savez_compressed(content, **kept)
            write_bytes(stored, content.getvalue())
    if isinstance(options, Lost):
        page, figure = lost(options, record)
    else:
        page, figure = (what_decides if crossing else to_hindsight)(options, record["kl"].astype(float))
    write_page(options.output, stem, page, {stem: figure})


def _stored(file: pathlib.Path, asked: str) -> Record:
    """What has been measured for these options; nothing if nothing has.

    Raises:
      ValueError: those of others are there.
    """
    if not file.exists():
        return {}
    with np.load(file) as data:
        if (there := str(data["options"])) != asked:
            raise ValueError(f"{file} was measured with {there}, not {asked}; give another --output")
        return {name: x for name, x in data.items() if name != "options"}


@as_command
def main(argv: Sequence[str]) -> None:
    """Parses and runs."""
    if "long_outputs" in argv:
        long_outputs.run(parsed(LongOutputs, argv, "findings", __doc__), [sys.executable, *sys.argv])
    else:
        run(parsed(Lost if "lost" in argv else Findings, argv, "findings", __doc__))


if __name__ == "__main__":
    main()
