"""A results directory: resumed, damaged, contended, moved; nothing is lost and nothing counts twice."""

import errno
import fcntl
import json
import os
import re
import subprocess

import numpy as np
import pytest

from kvjax.experiments.core import records
from kvjax.experiments.core.records import Records, load_kept, read_bad, read_lines, read_manifest
from tests.files import contents

CONFIG = {"name": "m", "seed": 0, "ids": {"m@1": "a", "full@1.0": "b"}}
LINE = {"method": "m", "budget": "1", "task": "t", "index": 0, "question": 0, "id": "a", "score": 0.5}


def opened(directory, config=CONFIG, **options):
    return Records(directory, config, ["run"], **options)


def numbered(*indices):
    return [{**LINE, "index": i} for i in indices]


@pytest.fixture
def three(tmp_path):
    """A directory of three lines."""
    with opened(tmp_path / "x") as found:
        found.append(numbered(0, 1, 2))
    return tmp_path / "x"


def test_lines_are_written_once_and_found_again(three):
    before = contents(three)
    with opened(three) as again:
        assert [line["index"] for line in again.lines.values()] == [0, 1, 2]
        again.append([*numbered(2, 3, 3), {**LINE, "question": 1}])
    assert (three / "samples.jsonl").read_bytes().startswith(before["samples.jsonl"])
    assert [(k[3], k[4]) for k in read_lines(three / "samples.jsonl")[0]] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]
    manifest = read_manifest(three)
    assert manifest["config"] == CONFIG
    assert [made["command"] for made in manifest["made"]] == [["run"]]


@pytest.mark.parametrize(
    "rest", [b'{"meth', b'{"method": "m", "budget": "1", "task": "t", "ind', bytes(90), b'{"method": "m"' + bytes(90)]
)
def test_a_torn_last_line_is_dropped(three, rest, capsys):
    whole = (three / "samples.jsonl").read_bytes()
    (three / "samples.jsonl").write_bytes(whole + rest)
    with opened(three) as again:
        assert "the last line of" in capsys.readouterr().err
        assert len(again.lines) == 3
        again.append(numbered(3))
    with opened(three) as again:
        assert [*again.lines.values()] == numbered(0, 1, 2, 3)
    assert (three / "samples.jsonl").read_bytes().startswith(whole)


def test_a_flipped_bit_of_a_line_is_found(three):
    """Whichever it is. A line without a checksum, as an older kvjax wrote it, is read all the same."""
    file, first = three / "samples.jsonl", json.dumps(LINE).encode() + b"\n"
    whole, said = file.read_bytes()[:-1].rpartition(b"\n")[2], set()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(first + flipped + b"\n")
        try:
            lines = read_lines(file)[0]
        except ValueError as e:
            said.add(re.sub(f".*{file} |: .*", "", str(e)))
        else:  # the name of the checksum, so that there is none
            assert lines["m", "1", "t", 2, 0].items() >= numbered(2)[0].items()
    assert said == {"is no line that a run wrote", "is not as it was written"}


def lines_of(change):
    return lambda data: b"".join(change(data.splitlines(keepends=True)))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("manifest.json", None, "holds samples.jsonl but no manifest.json.*--restart"),
        ("manifest.json", lambda _: b"", "manifest.json is broken .*--restart"),
        ("manifest.json", lambda m: m[: len(m) // 2], "manifest.json is broken .*--restart"),
        ("manifest.json", lambda _: b'{"config": 3}', "manifest.json is broken .*--restart"),
        ("manifest.json", lambda _: b'{"config": {"ids": ["a"]}, "made": [{}]}', "manifest.json is broken .*--restart"),
        ("manifest.json", lambda m: m.replace(b'"made"', b'"code"'), "holds results of an older kvjax, .*run it anew"),
        ("manifest.json", lambda m: m.replace(b'"seed": 0', b'"seed": 1'), r"another config \(seed: 1 there, 0 now\)"),
        ("samples.jsonl", lines_of(lambda m: [m[0], b"#\n", *m[1:]]), "line 2 of .* is no line .*: '#'; delete the"),
        ("samples.jsonl", lines_of(lambda m: [*m, b"{}\n"]), "line 4 of .* is no line that a run wrote"),
        ("samples.jsonl", lambda m: b"\xff\x00{\n" + m, "line 1 of .* is no line that a run wrote"),
        ("samples.jsonl", lines_of(lambda m: [*m, m[1]]), "line 4 of .* stands there twice"),
        ("samples.jsonl", lambda m: m.replace(b"0.5", b"0.4", 1), "line 1 of .* is not as it was written: "),
        ("samples.jsonl", lambda m: m.replace(b"\n", b"\r"), "bytes without a line break .* put them back"),
        ("samples.jsonl", lambda _: json.dumps(LINE | {"id": "z"}).encode() + b"\n", "a line of another run.*delete"),
    ],
)
def test_what_cannot_be_this_runs_is_refused_and_stays(three, file, damage, message):
    found = (three / file).read_bytes()
    (three / file).unlink() if damage is None else (three / file).write_bytes(damage(found))
    damaged = contents(three)
    with pytest.raises(ValueError, match=message):
        opened(three)
    assert contents(three) == damaged
    with opened(three, restart=True) as anew:
        assert not anew.lines
    assert contents(three.with_name("x.old-1")) == damaged


