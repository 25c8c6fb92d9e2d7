"""The main job from the command line: results, resuming, errors."""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvjax import configs
from kvjax.configs.experiment import Setup
from kvjax.experiments import compare, run
from kvjax.experiments.evaluation import report
from kvjax.experiments.evaluation.evaluate import Evaluator
from tests.runs import ROOT, Made, one_layer, samples, small, without_times


def test_outputs(finished):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["config"]["setup"]["length"] == 256
    assert [(p["method"], p["budget"]) for p in manifest["config"]["policies"]] == [
        ("full", "1.0"),
        ("snapkv", "0.5"),
        ("snapkv", "0.25"),
        ("random", "0.5"),  # where the method runs, too
    ]
    assert "Evict(score=Pooled(" in manifest["config"]["policies"][1]["policy"]
    assert manifest["config"]["seed"] == 0
    assert set(manifest["versions"]) >= {"python", "jax", "flax", "transformers", "kvjax"}
    assert manifest["device"]["platform"] == "cpu"
    assert manifest["command"]
    assert "git_commit" in manifest

    lines = samples(finished)
    assert len(lines) == 4 * len(Setup().task_names) * 4
    assert len({(s["method"], s["budget"], s["task"], s["index"]) for s in lines}) == len(lines)
    for s in lines:
        assert s["live"] <= s["most_live"]
        if s["method"] == "snapkv":
            assert s["live"] <= float(s["budget"]) * s["prompt_tokens"] + 1e-6
        if s["task"] != "perplexity":
            assert s["score"] == (s["score"] if s["task"] == "multi_query" else round(s["score"]))

    summary = json.loads((finished / "summary.json").read_text())
    row = next(r for r in summary["rows"] if (r["method"], r["budget"], r["task"]) == ("snapkv", "0.5", "key_value"))
    assert row["examples"] == 4
    assert 0 <= row["low"] <= row["score"] <= row["high"] <= 1
    assert 0 <= row["agreement"]["same"][0] <= row["agreement"]["prefix"][0] <= 1
    assert 0.4 < row["kv_bytes_of_full"] < 0.8
    assert row["slots"] * 2 * 4 * 32 == row["kv_bytes"]
    assert row["timed_batches"] == 2
    for timed in ("prefill_seconds", "decode_tokens_per_second"):
        assert 0 < row[f"{timed}_low"] <= row[timed] <= row[f"{timed}_high"]
    assert row["prefill_peak_bytes"] > row["decode_peak_bytes"] > 0
    for plot in ("score_against_budget", "perplexity_against_budget", "depth_against_length", "kept_positions"):
        assert (finished / f"{plot}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| snapkv | 0.25 |" in (finished / "summary.md").read_text()
    assert "not the defaults of `kvjax.methods`: snapkv(window=16)." in (finished / "summary.md").read_text()


def test_a_finished_run_is_not_repeated(finished, capsys):
    before = (finished / "samples.jsonl").stat().st_mtime_ns
    run.main(["--config", "snapkv.py", *small(), "--baselines", "random", "--output", str(finished)])
    assert (finished / "samples.jsonl").stat().st_mtime_ns == before
    assert "is complete; --restart runs it again" in capsys.readouterr().out


def test_another_config_does_not_overwrite(finished):
    with pytest.raises(SystemExit, match=r"holds a run with another config \(policies: .*choose another --output"):
        run.main(["--config", "snapkv.py", *small(), "--baselines", "--output", str(finished)])
    assert len(samples(finished)) == 80


def test_restart_moves_the_old_run_aside(finished, tmp_path):
    here = tmp_path / "again"
    shutil.copytree(finished, here)
    arguments = ["--config", "h2o.py", "--output", str(here), "--tasks", "key_value", "--baselines", "--length", "256"]
    run.main([*arguments, "--examples", "2", "--batch-size", "2", "--budget", "32", "--restart"])
    assert len(samples(tmp_path / "again.old-1")) == 80
    assert {s["method"] for s in samples(here)} == {"full", "h2o"}


TWO_TASKS = "single_needle", "perplexity"

METHODS = ("full", "1.0"), ("snapkv", "0.5")


def test_resuming_after_a_kill_ends_with_the_same_numbers(finished, tmp_path):
    """SIGKILL in the middle, then the same arguments again."""
    directory = tmp_path / "killed"
    arguments = ["--config", "snapkv.py", *small(budget=["0.5"]), "--baselines", "--tasks", *TWO_TASKS]
    arguments += ["--output", str(directory)]
    command = [sys.executable, "experiments/run.py", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = directory / "samples.jsonl"
    deadline = time.monotonic() + 120
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 6):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = lines.read_bytes()
    assert 6 <= done.count(b"\n") < 16
    assert not (directory / "summary.json").exists()

    with lines.open("ab") as f:  # what a kill in the middle of a write leaves
        f.write(b'{"method": "snapkv", "budg')
    run.main(arguments)
    assert lines.read_bytes().startswith(done)  # nothing computed was lost or computed again
    mine = lambda rows: [r for r in rows if r["task"] in TWO_TASKS and (r["method"], r["budget"]) in METHODS]
    assert without_times(samples(directory)) == without_times(mine(samples(finished)))
    unequal = (*report.TIMES, "against_full")  # which is adjusted for all methods of a run
    timeless = lambda d: [
        {k: v for k, v in r.items() if k not in unequal}
        for r in mine(json.loads((d / "summary.json").read_text())["rows"])
    ]
    assert timeless(directory) == timeless(finished)


def test_batches_do_not_change_results(finished, tmp_path):
    """Other batch sizes put prompts of other lengths together; rows are independent."""
    arguments = ["--config", "snapkv.py", *small(budget=["0.5"], batch_size=["4"]), "--baselines"]
    arguments += ["--tasks", "single_needle", "multi_query"]
    run.main([*arguments, "--output", str(tmp_path / "x")])
    pick = lambda d: {
        (s["method"], s["budget"], s["task"], s["index"]): (s["answers"][0]["output"], s["live"], s["most_live"])
        for s in samples(d)
        if s["task"] in ("single_needle", "multi_query") and s["budget"] in ("1.0", "0.5") and s["method"] != "random"
    }
    assert pick(tmp_path / "x") == pick(finished)


def test_question_after_compression(tmp_path, finished):
    arguments = ["--config", "snapkv.py", *small(model=["embedded"]), "--protocol", "after_compression", "--baselines"]
    run.main([*arguments, "--output", str(tmp_path / "x")])
    lines = samples(tmp_path / "x")
    full = [s["score"] for s in lines if s["method"] == "full" and s["task"] != "perplexity"]
    assert np.mean(full) > 0.9  # read step by step, the question is answered as well as in one pass
    aware = {s["task"]: s["prompt_tokens"] for s in samples(finished)}
    assert {s["task"]: s["prompt_tokens"] for s in lines}["key_value"] < aware["key_value"]


QUICK = {"think"}  # other tests run snapkv, h2o and fastgen


@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in configs.available()]
)
def test_every_config_runs(config, tmp_path):
    run.main(
        ["--config", f"{config}.py", "--output", str(tmp_path / config), "--length", "256", "--examples", "2"]
        + ["--batch-size", "2", "--tasks", "key_value", "--baselines"]
        + (["--budget", "0.25"] if "budget" in inspect.signature(configs.find(config)[1]).parameters else [])
    )
    assert {s["method"] for s in samples(tmp_path / config)} == {"full", config}


