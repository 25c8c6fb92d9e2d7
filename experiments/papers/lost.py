"""Where the tokens of a hidden fact are live when the answer begins, by layer and kv head.

Letters: C policies at their budgets, L layers, K kv heads, F tokens of the longest fact, B prompts.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from tqdm import tqdm

from kvjax import models
from kvjax.configs.experiment import Setup
from kvjax.experiments.core.engine import Engine, read_once, share_slots
from kvjax.experiments.core.job import planned
from kvjax.experiments.core.setup import Run, build, find_builders
from kvjax.experiments.papers.base import canvas
from kvjax.experiments.tasks import Example

BESIDE: Final = 64
"""Tokens on either side of a fact that it is compared with."""
KEY, VALUE = 1, 2
"""What a token of a fact is of; all tokens of a fact of the project's own tasks are of the value."""
Record = dict[str, np.ndarray]
"""What was measured, by name; prompts are the last axis of every array."""


def fact_in(tokenizer: Any, example: Example) -> Int[np.ndarray, "T"]:
    """`KEY` and `VALUE` where the tokens of a context are of the fact that is asked for, else 0.

    Raises:
      ValueError: a context that has no such fact.
    """
    part, meta = np.zeros(len(example.context), np.int8), dict(example.meta)
    if "needle_at" in meta:
        part[int(meta["needle_at"]) :][: int(meta["needle_tokens"])] = VALUE
        return part
    value, pieces = (
        example.questions[0].references[0],
        [tokenizer.decode([t]).replace(" ", "") for t in example.context],
    )
    found = re.search(f"magic[a-z]+for([^:]+)is:({value})", "".join(pieces))
    if found is None:
        raise ValueError(f"{example.task}, example {example.index}: its context has no magic value {value!r} to trace")
    token_of = np.repeat(np.arange(len(pieces)), [*map(len, pieces)])  # of each character
    for kind in (KEY, VALUE):
        part[token_of[slice(*found.span(kind))]] = kind
    return part


def traced(setup: Setup, runs: Sequence[Run], first: int = 0) -> Iterator[Record]:
    """What policies leave of the facts in each batch of prompts, from a prompt on.

    Args:
      setup: model and prompts, whose examples each ask for one value.
      runs: the policies.
      first: how many prompts are left out.

    Yields:
      live: "C L K F B", whether each token of the fact is.
      near: "C L B", the share of (head, token) that is live of the `BESIDE` tokens on either side of the fact.
      score, output: "C B", of the answer.
      part: "F B", as `fact_in` has it, 0 behind the last.
      length, value, context: "B", tokens of the prompt, what is asked for, and a name of what it is hidden in.
    """
    tokenizer, config = models.load_tokenizer(setup.source), models.read_config(setup.source)
    prompts, _ = build(setup, find_builders(setup), tokenizer, config)
    facts = {prompt: fact_in(tokenizer, prompt.example) for prompt in prompts}
    most = max(int(np.count_nonzero(part)) for part in facts.values())
    model, params = models.load(setup.source, dtype=setup.dtype)
    for asked in planned(model, params, runs, prompts, batch_size=setup.batch_size, tokenizer=tokenizer, once=True):
        engines = [engine for *_, engine in asked]
        share_slots(engines)
        together = [[e for e in engines if e.stored == way] for way in dict.fromkeys(e.stored for e in engines)]
        every = engines[0].shape.prompts
        todo, first = every[first:], max(first - len(every), 0)
        for i in tqdm(range(0, len(todo), setup.batch_size), unit="batch"):
            batch, found = todo[i : i + setup.batch_size], dict[Engine, list[Record]]()
            for same in together:
                ((_, (full,)),) = read_once(same, [batch])
                for engine in same:
                    if not i:
                        engine.compile(full)
                    lines, kept = engine.run(batch, [p.example for p in batch], full)
                    each = zip(batch, lines, kept, strict=True)
                    found[engine] = [line | _left(facts[p], most, layers) for p, (line,), layers in each]
            names, rows = ("live", "near", "score", "output"), [found[engine] for engine in engines]
            of = {x: np.moveaxis(np.array([[row[x] for row in own] for own in rows]), 1, -1) for x in names}
            parts = [facts[p][facts[p] > 0] for p in batch]
            of["part"] = np.stack([np.pad(part, (0, most - len(part))) for part in parts], -1)
            of["value"] = np.array([p.example.questions[0].references[0] for p in batch])
            of["length"] = np.array([len(p.tokens) for p in batch])
            own = (dict(p.example.meta).get("same_context", f"{p.example.task}/{p.example.index}") for p in batch)
            yield of | {"context": np.array([*own])}


def _left(part: Int[np.ndarray, "T"], most: int, layers: Sequence[Int[np.ndarray, "K S"]]) -> dict[str, Any]:
    """What is live of a fact and beside it, of the positions that layers hold."""
    live = np.array([[np.isin(np.arange(len(part)), head) for head in positions] for positions in layers])
    (at,) = np.nonzero(part)
    beside = np.flatnonzero(part[: at[-1] + 1 + BESIDE] == 0)
    near = live[..., beside[beside >= at[0] - BESIDE]].mean((1, 2))
    return {"live": np.pad(live[..., at], ((0, 0), (0, 0), (0, most - len(at)))), "near": near.astype(np.float32)}


def live_of(record: Record, kind: int) -> Float[np.ndarray, "C L B"]:
    """The share of (head, token) that is live of a kind of tokens."""
    of = record["part"] == kind
    return (record["live"] & of).mean(2).sum(2) / np.maximum(of.sum(0), 1)


def ends(record: Record) -> list[Float[np.ndarray, "C B"]]:
    """The share of heads in which the value's first token is live, and its last."""
    of, heads = record["part"] == VALUE, record["live"].mean((1, 2))
    places = of.argmax(0), len(of) - 1 - of[::-1].argmax(0)
    return [heads[:, place, range(len(place))] for place in places]


def whole(record: Record) -> Int[np.ndarray, "C B"]:
    """In how many layers some head has the whole value."""
    return (record["live"] | (record["part"] != VALUE)).all(3).any(2).sum(1)


def map_of(record: Record, names: Sequence[str], budgets: Sequence[float]) -> Figure:
    """For every budget a map of what is live of the value, layers by methods in the order of scores, and these.

    Args:
      record: policies are those of names, each at all budgets.
      names: of methods.
      budgets: shares of the prompt.
    """
    sizes = {"width": 5.0, "height": 0.9 + 0.24 * len(names), "width_ratios": (2.4, 1)}
    figure, grid = canvas(2, len(budgets), **sizes)
    value, score, layers = 100 * live_of(record, VALUE).mean(-1), 100 * record["score"].mean(-1), whole(record).mean(-1)
    for i, (budget, (left, right)) in enumerate(zip(budgets, grid, strict=True)):
        own = slice(i, None, len(budgets))
        order = np.lexsort((-layers[own], -score[own]))
        norm = TwoSlopeNorm(100 * budget, 0, 100)
        image = left.imshow(value[own][order], norm=norm, cmap="RdBu", aspect="auto", interpolation="none")
        left.grid(False)
        left.set(title=f"live of the value, {100 * budget:g} % of the prompt kept", xlabel="layer")
        left.set_yticks(range(len(order)), [names[k] for k in order])
        bar = figure.colorbar(image, ax=left, pad=0.01, ticks=sorted({0, 100, 100 * budget}))
        bar.set_label("of (head, token), %; white: the budget")
        right.barh(range(len(order)), score[own][order])
        right.set(ylim=left.get_ylim(), yticks=[], xlim=(0, 100), xlabel="answers right, %")
    return figure
