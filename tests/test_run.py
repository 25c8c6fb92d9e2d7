"""The main job from the command line: results, resuming, errors."""

import argparse
import errno
import fcntl
import inspect
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import configs
import models
from configs.experiment import Experiment, Setup
from experiments import compare, run
from experiments.evaluation import metrics, report, results
from experiments.evaluation.evaluate import Cost
from experiments.evaluation.results import Results
from experiments.tasks import TASKS, Example
from kvjax import methods
from models.embedded import EMBEDDED

ROOT = pathlib.Path(__file__).parents[1]


def other_than_small(**changes):
    """The options of `SMALL` with others in place of some."""
    options = {"length": ["256"], "examples": ["4"], "batch_size": ["2"], "budget": ["0.5", "0.25"]} | changes
    return [word for name, values in options.items() for word in ("--" + name.replace("_", "-"), *values)]


SMALL = other_than_small()


def samples(directory):
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


def without_times(lines):
    """Without seals too, which are over the whole line."""
    measured = ("prefill_seconds", "decode_tokens_per_second", "seal")
    return [{k: v for k, v in s.items() if k not in measured} for s in lines]


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


TWO_TASKS = "single_needle", "perplexity"
METHODS = ("full", "1.0"), ("snapkv", "0.5")


def test_resuming_after_a_kill_ends_with_the_same_numbers(finished, tmp_path):
    """SIGKILL in the middle, then the same command again."""
    directory = tmp_path / "killed"
    command = [sys.executable, "experiments/run.py", "--config", "snapkv.py", *other_than_small(budget=["0.5"])]
    command += ["--baselines", "--tasks", *TWO_TASKS, "--output", str(directory)]
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
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert lines.read_bytes().startswith(done)  # nothing computed was lost or computed again
    mine = lambda rows: [r for r in rows if r["task"] in TWO_TASKS and (r["method"], r["budget"]) in METHODS]
    assert without_times(samples(directory)) == without_times(mine(samples(finished)))
    timeless = lambda d: [
        {k: v for k, v in r.items() if k not in ("prefill_seconds", "decode_tokens_per_second")}
        for r in mine(json.loads((d / "summary.json").read_text())["rows"])
    ]
    assert timeless(directory) == timeless(finished)


def test_two_processes_do_not_share_a_directory(tmp_path):
    first = Results(tmp_path / "x", {"a": 1}, [])
    with pytest.raises(ValueError, match="another process is writing"):
        Results(tmp_path / "x", {"a": 1}, [])
    first.close()
    Results(tmp_path / "x", {"a": 1}, []).close()


def test_a_restart_does_not_move_the_directory_of_a_running_job(tmp_path, monkeypatch):
    first = Results(tmp_path / "x", {"a": 1}, [])
    line = {"method": "m", "budget": "1", "task": "t", "index": 0}
    with pytest.raises(ValueError, match="another process is writing"):
        Results(tmp_path / "x", {"a": 1}, [], restart=True)
    first.append([line])
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    first.close()
    with Results(tmp_path / "x", {"a": 1}, [], restart=True) as second:
        assert not second.samples
        with pytest.raises(ValueError, match="another process is writing"):  # the new directory is locked too
            Results(tmp_path / "x", {"a": 1}, [])
    assert [{k: v for k, v in s.items() if k != "seal"} for s in samples(tmp_path / "x.old-1")] == [line]

    flock = fcntl.flock

    def moved_first(lock, how):  # another process moves the directory between the opening of the file and its lock
        (tmp_path / "x").rename(tmp_path / "y")
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", moved_first)
    with pytest.raises(ValueError, match="another process is writing"):
        Results(tmp_path / "x", {"a": 1}, [])


