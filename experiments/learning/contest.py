"""Which policy loses least, by the exact eviction loss at equal bytes, on prompts that none has seen.

    python experiments/learn.py contest --output results/contest
    python experiments/learn.py contest --model varied --seed 0 --budget 0.25

Every policy keeps as many tokens of each prompt, in a cache that is allocated for exactly those; the loss is by how
much the outputs of a model's layers for the 16 rows to come change (`kvjax.analysis`). Published methods stand beside
compositions of our own, of which the learned ones are trained on the calibration prompts of each model and seed.
Results are stored prompt by prompt, and the same command goes on.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import tyro

import kvjax
from kvjax import methods, models
from kvjax.budgets import Schedule
from kvjax.compose.across import by_top_scores
from kvjax.configs.experiment import label
from kvjax.configs.learned_scorer import get_config
from kvjax.configs.learning import LearnedScorer, Prompts
from kvjax.configs.probed import probed
from kvjax.contract import Layout
from kvjax.experiments.core import stats
from kvjax.experiments.core.locks import alone_in
from kvjax.experiments.core.markdown import table
from kvjax.experiments.core.provenance import device_info
from kvjax.experiments.core.records import Records, read_lines
from kvjax.experiments.learning.budget import losses_of
from kvjax.experiments.learning.future_rows import Reader, examples
from kvjax.experiments.learning.scorer import policy_of, trained
from kvjax.models import scorer
from kvjax.models.written import write_bytes
from kvjax.scores.attention import Votes
from kvjax.scores.blends import Pooled, RemovalError, Shares
from kvjax.scores.learned import Learned

Make = Callable[[float], kvjax.Policy]
HEADS, FREE = kvjax.Adaptive(0.5), kvjax.Adaptive(1.0)


@dataclasses.dataclass(frozen=True)
class Contest:
    """What to run.

    Attributes:
      model: models whose prompts count, each with what is learned of it.
      seed: of prompts and of what is learned.
      budget: shares of the prompt.
      held_out: prompts a task and seed.
      output: where results go.
    """

    model: tuple[str, ...] = ("embedded", "varied")
    seed: tuple[int, ...] = (0, 1, 2)
    budget: tuple[float, ...] = (0.125,)
    held_out: int = 16
    output: pathlib.Path = pathlib.Path("results/contest")


def published(setup: Any, window: int, kernel: int) -> dict[str, Make]:
    """The methods of papers that evict a prompt, with the window that all voting ones share."""
    how = {"window": window, "kernel": kernel}
    snap = lambda b: methods.snapkv(b, **how)
    ada = lambda b: methods.ada_snapkv(b, **how)
    once = lambda policy: kvjax.when(Schedule(), dataclasses.replace(policy, layout=Layout()))
    filters, importance = probed(setup, "", "filters"), probed(setup, "", "heads")
    return {
        "snapkv": snap,
        "snapkv, mean of 5": lambda b: methods.snapkv(b, window=window, kernel=5, pooling="avg"),
        "ada_snapkv": ada,
        "pyramidkv": lambda b: methods.pyramidkv(b, **how),
        "criticalkv": lambda b: methods.criticalkv(snap(b)),
        "criticalkv, ada_snapkv": lambda b: methods.criticalkv(ada(b)),
        "chunkkv": lambda b: methods.chunkkv(snap(b)),
        "headkv": lambda b: methods.headkv(b, importance, **how),
        "defensivekv": lambda b: methods.defensivekv(b, window=window),
        "layer_defensivekv": lambda b: methods.layer_defensivekv(b, window=window),
        "cake": lambda b: methods.cake(b, window=window),
        "lava": lambda b: methods.lava(b, **how),
        "finch": lambda b: once(methods.finch(b, window=window)),
        "h2o": lambda b: once(methods.h2o(b)),
        "tova": lambda b: once(methods.tova(b)),
        "ahakv": lambda b: once(methods.ahakv(b)),
        "expected_attention": methods.expected_attention,
        "keydiff": methods.keydiff,
        "knorm": methods.knorm,
        "lagkv": lambda b: methods.lagkv(b, lag=32),
        "curdkv": methods.curdkv,
        "compactor": methods.compactor,
        "q_filters": lambda b: methods.q_filters(b, filters),
        "streaming_llm": lambda b: once(methods.streaming_llm(b)),
    }


def ours(experiment: LearnedScorer, head: scorer.TrainedHead) -> dict[str, Make]:
    """Compositions that no paper has: removal errors of observed and of learned attention, and heads that compete."""
    window, kernel = experiment.window_size, experiment.kernel_size
    learned = Learned(head, window, kernel)
    predicted = RemovalError(learned, "logarithm")
    observed = RemovalError(Pooled(Votes(window), "max", kernel))
    make = lambda score, **options: lambda b: kvjax.Evict(score, b, recent=window, **options)
    pool = {"layout": Layout(pool=True)}
    return {
        "removal error of votes": make(observed),
        "removal error of votes, heads compete": make(observed, heads=HEADS, **pool),
        "learned": lambda b: policy_of(experiment, head, b),
        "learned, heads compete": make(Shares(learned, "logarithm"), heads=HEADS, **pool),
        "learned, heads compete freely": make(Shares(learned, "logarithm"), heads=FREE, **pool),
        "removal error of learned": make(predicted),
        "removal error of learned, heads compete": make(predicted, heads=HEADS, **pool),
        "removal error of learned, heads compete freely": make(predicted, heads=FREE, **pool),
        "removal error of learned, layers compete": lambda b: kvjax.across_layers(
            make(predicted, heads=FREE, **pool)(b), by_top_scores, max_ratio=4.0
        ),
    }


def run_one(contest: Contest, model_name: str, seed: int) -> None:
    """One model under one seed: learn, read what is held out, and append a line a policy and prompt."""
    prompts = Prompts(model=model_name, seed=seed, held_out=contest.held_out)
    experiment = dataclasses.replace(get_config(prompts=prompts), budgets=contest.budget)
    config = {"model": model_name, "seed": seed, "budget": contest.budget, "held_out": contest.held_out}
    config["checkpoint"] = models.fingerprint(prompts.source)
    directory = contest.output / f"{model_name}-{seed}"
    with Records(directory, config, [sys.executable, *sys.argv]) as records:
        model, params = models.load(prompts.source, dtype=prompts.dtype)
        tokenizer = models.load_tokenizer(prompts.source)
        done = {(line["task"], line["index"]) for line in records.lines.values()}  # all lines of a prompt come at once
        found = examples(prompts, tokenizer, "held_out")
        lacks = lambda e: (e.task, e.index) not in done
        if not any(map(lacks, found)):
            return
        head = trained(experiment, model, params, tokenizer, directory)
        every = {
            **published(prompts, experiment.window_size, experiment.kernel_size),
            **{f"ours: {name}": make for name, make in ours(experiment, head).items()},
        }
        policies = {(name, b): make(b) for name, make in every.items() for b in contest.budget}
        snapkv = methods.snapkv(contest.budget[0], window=experiment.window_size)
        reader = Reader(model, params, snapkv, prompts, tuple(policies.values()))
        for batch, reading in reader.batches(found, f"{model_name}, seed {seed}", lacks):
            losses = {name: losses_of(policy, reading)[:2] for name, policy in policies.items()}
            records.append(
                {"method": name, "budget": label(b), "task": example.task, "index": example.index, "question": 0}
                | {"loss": float(np.mean(loss[i])), "live": int(live[i])}
                for i, example in enumerate(batch)
                for (name, b), (loss, live) in losses.items()
            )


def losses(contest: Contest) -> dict[str, Any]:
    """What is stored: setup, device, and for every model, seed and budget the prompts and each policy's losses."""
    found: dict[str, Any] = {}
    for model in contest.model:
        for seed in contest.seed:
            lines = read_lines(contest.output / f"{model}-{seed}" / "samples.jsonl")[0].values()
            for b in contest.budget:
                own = found[f"{model}, seed {seed}, {b:g}"] = {"prompts": [], "loss": {}, "live": {}}
                for line in (line for line in lines if line["budget"] == label(b)):
                    if line["method"] == "snapkv":
                        own["prompts"].append([line["task"], line["index"]])
                    own["loss"].setdefault(line["method"], []).append(round(line["loss"], 5))
                    own["live"][line["method"]] = own["live"].get(line["method"], 0) + line["live"]
    setup = {name: value for name, value in dataclasses.asdict(contest).items() if name != "output"}
    return {"setup": setup, "device": device_info(), "runs": found}


