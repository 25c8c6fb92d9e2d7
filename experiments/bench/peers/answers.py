"""kvpress's answers to the prompts of a run, beside kvjax's: are methods in the same order?

    python -m kvjax.experiments.bench.peers.answers results/board/smollm2-135m-instruct/runs/in_prompt

Presses have kvpress's defaults, and keep the share of the prompt that kvjax's method did. Each reads the tokens that it
read, and answers as greedily. Written are `answers.md` and `scores.csv.gz`; a press that has answered is not asked
again, so that Ctrl-C loses one press.
"""

import json
import pathlib
import tempfile
from typing import Any, Final

import pandas as pd
import tyro

from kvjax import models
from kvjax.configs.experiment import Setup, check_whole
from kvjax.experiments.bench.peers.checkpoints import published
from kvjax.experiments.bench.peers.environment import ROOT, check_interpreter, make_environment
from kvjax.experiments.bench.peers.rows import PRESSES
from kvjax.experiments.bench.process import apart, stored_rows
from kvjax.experiments.core import stats
from kvjax.experiments.core.command import script, write_json, write_page
from kvjax.experiments.core.engine import Prompt, text_of
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.core.page import Table, difference, markdown, percent
from kvjax.experiments.core.records import Line, read_lines, read_manifest
from kvjax.experiments.core.setup import build, find_builders

_PEERS: Final = "experiments.bench.peers"  # without kvjax
OF_PRESS: Final = {**PRESSES, "snapkv": "SnapKVPress", "ada_snapkv": "AdaKVPress"}
"""kvjax's methods and the presses that answer beside them."""


def asked(directory: pathlib.Path, examples: int) -> tuple[Setup, list[Prompt]]:
    """The setup of a run, and of its prompts that end with a question those of the first examples of every task.

    Raises:
      ValueError: there are none.
    """
    said = read_manifest(directory)["config"]["setup"]
    given: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in said.items()}
    setup = Setup(**given)
    tokenizer, config = models.load_tokenizer(setup.source), models.read_config(setup.source)
    prompts, _ = build(setup, find_builders(setup), tokenizer, config)
    found = [p for p in prompts if p.example.index < examples and len(p.asked) == 1 and not p.asked[0][1]]
    if not found:
        raise ValueError(f"no prompt of {directory} ends with its question; presses are asked what is asked in_prompt")
    return setup, found


def table(rows: pd.DataFrame) -> Table:
    """A row a method, the best of kvjax's first: both scores with intervals, and how many answers are the same."""
    places = {side: rows.groupby("method")[side].mean().rank(ascending=False) for side in ("ours", "theirs")}
    cells = []
    for method in places["ours"].sort_values(kind="stable").index:
        of = rows[rows["method"] == method]
        ours, theirs, contexts = (of[name].tolist() for name in ("ours", "theirs", "context"))
        c = stats.compare(ours, theirs, contexts)
        scores = (percent(*stats.interval(x, contexts)) for x in (ours, theirs))
        ranks = (f"{places[side][method]:g}" for side in places)
        same = f"{(of['our_output'] == of['their_output']).mean():.0%}"
        cells.append(
            (
                method,
                of["press"].iloc[0],
                f"{of['share'].iloc[0]:.1%}",
                *scores,
                *ranks,
                difference(False, c.difference, c.low, c.high),
                same,
            )
        )
    head = "method", "press", "of prompt", "kvjax, %", "kvpress, %", "place", "its place", "difference", "same answers"
    return Table(head, cells)


def page(rows: pd.DataFrame, setup: Setup, budget: str, about: dict[str, Any]) -> str:
    """`answers.md`."""
    means = rows.groupby("method")[["ours", "theirs"]].mean()
    tau = means["ours"].corr(means["theirs"], method="kendall")
    count = rows.groupby(["task", "index"]).ngroups
    title = f"{len(means)} methods of kvjax and presses of kvpress on {count} prompts: Kendall's tau {tau:.2f}"
    versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items())
    text = (
        f"Model {setup.model} in {setup.dtype}, tasks {', '.join(setup.task_names)} by up to {setup.length:,} tokens, "
        f"kvjax's budgets {budget}. A press has kvpress's defaults, keeps the share of the prompt that the method kept "
        f"on average, reads the same tokens and answers as greedily ({versions}). Defaults differ (windows, pooling, "
        "tokens that always stay). Tau is of means over all prompts, as are places, ties between. Differences are "
        "kvjax's points less kvpress's on the same prompts; intervals of 95 %."
    )
    return markdown(title, text, table(rows))