def test_a_directory_that_was_moved_or_unlocked_is_not_written_to(tmp_path):
    line = {"method": "m", "budget": "1", "task": "t", "index": 0}
    for i, harm in enumerate((lambda d: d.rename(tmp_path / "away"), lambda d: (d / ".lock").unlink())):
        with Results(tmp_path / f"{i}", {"a": 1}, []) as first:
            first.append([line])
            harm(tmp_path / f"{i}")
            with (
                Results(tmp_path / f"{i}", {"a": 1}, []) as second,
                pytest.raises(ValueError, match="was moved, or its"),
            ):
                first.append([{**line, "index": 1}])
            assert len(second.samples) == i


def test_a_restart_moves_neither_a_job_that_runs_inside_nor_the_working_directory(tmp_path, monkeypatch):
    outer = tmp_path / "outer"
    Results(outer, {"a": 1}, []).close()
    with Results(outer / "inner", {"a": 1}, []), pytest.raises(ValueError, match=r"another process .*outer/inner"):
        Results(outer, {"a": 1}, [], restart=True)
    for directory, inside in ((outer, outer / "inner"), (pathlib.Path("."), outer)):
        monkeypatch.chdir(inside)
        with pytest.raises(ValueError, match=f"would move the working directory, {outer}, aside; run it from else"):
            Results(directory, {"a": 1}, [], restart=True)
    assert [p.name for p in tmp_path.iterdir()] == ["outer"]


def test_a_lock_of_another_program_keeps_what_is_in_it(tmp_path):
    (tmp_path / ".lock").write_text("12")
    Results(tmp_path, {"a": 1}, []).close()
    assert (tmp_path / ".lock").read_text() == "12"


# --- damaged directories ---


class Made:
    """An evaluator that makes its results up from examples and policies, at once."""

    def __init__(self, model, params, policy, **options):
        self.size = len(repr(policy))

    def compile(self):
        return Cost(self.size, 8 * self.size, None, None)

    def run(self, batch):
        fixed = {"most_live": 9, "prefill_seconds": 0.5, "decode_tokens_per_second": 20.0}
        outcomes = [
            {**dict(e.meta), **fixed, "prompt_tokens": len(e.context), "live": 7.0, "score": (self.size + e.index) % 2}
            for e in batch
        ]
        return outcomes, [np.full((len(batch), 2, 3), self.size, np.int32)] * 2

    def release(self):
        pass


SHORT = ["--config", "window.py", "--length", "256", "--examples", "4", "--batch-size", "2", "--budget", "0.5"]
SHORT += ["--tasks", "key_value", "--baselines"]


def make_up(patch, embedded):
    """Runs cost nothing: their results are made up, and no picture is drawn."""
    patch.setattr(run, "Evaluator", Made)
    patch.setattr(models, "load", lambda *_, **__: embedded[:2])
    patch.setattr(models, "load_tokenizer", lambda *_: embedded[2])
    for plot in ("score_against_budget", "depth_against_length", "kept_positions"):
        patch.setattr(report, f"plot_{plot}", lambda *_: None)


@pytest.fixture
def made(monkeypatch, embedded):
    make_up(monkeypatch, embedded)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, embedded):
    """Two finished runs that differ in their seeds."""
    directory = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        make_up(patch, embedded)
        run.main([*SHORT, "--output", str(directory / "here")])
        run.main([*SHORT, "--seed", "1", "--output", str(directory / "other")])
    return directory


