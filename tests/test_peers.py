"""The table beside peers: what is asked of workers, what follows from their answers, and that no row is lost."""

import contextlib
import importlib.util
import json
import pathlib
import sys
import types

import numpy as np
import pandas as pd
import pytest

from kvjax.experiments import run
from kvjax.experiments.bench.peers import __main__ as peers
from kvjax.experiments.bench.peers import answers, environment, measure, rows
from kvjax.experiments.bench.peers.checkpoints import MODELS, Model, as_toy, checkpoint
from kvjax.experiments.bench.peers.report import draw, markdown, short
from kvjax.experiments.bench.peers.rows import GOALS, Job, Row
from kvjax.experiments.bench.peers.workers import JobError, Sides
from kvjax.models import load_tokenizer
from kvjax.models.weights import read_config
from tests.runs import ROOT, one_layer, small

# A worker whose jobs are as quick as their `length` says, in milliseconds, and fail or end the process by their name.
WORKER = """
import os, sys, time
from kvjax.experiments.bench.peers.protocol import serve
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
    return run
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
    with contextlib.closing(make()) as sides:
        sides.make = make
        yield sides


def job(side="kvjax", what="full", kind="prefill", length=1, **fields):
    return Job(side, kind, what, "evict", length, **fields)


def row(ours, beside, name="row", **fields):
    return Row("some", name, "a row", ours, beside, **fields)


def all_rows():
    return [r for model in MODELS for r in rows.make_rows(model)]


def test_every_goal_is_of_a_row_and_rows_are_chosen_by_name():
    keys = [r.key for r in all_rows()]
    assert len({*keys}) == len(keys)
    assert set(GOALS) <= {*keys}
    names = lambda *only: [r.key for r in rows.choose(all_rows(), only)]
    assert names() == keys
    assert names("tiny/step", "gemma3-bf16/prefill/*k", "llama2gb-f32/peak") == [
        "gemma3-bf16/prefill/1k",
        "gemma3-bf16/prefill/4k",
        *(f"tiny/step/{method}" for method in ("tova", "h2o", "keyformer", "roco", "random")),
        "llama2gb-f32/peak",
    ]
    assert names("peak") == [f"{model.name}/peak" for model in MODELS]


def test_rows_that_share_jobs_are_measured_together_and_weighed_apart():
    groups = [[r.name for r in some] for some in measure.together(rows.make_rows(MODELS[-2]))]
    assert ["full/1x2k", "steps/2k"] in groups
    assert ["statistics/h2o", "statistics/nacl", "statistics/keyformer"] in groups
    assert ["first/cold", "first/kept", "first/kvpress", "peak"] in groups
    assert ["memory/4k"] in groups


def test_rows_with_goals_are_measured_first_and_those_behind_their_prompts_with_them():
    keys = [[r.key for r in some] for some in rows.turns(all_rows())]
    assert keys[0][:4] == [f"llama1b-bf16/{name}" for name in ("prefill/1k", "full/1x1k", "steps/1k", "full/4x1k")]
    assert "llama1b-bf16/first/kept" in keys[0]
    assert "llama1b-bf16/prefill/4k" not in keys[0]
    assert keys[-1][-1] == "tiny/counterpart/think"
    assert sorted(key for some in keys for key in some) == sorted(r.key for r in all_rows())


@pytest.mark.slow
def test_jobs_run_in_turns_and_a_worker_that_ends_takes_one_job_with_it(sides):
    ours = [job(length=n) for n in (1, 2)]
    theirs = [job("peer", what) for what in ("dies", "fails", "breaks", "SnapKVPress")]
    some = [*(row(ours[0], other) for other in theirs), row(ours[1], theirs[3])]
    asked = []
    ask, sides.ask = sides.ask, lambda do, job: (asked.append((do, job)), ask(do, job))[1]
    found, failed = measure.measure(some, sides, 0.0, lambda _: None)
    runs = [job for do, job in asked if do == "run"]
    assert runs[-6:] == [ours[0], theirs[3], ours[1]] * 2
    assert failed == {
        theirs[0]: "the worker ended with code 9: out of memory",
        theirs[1]: "RuntimeError: no such method",
        theirs[2]: "RuntimeError: too few tokens",
    }
    assert {other: len(rounds) for other, rounds in found.items()} == {ours[0]: 2, theirs[3]: 2, ours[1]: 2}
    assert min(x["seconds"] for x in found[ours[1]]) >= 0.002
    assert measure.outcome(some[3], found, failed)["beside"]["label"] == "SnapKVPress"
    with pytest.raises(JobError, match="fails: RuntimeError: no such method"):
        measure.outcome(some[1], found, failed)


@pytest.mark.parametrize(("seconds", "rounds"), [(60.0, 9), (16.0, 5), (5.0, 3), (2.0, 2)])
def test_rounds_are_as_many_as_there_is_time_for(seconds, rounds, monkeypatch):
    """A round takes 3 seconds by this clock."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(monotonic=lambda: clock.now))

    def ask(do, job):
        clock.now += job.length if do == "run" else 0.0
        return {}

    one = row(job(length=1), job("peer", length=2))
    found, _ = measure.measure([one], types.SimpleNamespace(ask=ask), seconds, lambda _: None)
    assert [len(x) for x in found.values()] == [rounds, rounds]


