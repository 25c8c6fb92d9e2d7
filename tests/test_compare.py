"""Runs side by side."""

import dataclasses
import json
import shutil

import pytest

from kvjax import models
from kvjax.configs.experiment import Setup
from kvjax.experiments import compare, run
from kvjax.experiments.evaluation import boards
from kvjax.experiments.evaluation.examples import described, find_builders
from kvjax.experiments.evaluation.results import Results
from tests.runs import ROOT, SHORT, interrupt, samples, small


def test_leaderboard(finished, tmp_path, capsys):
    other = tmp_path / "h2o"
    run.main(["--config", "h2o.py", *small(budget=["0.5"]), "--baselines", "--output", str(other)])
    capsys.readouterr()
    compare.main([str(finished), str(other), str(tmp_path), "--output", str(tmp_path / "board")])
    printed = capsys.readouterr()
    assert "no summary.json" in printed.err
    board, overview = printed.out.split("Retrieval mean in percent / perplexity, by budget:")
    rows = [line.split(" | ")[:2] for line in board.splitlines() if line.startswith("| ")]
    assert "not the defaults of `kvjax.methods`: snapkv(window=16).\n" in board
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
        monkeypatch.setattr(compare, "write_figure", lambda *_, **options: interrupt())
        with pytest.raises(SystemExit):
            compare.main([str(pair / "here"), "--output", str(board)])
        assert [p.name for p in board.glob("*.json")] == []
        monkeypatch.undo()


def test_tasks_of_ones_own_have_a_mean_too():
    costs = {"live_of_prompt": 0.5, "kv_bytes_of_full": 0.5, "kv_budget": 0.5}
    rows = [
        {"method": "h2o", "budget": "0.5", "task": task, **costs, **found}
        for task, found in (("mine", {"score": 0.25}), ("yours", {"score": 0.75}), ("text", {"perplexity": 6.5}))
    ]
    methods, budgets, cells = compare.by_budget(rows)
    assert (methods, budgets, cells) == (["h2o"], ["0.5"], {("h2o", "0.5"): {"score": 50.0, "perplexity": 6.5}})
    assert compare.plot([]) is None
    label = lambda rows: compare.plot(rows).axes[-2].get_ylabel() + compare.plot(rows).axes[-2].get_xlabel()
    assert label(rows) == "mean score, %"
    rows = [row | {"metrics": [metric]} for row, metric in zip(rows, ("contains", "f1", "f1"), strict=True)]
    assert label(rows) == "mean score (of different metrics: contains, f1), %"


def test_names_beside_the_map_are_short_and_differ():
    names = ["h2o", "snapkv (snapkv-budget-64)", *(f"snapkv (snapkv-{'budget-' * 12}{i})" for i in range(2))]
    short = compare._beside(names)
    assert short[:2] == ["h2o", "snapkv (budget-64)"]
    assert len(set(short)) == 4
    assert max(len(line) for name in short for line in name.splitlines()) <= 38


def test_a_shard_may_have_no_examples(made, tmp_path, capsys):
    """A job array may be larger than the run: what has nothing to do is complete."""
    parts = [tmp_path / f"x-shard-{i}-of-5" for i in range(1, 6)]
    run.main([*SHORT, "--output", str(tmp_path / "x")])
    for i in (*range(1, 6), 5):
        run.main([*SHORT, "--output", str(tmp_path / "x"), "--shard", f"{i}/5"])
    printed = capsys.readouterr().out
    assert "x-shard-5-of-5 is complete" in printed
    assert "shard 5/5 has none of the" in printed
    assert not (parts[4] / "samples.jsonl").exists()
    assert compare.load(parts)[1] == compare.load([tmp_path / "x"])[1]


