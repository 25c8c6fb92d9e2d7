"""Runs of the main job that are killed at any moment: resumed, they end with the same results."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvjax.experiments import stopping
from tests.runs import ROOT, one_layer, samples
from tests.tools import kills


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
@pytest.mark.parametrize("script", ["run", "-m run", "sweep", "report", "learn", "train"])
def test_a_signal_before_anything_is_begun_ends_a_script_at_once_with_one_line(script):
    """While it imports, where jax would drop what Python raises."""
    for number, seconds in ((signal.SIGTERM, 0.0), (signal.SIGINT, 0.1)):
        process = begun(script, "--help")
        time.sleep(seconds)
        process.send_signal(number)
        _, error = process.communicate(timeout=10)
        assert process.returncode == 128 + number
        assert error == f"\n{number.name}: interrupted; no result was being written\n"


@pytest.mark.slow
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


MARKS = dict.fromkeys(
    ("in_prompt", "after_compression", "reproduce", "replication"), pytest.mark.exhaustive
)  # as others are


@pytest.mark.parametrize("kind", [pytest.param(k, marks=MARKS.get(k, pytest.mark.slow)) for k in kills.KINDS])
def test_what_is_killed_at_any_moment_ends_with_the_same_results(tmp_path, kind):
    """SIGKILL while it compiles, reads, answers, writes or draws. `tests.tools.kills` has many."""
    whole, seconds = kills.whole(kind, tmp_path / "whole" / "x")
    runs = {"sweep": 2, "board": 2, "findings": 0, "train": 0}.get(kind, 1)
    assert len([path for path in whole if path.endswith("manifest.json")]) == runs
    for path, lines in whole.items():
        if path.endswith("samples.jsonl") and kind in ("in_prompt", "after_compression", "sweep"):
            asked = {(s["method"], s["task"], s["index"]) for s in map(json.loads, lines)}
            assert len(asked) == 2 * 2 * (4 * len(kills.TASKS) + 2)
            assert len(lines) > len(asked)
        if path.endswith("bad_rows.jsonl"):
            assert [json.loads(row)["line"] for row in lines.splitlines()] == [2, 2]
    moment = np.random.default_rng(len(kind)).random() * seconds
    assert kills.killed_and_resumed(kind, tmp_path / "killed" / "x", moment) == whole