def test_memory_is_that_of_one_run_less_what_stays(sides):
    small, large = job(batch=1), job(batch=33)
    found, _ = measure.measure([row(large, small, measure="beyond")], sides, 1.0, lambda _: None)
    median = lambda job: np.median([x["beyond"] for x in found[job]])
    assert median(large) - median(small) == pytest.approx(16 << 20, abs=1 << 20)


@pytest.mark.parametrize(
    ("key", "ratio", "expected", "met"),
    [
        ("tiny/full/1x2k", "speed", 3.0, True),
        ("smollm2-f32/decode/snapkv", "speed", 3.0, False),
        ("tiny/statistics/h2o", "cost", 1 / 3, True),
        ("tiny/no", "speed", 3.0, None),
    ],
)
def test_ratios_are_within_rounds_and_by_tokens(key, ratio, expected, met):
    ours, theirs = job(kind="decode", batch=2, steps=4), job("peer", kind="decode", steps=4)
    found = {
        ours: [{"seconds": x} for x in (1.0, 2.0, 4.0)],
        theirs: [{"seconds": x} for x in (1.0, 3.0, 8.0)],
    }
    model, _, name = key.partition("/")
    entry = measure.outcome(Row(model, name, "", ours, theirs, ratio), found, {})
    assert entry["ratio"]["median"] == pytest.approx(expected)
    assert entry["kvjax"]["value"] == pytest.approx(0.25)
    assert entry["met"] is met


def test_what_something_adds_is_beside_what_the_other_adds():
    ours, theirs, plain, other = (job(what=name) for name in "abcd")
    found = {j: [{"beyond": x}] for j, x in ((ours, 12.0), (theirs, 300.0), (plain, 10.0), (other, 100.0))}
    entry = measure.outcome(row(ours, theirs, less=(plain, other), ratio="cost", measure="beyond"), found, {})
    assert entry["ratio"]["median"] == pytest.approx(0.01)