def test_shards_are_one_run(made, tmp_path, capsys):
    whole, parts = tmp_path / "whole" / "x", [tmp_path / f"x-shard-{i}-of-3" for i in (1, 2, 3)]
    run.main([*SHORT, "--output", str(whole)])
    for i in (1, 2, 3):
        run.main([*SHORT, "--output", str(tmp_path / "x"), "--shard", f"{i}/3"])
    assert [len(samples(d)) for d in parts] == [4, 2, 2]
    board = lambda *directories: compare.load(directories)[1]
    assert board(*reversed(parts)) == board(whole)
    shutil.copytree(parts[1], tmp_path / "again")
    for given, message in (
        (parts[:2], "x-shard-1-of-3 is a shard of a run whose shard 3/3 is missing; finish it"),
        ([*parts, tmp_path / "again"], "again is a shard that another directory is too; leave it out"),
    ):
        with pytest.raises(SystemExit, match=message):
            compare.main([str(d) for d in given])
    with pytest.raises(SystemExit) as e:
        run.main([*SHORT, "--shard", "4/3"])
    assert e.value.code == 2
    assert "'4/3' is not one of 1/N to N/N" in capsys.readouterr().err


@pytest.fixture
def board(pair, tmp_path):
    """A leaderboard of one run, whose rows another method and another setup can be put into."""
    compare.main([str(pair / "here"), "--output", str(tmp_path / "board")])
    return tmp_path / "board" / boards.FILE


def changed(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return boards.read([path.parent])


def test_a_run_stands_among_the_methods_of_a_leaderboard(pair, board, capsys):
    def other_methods(content):
        window = [row for row in content["rows"] if row["method"] == "window"]
        content["rows"] += [{**row, "method": "h2o", "code": "commit abc"} for row in window]
        content["setup"]["tasks"] = ["key_value"]  # as before tasks had builders
        content["setup"] = {k: v for k, v in content["setup"].items() if k not in ("compress", "truncate", "data")}

    of = lambda rows: {(r["method"], r["budget"]) for r in rows}
    rows = compare.load([pair / "here"], changed(board, other_methods))[1]
    assert of(rows) == {("full", "1.0"), ("window", "0.5"), ("h2o", "0.5")}
    assert len(rows) == 6
    compare.main([str(pair / "here"), "--with", str(board.parent)])
    assert "| commit abc |" in capsys.readouterr().out.split("Retrieval mean")[0]

    def another_window(content):
        for row in content["rows"]:
            row["live_tokens"] += row["method"] == "window"

    rows = compare.load([pair / "here"], changed(board, another_window))[1]
    assert of(rows) == {("full", "1.0"), ("window", "0.5"), ("window (board)", "0.5"), ("h2o", "0.5")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["setup"].update(checkpoint="abc"), "cannot be compared with .*here: checkpoint='abc' against '"),
        (lambda c: c["setup"].update(compress="decode"), "compress='decode' against 'both'"),
        (lambda c: c["setup"]["tasks"]["key_value"].update(examples=9), "tasks.key_value.examples=9 against 4"),
        (lambda c: c["setup"].update(tasks=["key_value", "vt"]), "tasks='key_value, vt' against 'key_value'$"),
        (lambda c: c["rows"][0].update(live_tokens=99.0), "prompts of key_value have 99 tokens on average against 7"),
        (lambda c: c["rows"][0].pop("low"), "leaderboard.json is broken .*is not what compare.py writes"),
        (lambda c: c.pop("setup"), "leaderboard.json is broken .*KeyError: 'setup'"),
    ],
)
def test_leaderboards_of_another_setup_or_task_are_refused(pair, board, change, message):
    with pytest.raises(ValueError, match=message):
        compare.load([pair / "here"], changed(board, change))


def test_the_leaderboard_that_comes_along_can_be_joined():
    (found,) = boards.read([ROOT / "experiments" / "leaderboard"])
    setup = Setup(examples=24)
    tasks = described(setup, find_builders(setup))
    now = dataclasses.asdict(setup) | {"checkpoint": models.fingerprint(setup.source), **tasks}
    assert boards.differences(found.setup, now) == []
    with pytest.raises(ValueError, match=r"--with .*there is no leaderboard.json"):
        boards.read([ROOT])
