"""Runs of the main job that are killed at any moment: resumed, they end with the same results."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvjax.experiments import run, stopping
from kvjax.experiments.evaluation.summary import TIMES
from tests.runs import ROOT, one_layer, samples, without_times

TASKS = "single_needle", "needle", "vt", "multi_turn", "evicted_perplexity"
MOMENTS = 5  # of each protocol
ROW = {"context": "the code for ada is 7 3 .", "question": "what is the code for ada ?", "answers": ["7 3"]}


def arguments(data, protocol, directory):
    found = ["--config", "snapkv.py", "--model", one_layer(), "--tasks", *TASKS, "--data", str(data), "--budget", "0.5"]
    found += [
        "--window",
        "4",
        "--baselines",
        "--length",
        "384",
        "--examples",
        "4",
        "--batch-size",
        "2",
        "--max-new-tokens",
        "4",
    ]
    return [*found, "--protocol", protocol, "--seed", "0", "1", "--output", str(directory / "x")]


@pytest.fixture
def interruptible():
    """Ctrl-C ends what tests start, as it does not where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def begun(script, *options):
    """A process of a script, once it takes SIGTERM."""
    how = ["-m", f"kvjax.experiments.{script[3:]}"] if script.startswith("-m ") else [f"experiments/{script}.py"]
    command = [sys.executable, *how, *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    caught = lambda text: int(text.split("SigCgt:")[1].split()[0], 16) >> signal.SIGTERM - 1 & 1
    while not caught(pathlib.Path(f"/proc/{process.pid}/status").read_text()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("options", [["-um", "kvjax.experiments.harness"], ["-mkvjax.experiments.bench.peers"]])
def test_modules_of_packages_are_known_however_python_is_told(options, monkeypatch):
    begun = []
    monkeypatch.setattr(stopping, "begin", lambda: begun.append(True))
    for given in (options, ["-W", "mkvjax.experiments.run", "-c", "import kvjax"]):
        monkeypatch.setattr(sys, "orig_argv", ["python", *given])
        stopping.begin_module()
    assert begun == [True]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("script", ["run", "-m run", "sweep", "report", "learn_gates", "train_tiny"])
def test_a_signal_before_anything_is_begun_ends_a_script_at_once_with_one_line(script):
    """While it imports, where jax would drop what Python raises."""
    for number, seconds in ((signal.SIGTERM, 0.0), (signal.SIGINT, 0.6)):
        process = begun(script, "--help")
        time.sleep(seconds)
        process.send_signal(number)
        _, error = process.communicate(timeout=10)
        assert process.returncode == 128 + number
        assert error == f"\n{number.name}: interrupted; no result was being written\n"


def test_a_signal_stops_a_run_after_the_examples_that_run_and_says_how_it_goes_on(tmp_path):
    here, number = tmp_path / "x", signal.SIGTERM
    options = [*("--config", "window.py", "--model", one_layer(), "--tasks", "key_value", "--baselines"), "--length"]
    options += [*("256", "--examples", "300", "--batch-size", "1", "--budget", "0.5", "--output"), str(here)]
    process = begun("run", *options)
    while not (here / "samples.jsonl").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"\n{number.name}: stopping after the examples that run; a second signal ends it at once\n" in error
    said = f"{here} holds what was finished ({len(samples(here))} lines of samples.jsonl), and the same command goes on"
    assert said in error
    assert "Traceback" not in error
    assert len(samples(here)) < 600


def start(options):
    """A process that compiles everything itself, once it has a manifest."""
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "experiments/run.py", *options]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    manifest, deadline = f"{options[-1]}/manifest.json", time.monotonic() + 300
    while not os.path.exists(manifest):
        assert process.poll() is None, "the run ended before it began"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def found(directory):
    """All that a run leaves, but for times, and for pictures and tables of them."""
    timeless = lambda rows: [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
    summary = json.loads((directory / "summary.json").read_text())
    return {
        "files": sorted(str(p.relative_to(directory)) for p in directory.rglob("*")),
        "samples": sorted(without_times(samples(directory)), key=lambda s: json.dumps(s)),
        "summary": {k: timeless(rows) if k != "bad_rows" else rows for k, rows in summary.items()},
        "bad": (directory / "bad_rows.jsonl").read_bytes(),
        "costs": json.loads((directory / "costs.json").read_text()),
        "kept": [
            {name: array.tolist() for name, array in np.load(p, allow_pickle=False).items()}
            for p in sorted((directory / "kept").glob("*.npz"))
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["in_prompt", "after_compression"])
def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_results(tmp_path, protocol):
    """SIGKILL at moments drawn over the whole run: while it compiles, reads, answers, writes, draws."""
    data = tmp_path / "mine.jsonl"
    data.write_text(f"{json.dumps(ROW)}\n{{nope\n{json.dumps({**ROW, 'context': ROW['context'] * 3})}\n")
    process, began = start(arguments(data, protocol, tmp_path / "whole")), time.monotonic()
    assert process.wait() == 0
    seconds = time.monotonic() - began
    whole = found(tmp_path / "whole" / "x")
    assert len(whole["samples"]) == 2 * 2 * (4 * len(TASKS) + 2)
    assert [row["line"] for row in whole["summary"]["bad_rows"]] == [2, 2]

    rng = np.random.default_rng(len(protocol))
    for i in range(MOMENTS):
        options = arguments(data, protocol, tmp_path / str(i))
        process, moment = start(options), (i + rng.random()) / MOMENTS
        time.sleep(moment * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        here = tmp_path / str(i) / "x"
        lines = here / "samples.jsonl"
        done = lines.read_bytes() if lines.exists() else b""
        whole_lines, _, rest = done.rpartition(b"\n")
        there = sorted(p.name for p in here.iterdir() if p.name != ".lock")
        print(
            f"{protocol}, {moment:.2f} of {seconds:.0f} s: {len(whole_lines.splitlines())} lines and {len(rest)} bytes"
        )
        print(f"  {', '.join(there)}")
        run.main(options)
        assert lines.read_bytes().startswith(whole_lines)  # nothing is lost, nothing runs again
        assert found(here) == whole