def test_random_models_are_written_once_in_their_dtype(tmp_path, capsys):
    small = Model("small", "a small one", peers.MODELS[-2].source, "bfloat16")
    for _ in range(2):
        place = checkpoint(small, tmp_path)
    assert read_config(place).embed_dim == 256
    assert json.loads((place / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert capsys.readouterr().out.count("writing a small one") == 1


@pytest.fixture
def script(monkeypatch, tmp_path, sides):
    """The script with workers that do nothing, and three rows, the first of which comes last."""
    three = [row(job(length=n), job("peer", length=n), name=f"row/{n}", late=n == 1) for n in (1, 2)]
    three.append(row(job(what="fails"), job("peer", length=3), name="row/fails"))
    monkeypatch.setattr(peers, "MODELS", (Model("some", "some", ""),))
    monkeypatch.setattr(peers, "make_rows", lambda model: three)
    monkeypatch.setattr(peers, "Sides", sides.make)
    monkeypatch.setattr(peers, "checkpoint", lambda model, folder: folder)
    options = {"threads": 1, "seconds": 1e-9, "peers_python": pathlib.Path("/bin/true"), "output": tmp_path / "table"}
    return lambda **given: peers.bench(**{**options, **given})


def stored(path):
    return json.loads((path / "table" / "peers.json").read_text())["rows"]


@pytest.mark.slow
def test_rows_are_stored_as_they_are_measured_and_replace_themselves_alone(script, tmp_path, monkeypatch):
    def interrupted(some, *args):
        if some[0].late:
            raise KeyboardInterrupt
        return measure.measure(some, *args)

    monkeypatch.setattr(peers, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt, match="holds the rows that were measured"):
        script()
    monkeypatch.setattr(peers, "measure", measure.measure)
    before = stored(tmp_path)
    assert list(before) == ["some/row/2"]
    with pytest.raises(ValueError, match=r"not measured: some/row/fails \(fails: RuntimeError: no such method"):
        script(missing=True)
    assert list(stored(tmp_path)) == ["some/row/2", "some/row/1"]
    assert stored(tmp_path)["some/row/2"] == before["some/row/2"]
    script(only=("row/2",))
    assert stored(tmp_path)["some/row/2"] != before["some/row/2"]
    assert (tmp_path / "table" / "peers.md").read_text().count("| a row | ") == 2
    assert (tmp_path / "table" / "peers.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="holds rows with another toy: False there, True now; choose another"):
        script(toy=True)


def test_no_row_is_begun_when_the_time_is_up(script, tmp_path):
    with pytest.raises(ValueError, match=r"some/row/2 \(its time was up; --missing goes on\)"):
        script(minutes=1e-9)
    assert not (tmp_path / "table" / "peers.json").exists()


def test_rows_are_listed_with_their_goals(capsys):
    peers.bench(list=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("prefill, 1,024 tokens (at least 0.90)")
    assert len(lines) == len(all_rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 10_000}, "threads=10000, but there are"),
        ({"cores": (10_000,)}, r"--cores \[10000\] are not among"),
        ({"only": ("nothing",)}, "--only nothing is no row; there are llama1b-bf16/prefill/1k, "),
        ({"threads": 1, "peers_python": pathlib.Path("/no/python")}, "--peers-python /no/python cannot be run"),
        ({"threads": 1, "peers_python": pathlib.Path("/bin/false")}, "/bin/false lacks what is compared"),
        ({"threads": 1, "environment": pathlib.Path(__file__).parent}, "holds something else than an environment"),
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


def test_the_committed_table_is_that_of_the_committed_rows(capsys):
    folder = ROOT / "experiments" / "bench_results" / "peers"
    table = json.loads((folder / "peers.json").read_bytes())
    assert markdown(table) == (folder / "peers.md").read_text()
    made = {r.key: r for r in all_rows()}
    assert {key: row["text"] for key, row in table["rows"].items()} == {key: made[key].text for key in table["rows"]}
    assert {key: row["goal"] for key, row in table["rows"].items()} == {key: made[key].goal for key in table["rows"]}
    assert len(draw(table).axes) == len({row["model"] for row in table["rows"].values()})
    peers.bench(short=True, output=folder)
    assert capsys.readouterr().out.splitlines() == [*short(table).markdown(), ""]
    assert len(short(table).rows) == 8


@pytest.mark.exhaustive
def test_the_table_is_measured_at_toy_size(tmp_path):
    only = [f"tiny/{name}" for name in ("prefill", "statistics", "full", "steps", "step/h2o", "peak", "load", "first")]
    if importlib.util.find_spec("kvpress") is not None:
        only += [f"tiny/{name}" for name in ("decode", "counterpart", "memory")]
    else:
        only[-1:] = ["tiny/first/cold", "tiny/first/kept"]
    here = {"threads": 1, "seconds": 1e-9, "peers_python": pathlib.Path(sys.executable), "output": tmp_path / "table"}
    peers.bench(only=tuple(only), toy=True, **here)
    found = stored(tmp_path)
    assert {*found} == {r.key for r in rows.choose(rows.make_rows(as_toy(MODELS[-2])), only)}
    assert all(np.isfinite(r["ratio"]["median"]) for r in found.values())


@pytest.mark.exhaustive
def test_a_model_of_ones_own_is_measured(tmp_path):
    output = tmp_path / "table"
    options = {"model": one_layer(), "dtype": "bfloat16", "peers_python": pathlib.Path(sys.executable)}
    peers.bench(only=("first/kept", "prefill"), toy=True, threads=1, seconds=1e-9, output=output, **options)
    assert [row["name"] for row in stored(tmp_path).values()] == ["prefill/128", "prefill/256", "first/kept"]
    assert f"## {one_layer()}-bfloat16" in (output / "peers.md").read_text()


def test_presses_answer_what_a_run_was_asked(made, tmp_path, monkeypatch):
    """Each once; scores, places and answers that are the same stand beside the run's."""
    where, output, told = tmp_path / "run", tmp_path / "answers", []
    run.main([*small(tasks=["key_value"], baselines=["tova"]), "--config", "snapkv.py", "--output", str(where)])
    setup, prompts = answers.asked(where, 3)
    tokenizer = load_tokenizer(setup.source)

    def apart(module, function, *given, **how):
        told.append((function, *given[2:4]))
        right = [tokenizer.encode(p.example.questions[0].references[0]) for p in prompts]
        if how["python"] == ("bare",):
            raise RuntimeError("failed:\nNo module named 'torch'")
        return {"kvpress": "1"} if function == "versions" else right if given[2] == "SnapKVPress" else [[], *right[1:]]

    monkeypatch.setattr(answers, "apart", apart)
    monkeypatch.setattr(answers, "check_interpreter", lambda python: python)
    ask = lambda **more: answers.bench(where, "0.5", examples=3, peers_python=tmp_path, output=output, **more)
    with pytest.raises(ValueError, match=r"has no h2o at 0.5 that has a press; there are snapkv, tova"):
        ask(methods=("h2o",))
    with pytest.raises(ValueError, match=r"has no method at 0.75 that has a press; there are none"):
        answers.bench(where, "0.75", examples=3, peers_python=tmp_path, output=output)
    with pytest.raises(ValueError, match=r"versions\(\) of bare failed: No module named 'torch'"):
        answers.bench(where, "0.5", peers_python=pathlib.Path("bare"), output=output)
    ask()
    ask()
    share = 21 / sum(len(p.tokens) for p in prompts)
    asked = [x for x in told if x[0] == "answers"]
    assert asked == [("answers", press, pytest.approx(share)) for press in ("SnapKVPress", "TOVAPress")]
    text = (output / "answers.md").read_text()
    assert "2 methods of kvjax and presses of kvpress on 3 prompts" in text
    found = pd.read_csv(output / "scores.csv.gz").groupby("method")["theirs"].sum()
    assert found.to_dict() == {"snapkv": 3.0, "tova": 2.0}