def contents(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def lines_of(change):
    """Damage to the lines of samples.jsonl: `change(lines, other run's lines)`."""
    split = lambda data: data.splitlines(keepends=True)
    return lambda mine, other: b"".join(change(split(mine), split(other)))


DELETED = lambda mine, other: None
EMPTY = lambda mine, other: b""
GARBAGE = lambda mine, other: b"\xff\x00{garbage\n" * 3
HALF = lambda mine, other: mine[: len(mine) // 2]
SWAPPED = lambda mine, other: other
FULL, WINDOW = "kept/full@1.0.npz", "kept/window@0.5.npz"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((f, d) for f in ("costs.json", "summary.json") for d in (DELETED, EMPTY, GARBAGE, HALF, SWAPPED)),
        *((f, d) for f in ("summary.md", WINDOW) for d in (DELETED, EMPTY, GARBAGE, HALF)),
        *((f, d) for f in ("samples.jsonl", ".lock") for d in (DELETED, EMPTY)),
        ("costs.json", lambda mine, other: b"[]"),
        ("costs.json", lambda mine, other: mine.replace(b'"kv_bytes": ', b'"kv_bytes": 1')),
        ("summary.json", lambda mine, other: mine.replace(b'"score": ', b'"score": 1')),
        (".lock", GARBAGE),
        ("samples.jsonl", HALF),
        ("samples.jsonl", lambda mine, other: mine + b'{"method": "window", "bud'),
        ("samples.jsonl", lambda mine, other: mine[:-9] + bytes(90)),
        ("samples.jsonl", lines_of(lambda mine, other: mine[:3] + mine[5:])),
    ],
)
def test_what_can_be_found_anew_is_found_anew(made, pair, tmp_path, file, damage):
    here, other = tmp_path / "here", pair / "other"
    shutil.copytree(pair / "here", here)
    before = contents(here)
    found = damage(before[file], contents(other)[file])
    (here / file).unlink() if found is None else (here / file).write_bytes(found)
    run.main([*SHORT, "--output", str(here)])
    ordered = lambda files: {**files, ".lock": b"", "samples.jsonl": sorted(files["samples.jsonl"].splitlines())}
    assert ordered(contents(here)) == ordered(before)


def test_kept_positions_of_another_policy_are_found_anew(made, pair, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(pair / "here", here)
    before = contents(here)
    shutil.copy(here / FULL, here / WINDOW)
    assert contents(here) != before
    run.main([*SHORT, "--output", str(here)])
    assert contents(here) == before


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("manifest.json", DELETED, "holds samples.jsonl, costs.json, .* but no manifest.json.*--restart"),
        *(("manifest.json", d, "manifest.json is broken .*--restart") for d in (EMPTY, GARBAGE, HALF)),
        ("manifest.json", lambda mine, other: b"[]", "manifest.json is broken .*--restart"),
        ("manifest.json", lambda mine, other: b'{"config": 3}', "manifest.json is broken .*--restart"),
        ("manifest.json", SWAPPED, r"another config \(seed: 1 there, 0 now; setup.seed: 1 there, 0 now\)"),
        ("samples.jsonl", SWAPPED, "line 1 of .*samples.jsonl was changed, or was written by another run"),
        ("samples.jsonl", GARBAGE, "line 1 of .*samples.jsonl is no line that this run wrote: .*delete the line"),
        ("samples.jsonl", lines_of(lambda m, o: [*m[:2], b"#\n", *m[2:]]), "line 3 .* is no line .*: '#'; delete the"),
        ("samples.jsonl", lines_of(lambda m, o: [*m[:2], b"{}\n"]), "line 3 of .* is no line that this run wrote"),
        ("samples.jsonl", lines_of(lambda m, o: [*m[:2], b"\n", *m[2:]]), "line 3 of .* is no line that this run"),
        ("samples.jsonl", lines_of(lambda m, o: [*m[:2], o[2], *m[3:]]), "line 3 of .* was written by another run"),
        ("samples.jsonl", lambda mine, other: mine.replace(b"\n", b"\r"), "bytes without a line break .* not one line"),
        ("samples.jsonl", lambda mine, other: mine.replace(b"\n", b""), "ends in .* bytes without a line break"),
        ("samples.jsonl", lambda mine, other: b"[" + mine.split(b"\n")[0] + b"]", "ends in .* put them back"),
        ("samples.jsonl", lines_of(lambda m, o: [*m, m[1]]), "line 9 of .*samples.jsonl stands there twice"),
        (
            "samples.jsonl",
            lines_of(lambda m, o: [m[0].replace(b'"live": 7.0', b'"live": 8.0'), *m[1:]]),
            "line 1 of .*samples.jsonl was changed",
        ),
    ],
)
def test_what_cannot_be_shown_to_be_this_runs_is_refused(made, pair, tmp_path, file, damage, message):
    here, other = tmp_path / "here", pair / "other"
    shutil.copytree(pair / "here", here)
    intact = contents(here)
    found = damage(intact[file], contents(other)[file])
    (here / file).unlink() if found is None else (here / file).write_bytes(found)
    damaged = contents(here)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run.main([*SHORT, "--output", str(here)])
    assert contents(here) == damaged
    run.main([*SHORT, "--output", str(here), "--restart"])
    assert contents(tmp_path / "here.old-1") == damaged
    assert contents(here)["summary.json"] == intact["summary.json"]