def summary(contest: Contest, stored: dict[str, Any]) -> str:
    """Mean loss of every method by model, and how much less it is than the best published one's."""
    text = ["# Exact eviction loss at equal bytes", ""]
    text += [
        "In percent, over all seeds, with 95 % intervals over prompts; beside it, on the same prompts, the loss of"
    ]
    text += ["the published method that loses least less the method's: above 0 is better.", ""]
    for b in contest.budget:
        for model in contest.model:
            runs = [
                run
                for name, run in stored["runs"].items()
                if name.startswith(f"{model}, ") and name.endswith(f", {b:g}")
            ]
            methods_ = list(runs[0]["loss"])
            found = {name: [100 * x for run in runs for x in run["loss"][name]] for name in methods_}
            live = {name: sum(run["live"][name] for run in runs) for name in methods_}
            best = min((n for n in found if not n.startswith("ours")), key=lambda n: np.mean(found[n]))
            rows = []
            for name in sorted(found, key=lambda n: np.mean(found[n])):
                pairs = zip(found[best], found[name], strict=True)
                mean, less = stats.mean(found[name]), stats.mean([x - y for x, y in pairs])
                shown = lambda x: "{:.2f} [{:.2f}, {:.2f}]".format(*x)
                beside = "the best published" if name == best else shown(less)
                rows.append([name, shown(mean), beside, f"{live[name] / live['snapkv']:.1%}"])
            text += [f"## {model}, {b:.1%} of the prompt, {len(found[best])} prompts", ""]
            text += [*table(["method", "loss", f"less than {best}", "tokens, of SnapKV's"], rows), ""]
    return "\n".join(text)


def run(contest: Annotated[Contest, tyro.conf.arg(name="")] = Contest()) -> None:
    """Runs what is missing, and prints the tables."""
    with alone_in(contest.output):
        for model in contest.model:
            for seed in contest.seed:
                run_one(contest, model, seed)
        stored = losses(contest)
        text = summary(contest, stored)
        write_bytes(contest.output / "contest.json", json.dumps(stored, separators=(",", ":")).encode())
        write_bytes(contest.output / "contest.md", text.encode())
    print(text)