def test_a_method_without_budgets(tmp_path, capsys):
    """FastGen: labels are its recovery ratios, its place in plots is what it kept."""
    directory = tmp_path / "fastgen"
    options = ["--length", "256", "--examples", "4", "--batch-size", "2", "--tasks", "single_needle", "key_value"]
    options += ["--model", one_layer(), "--recovery", "0.98", "0.9", "--baselines", "random"]
    run.main(["--config", "fastgen.py", *options, "--output", str(directory)])
    summary = json.loads((directory / "summary.json").read_text())
    means = {(r["method"], r["budget"]): r for r in summary["retrieval_mean"]}
    assert [*means] == [
        ("full", "1.0"), ("fastgen", "T=0.98"), ("fastgen", "T=0.9"), ("random", "0.125"),
    ]  # fmt: skip
    places = [report.budget_fraction(means["fastgen", f"T={t}"], 256) for t in ("0.98", "0.9")]
    assert 0.05 < places[1] <= places[0] < 1
    assert means["full", "1.0"]["live_of_prompt"] == 1
    assert report.budget_fraction(means["random", "0.125"], 256) == 0.125
    for plot in ("score_against_budget", "depth_against_length", "kept_positions"):
        assert (directory / f"{plot}.png").is_file()
    assert "| fastgen | T=0.9 |" in (directory / "summary.md").read_text()

    with pytest.raises(SystemExit, match="error: recovery is empty"):
        run.main(["--config", "fastgen.py", "--recovery", "--output", str(tmp_path / "empty")])
    experiment, _, _ = run.parse(["--config", "snapkv.py", "--baselines", "fastgen"])
    assert [b for m, b, _ in run.all_policies(experiment) if m == "fastgen"] == ["T=0.98", "T=0.95", "T=0.9"]

    compare.main([str(directory), "--output", str(tmp_path / "board")])
    lines = capsys.readouterr().out.splitlines()
    tables = "\n".join(lines).split("Retrieval mean in percent / perplexity, by budget:")
    order = [line.split(" | ")[1] for line in tables[0].splitlines() if line.startswith("| ")][1:]
    assert order[0] == "1.0"
    assert order[-1] == "0.125"
    assert all(
        f"| fastgen T={t} ({round(100 * x)} % live) |" in tables[1] for t, x in zip((0.98, 0.9), places, strict=True)
    )