def test_results_leave_the_model_and_the_config_what_and_where_they_are(made, tmp_path):
    model, outer = tmp_path / "outer" / "model", tmp_path / "outer"
    shutil.copytree(EMBEDDED, model)
    shutil.copy(pathlib.Path(configs.__file__).parent / "window.py", outer / "mine.py")
    before = contents(model)
    with pytest.raises(SystemExit, match=r"error: --output .*model is the model's own directory; choose another"):
        run.main([*SHORT, "--model", str(model), "--output", str(model)])
    run.main([*SHORT, "--model", str(model), "--output", str(outer)])
    with pytest.raises(
        SystemExit, match=r"error: --restart would move .*outer/model aside with .*outer; choose another"
    ):
        run.main([*SHORT, "--model", str(model), "--output", str(outer), "--restart"])
    with pytest.raises(SystemExit, match=r"error: --restart would move .*mine\.py aside"):
        run.main(["--config", str(outer / "mine.py"), *SHORT[2:], "--output", str(outer), "--restart"])
    assert contents(model) == before
    assert [p.name for p in tmp_path.iterdir()] == ["outer"]


MINE = """
import dataclasses
import kvjax
from configs.experiment import Common, Experiment, Setup, sweep
from kvjax.scoring.scores import Score

@dataclasses.dataclass(frozen=True)
class Newest(Score):
    def __call__(self, memory, kv, stats, ctx, candidates):
        return kv.pos + 0.0

def get_config(budget: tuple[float, ...] = (0.5,), power: int = 2, setup: Common = Setup()) -> Experiment:
    make = {"lambda": lambda b: kvjax.from_fn(lambda kv, stats, ctx: -(kv.k**power).sum(-1), budget=b),
            "class": lambda b: kvjax.Evict(Newest(), b)}
    return Experiment("mine", sweep(make["KIND"], budget), setup)
"""


@pytest.mark.parametrize(
    ("kind", "change", "options"),
    [
        ("lambda", lambda text: text.replace("kv.k**", "kv.v**"), []),
        ("lambda", lambda text: text, ["--power", "3"]),
        ("class", lambda text: text.replace("kv.pos + 0.0", "-kv.pos + 0.0"), []),
    ],
)
def test_results_of_code_that_a_repr_does_not_show_do_not_mix(made, tmp_path, kind, change, options):
    file, here = tmp_path / "mine.py", tmp_path / "here"
    command = ["--config", str(file), *SHORT[2:], "--output", str(here)]
    file.write_text(MINE.replace("KIND", kind))
    run.main(command)
    before = contents(here)
    run.main(command)  # functions have other addresses now, and are the same
    assert contents(here) == before
    file.write_text(change(MINE.replace("KIND", kind)))
    with pytest.raises(SystemExit, match=r"another config \(policies\[1\].policy: .* of code \w+\W+there, .* of code"):
        run.main([*command, *options])
    assert contents(here) == before


READS = """
import helper
import kvjax
from configs.experiment import Common, Experiment, Setup, sweep

SCALE = helper.SCALE

def inner(x):
    return x * SCALE

class Scaled:
    scale = SCALE

    def __call__(self, kv, stats, ctx):
        return kv.pos * self.scale

def nested(kv, stats, ctx):
    return (lambda x: inner(x))(kv.pos)

def outside(kv, stats, ctx):
    return kv.pos * helper.SCALE

def get_config(budget: tuple[float, ...] = (0.5,), setup: Common = Setup()) -> Experiment:
    return Experiment("mine", sweep(lambda b: kvjax.from_fn(WHAT, budget=b), budget), setup)
"""


