"""The main job from the command line: results, resuming, errors."""

import inspect
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import configs
from configs.experiment import Setup
from experiments import compare, metrics, report, run
from experiments.results import Results
from experiments.tasks import TASKS

ROOT = pathlib.Path(__file__).parents[1]
SMALL = ["--length", "256", "--examples", "4", "--batch-size", "2", "--budget", "0.5", "0.25"]


def samples(directory):
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


def without_times(lines):
    return [{k: v for k, v in s.items() if k not in ("prefill_seconds", "decode_tokens_per_second")} for s in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished small run with all tasks and one baseline."""
    directory = tmp_path_factory.mktemp("finished") / "snapkv"
    run.main(["--config", "snapkv.py", *SMALL, "--baselines", "random", "--output", str(directory)])
    return directory


def test_outputs(finished):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["config"]["setup"]["length"] == 256
    assert [(p["method"], p["budget"]) for p in manifest["config"]["policies"]] == [
        ("full", "1.0"),
        ("snapkv", "0.5"),
        ("snapkv", "0.25"),
        ("random", "0.125"),
    ]
    assert "Evict(score=Pooled(" in manifest["config"]["policies"][1]["policy"]
    assert manifest["config"]["seed"] == 0
    assert set(manifest["versions"]) >= {"python", "jax", "flax", "transformers", "kvjax"}
    assert manifest["device"]["platform"] == "cpu"
    assert manifest["command"]
    assert "git_commit" in manifest

    lines = samples(finished)
    assert len(lines) == 4 * len(TASKS) * 4
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
    assert 0.4 < row["kv_bytes_of_full"] < 0.8
    assert row["slots"] * 2 * 4 * 32 == row["kv_bytes"]
    assert row["prefill_seconds"] > 0
    assert row["decode_tokens_per_second"] > 0
    assert row["prefill_peak_bytes"] > row["decode_peak_bytes"] > 0
    for plot in ("score_against_budget", "depth_against_length", "kept_positions"):
        assert (finished / f"{plot}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| snapkv | 0.25 |" in (finished / "summary.md").read_text()


def test_a_finished_run_is_not_repeated(finished, capsys):
    before = (finished / "samples.jsonl").stat().st_mtime_ns
    run.main(["--config", "snapkv.py", *SMALL, "--baselines", "random", "--output", str(finished)])
    assert (finished / "samples.jsonl").stat().st_mtime_ns == before
    assert "is complete; --restart runs it again" in capsys.readouterr().out


def test_another_config_does_not_overwrite(finished):
    with pytest.raises(SystemExit, match=r"holds a run with another config \(policies: .*choose another --output"):
        run.main(["--config", "snapkv.py", *SMALL, "--baselines", "--output", str(finished)])
    assert len(samples(finished)) == 80


def test_restart_moves_the_old_run_aside(finished, tmp_path):
    here = tmp_path / "again"
    shutil.copytree(finished, here)
    arguments = ["--config", "h2o.py", "--output", str(here), "--tasks", "key_value", "--baselines", "--length", "256"]
    run.main([*arguments, "--examples", "2", "--batch-size", "2", "--budget", "32", "--restart"])
    assert len(samples(tmp_path / "again.old-1")) == 80
    assert {s["method"] for s in samples(here)} == {"full", "h2o"}


def test_resuming_after_a_kill_ends_with_the_same_numbers(finished, tmp_path):
    """SIGKILL in the middle, then the same command again."""
    directory = tmp_path / "killed"
    command = [sys.executable, "experiments/run.py", "--config", "snapkv.py", *SMALL, "--baselines", "random"]
    command += ["--output", str(directory)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = directory / "samples.jsonl"
    deadline = time.monotonic() + 120
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 22):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = lines.read_bytes()
    assert 22 <= done.count(b"\n") < 80
    assert not (directory / "summary.json").exists()

    with lines.open("ab") as f:  # what a kill in the middle of a write leaves
        f.write(b'{"method": "snapkv", "budg')
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert lines.read_bytes().startswith(done)  # nothing computed was lost or computed again
    assert without_times(samples(directory)) == without_times(samples(finished))
    timeless = lambda d: [
        {k: v for k, v in r.items() if k not in ("prefill_seconds", "decode_tokens_per_second")}
        for r in json.loads((d / "summary.json").read_text())["rows"]
    ]
    assert timeless(directory) == timeless(finished)


def test_two_processes_do_not_share_a_directory(tmp_path):
    first = Results(tmp_path / "x", {"a": 1}, [])
    with pytest.raises(ValueError, match="another process is writing"):
        Results(tmp_path / "x", {"a": 1}, [])
    first.close()
    Results(tmp_path / "x", {"a": 1}, []).close()


def test_batches_do_not_change_results(finished, tmp_path):
    """Other batch sizes put prompts of other lengths together; rows are independent."""
    arguments = ["--config", "snapkv.py", *SMALL, "--baselines", "random", "--tasks", "single_needle", "multi_query"]
    run.main([*arguments, "--batch-size", "4", "--output", str(tmp_path / "x")])
    pick = lambda d: {
        (s["method"], s["budget"], s["task"], s["index"]): (s["output"], s["live"])
        for s in samples(d)
        if s["task"] in ("single_needle", "multi_query")
    }
    assert pick(tmp_path / "x") == pick(finished)


def test_question_after_compression(tmp_path, finished):
    arguments = ["--config", "snapkv.py", *SMALL, "--protocol", "after_compression", "--baselines"]
    run.main([*arguments, "--output", str(tmp_path / "x")])
    lines = samples(tmp_path / "x")
    full = [s["score"] for s in lines if s["method"] == "full" and s["task"] != "perplexity"]
    assert np.mean(full) > 0.9  # read step by step, the question is answered as well as in one pass
    aware = {s["task"]: s["prompt_tokens"] for s in samples(finished)}
    assert {s["task"]: s["prompt_tokens"] for s in lines}["key_value"] < aware["key_value"]


QUICK = {"snapkv", "h2o", "fastgen", "think"}


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
    small = ["--length", "256", "--examples", "4", "--batch-size", "2", "--tasks", "single_needle", "key_value"]
    run.main(["--config", "fastgen.py", *small, "--baselines", "random", "--output", str(directory)])
    summary = json.loads((directory / "summary.json").read_text())
    means = {(r["method"], r["budget"]): r for r in summary["retrieval_mean"]}
    assert [*means] == [
        ("full", "1.0"), ("fastgen", "T=0.98"), ("fastgen", "T=0.95"), ("fastgen", "T=0.9"), ("random", "0.125"),
    ]  # fmt: skip
    places = [report.budget_fraction(means["fastgen", f"T={t}"], 256) for t in ("0.98", "0.95", "0.9")]
    assert 0.05 < places[2] <= places[1] <= places[0] < 1
    assert means["full", "1.0"]["live_of_prompt"] == 1
    assert report.budget_fraction(means["random", "0.125"], 256) == 0.125
    for plot in ("score_against_budget", "depth_against_length", "kept_positions"):
        assert (directory / f"{plot}.png").is_file()
    assert "| fastgen | T=0.95 |" in (directory / "summary.md").read_text()

    with pytest.raises(SystemExit, match="error: recovery_ratio is empty"):
        run.main(["--config", "fastgen.py", "--recovery-ratio", "--output", str(tmp_path / "empty")])
    experiment, _, _ = run.parse(["--config", "snapkv.py", "--baselines", "fastgen"])
    assert [b for m, b, _ in run.all_policies(experiment) if m == "fastgen"] == ["T=0.98", "T=0.95", "T=0.9"]

    compare.main([str(directory), "--output", str(tmp_path / "board")])
    lines = capsys.readouterr().out.splitlines()
    tables = "\n".join(lines).split("Retrieval mean in percent / perplexity, by budget:")
    order = [line.split(" | ")[1] for line in tables[0].splitlines() if line.startswith("| ")][1:]
    assert order[0] == "1.0"
    assert order[-1] == "0.125"
    assert all(f"| fastgen T={t} |" in tables[1] for t in (0.98, 0.95, 0.9))


def test_leaderboard(finished, tmp_path, capsys):
    other = tmp_path / "h2o"
    run.main(["--config", "h2o.py", *SMALL, "--baselines", "--output", str(other)])
    capsys.readouterr()
    compare.main([str(finished), str(other), str(tmp_path), "--output", str(tmp_path / "board")])
    printed = capsys.readouterr()
    assert "no summary.json" in printed.err
    board, overview = printed.out.split("Retrieval mean in percent / perplexity, by budget:")
    rows = [line.split(" | ")[:2] for line in board.splitlines() if line.startswith("| ")]
    assert ["| full", "1.0"] in rows
    assert rows.index(["| full", "1.0"]) == 1
    assert {r[0] for r in rows[1:]} == {"| full", "| snapkv", "| random", "| h2o"}
    by_method = {line.split(" | ")[0]: line for line in overview.splitlines() if line.startswith("| ")}
    assert set(by_method) == {"| method", "| full", "| snapkv", "| random", "| h2o"}
    mean, perplexity = (
        next(r for r in json.loads((tmp_path / "board" / "leaderboard.json").read_text())["rows"] if r["task"] == task)
        for task in ("retrieval_mean", "perplexity")
    )
    shown = f"{100 * mean['score']:.1f} / {perplexity['perplexity']:.2f}"
    assert perplexity["method"] == mean["method"] == "full"
    assert shown in by_method["| full"]
    assert (tmp_path / "board" / "leaderboard.png").is_file()
    assert json.loads((tmp_path / "board" / "leaderboard.json").read_text())["setup"]["length"] == 256

    manifest = json.loads((other / "manifest.json").read_text())
    manifest["config"]["setup"]["seed"] = 1
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit, match=r"cannot be compared with .*seed=1 against 0"):
        compare.main([str(finished), str(other)])
    with pytest.raises(SystemExit, match="there is no"):
        compare.main([str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "nope.py"], r"no config 'nope.py'; configs/ has ada_pyramid, ada_snapkv, ahakv,"),
        (["--config", "configs/nope.py"], "no config"),
        (["--config", "snapkv.py", "--budget", "16", "--window-size", "32"], "budget of 16 tokens cannot hold the 32"),
        (["--config", "snapkv.py", "--budget", "0"], "budget=0 tokens"),
        (["--config", "snapkv.py", "--budget"], "budget is empty"),
        (["--config", "snapkv.py", "--baselines", "nope"], "no config 'nope'"),
        (["--config", "snapkv.py", "--model", "not/there/at/all"], "neither a directory nor a hub id"),
        (["--config", "snapkv.py", "--length", "100"], "raise the length"),
        (["--config", "snapkv.py", "--examples", "0"], "examples=0 must be at least 1"),
    ],
)
def test_errors_end_with_one_line(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run.main(argv)
    assert not list(tmp_path.rglob("samples.jsonl"))


@pytest.mark.parametrize("argv", [["--windw-size", "3"], ["--pooling", "median"], ["--budget", "lots"]], ids=str)
def test_unknown_options_list_the_known_ones(argv, capsys):
    with pytest.raises(SystemExit) as e:
        run.main(["--config", "snapkv.py", *argv])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert "parameters of snapkv: --output --restart --budget --window-size --kernel-size --pooling --group" in err
    assert "--baseline-budget" in err


def test_help(capsys):
    with pytest.raises(SystemExit) as e:
        run.main(["--config", "snapkv.py", "--help"])
    assert e.value.code == 0
    assert "--window-size" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        run.main(["--help"])
    assert e.value.code == 0
    assert "configs: ada_pyramid, ada_snapkv, ahakv" in capsys.readouterr().out


def test_a_config_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import kvjax\n"
        "from configs.experiment import Common, Experiment, Setup, sweep\n\n\n"
        "def get_config(budget: tuple[float, ...] = (0.25,), setup: Common = Setup()) -> Experiment:\n"
        '    """A mix of layers."""\n'
        "    make = lambda b: kvjax.partition(\n"
        "        {0: kvjax.identity(), 1: kvjax.methods.h2o(b)}, (0, 0, 1, 1)\n"
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
    assert Setup().tasks == tuple(TASKS)


def test_intervals():
    assert metrics.wilson([1.0] * 10)[1:] == pytest.approx((0.7225, 1.0), abs=1e-3)
    assert metrics.wilson([0.0] * 10)[1:] == pytest.approx((0.0, 0.2775), abs=1e-3)
    p, low, high = metrics.wilson([1.0, 0.0] * 50)
    assert (p, low, high) == pytest.approx((0.5, 0.4038, 0.5962), abs=1e-3)
    ppl, low, high = metrics.perplexity([1.0, 1.2, 0.8, 1.0])
    assert ppl == pytest.approx(np.e)
    assert low < ppl < high
    assert metrics.perplexity([1.0])[1:] == (0.0, float("inf"))


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


def test_prompts_read_in_blocks(finished, tmp_path):
    """Less memory than at once, the full cache's results where nothing is evicted, and a setting in the manifest."""
    run.main(["--config", "snapkv.py", *SMALL, "--baselines", "--block", "64", "--output", str(tmp_path / "blocks")])
    blocks, whole = tmp_path / "blocks", finished
    assert json.loads((blocks / "manifest.json").read_text())["config"]["setup"]["block"] == 64
    peak = lambda directory: {
        (r["method"], r["budget"]): r["prefill_peak_bytes"]
        for r in json.loads((directory / "summary.json").read_text())["rows"]
    }
    full = lambda directory: [
        (s["task"], s["index"], s.get("score")) for s in samples(directory) if s["method"] == "full"
    ]
    assert peak(blocks)["snapkv", "0.25"] < peak(whole)["snapkv", "0.25"]
    assert full(blocks) == full(whole)
    with pytest.raises(SystemExit, match="FastGen looks at the whole prompt at once, but block=64"):
        run.main(
            ["--config", "fastgen.py", *SMALL[:6], "--baselines", "--block", "64", "--output", str(tmp_path / "f")]
        )
