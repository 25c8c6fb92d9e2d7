"""Runs of the main job that are killed at any moment: resumed, they end with the same results."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.runs import ROOT, one_layer, samples
from tests.tools import kills


def begun(*how):
    """A process of Python, once it takes SIGTERM."""
    command = [sys.executable, *how]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    caught = lambda text: int(text.split("SigCgt:")[1].split()[0], 16) >> signal.SIGTERM - 1 & 1
    while not caught(pathlib.Path(f"/proc/{process.pid}/status").read_text()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_anything_is_begun_ends_a_command_at_once_with_one_line(number):
    """All run through `as_command`. What Python itself raises jax might drop."""
    slow = (
        "from kvjax.experiments.core.command import as_command; import time; as_command(lambda argv: time.sleep(99))()"
    )
    process = begun("-c", slow)
    process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert error == f"\n{number.name}: interrupted; no result was being written\n"


@pytest.mark.slow
def test_a_signal_stops_a_run_after_the_examples_that_run_and_says_how_it_goes_on(tmp_path):
    here, number = tmp_path / "x", signal.SIGTERM
    options = [*("--config", "window.py", "--model", one_layer(), "--tasks", "key_value", "--baselines"), "--length"]
    options += [*("256", "--examples", "300", "--batch-size", "1", "--budget", "0.5", "--output"), str(here)]
    process = begun("experiments/run.py", *options)
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