@pytest.mark.parametrize("what", ["nested", "outside", "Scaled()"])
def test_results_of_globals_that_a_config_reads_do_not_mix(made, tmp_path, monkeypatch, what):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(READS.replace("WHAT", what))
    (tmp_path / "helper.py").write_text("import os\n\nSCALE, UNUSED = float(os.environ['SCALE']), object()\n")
    command = ["--config", str(tmp_path / "mine.py"), *SHORT[2:], "--output", str(tmp_path / "here")]
    for scale, refused in (("2", False), ("2", False), ("3", True)):
        monkeypatch.setenv("SCALE", scale)
        monkeypatch.delitem(sys.modules, "helper", raising=False)
        if refused:
            with pytest.raises(SystemExit, match=r"another config \(policies\[1\].policy: .* of code \w+\W+there"):
                run.main(command)
        else:
            run.main(command)
    monkeypatch.delitem(sys.modules, "helper")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_results_of_other_weights_in_the_same_place_do_not_mix(made, tmp_path, file):
    model, here = tmp_path / "model", tmp_path / "here"
    shutil.copytree(EMBEDDED, model)
    run.main([*SHORT, "--model", str(model), "--output", str(here)])
    (model / file).write_bytes((model / file).read_bytes() + b" ")
    with pytest.raises(SystemExit, match=r"another config \(checkpoint: '\w+' there, '\w+' now\)"):
        run.main([*SHORT, "--model", str(model), "--output", str(here)])
    run.main([*SHORT, "--model", str(model), "--output", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match=r"new cannot be compared with .*here: checkpoint='\w+' against"):
        compare.main([str(here), str(tmp_path / "new")])


def test_other_code_or_versions_between_start_and_resumption_are_said_and_noted(made, tmp_path, capsys, monkeypatch):
    here, command = tmp_path / "x", [*SHORT, "--output", str(tmp_path / "x")]
    run.main(command)
    first = json.loads((here / "manifest.json").read_text())
    other = {**results.environment([]), "code": "0", "versions": {**first["versions"], "jax": "0"}}
    monkeypatch.setattr(results, "environment", lambda _: other)
    said = rf"x holds results that were made otherwise .*code: '\w+' there, '0' now; versions.jax: '{jax.__version__}'"
    run.main(command)  # complete
    assert re.search(said, capsys.readouterr().err)
    assert json.loads((here / "manifest.json").read_text()) == first
    (here / "samples.jsonl").write_bytes(b"".join((here / "samples.jsonl").read_bytes().splitlines(True)[:3]))
    run.main(command)
    assert re.search(said, capsys.readouterr().err)
    assert json.loads((here / "manifest.json").read_text()) == {**first, "resumed": [{"after_lines": 3, **other}]}
    run.main(command)
    assert not capsys.readouterr().err
    for noted in (3, [3], {"code": "0"}):  # changed by hand
        (here / "manifest.json").write_text(json.dumps({**first, "resumed": noted}))
        (here / "samples.jsonl").write_bytes(b"".join((here / "samples.jsonl").read_bytes().splitlines(True)[:3]))
        run.main(command)
        assert json.loads((here / "manifest.json").read_text())["resumed"] == [{"after_lines": 3, **other}]


def test_an_interruption_says_what_is_stored_and_how_to_go_on(made, tmp_path, capsys, monkeypatch):
    def interrupted(self, batch, work=Made.run):
        if batch[0].index == 2:
            raise KeyboardInterrupt
        return work(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Made, "run", interrupted)
        with pytest.raises(SystemExit) as e:
            run.main([*SHORT, "--output", str(tmp_path / "x")])
    assert e.value.code == 130
    error = capsys.readouterr().err
    assert f"{tmp_path / 'x'} holds what was finished (2 lines of samples.jsonl)" in error
    assert "the same command goes on from there" in error
    run.main([*SHORT, "--output", str(tmp_path / "x")])
    assert len(samples(tmp_path / "x")) == 8
    monkeypatch.setattr(run, "parse", lambda _: interrupted(None, [Example("t", 2, ())]))
    with pytest.raises(SystemExit) as e:
        run.main([])
    assert e.value.code == 130


@pytest.mark.parametrize("file", ["samples.jsonl", "costs.json", "kept", "summary.md"])
def test_a_full_disk_is_named_with_the_file(made, tmp_path, monkeypatch, file):
    """And what was written before is there when the disk has room again."""
    sync = os.fsync

    def full(number):
        if file in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SystemExit, match=f"error: .*No space left on device: .*/x/{file}"):
            run.main([*SHORT, "--output", str(tmp_path / "x")])
    assert not list(tmp_path.rglob("*.tmp"))
    run.main([*SHORT, "--output", str(tmp_path / "x")])
    assert len(samples(tmp_path / "x")) == 8
    with Results(tmp_path / "y", {"a": 1}, []) as results:
        (tmp_path / "y" / "samples.jsonl").symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"No space left on device: .*samples\.jsonl"):
            results.append([{"method": "m", "budget": "1", "task": "t", "index": 0}])