def test_a_config_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "import kvjax\n"
        "from kvjax.configs.experiment import Common, Experiment, Setup, sweep\n\n\n"
        "@dataclasses.dataclass\n"
        "class Mine:\n"
        "    x: int = 3\n\n\n"
        "def get_config(budget: tuple[float, ...] = (0.25,), setup: Common = Setup()) -> Experiment:\n"
        '    """A mix of layers."""\n'
        "    make = lambda b: kvjax.partition(\n"
        "        {0: kvjax.Policy(), 1: kvjax.methods.h2o(b)}, (0, 0, 1, 1)\n"
        "    )\n"
        '    return Experiment("mine", sweep(make, budget), setup)\n'
    )
    small = ["--length", "256", "--examples", "2", "--batch-size", "2", "--tasks", "key_value", "--baselines"]
    run.main(["--config", "mine.py", *small])
    assert {
        s["method"]
        for s in samples(tmp_path / "results" / "mine-length-256-examples-2-batch-size-2-tasks-key_value-baselines")
    } == {"full", "mine"}
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(SystemExit, match="defines no get_config"):
        run.main(["--config", "./empty.py"])


def test_tasks_may_have_budgets_of_their_own(made, tmp_path):
    """Rows are labelled with the budget that they ran under, of the method and of its baselines; a mean is of all."""
    command = [
        "--config",
        "window.py",
        *small(budget=["0.5", "0.25"]),
        "--tasks",
        "key_value",
        "perplexity",
        "multi_query",
    ]
    command += [
        "--baselines",
        "random",
        "fastgen",
        "--task-budget",
        "multi_query=0.5",
        "perplexity=32",
        "perplexity=0.75",
    ]
    run.main([*command, "--output", str(tmp_path / "x")])
    under: dict[tuple[str, str], set[str]] = {}
    for s in samples(tmp_path / "x"):
        under.setdefault((s["method"], s["budget"]), set()).add(s["task"])
    every = {"key_value", "perplexity", "multi_query"}
    assert under == {
        ("full", "1.0"): every,
        ("window", "0.5"): {"key_value", "multi_query"},
        ("window", "0.25"): {"key_value"},
        ("window", "32"): {"perplexity"},
        ("window", "0.75"): {"perplexity"},
        ("random", "0.5"): {"key_value", "multi_query"},
        ("random", "32"): {"perplexity"},
        ("random", "0.75"): {"perplexity"},
        **{("fastgen", f"T={t}"): every for t in (0.98, 0.95, 0.9)},
    }
    policies = json.loads((tmp_path / "x" / "manifest.json").read_text())["config"]["policies"]
    of = {(p["method"], p["budget"]): (p["policy"], p["tasks"]) for p in policies}
    assert "budget=32," in of["window", "32"][0]
    assert of["window", "32"][1] == ["perplexity"]
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    means = {(r["method"], r["budget"]) for r in summary["retrieval_mean"]}
    both = {("window", "0.5"), ("random", "0.5")}
    assert means == {("full", "1.0"), *both, *(("fastgen", f"T={t}") for t in (0.98, 0.95, 0.9))}
    run.main([*command, "--output", str(tmp_path / "x")])


