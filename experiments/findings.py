"""Two questions to all methods: what decides, and how far the best is from hindsight.

    python experiments/findings.py what_decides --model smollm2-135m-instruct --text book.txt
    python experiments/findings.py to_hindsight --model smollm2-135m-instruct --text book.txt

Every policy evicts from the same reading of each prompt, and the tokens that follow are read with what is left: what is
measured is how far the model's next-token distribution diverges from the full cache's (`kvjax.analysis.curves`).
`what_decides` crosses scores, tokens that always stay and divisions of the budget, and says what share of the variance
of log divergences, between means over prompts, each of them explains. `to_hindsight` sets published methods beside the
masks that keep what the continuation attends to most. Written to `results/findings/`: a page, its picture, and
`NAME-MODEL.npz`, the divergences of every policy, budget and prompt, to which batches of prompts are added as they end.
"""

import importlib

if __name__ == "__main__":  # before imports that take seconds
    importlib.import_module(f"{__package__ or ''}.stopping".lstrip(".")).begin()

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
import tyro
from jaxtyping import Float
from matplotlib.figure import Figure
from tqdm import tqdm

import kvjax
from kvjax import Evict, Policy, methods, models
from kvjax.analysis import Interval, curves, interval
from kvjax.budgets import Pyramid, Schedule
from kvjax.configs.experiment import Budget, check_distinct, check_whole
from kvjax.experiments.core.command import check_output, run_options, write_page
from kvjax.experiments.core.page import Table, cell, markdown, percent
from kvjax.experiments.core.setup import text_digest
from kvjax.experiments.papers import prompts
from kvjax.experiments.papers.base import message
from kvjax.models.embedded import included
from kvjax.models.written import write_bytes

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

    name: Annotated[Literal["what_decides", "to_hindsight"], tyro.conf.Positional]
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
        check_whole(1, **{name: getattr(self, name) for name in ("length", "follow", "batch_size")})
        check_whole(2, prompts=self.prompts)
        check_distinct("budget", [f"{100 * share:.4g} %" for share in self.budget])
        if not all(0 < share < 1 for share in self.budget):
            raise ValueError(f"budget {self.budget} must be shares of the prompt above 0 and below 1")


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
    source, size = included(options.model), {"count": options.prompts, "length": options.length + options.follow}
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


def shares(means: Float[np.ndarray, "S P D"]) -> dict[str, float]:
    """The share of the variance between cells that each factor alone explains, and that of their interactions.

    Sums of squares of a balanced design with a number a cell: main effects of `FACTORS`, and the interactions.
    """
    total = ((means - means.mean()) ** 2).sum()
    found = {}
    for axis, name in enumerate(FACTORS):
        others = tuple(a for a in range(3) if a != axis)
        effect = means.mean(others) - means.mean()
        found[name] = float((effect**2).sum() * means.size / means.shape[axis] / total)
    return found | {"interactions": 1 - sum(found.values())}


def explained(kl: Divergences, among: Collection[str], draws: int = 1000) -> dict[str, Interval]:
    """`shares` of mean log divergences, "P" in the order of `crossed`, with 95 % intervals of resampled prompts.

    Args:
      kl: the divergences.
      among: the scores that count.
      draws: how often prompts are resampled.
    """
    logs = _logs(kl).reshape(len(SCORES), len(PROTECTIONS), len(DIVISIONS), -1)[[x in among for x in SCORES]]
    rng, n = np.random.default_rng(0), logs.shape[-1]
    each = [shares(logs[..., rng.integers(n, size=n)].mean(-1)) for _ in range(draws)]
    ends = lambda name: map(float, np.quantile([x[name] for x in each], (0.025, 0.975)))
    return {name: Interval(x, *ends(name)) for name, x in shares(logs.mean(-1)).items()}


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


def _page(options: Findings, title: str, what: str, *tables: str | Table) -> str:
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
        f"the next {options.follow} are read with what is left; {what}. Geometric means over prompts, with 95 % "
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
    contents = {"text": text_digest(text), "model": models.fingerprint(included(options.model))}
    stored, asked = options.output / f"{stem}.npz", json.dumps(sizes | {"contents": contents}, default=str)
    crossing = options.name == "what_decides"
    kl = _stored(stored, asked)
    if len(kl) and kl.shape[-1] == options.prompts:
        print(f"{stored} is complete")
    else:
        policies, oracles = (crossed(), ()) if crossing else (published(), _ORACLES)
        for found in measured(options, policies, oracles, kl.shape[-1]):
            kl = np.concatenate([kl, found], -1) if len(kl) else found
            content = io.BytesIO()
            np.savez_compressed(content, kl=kl.astype(np.float32), options=asked)
            write_bytes(stored, content.getvalue())
    page, figure = (what_decides if crossing else to_hindsight)(options, np.asarray(kl, np.float64))
    write_page(options.output, stem, page, {stem: figure})


def _stored(file: pathlib.Path, asked: str) -> Divergences:
    """The divergences of the prompts that have been measured for these options.

    Raises:
      ValueError: those of others are there.
    """
    if not file.exists():
        return np.zeros((0, 0, 0))
    with np.load(file) as data:
        if (there := str(data["options"])) != asked:
            raise ValueError(f"{file} was measured with {there}, not {asked}; give another --output")
        return data["kl"].astype(float)


def main(argv: Sequence[str]) -> None:
    """Parses and runs."""
    run_options(Findings, run, argv, "findings", __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
