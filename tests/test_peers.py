"""The table beside peers: what is asked of workers, what follows from their answers, and that no row is lost."""

import dataclasses
import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

from kvjax.experiments.bench.peers import __main__ as peers
from kvjax.experiments.bench.peers import environment, measure, rows
from kvjax.experiments.bench.peers.measure import Measured
from kvjax.experiments.bench.peers.report import draw, markdown
from kvjax.experiments.bench.peers.rows import GOALS, TOY, Job, Row
from kvjax.experiments.bench.peers.workers import JobError, Sides
from kvjax.experiments.bench.process import stored_rows
from tests.runs import ROOT, one_layer

# A worker whose jobs are as quick as their `steps` say, in milliseconds, and fail or end the process by their name.
WORKER = """
import os, sys, time
from kvjax.experiments.bench.peers.protocol import Prepared, serve
def prepare(job):
    print("what a library says")
    if job["what"] == "fails":
        raise RuntimeError("no such method")
    if job["what"] == "dies":
        print("out of memory", file=sys.stderr)
        os._exit(9)
    def run():
        if job["what"] == "breaks":
            raise RuntimeError("too few tokens")
        time.sleep(job["length"] / 1000)
        return len(b"x" * (job["batch"] << 20)) // 2
    return Prepared(run, {"compile_seconds": 0.25})
serve(prepare, ABOUT)
"""
DEVICE = {"machine": "x86_64", "kind": "cpu", "versions": dict.fromkeys(("python", "jax", "jaxlib", "kvjax"), "1")}


@pytest.fixture
def sides(tmp_path):
    about = {"kvjax": {"device": DEVICE}, "peer": {"versions": {"torch": "2", "kvpress": None}}}
    commands = {side: [sys.executable, "-c", WORKER.replace("ABOUT", repr(about[side]))] for side in about}
    make = lambda *_: Sides(
        tmp_path, "float32", pathlib.Path(sys.executable), [min(peers.os.sched_getaffinity(0))], tmp_path, commands
    )
    with make() as sides:
        sides.make = make
        yield sides


def job(side="kvjax", what="full", kind="prefill", length=1, **fields):
    return Job(side, kind, what, "evict", length, **fields)


def row(ours, *beside, name="some/row", **fields):
    return Row(name, "a row", ours, beside, **fields)


def test_every_goal_is_of_a_row_and_rows_are_chosen_by_name():
    found = rows.make_rows(rows.FULL)
    assert len({r.name for r in found}) == len(found)
    assert set(GOALS) <= {r.name for r in found}
    names = lambda *only: [r.name for r in rows.choose(found, only)]
    assert names("step", "prefill/*k", "depth/h2o")[-2:] == ["step/random", "depth/h2o"]
    assert "stream/tova" not in names()
    assert names("stream/tova") == ["stream/tova"]
    with pytest.raises(ValueError, match="--only nothing is no row; there are prefill/2k, "):
        names("nothing")


def test_rows_that_share_jobs_are_measured_together():
    groups = [[r.name for r in some] for some in measure.together(rows.make_rows(TOY))]
    assert ["full/1x256", "full/2x256", "batch/256"] in groups
    assert ["statistics/h2o", "statistics/keyformer"] in groups
    assert ["memory/256"] in groups


def test_jobs_run_in_turns_and_a_worker_that_ends_takes_one_job_with_it(sides):
    ours, theirs = (
        [job(length=n) for n in (1, 2)],
        [job("peer", what) for what in ("dies", "fails", "breaks", "SnapKVPress")],
    )
    both = [row(ours[0], *theirs), row(ours[1], theirs[3])]
    asked = []
    ask, sides.ask = sides.ask, lambda do, job: (asked.append((do, job)), ask(do, job))[1]
    found, failed = measure.measure(both, sides, 2, 1, lambda _: None)
    runs = [job for do, job in asked if do == "run"]
    assert runs == [ours[0], theirs[3], ours[1]] * 2 + [*ours, theirs[3]]
    assert failed[theirs[0]] == "the worker ended with code 9: out of memory"
    assert failed[theirs[1]] == "RuntimeError: no such method"
    assert failed[theirs[2]] == "RuntimeError: too few tokens"
    assert set(found) == {*ours, theirs[3]}
    assert [len(found[ours[0]].rounds), len(found[ours[0]].alone)] == [2, 1]
    assert min(found[ours[1]].rounds) >= 0.002
    assert found[ours[0]].facts["compile_seconds"] == 0.25
    entry = measure.outcome(both[0], found, failed)
    assert entry["beside"]["label"] == "SnapKVPress"
    assert set(entry["missing"]) == {"dies", "fails", "breaks"}
    with pytest.raises(JobError, match="no such method"):
        measure.outcome(row(ours[0], theirs[1]), found, failed)