def test_a_policy_reads_only_the_prompts_of_its_tasks(made, tmp_path, monkeypatch, capsys):
    """A budget of one file is not held against another's lengths, and one whose rows are all bad has nothing to do."""
    row = {"context": "the code for ada is 7 3 . ", "question": "what ?", "answers": ["7 3"], "max_new_tokens": 4}
    rows = {"short": [row], "long": [{**row, "context": row["context"] * 12}], "bad": [{}]}
    files = [tmp_path / f"{name}.jsonl" for name in rows]
    for file, content in zip(files, rows.values(), strict=True):
        file.write_text("\n".join(map(json.dumps, content)))

    class Planned(Made):
        def __init__(self, *setting, **options):
            super().__init__(*setting, **options)
            Evaluator(*setting, **options)

    monkeypatch.setattr(run, "Evaluator", Planned)
    command = ["--config", "ahakv.py", "--recent", "0.5", "--budget", "0.75", "--baselines"]
    command += ["--data", *map(str, files), "--task-budget", "short=39", "bad=0.25", "--output", str(tmp_path / "x")]
    run.main(command)
    full = [("full", "1.0", task) for task in ("short", "long")]
    expected = {*full, ("ahakv", "0.75", "long"), ("ahakv", "39", "short")}
    assert {(s["method"], s["budget"], s["task"]) for s in samples(tmp_path / "x")} == expected
    run.main(command)
    assert "is complete" in capsys.readouterr().out
    command[command.index("short=39")] = "long=39"
    with pytest.raises(SystemExit, match=r"a budget of 39 tokens cannot hold 0 sinks and \d+"):
        run.main([*command, "--restart"])


MAKE = """
from helper_of_make import WINDOW
from kvjax import methods

def make(budget):
    return methods.snapkv(budget, window=WINDOW)

def task(task, index):
    from kvjax.experiments.tasks import Example, Question
    said = task.ids("the code for ada is 7 3 .".split())
    asked = [Question(task.ids(["what"]), references=("7",), max_new_tokens=n) for n in (2, 3)]
    return Example("", -1, task.bos + said * (index + 1), tuple(asked))
"""


def test_a_policy_and_a_task_of_ones_own_over_seeds_and_text(tmp_path, monkeypatch, capsys):
    """Files may import those beside them. Of each seed there are all examples; one's own text is the haystack."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper_of_make.py").write_text("WINDOW = 4\n")
    (tmp_path / "mine.py").write_text(MAKE)
    (tmp_path / "text.txt").write_text("The old mine. A pear was lifted! She crossed the river.\n\n" * 60)
    command = ["--policy", "mine.py:make", *small(budget=["0.5"], examples=["2"]), "--baselines", "--seed", "0", "5"]
    run.main(
        [*command, "--tasks", "mine.py:task", "single_needle", "perplexity", "--text", "text.txt", "--output", "x"]
    )
    found = {(s["method"], s["task"], s["index"]): s for s in samples(tmp_path / "x")}
    assert set(found) == {
        (m, t, i) for m in ("full", "mine.make") for t in ("task", "single_needle", "perplexity") for i in range(4)
    }
    assert len(found["mine.make", "task", 1]["answers"]) == 2
    assert found["mine.make", "task", 3]["seed"] == 5
    outputs = lambda i: [a["output"] for a in found["full", "task", i]["answers"]]
    assert outputs(0) == outputs(2)  # this task draws nothing
    assert found["full", "perplexity", 0]["tokens"] == 64
    (tmp_path / "two.py").write_text("def two(budget, window): ...")
    with pytest.raises(ValueError, match=r"two\.py:two is not called as make\(budget\): missing .*'window'"):
        run.parse(["--policy", "two.py:two"])
    for argv in (["--list-tasks"], ["--config", "snapkv.py", "--tasks", "list"]):
        with pytest.raises(SystemExit) as e:
            run.main(argv)
        assert e.value.code == 0
        assert re.search(r"key_value +A table of bare pairs", capsys.readouterr().out)


def test_runs_from_another_directory(tmp_path):
    """As installed, with no repository around: paths do not depend on the working directory."""
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_prompts_read_in_blocks(finished, tmp_path):
    """Less memory than at once, the full cache's results where nothing is evicted, and a setting in the manifest."""
    arguments = ["--config", "snapkv.py", *small(budget=["0.25"]), "--baselines", "--tasks", *TWO_TASKS]
    run.main([*arguments, "--block", "64", "--output", str(tmp_path / "blocks")])
    blocks, whole = tmp_path / "blocks", finished
    assert json.loads((blocks / "manifest.json").read_text())["config"]["setup"]["block"] == 64
    peak = lambda directory: {
        (r["method"], r["budget"]): r["prefill_peak_bytes"]
        for r in json.loads((directory / "summary.json").read_text())["rows"]
    }
    full = lambda directory: [
        (s["task"], s["index"], s.get("score"))
        for s in samples(directory)
        if s["method"] == "full" and s["task"] in TWO_TASKS
    ]
    assert peak(blocks)["snapkv", "0.25"] < peak(whole)["snapkv", "0.25"]
    assert full(blocks) == full(whole)
    options = ["--length", "256", "--baselines", "--block", "64", "--output", str(tmp_path / "f")]
    with pytest.raises(SystemExit, match="FastGen looks at the whole prompt at once, but block=64"):
        run.main(["--config", "fastgen.py", *options])
