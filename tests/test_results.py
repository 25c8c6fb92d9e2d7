"""Directories of results: locks, damage, interruptions, and what is never lost."""

import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

from kvjax.experiments import compare, run
from kvjax.experiments import report as page
from kvjax.experiments.evaluation import results, reuse
from kvjax.experiments.evaluation.results import Results
from kvjax.models.embedded import EMBEDDED
from tests.runs import SHORT, Made, contents, interrupt, samples


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


def test_where_the_file_system_has_no_locks_a_file_says_whose_a_directory_is(made, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    here, command = tmp_path / "x", [*SHORT, "--output", str(tmp_path / "x")]
    owner, ended = here / ".lock.owner", subprocess.Popen(["true"])
    ended.wait()
    with Results(here, {"a": 1}, []):
        mine = json.loads(owner.read_text())
        with pytest.raises(SystemExit, match=rf"another .* to .*x: {os.getpid()} on .*, as .*/.lock.owner says, since"):
            run.main(command)
    assert not owner.exists()
    for unknown in ({"host": "elsewhere"}, {"namespace": "pid:[1]"}):
        owner.write_text(json.dumps({**mine, **unknown, "process": ended.pid}))
        with pytest.raises(SystemExit, match=rf"to .*x: {ended.pid} on .*, or delete that file if the process"):
            run.main(command)
    for left in ({"process": ended.pid}, {"started": "1"}):  # a process that ended, whose number another may have got
        owner.write_text(json.dumps({**mine, **left}))
        run.main([*command, "--restart"])
        assert not [*tmp_path.rglob(owner.name)]
    page.main([str(here), "--output", str(tmp_path / "page")])
    assert {p.name for p in (tmp_path / "page").iterdir()} == {"report.html", "report.md"}

    def another_takes_over(*_):
        owner.unlink()
        owner.write_text(json.dumps(mine))
        raise ProcessLookupError

    owner.write_text(json.dumps({**mine, "process": ended.pid}))
    monkeypatch.setattr(os, "kill", another_takes_over)
    with pytest.raises(SystemExit, match=rf"to .*x: {os.getpid()} on "):
        run.main(command)
    assert json.loads(owner.read_text()) == mine
    assert [*here.glob(f"{owner.name}*")] == [owner]


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
    (outer / "mine.py").write_text("from kvjax import configs\n\nget_config = configs.find('window')[1]\n")
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
import kvjax
from kvjax.configs.experiment import Common, Experiment, Setup, sweep
from kvjax.contract import Score

class Newest(Score):
    def __call__(self, slots):
        return slots.kv.pos + 0.0

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
        ("class", lambda text: text.replace("slots.kv.pos + 0.0", "-slots.kv.pos + 0.0"), []),
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
from kvjax.configs.experiment import Common, Experiment, Setup, sweep

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
    def interrupted(self, bucket, batch, work=Made.run, **options):
        if batch[0].example.index == 2:
            raise KeyboardInterrupt
        return work(self, bucket, batch, **options)

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
    assert "| 500.0 (one batch) | 20 (one batch) |" in (tmp_path / "x" / "summary.md").read_text()  # made up, all equal
    monkeypatch.setattr(run, "parse", interrupt)
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        run.main([])
    assert e.value.code == 130
    assert capsys.readouterr().err == "\ninterrupted; no result was being written\n"


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


def test_what_is_written_beside_a_file_goes_through_no_link_and_does_not_stay(made, tmp_path):
    here, victim = tmp_path / "x", tmp_path / "victim"
    here.mkdir()
    victim.write_text("mine")
    planted = {f"{name}.tmp" for name in ("manifest.json", "costs.json", "summary.md", "summary.json")}
    for name in planted:
        (here / name).symlink_to(victim)
    (here / ".costs.json.0123456789abcdef.tmp").write_text("what a kill left")
    run.main([*SHORT, "--output", str(here)])
    assert victim.read_text() == "mine"
    assert {p.name for p in here.rglob("*.tmp")} == planted


def test_the_full_cache_of_an_equal_run_beside_is_taken_over(made, tmp_path, capsys, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    other = ["--config", "h2o.py", *SHORT[2:]]
    run.main([*SHORT, "--output", str(first)])
    ran = []
    monkeypatch.setattr(Made, "run", lambda self, *a, work=Made.run, **k: ran.append(self.size) or work(self, *a, **k))
    run.main([*other, "--output", str(second)])
    assert f"the full cache's 4 examples are taken over from {first}" in capsys.readouterr().out
    assert len({*ran}) == 1  # h2o's
    manifest = json.loads((second / "manifest.json").read_text())
    assert manifest["taken_over"] == {"full@1.0": {"from": str(first), "lines": 4}}
    lines = lambda d: [{k: v for k, v in s.items() if k != "seal"} for s in samples(d) if s["method"] == "full"]
    assert lines(first) == lines(second)
    run.main([*other, "--output", str(second)])
    assert "is complete" in capsys.readouterr().out
    for here, options in ((second, ["--restart"]), (tmp_path / "third", ["--seed", "1"])):
        run.main([*other, "--output", str(here), *options])
        assert "taken over" not in capsys.readouterr().out
    monkeypatch.setattr(reuse, "environment", lambda _: {**results.environment([]), "code": "0"})
    run.main([*other, "--output", str(tmp_path / "fourth")])
    assert "taken over" not in capsys.readouterr().out