@pytest.mark.parametrize(
    "wrong",
    [{"score": x} for x in (None, "x", float("nan"), 2, 10**400)]
    + [{"nll": x} for x in (None, "x", float("nan"), float("inf"))]
    + [{"method": ["m"]}, {"budget": 1}, {"task": None}, {"index": "0"}, {"question": 1.0}],
)
def test_what_is_no_score_and_no_name_is_no_line(three, wrong):
    """Of lines without a checksum."""
    (three / "samples.jsonl").write_text(json.dumps(LINE | wrong) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is no line that a run wrote"):
        opened(three)


def test_a_start_that_came_to_nothing_belongs_to_nobody(tmp_path):
    with opened(tmp_path, {"seed": 1}):
        pass
    with opened(tmp_path):
        assert read_manifest(tmp_path)["config"] == CONFIG


def test_one_process_at_a_time_writes_and_a_restart_moves_no_running_job(tmp_path, monkeypatch):
    outer, inner = tmp_path / "x", tmp_path / "x" / "inner"
    with opened(outer) as first:
        for restart in (False, True):
            with pytest.raises(ValueError, match=r"another process is writing to .*x; wait for it"):
                opened(outer, restart=restart)
        first.append([LINE])
    with opened(inner), pytest.raises(ValueError, match=r"another process .*x/inner"):
        opened(outer, restart=True)
    monkeypatch.chdir(inner)
    with pytest.raises(ValueError, match=r"would move the working directory, .*x, aside; run it from elsewhere"):
        opened(outer, restart=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, not a directory"):
        opened(tmp_path / "file")


@pytest.mark.parametrize("harm", [lambda d: d.rename(d.with_name("away")), lambda d: (d / ".lock").unlink()])
def test_a_directory_that_was_moved_or_unlocked_is_not_written_to(tmp_path, harm):
    with opened(tmp_path / "x") as first:
        first.append([LINE])
        harm(tmp_path / "x")
        with opened(tmp_path / "x"), pytest.raises(ValueError, match=r"was moved, or its .lock deleted"):
            first.append(numbered(1))


def test_where_the_file_system_has_no_locks_a_file_says_whose_a_directory_is(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    owner, ended = tmp_path / ".lock.owner", subprocess.Popen(["true"])
    ended.wait()
    with opened(tmp_path) as first:
        mine = owner.read_text()
        with pytest.raises(ValueError, match=r"another process .*; if that process has ended, delete .*owner"):
            opened(tmp_path)
        first.append([LINE])
    assert not owner.exists()
    owner.write_text(mine.replace(str(os.getpid()), str(ended.pid), 1))  # what a killed process left
    with opened(tmp_path) as again:
        assert len(again.lines) == 1


def test_a_full_disk_is_named_with_the_file_and_loses_nothing(three, monkeypatch):
    whole, sync = (three / "samples.jsonl").read_bytes(), os.fsync

    def full(number):
        os.ftruncate(number, os.fstat(number).st_size - 9)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(three) as again:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: .*samples\.jsonl"):
            again.append(numbered(3))
        with pytest.raises(OSError, match=r"No space left on device: .*kept"):
            again.keep("m@1", [np.zeros((1, 2))])
        monkeypatch.setattr(os, "fsync", sync)
    assert not [*three.rglob("*.tmp")]
    with opened(three) as again:
        assert len(again.lines) == 3
    assert (three / "samples.jsonl").read_bytes() == whole


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_named(three):
    three.chmod(0o500)
    with pytest.raises(OSError, match=r"Permission denied: .*x"):
        opened(three)


def test_what_is_written_beside_a_file_goes_through_no_link_and_does_not_stay(tmp_path):
    victim, here = tmp_path / "victim", tmp_path / "x"
    victim.write_text("mine")
    here.mkdir()
    (here / "manifest.json").symlink_to(victim)
    (here / ".manifest.json.0123456789abcdef.tmp").write_text("what a kill left")
    (here / ".lock").write_text("12")  # of another program
    with opened(here) as found:
        found.append([LINE])
    assert victim.read_text() == "mine"
    assert (here / ".lock").read_text() == "12"
    assert sorted(p.name for p in here.iterdir()) == [".lock", "manifest.json", "samples.jsonl"]


@pytest.mark.parametrize("name", ["kept", "checkpoints", "samples.jsonl"])
def test_a_link_that_would_be_written_through_is_refused(three, name, tmp_path):
    """What it leads to stays, the torn line at its end too."""
    victim = tmp_path / "victim"
    victim.write_bytes((three / "samples.jsonl").read_bytes() + b"torn")
    (three / name).unlink(missing_ok=True)
    (three / name).symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(ValueError, match=f"{name} is a link to another place; delete it"):
        opened(three)
    assert victim.read_bytes() == before


def test_other_code_or_versions_are_said_and_noted_before_the_next_line(three, monkeypatch, capsys):
    first = read_manifest(three)
    other = {**first["made"][0], "code": "0", "versions": {**first["made"][0]["versions"], "jax": "0"}}
    monkeypatch.setattr(records, "environment", lambda _: other)
    for _ in range(2):
        with opened(three) as again:
            assert "made otherwise than this run would make them (code: " in capsys.readouterr().err
        assert read_manifest(three) == first
    with opened(three) as again:
        again.append(numbered(3))
        again.append(numbered(4))
    assert read_manifest(three) == {**first, "made": [*first["made"], {"after_lines": 3, **other}]}
    capsys.readouterr()
    with opened(three):
        pass
    assert not capsys.readouterr().err


def test_bad_rows_and_kept_positions_are_read_back(three):
    bad, layers = [{"task": "t", "index": 1, "line": 2, "reason": "no answers"}], [np.arange(6).reshape(2, 3)] * 2
    with opened(three) as again:
        again.set_bad(bad)
        again.keep("m@1", layers)
    (three / "kept" / "full@1.0.npz").write_bytes(b"broken")
    assert read_bad(three) == bad
    assert {name: np.stack(x).tolist() for name, x in load_kept(three).items()} == {"m@1": np.stack(layers).tolist()}


def test_lines_of_an_equal_run_beside_are_taken_over(three, tmp_path, monkeypatch, capsys):
    with opened(three) as first:
        first.keep("m@1", [np.zeros((1, 2))])
    other = {"name": "other", "ids": {"n@2": "a", "full@1.0": "c"}}
    wanted = {("n", "2", "t", i, 0) for i in (0, 2, 4)}
    with opened(three.with_name("y"), other) as second:
        assert second.take_over("full@1.0", wanted) == 0
        assert second.take_over("n@2", wanted) == 2
        assert second.take_over("n@2", wanted) == 0
    assert f"n@2: 2 lines are taken over from {three}" in capsys.readouterr().out
    mine, theirs = (read_lines(d / "samples.jsonl")[0].values() for d in (three.with_name("y"), three))
    assert [*mine] == [{**line, "method": "n", "budget": "2"} for line in theirs if line["index"] != 1]
    assert [*load_kept(three.with_name("y"))] == ["n@2"]
    noted = read_manifest(three.with_name("y"))["taken_over"]
    assert noted == [{"of": "n@2", "from": str(three), "lines": 2}]
    whole = (three / "samples.jsonl").read_bytes()
    (three / "samples.jsonl").write_bytes(whole.replace(b'"m"', b'["m"]', 1))
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "manifest.json").write_text('{"config": {"ids": ["a"]}, "made": [{}]}')
    with opened(three.with_name("v"), other) as third:  # an equal run that is broken is named; others go in
        assert third.take_over("n@2", wanted) == 2
    said = f"n@2: nothing is taken over from {three}, an equal run: line 1 of "
    assert said in capsys.readouterr().err
    (three / "samples.jsonl").write_bytes(whole)
    now = records.environment([])
    monkeypatch.setattr(records, "environment", lambda _: {**now, "code": "0"})
    with opened(three.with_name("z"), other) as third:
        assert third.take_over("n@2", wanted) == 0