def test_batches_do_not_change_results(finished, tmp_path):
    """Other batch sizes put prompts of other lengths together; rows are independent."""
    small = other_than_small(budget=["0.5"], batch_size=["4"])
    arguments = ["--config", "snapkv.py", *small, "--baselines", "--tasks", "single_needle", "multi_query"]
    run.main([*arguments, "--output", str(tmp_path / "x")])
    pick = lambda d: {
        (s["method"], s["budget"], s["task"], s["index"]): (s["output"], s["live"])
        for s in samples(d)
        if s["task"] in ("single_needle", "multi_query") and s["budget"] in ("1.0", "0.5")
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
    small = ["--length", "256", "--examples", "4", "--batch-size", "2", "--tasks", "single_needle", "key_value"]
    small += ["--recovery-ratio", "0.98", "0.9", "--baselines", "random"]
    run.main(["--config", "fastgen.py", *small, "--output", str(directory)])
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
    assert all(f"| fastgen T={t} |" in tables[1] for t in (0.98, 0.9))


def test_leaderboard(finished, tmp_path, capsys):
    other = tmp_path / "h2o"
    run.main(["--config", "h2o.py", *other_than_small(budget=["0.5"]), "--baselines", "--output", str(other)])
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
    assert not any("second" in k for k in perplexity)  # times of separate runs are not comparable
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
        *((["--config", "snapkv.py", "--budget", b], "share of the prompt lies in") for b in ("inf", "-0.5", "0.0")),
        *((["--config", "snapkv.py", "--budget", b], "--budget: nan is no number") for b in ("nan", "-NaN")),
        (["--config", "snapkv.py", "--window-size=99999999999"], "--window-size=9+: 9+ must be at most 2147483647"),
        (["--config", "expected_attention.py", "--eps", "nan"], "--eps: nan is no number"),
        (["--config", "snapkv.py", "--budget", "-1"], "a number of tokens is whole and cannot be negative"),
        (["--config", "snapkv.py", "--budget", "0.25", "0.250"], "budget has 0.25 twice"),
        (["--config", "snapkv.py", "--baseline-budget", "1.5"], "share of the prompt lies in"),
        (["--config", "snapkv.py", "--baselines", "h2o", "./h2o.py"], "h2o at budget 0.125 is there twice"),
        (["--config", "fastgen.py", "--recovery-ratio", "0.9", "0.90"], "policies of fastgen has 'T=0.9' twice"),
        (
            ["--config", "snapkv.py", "--budget", "64", "--budget=0.25"],
            "--budget is given twice; give it once, with all",
        ),
        (["--config", "snapkv.py", "--window_size", "8", "--window-size", "9"], "--window-size is given twice"),
        (["--config", "snapkv.py", "--config", "h2o.py"], "--config is given twice"),
        (["--config", "snapkv.py", "--model", "20261122103000"], "20261122103000 is neither a directory nor a hub id"),
        (["--config", "snapkv.py", "--tasks"], "tasks is empty"),
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


def test_comparing_skips_what_is_no_run_of_the_main_job_and_says_so(made, tmp_path, capsys):
    here, other = tmp_path / "here", tmp_path / "other" / "here"
    run.main([*SHORT, "--output", str(here)])
    run.main([*SHORT, "--block", "64", "--output", str(other)])
    learned = tmp_path / "learned"
    with Results(learned, {"name": "learned_budget", "policies": [], "prompts": {}}, []):
        (learned / "summary.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    shutil.copy(here / "summary.json", tmp_path / "bare")
    capsys.readouterr()
    compare.main([str(d) for d in (here, learned, tmp_path / "bare", here)])
    printed = capsys.readouterr()
    assert printed.err.count("not a run of experiments/run.py") == 2
    assert f"skipped {learned}: " in printed.err
    assert printed.out.count("\n| window | 0.5 |") == 1
    manifest = json.loads((here / "manifest.json").read_text())
    for changed in ({"setup": 3}, {"policies": None}, {"policies": [{"budget": "0.5"}]}):
        (learned / "manifest.json").write_text(json.dumps({"config": {**manifest["config"], **changed}}))
        compare.main([str(d) for d in (here, learned)])
        assert f"skipped {learned}: not a run of experiments/run.py" in capsys.readouterr().err
    (here / "summary.json").write_bytes(b"#")  # rows are made from the lines
    compare.main([str(here)])
    assert capsys.readouterr().out == printed.out

    compare.main([str(here), str(other)])  # in blocks it is another policy, and the runs have one name
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n| window ({d}) | 0.5 |") == 1 for d in (here, other))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("manifest.json", "{", "manifest.json is broken"),
        ("samples.jsonl", "", "here lacks 8 lines of samples.jsonl; run it again"),
        ("samples.jsonl", "#\n", "line 1 of .*samples.jsonl is no line that this run wrote"),
        ("costs.json", "{}", "here lacks costs.json; run it again"),
    ],
)
def test_comparing_refuses_damaged_runs(pair, tmp_path, file, content, message):
    shutil.copytree(pair / "here", tmp_path / "here")
    (tmp_path / "here" / file).write_text(content)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        compare.main([str(tmp_path / "here")])


def test_a_leaderboard_that_is_cut_off_leaves_no_rows_of_an_earlier_one(pair, tmp_path, monkeypatch):
    board = tmp_path / "board"
    for directory in ("here", "other"):
        compare.main([str(pair / directory), "--output", str(board)])
        monkeypatch.setattr(compare, "plot", interrupt)
        with pytest.raises(SystemExit):
            compare.main([str(pair / "here"), "--output", str(board)])
        assert [p.name for p in board.glob("*.json")] == []
        monkeypatch.undo()


def interrupt(*_):
    raise KeyboardInterrupt


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
            "from configs.experiment import Setup\nget_config = lambda: Setup('x', 3)\n",
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
    with pytest.raises(ValueError, match=r"h2o at budget 0\.125 is there twice"):
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
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "import kvjax\n"
        "from configs.experiment import Common, Experiment, Setup, sweep\n\n\n"
        "@dataclasses.dataclass\n"
        "class Mine:\n"
        "    x: int = 3\n\n\n"
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
    arguments = ["--config", "snapkv.py", *other_than_small(budget=["0.25"]), "--baselines", "--tasks", *TWO_TASKS]
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
    with pytest.raises(SystemExit, match="FastGen looks at the whole prompt at once, but block=64"):
        run.main(
            ["--config", "fastgen.py", *SMALL[:6], "--baselines", "--block", "64", "--output", str(tmp_path / "f")]
        )