def test_memory_is_that_of_one_run_less_what_stays(sides):
    small, large = job(batch=1), job(batch=33)
    found, _ = measure.measure([row(large, small, measure="bytes")], sides, 2, 1, lambda _: None)
    assert np.median(found[large].rounds) - np.median(found[small].rounds) == pytest.approx(16 << 20, abs=1 << 20)
    assert not found[large].alone


@pytest.mark.parametrize(
    ("ratio", "goal", "median", "alone", "met"),
    [
        ("speed", "full/1x2k", 3.0, 4.0, True),
        ("speed", "decode/ada_snapkv", 3.0, 4.0, True),
        ("speed", "counterpart/ada_snapkv", 3.0, 4.0, False),
        ("cost", "statistics/h2o", 1 / 3, 0.25, True),
        ("speed", "no/goal", 3.0, 4.0, None),
    ],
)
def test_ratios_are_within_rounds_and_a_goal_is_met_in_turns_and_alone(ratio, goal, median, alone, met):
    ours, slow = job(kind="decode", batch=2, steps=4), job("peer", kind="decode", steps=4)
    fast = dataclasses.replace(slow, what="KnormPress")
    found = {
        ours: Measured({}, [1.0, 2.0, 4.0], [1.0]),
        slow: Measured({}, [9.0, 9.0, 9.0], [8.0]),
        fast: Measured({}, [1.0, 3.0, 8.0], [2.0]),
    }
    entry = measure.outcome(row(ours, slow, fast, name=goal, ratio=ratio), found, {})
    assert entry["beside"]["label"] == "KnormPress"
    assert entry["others"] == {"transformers": 2.0, "KnormPress": 0.5}
    assert entry["ratio"]["median"] == pytest.approx(median)
    assert entry["ratio"]["alone"] == pytest.approx(alone)
    assert entry["met"] is met


def test_what_something_adds_is_beside_what_the_other_adds():
    ours, theirs, plain, other = (job(what=name) for name in "abcd")
    found = {j: Measured({}, [x]) for j, x in ((ours, 12.0), (theirs, 300.0), (plain, 10.0), (other, 100.0))}
    entry = measure.outcome(row(ours, theirs, less=(plain, other), ratio="cost", measure="bytes"), found, {})
    assert entry["ratio"]["median"] == pytest.approx(0.01)


@pytest.fixture
def script(monkeypatch, tmp_path, sides):
    """The script with workers that do nothing, and three rows."""
    three = [row(job(length=n), job("peer", length=n), name=f"row/{n}") for n in (1, 2)]
    three.append(row(job(what="fails"), job("peer", length=3), name="row/fails"))
    monkeypatch.setattr(peers, "make_rows", lambda sizes: three)
    monkeypatch.setattr(peers, "Sides", sides.make)
    monkeypatch.setattr(peers, "write_checkpoint", lambda path: None)
    options = {"toy": True, "threads": (1,), "peers_python": pathlib.Path("/bin/true"), "output": tmp_path / "table"}
    return lambda **given: peers.bench(**{**options, **given})


def stored(path):
    return json.loads((path / "table" / "peers.json").read_text())["rows"]


def test_rows_are_stored_as_they_are_measured_and_replace_themselves_alone(script, tmp_path, monkeypatch):
    def interrupted(some, *args):
        if some[0].name == "row/2":
            raise KeyboardInterrupt
        return measure.measure(some, *args)

    monkeypatch.setattr(peers, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt, match="holds the rows that were measured"):
        script()
    monkeypatch.setattr(peers, "measure", measure.measure)
    assert list(stored(tmp_path)) == ["row/1 1"]
    script(only=("row/2",))
    before = stored(tmp_path)
    assert list(before) == ["row/1 1", "row/2 1"]
    with pytest.raises(ValueError, match=r"not measured: row/fails, 1 threads \(fails: RuntimeError: no such method"):
        script(only=("row/1", "row/fails"))
    after = stored(tmp_path)
    assert after["row/2 1"] == before["row/2 1"]
    assert after["row/1 1"] != before["row/1 1"]
    assert (tmp_path / "table" / "peers.md").read_text().count("| a row | 1 |") == 2
    assert (tmp_path / "table" / "peers.png").stat().st_size > 5000
    with pytest.raises(ValueError, match=r"holds rows with another sizes: .*256.* there, .*2048.* now; choose another"):
        script(toy=False)


