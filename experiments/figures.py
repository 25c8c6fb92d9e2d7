"""The papers' figures, on any model and text.

    python experiments/figures.py attention_entropy
    python experiments/figures.py all
    python experiments/figures.py head_concentration --model Qwen/Qwen3-0.6B --text book.txt --length 2048
    python experiments/figures.py --help

Writes the picture (`NAME.png`), its arrays (`NAME.npz`) and where they come from (`NAME.json`) to `results/figures/`.
Each figure is a function in `experiments.papers` that returns the arrays, and one that plots them.
"""

import contextlib
import dataclasses
import inspect
import io
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from tqdm import tqdm

from kvjax import models
from kvjax.configs.experiment import check_distinct, check_whole
from kvjax.experiments.core.command import as_command, check_output, parsed, write_figure, write_json
from kvjax.experiments.core.locks import alone_in
from kvjax.experiments.core.provenance import environment
from kvjax.experiments.papers import FIGURES, prompts
from kvjax.experiments.papers.base import Prompts
from kvjax.models.written import write_bytes

ALL = "all"


@dataclasses.dataclass(frozen=True)
class Options:
    """Draws one figure of the papers, or all of them.

    Attributes:
      name: which figure, or "all".
      model: a checkpoint directory, a hub id ("owner/name" or "owner/name@revision") or a name of `models.PRESETS`;
        "embedded" or "varied" for a small model that comes with the project.
      text: a text file to read prompts from; the project's own held-out text if None.
      output: directory for the results.
      prompts: how many prompts; what the figure is made for if None.
      length: tokens of a prompt; what the figure is made for if None.
      seed: of the project's text; with several, the prompts of all.
      dtype: of parameters and activations; "auto" for the one that is stored.
      layers: those that are drawn, for figures with a panel a layer; all if not given.
      budget: tokens of a head (128) or shares of the prompt (0.2); what the figure is made for if not given.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    model: str = "embedded"
    text: pathlib.Path | None = None
    output: pathlib.Path = pathlib.Path("results/figures")
    prompts: int | None = None
    length: int | None = None
    seed: int | tuple[int, ...] = 0
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    layers: tuple[int, ...] = ()
    budget: tuple[int | float, ...] = ()

    def __post_init__(self):
        if self.name not in (*FIGURES, ALL):
            raise ValueError(f"there is no figure {self.name!r}; there are {', '.join(FIGURES)} and {ALL}")
        given = {n: v for n in ("prompts", "length") if (v := getattr(self, n)) is not None}
        check_whole(1, **given)
        check_whole(0, seed=self.seed)
        check_distinct("seed", self.seeds)
        if len(self.seeds) > 1 and self.text is not None:
            raise ValueError(f"{self.text} is one text for all {len(self.seeds)} seeds; ask for more prompts instead")
        for name in self.given:
            takes = [n for n, f in FIGURES.items() if name in inspect.signature(f.data).parameters]
            if self.name not in takes:
                raise ValueError(f"{self.name} has no {name}; those that have are {', '.join(takes)}")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"output={self.output} is a file, not a directory")

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds."""
        return self.seed if isinstance(self.seed, tuple) else (self.seed,)

    @property
    def given(self) -> dict[str, Any]:
        """What the figure's function is given."""
        return {name: x for name, x in (("layers", self.layers), ("budgets", self.budget)) if x}


@contextlib.contextmanager
def elapsed(what: str) -> Iterator[None]:
    """Says what is being done and for how long, on one line that a terminal renews every second."""
    done, terminal = threading.Event(), sys.stdout.isatty()
    if not terminal:
        print(f"{what} ...", flush=True)
    bar = tqdm(desc=what, bar_format="{desc} {elapsed}", leave=False, file=sys.stdout, disable=not terminal)

    def renew() -> None:
        while not done.wait(1.0):
            bar.refresh()

    clock = threading.Thread(target=renew, daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()
        bar.close()


def draw(
    name: str, read: Prompts, output: pathlib.Path, about: dict[str, Any], *, part: str = "", **given: Any
) -> None:
    """Computes, plots and writes one figure.

    Args:
      name: which one.
      read: the model and its prompts.
      output: directory, made if absent.
      about: what else to note beside the arrays.
      part: which of several figures this is, for the line that is shown meanwhile.
      **given: layers or budgets, for the figure's function.
    """
    start = time.perf_counter()
    with elapsed(f"{part}{name}: compiling and reading {len(read.tokens)} prompts of {read.length} tokens"):
        data = FIGURES[name].data(read, **given)
    seconds = time.perf_counter() - start
    with elapsed(f"{part}{name}: drawing"):
        picture = FIGURES[name].plot(data)
    arrays: dict[str, Any] = {k: np.asarray(x) for k, x in vars(data).items()}
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    shapes = {k: list(x.shape) for k, x in arrays.items()}
    title = picture.get_suptitle().replace("\n", " ")
    note = {"figure": name, "about": FIGURES[name].title, "title": title, "arrays": shapes, "seconds": seconds}
    with alone_in(output):
        (output / f"{name}.json").unlink(missing_ok=True)  # no note ever stands beside what it is not about
        write_figure(output / f"{name}.png", picture)
        write_bytes(output / f"{name}.npz", content.getvalue())
        write_json(output / f"{name}.json", {**note, **about})
    print(f"{name}: {title} ({seconds:.0f} s)", flush=True)


def run(options: Options, command: Sequence[str]) -> None:
    """Draws what `options` ask for.

    Raises:
      ValueError: a model or text that does not fit.
    """
    check_output(options.output / "figure.png")
    source = options.model
    tokenizer = models.load_tokenizer(source)
    environment_ = environment([*command])
    names = tuple(FIGURES) if options.name == ALL else (options.name,)
    every = list[tuple[str, dict[str, int], np.ndarray]]()
    for name in names:  # before weights are loaded
        figure = FIGURES[name]
        size = {"count": options.prompts or figure.prompts, "length": options.length or figure.length}
        if options.text is None:
            each = [prompts.from_project(tokenizer, **size, seed=seed) for seed in options.seeds]
            tokens = np.concatenate(each)
        else:
            tokens = prompts.from_file(tokenizer, options.text, **size)
        every.append((name, size, tokens))
    model, params = models.load(source, dtype=options.dtype)
    for i, (name, size, tokens) in enumerate(every, 1):
        text = "project" if options.text is None else str(options.text)
        config = {"model": options.model, "text": text, **size, "seed": options.seed, "dtype": options.dtype}
        part, about = f"{i} of {len(names)}, " if len(names) > 1 else "", {"config": config | options.given}
        draw(name, Prompts(model, params, tokens), options.output, about | environment_, part=part, **options.given)
    print(f"written to {options.output}")


@as_command
def main(argv: Sequence[str]) -> None:
    """Parses and runs."""
    names = "\n".join(f"  {name:20s} {figure.title}" for name, figure in FIGURES.items())
    about = f"{(__doc__ or '').splitlines()[0]}\n\nfigures:\n{names}"
    run(parsed(Options, argv, "figures", about), [sys.executable, *sys.argv])


if __name__ == "__main__":
    main()
