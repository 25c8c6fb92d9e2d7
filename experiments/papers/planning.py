"""The hours and memory of an entry as its paper sets it, on one H100, before anything is loaded."""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

import kvjax
from kvjax.configs.experiment import label
from kvjax.experiments.papers import FIGURES
from kvjax.experiments.papers.attention import BLOCK
from kvjax.experiments.papers.methods import Budget, Method
from kvjax.experiments.papers.runs import JUDGED, Options, lines_of, models_of
from kvjax.experiments.papers.tables import DATA, MODELS, Entry, Model, data_of, task_of
from kvjax.run.plan import make_plan

FLOPS, BANDWIDTH = 400e12, 2.0e12  # 40 and 60 % of what is stated of an H100; an H200 reached 570e12 and 3.4e12
PER_WORD, EXAMPLE, CHOICES = 1.4, 60, 3  # tokens of a word and of an example of lm-eval, and answers to rank
ROWS, TIMED, NEEDLES = 1000, 5, 44  # prompts, where the text does not say how many; of needles a map's
ASSUMED: Final = f"""\
assumed: {FLOPS / 1e12:.0f} TFLOP/s, {BANDWIDTH / 1e12:.1f} TB/s, bfloat16, compiling not counted; {PER_WORD} tokens
a word, {EXAMPLE} an example of lm-eval, {CHOICES} answers to rank; where numbers are not known, {ROWS:,} rows, and
prompts as long as the model reads"""


class Work(NamedTuple):
    """Prompts of a data set: how many, their tokens, those to generate, and how many prompts run together."""

    task: str
    prompts: int
    tokens: int
    new: int
    batch: int


def planned(entry: Entry, options: Options) -> str:
    """What an entry runs, how long that takes and what it holds; options that make a run smaller do so here.

    Figures that are drawn read prompts with one model of the paper.

    Raises:
      ValueError: an entry that reads no data with a model, a model that it has not, or a budget that is not stated and
        not given.
    """
    wanted = models_of(entry, options)
    if entry.drawn:
        parts = [_of_figure(name, MODELS[wanted[0]], options) for name in entry.figures]
    else:
        parts = [line for name in wanted for line in _of_model(entry, name, options)] if entry.runs else []
        if any(DATA[d].runner == "planned" for d in entry.data):
            parts = ["no model runs: memory is computed, in seconds without the card"]
    if not parts:
        raise ValueError(f"{entry.name} measures no policy on a data set, which is all that is planned")
    return "\n".join([f"{entry.name}: {entry.shows}", *parts, ASSUMED])


def _of_model(entry: Entry, name: str, options: Options) -> Iterator[str]:
    """The lines about one of the entry's models; none where nothing is run."""
    model, columns = MODELS[name], [c for c in entry.measured(name) if c.metric not in JUDGED]
    sets = dict.fromkeys((d, c.shots) for c in columns for d in c.data if DATA[d].runner != "planned")
    if not sets:
        return
    works, lines = [work(*key, model, options) for key in sets], lines_of(entry, name, options)
    of = lambda count, line, w: count(entry.methods[line[0]], line[1], w, model, entry.beams)
    yield f"{model.title}, {model.billions} billion parameters, {len(lines)} methods and budgets"
    hours = [sum(of(seconds, line, w) for line in lines) / 3600 for w in works]
    for w, spent in zip(works, hours, strict=True):
        each = f"{w.prompts:,} prompts of {w.tokens:,} tokens, {w.batch} at once, {w.new:,} to generate"
        yield f"  {w.task}: {each}: {spent:.3g} hours"
    longest = max(works, key=lambda w: w.batch * (w.tokens + w.new))
    sizes = sorted((of(memory, line, longest), f"{line[0]} at {label(line[1])}") for line in lines)
    (least, smallest), (most, largest) = sizes[0], sizes[-1]
    weights = 2 * model.billions
    parts = f"{weights:.3g} of weights, {most / 1e9:.3g} of caches and reading ({longest.task} under {largest}"
    parts += f", {least / 1e9:.3g} under {smallest})"
    held = weights + most / 1e9
    over = "" if held <= 80 else ", which does not fit" + ("; lower --batch-size" if longest.batch > 1 else "")
    yield f"  in all {sum(hours):.3g} hours and {held:.3g} of the card's 80 GB{over}: {parts}"


def _of_figure(name: str, model: Model, options: Options) -> str:
    """The line about a figure: its prompts are read, and their attention is read again, some rows at a time."""
    size, config = FIGURES[name], model.config
    prompts = (options.examples or size.prompts) * len(options.seeds)
    tokens, heads = min(options.length or size.length, model.positions), config.num_query_heads
    operations = 2e9 * model.billions * tokens + 6 * model.layers * heads * model.head_dim * tokens**2
    spent = max(prompts * operations / FLOPS, 2e9 * model.billions / BANDWIDTH)
    read = 2 * model.layers * (heads + 2 * model.kv_heads) * model.head_dim + 8 * heads * BLOCK
    return (
        f"{name} by {model.title}: {prompts} prompts of {tokens:,} tokens, read once with all rows of attention, "
        f"{spent:.2g} seconds and {2 * model.billions + prompts * tokens * read / 1e9:.3g} of the card's 80 GB; "
        "evicting token by token takes longer"
    )


def work(name: str, shots: int, model: Model, options: Options) -> Work:
    """What a data set has a model read and generate."""
    data, timed = DATA[name], DATA[name].runner == "speed"
    new = min(data.new_tokens, options.new_tokens or data.new_tokens)
    tokens = model.positions if data.words is None else round(data.words * (1 if timed else PER_WORD))
    if data.runner in ("harness", "text"):
        tokens = (shots + 1) * EXAMPLE
    rows = options.examples or data.examples or {"speed": TIMED, "needle": NEEDLES}.get(data.runner, ROWS)
    rows *= len(options.seeds) * (data.batch if timed else CHOICES if data.runner == "harness" else 1)
    tokens = min(tokens, options.length or tokens, tokens if timed else model.positions - new)
    return Work(task_of(name, shots), rows, tokens, new, data.batch if timed else options.batch_size)


def seconds(made: Method, budget: Budget, w: Work, model: Model, beams: int) -> float:
    """Reading takes as long as its operations or as the bytes of its passes, a step as long as its bytes."""
    config, policy, lengths = model.config, made.policy(budget, w.tokens + w.new), np.array([w.tokens])
    cache = 4 * model.head_dim * make_plan(config, policy, lengths, w.tokens, w.new).num_slots
    batches, moved = math.ceil(w.prompts / w.batch), 2e9 * model.billions + w.batch * beams * cache
    block = made.block or (1 if data_of(w.task).runner == "stream" else w.tokens)
    attention = 2 * config.num_layers * config.num_query_heads * config.head_dim * w.tokens**2
    computed = w.prompts * (2e9 * model.billions * w.tokens + attention)
    reading = max(computed / FLOPS, batches * math.ceil(w.tokens / block) * moved / BANDWIDTH)
    return reading + batches * w.new * moved / BANDWIDTH


def memory(made: Method, budget: Budget, w: Work, model: Model, beams: int) -> int:
    """Bytes of caches and of reading, each hypothesis of a search with its own."""
    how = {"batch": w.batch * beams, "prompt_len": w.tokens, "max_new_tokens": w.new, "block": made.block}
    return kvjax.plan_memory(model.config, made.policy(budget, w.tokens + w.new), **how).peak