def bench(
    run: tyro.conf.Positional[pathlib.Path],
    budget: str = "bytes-0.25",
    methods: tuple[str, ...] = (),
    examples: int = 32,
    peers_python: pathlib.Path | None = None,
    environment: pathlib.Path | None = None,
    output: pathlib.Path = ROOT / "results" / "answers",
) -> None:
    """Asks every press that has a method among a run's, and compares.

    Args:
      run: a directory with samples.jsonl, of `board.py` or `run.py`.
      budget: of kvjax's methods there.
      methods: those whose presses are asked; all of the run that have one if not given.
      examples: of every task, the first ones.
      peers_python: an interpreter that has torch, transformers and kvpress, in place of the environment.
      environment: where the peers' environment is, or is made; in the user's cache directory if None.
      output: a directory.
    """
    check_whole(1, examples=examples)
    setup, prompts = asked(run, examples)
    ours: dict[str, dict[Any, Line]] = {}
    for (method, of, task, index, _), line in read_lines(run / "samples.jsonl")[0].items():
        if of == budget and method in OF_PRESS:
            ours.setdefault(method, {})[task, index] = line
    chosen = methods or tuple(ours)
    if lacking := [name for name in chosen or ("method",) if name not in ours]:
        known = ", ".join(ours) or "none"
        raise ValueError(f"{run} has no {', '.join(lacking)} at {budget} that has a press; there are {known}")
    python = check_interpreter(peers_python) if peers_python else make_environment(environment)
    about = {"run": run.name, "budget": budget, "examples": examples, "versions": _theirs(python, "versions")}
    if about["versions"]["kvpress"] is None:
        raise ValueError(f"{python} has no kvpress; leave --peers-python out, and the environment is made")
    tokenizer, ends = models.load_tokenizer(setup.source), models.read_config(setup.source).eos_ids
    source = published(str(setup.source), setup.dtype)
    path, rows = output / "answers.json", []
    with Locked(output), tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "prompts.json"
        write_json(file, [(p.tokens, p.example.questions[p.asked[0][0]].max_new_tokens, ends) for p in prompts])
        for method in chosen:
            lines = [ours[method].get((p.example.task, p.example.index), {}) for p in prompts]
            if any("score" not in line for line in lines):
                raise ValueError(f"{run} lacks scores of {method} at {budget}; let it finish first")
            share = sum(x["live"] for x in lines) / sum(x["prompt_tokens"] for x in lines)
            there = stored_rows(path, about)
            if method not in there:
                given = str(source), setup.dtype, OF_PRESS[method], share, str(file)
                there[method] = _theirs(python, "answers", *given)
                write_json(path, {**about, "rows": there})
            for p, line, ids in zip(prompts, lines, there[method], strict=True):
                question = p.example.questions[p.asked[0][0]]
                output_of = text_of(tokenizer, question, ids, ends)
                row = {"method": method, "press": OF_PRESS[method], "share": share, "context": line.get("context")}
                row |= {name: line[name] for name in ("task", "index")} | {"ours": line["score"]}
                row |= {"theirs": question.score(output_of), "our_output": line["output"], "their_output": output_of}
                rows.append(row | {"references": json.dumps(line["references"])})
            print(f"{method}: {OF_PRESS[method]} has answered", flush=True)
        every = pd.DataFrame(rows)
        write_page(output, "answers", page(every, setup, budget, about), {}, [every])


def _theirs(python: pathlib.Path, function: str, *given: Any) -> Any:
    """What a function of `first_theirs` returns in the peers' environment.

    Raises:
      ValueError: it failed.
    """
    try:
        return apart(f"{_PEERS}.first_theirs", function, *given, python=(str(python),), where=ROOT, PYTHONPATH="")
    except RuntimeError as e:
        raise ValueError(f"{function}{given} of {python} failed: {str(e).strip().splitlines()[-1]}") from e


if __name__ == "__main__":
    script(bench)