def test_rows_are_listed_with_their_goals(capsys):
    peers.bench(list=True)
    lines = capsys.readouterr().out.splitlines()
    assert "prefill of 8,192 tokens (at least 1.20)" in lines[2]
    assert len(lines) == len(rows.make_rows(rows.FULL))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"toy": True, "quick": True}, "--quick and --toy are two sizes"),
        ({"threads": (0,)}, "threads=.* must be at least 1"),
        ({"threads": (10_000,)}, "threads=10000, but there are"),
        ({"cores": (10_000,)}, r"--cores \[10000\] are not among"),
        ({"only": ("nothing",)}, "--only nothing is no row"),
        ({"threads": (1,), "peers_python": pathlib.Path("/no/python")}, "--peers-python /no/python cannot be run"),
        ({"threads": (1,), "peers_python": pathlib.Path("/bin/false")}, "/bin/false lacks what is compared"),
        ({"threads": (1,), "environment": pathlib.Path(__file__).parent}, "holds something else than an environment"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        peers.bench(**{"output": tmp_path, **options})


def test_packages_that_cannot_be_had_are_an_error_that_says_what_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"could not be made in .*torch==.*kvpress==0.5.5\), name its interpreter"):
        environment.make_environment(tmp_path / "new")


def test_an_environment_with_other_versions_is_made_anew(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(environment, "said", lambda *command: calls.append(command))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "pyvenv.cfg").touch()
    assert environment.make_environment(tmp_path) == tmp_path / "bin" / "python"
    assert [command[-1] for command in calls] == [str(tmp_path), *environment.requirements()[-2:]]
    calls.clear()
    environment.make_environment(tmp_path)
    assert not calls
    (tmp_path / "kvjax_peers.json").write_text("[]")
    environment.make_environment(tmp_path)
    assert len(calls) == 3


def test_the_committed_table_is_that_of_the_committed_rows():
    folder = ROOT / "experiments" / "bench_results" / "peers"
    table = json.loads((folder / "peers.json").read_bytes())
    assert markdown(table) == (folder / "peers.md").read_text()
    assert len(draw(table).axes) == 2
    about = {name: table[name] for name in ("model", "sizes", "kvjax", "peer")}
    fields = {name: getattr(peers.RANDOM, name) for name in peers._FIELDS}
    assert about == about | json.loads(json.dumps({"model": fields, "sizes": vars(rows.FULL)}))
    assert stored_rows(folder / "peers.json", about) == table["rows"]


@pytest.mark.exhaustive
def test_the_table_is_measured_at_toy_size(tmp_path):
    only = ["prefill", "statistics", "full", "batch", "step/h2o", "depth", "stream/h2o", "first"]
    if importlib.util.find_spec("kvpress") is not None:
        only += ["decode", "counterpart", "memory"]
    output = tmp_path / "table"
    peers.bench(only=tuple(only), toy=True, threads=(1,), peers_python=pathlib.Path(sys.executable), output=output)
    found = stored(tmp_path)
    assert [r.name for r in rows.choose(rows.make_rows(TOY), only)] == [r["name"] for r in found.values()]
    assert all(np.isfinite(r["ratio"]["median"]) for r in found.values())
    # Later versions of transformers than the one that is compared count what a static cache has read, for good.
    assert all("static" in label for r in found.values() for label in r["missing"])


@pytest.mark.exhaustive
def test_a_model_of_ones_own_is_measured(tmp_path):
    options = {"model": one_layer(), "dtype": "bfloat16", "peers_python": pathlib.Path(sys.executable)}
    output = tmp_path / "table"
    peers.bench(only=("prefill", "first/warm"), toy=True, threads=(1,), output=output, **options)
    assert list(stored(tmp_path)) == ["prefill/256 1", "first/warm 1"]
    assert f"{one_layer()} in bfloat16: 389 vocab size" in (output / "peers.md").read_text()
    with pytest.raises(ValueError, match="holds rows with another model"):
        peers.bench(toy=True, threads=(1,), output=output, peers_python=options["peers_python"])
