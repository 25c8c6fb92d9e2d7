"""The main job from the command line: results, resuming, errors."""

import argparse
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

import kvjax
from kvjax import configs, methods
from kvjax.budgets import Schedule
from kvjax.configs.experiment import Experiment, Setup
from kvjax.experiments import compare, run
from kvjax.experiments.evaluation import report
from kvjax.experiments.evaluation.evaluate import Evaluator
from kvjax.experiments.tasks import TASKS
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


def test_default_baselines_are_those_that_learned_positions_allow(tmp_path, capsys):
    config = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    baselines = lambda *argv: run.with_baselines(run.parse(["--config", "snapkv.py", *argv])[0]).setup.baselines
    assert baselines() == ("random", "streaming_llm", "h2o", "ada_snapkv")
    assert baselines("--model", str(tmp_path), "--baselines", "streaming_llm") == ("streaming_llm",)
    assert not capsys.readouterr().out
    assert baselines("--model", str(tmp_path)) == ("random", "h2o", "ada_snapkv")
    assert capsys.readouterr().out.startswith("baselines: random, h2o, ada_snapkv; without streaming_llm")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "nope.py"], r"no config 'nope.py'; configs/ has ada_pyramid, ada_snapkv, ahakv,"),
        (["--config", "configs/nope.py"], "no config"),
        (
            ["--config", "snapkv.py", "--budget", "16", "--window", "32"],
            "budget of 16 tokens cannot hold 0 sinks and 32 recent",
        ),
        (["--config", "snapkv.py", "--budget", "0"], "a budget of 0 tokens is none"),
        (["--config", "snapkv.py", "--budget"], "budget is empty"),
        (["--config", "snapkv.py", "--baselines", "nope"], "no config 'nope'"),
        (["--config", "snapkv.py", "--model", "not/there/at/all"], "neither a directory nor a hub id"),
        (["--config", "snapkv.py", "--length", "100"], "raise the length"),
        (
            ["--config", "snapkv.py", "--length", "20", "--tasks", "perplexity"],
            "length=20; raise the length to 65",
        ),
        *(
            (["--config", "snapkv.py", option, value], f"{option[2:].replace('-', '.')}.*{value} must be at {bound}")
            for option in ("--examples", "--length", "--batch-size", "--seed", "--block")
            for value, bound in (("0", "least 1"), ("-1", "least"), (str(10**20), "most 2147483647"))
            if (option, value) != ("--seed", "0")
        ),
        *((["--config", "snapkv.py", "--budget", b], f"{b} is not a share") for b in ("inf", "-0.5")),
        (["--config", "snapkv.py", "--budget", "0.0"], "a budget of 0.0 of the prompt is none"),
        *((["--config", "snapkv.py", "--budget", b], "--budget: nan is no number") for b in ("nan", "-NaN")),
        (["--config", "snapkv.py", "--window=99999999999"], "--window=9+: 9+ must be at most 2147483647"),
        (["--config", "expected_attention.py", "--eps", "nan"], "--eps: nan is no number"),
        (["--config", "snapkv.py", "--budget", "-1"], "a count of -1 tokens is negative"),
        (["--config", "snapkv.py", "--budget", "0.25", "0.250"], "budget has 0.25 twice"),
        (["--config", "snapkv.py", "--baseline-budget", "1.5"], "1.5 is not a share of the prompt"),
        (["--config", "snapkv.py", "--baselines", "h2o", "./h2o.py"], "h2o at budget 0.125 is there twice"),
        (["--config", "fastgen.py", "--recovery", "0.9", "0.90"], "recovery has 0.9 twice"),
        (
            ["--config", "snapkv.py", "--budget", "64", "--budget=0.25"],
            "--budget is given twice; give it once, with all",
        ),
        (["--config", "snapkv.py", "--num_beams", "2", "--num-beams", "3"], "--num-beams is given twice"),
        (["--config", "snapkv.py", "--config", "h2o.py"], "--config is given twice"),
        (["--config", "snapkv.py", "--model", "20261122103000"], "20261122103000 is neither a directory nor a hub id"),
        (["--config", "snapkv.py", "--tasks"], "tasks is empty"),
        (
            ["--config", "snapkv.py", "--tasks", "nope"],
            r"no task 'nope'; there are single_needle, .* path\.py:function",
        ),
        (["--config", "snapkv.py", "--seed", "1", "1"], "seed has 1 twice"),
        (
            ["--config", "snapkv.py", "--compress", "decode", "--baselines"],
            "--compress decode is not for snapkv: it evicts after the",
        ),
        (
            ["--config", "fastgen.py", "--compress", "prefill", "--baselines"],
            "--compress prefill is not for fastgen: FastGen has no schedule",
        ),
        (["--config", "snapkv.py", "--task-budget", "needle=0.5"], "--task-budget names 'needle', which does not run"),
        (["--config", "snapkv.py", "--task-budget", "key_value"], r"task_budget has 'key_value'; write task=budget"),
        (
            ["--config", "snapkv.py", "--task-budget", "key_value=2", "key_value=2"],
            "task_budget of key_value has 2 twice",
        ),
        (["--config", "snapkv.py", "--task-budget", "key_value=1.5"], "1.5 is not a share of the prompt"),
        (["--config", "fastgen.py", "--task-budget", "key_value=0.5"], "fastgen has no policy of that budget"),
        (["--policy", "mine.py:make"], "there is no Python file 'mine.py'"),
        (["--policy", "mine.py:make", "--config", "h2o.py"], "--config and --policy each say what to run"),
        (["--config", "snapkv.py", "--text", "no.txt"], "No such file or directory: 'no.txt'"),
        (["--config", "snapkv.py", "--data", "no.jsonl"], "--data no.jsonl: there is no such file"),
        (["--config", "snapkv.py", "--tasks", "key_value", "key_value"], "tasks has 'key_value' twice"),
        (["--config", ""], "no config ''"),
        (["--config", "."], "no config '.'"),
        (["--config", "snapkv.py", "--output", __file__], "is a file, not a directory; choose another --output"),
        (["--config", "snapkv.py", "--output", "/proc/nothing"], "No such file or directory: '/proc/nothing'"),
        (["--config", "snapkv.py", "--output", f"{__file__}/x"], "Not a directory"),
    ],
)
def test_errors_end_with_one_line(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run.main(argv)
    assert not list(tmp_path.rglob("samples.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:\n", "mine.py, line 1: invalid syntax"),
        ("import kvjax\n\nraise KeyError(3)\n", "mine.py, line 3: KeyError: 3"),
        ("import sys\nsys.exit(0)\n", "mine.py, line 2: SystemExit: 0"),
        ("def get_config(): return {}[3]\n", "mine.py, line 1: KeyError: 3"),
        ("def get_config(): raise ValueError('no')\n", "mine.py, line 1: no"),
        ("def get_config(x: 'Nope' = 3): pass\n", "mine.py: the types of get_config's options .*'Nope' is not defined"),
        (
            "from kvjax.configs.experiment import Setup\nget_config = lambda: Setup('x', 3)\n",
            r"mine.py, line 2: tasks=3 is not of",
        ),
        ("import no_such_module\n", "mine.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "mine.py defines no get_config"),
        ("get_config = 3\n", "mine.py defines no get_config"),
        ("def get_config(): return 3\n", "get_config of ./mine.py returns a int, but must return a Experiment"),
        (None, "no config './mine.py'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_broken_config_is_named_with_its_line(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").mkdir() if text is None else (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run.main(["--config", "./mine.py"])


def test_an_experiments_names_tell_its_policies_apart():
    window = methods.window(8)
    with pytest.raises(ValueError, match="policies of x has 8 twice"):
        Experiment("x", ((8, window), (8, methods.h2o(8))))
    with pytest.raises(ValueError, match="policies of x is empty"):
        Experiment("x", ())
    with pytest.raises(ValueError, match="'a/b' names rows and files"):
        Experiment("x", (("a/b", window),))
    with pytest.raises(ValueError, match=r"'xxx.*xxx' names files; shorten it from 101 to 100 bytes"):
        Experiment("x" * 101, ((8, window),))
    with pytest.raises(ValueError, match=r"full at budget 1\.0 is there twice"):
        run.all_policies(Experiment("full", ((1.0, window),), Setup(baselines=())))
    with pytest.raises(ValueError, match="h2o at budget 8 is there twice"):
        run.all_policies(Experiment("mine", ((8, window),), Setup(baselines=("h2o", "./h2o"))))


def test_a_default_directory_has_a_name_that_a_disk_takes():
    own = argparse.Namespace(config="snapkv.py")
    name, other = (run.default_directory(own, ["--budget", *["0.25"] * 99, last]).name for last in ("1", "2"))
    assert name != other
    assert run.default_directory(own, ["--x", "-1"]) != run.default_directory(own, ["--x", "1"])
    assert len(name) <= 255


def test_an_empty_output_is_refused(capsys):
    with pytest.raises(SystemExit) as e:
        run.main(["--config", "snapkv.py", "--output", ""])
    assert e.value.code == 2
    assert "argument --output: is empty; name a directory" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--windw-size", "3"], ["--pooling", "median"], ["--budget", "lots"]], ids=str)
def test_unknown_options_list_the_known_ones(argv, capsys):
    with pytest.raises(SystemExit) as e:
        run.main(["--config", "snapkv.py", *argv])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert "parameters of snapkv: --output --restart --budget --window --kernel --pooling" in err
    assert "--baseline-budget" in err


def test_help(capsys):
    with pytest.raises(SystemExit) as e:
        run.main(["--config", "snapkv.py", "--help"])
    assert e.value.code == 0
    assert "--window" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        run.main(["--help"])
    assert e.value.code == 0
    assert "configs: ada_pyramid, ada_snapkv, ahakv" in capsys.readouterr().out


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


def test_setup_names_all_tasks():
    assert set(Setup().task_names) <= set(TASKS)
    assert Setup(data=("x.jsonl",)).task_names == ()


def test_when_to_compress_is_a_matter_of_the_setup(capsys):
    policies = lambda *argv: {
        m: p for m, _, p in run.all_policies(run.with_baselines(run.parse([*argv, "--budget", "0.5"])[0]))
    }
    h2o = policies("--config", "h2o.py", "--baselines")["h2o"]
    for compress, when in (("prefill", Schedule()), ("decode", Schedule(prefill=False, every=1))):
        found = policies("--config", "h2o.py", "--compress", compress)
        assert found["h2o"] == kvjax.when(when, h2o)
        assert found["full"] == methods.full()
    think = ["--config", "think.py", "--compress", "prefill", "--channels", "0.5", "--baselines"]
    assert run.all_policies(run.parse(think)[0])[1][2] == methods.think(0.5)
    assert "ada_snapkv" not in found
    assert "ada_snapkv, which --compress decode is not for" in capsys.readouterr().out


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


def test_budget_labels():
    assert report.budget_fraction({"budget": "0.25"}, 1024) == 0.25
    assert report.budget_fraction({"budget": "128"}, 1024) == 0.125
    assert report.budget_fraction({"budget": "T=0.95", "live_of_prompt": 0.4}, 1024) == 0.4
    assert [report.has_budget(x) for x in ("1.0", "128", "0.0625", "T=0.95", "T=1")] == [True] * 3 + [False] * 2


def test_runs_from_another_directory(tmp_path):
    """As installed, with no repository around: paths do not depend on the working directory."""
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_rows_beyond_the_models_positions_are_warned_of(tmp_path):
    """Before anything is compiled; pytest makes an error of it."""
    shutil.copytree(one_layer(), tmp_path / "short")
    file = tmp_path / "short" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 128}))
    argv = ["--config", "window.py", *small(model=[str(tmp_path / "short")]), "--max-length", "512", "--baselines"]
    with pytest.raises(
        UserWarning, match=r"tokens and \d+ behind it are \d+, but the model was made for 128 positions"
    ):
        run.main([*argv, "--tasks", "key_value", "--output", str(tmp_path / "out")])


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
