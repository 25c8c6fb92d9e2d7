"""What the main job refuses, in one line, and how it names and limits what it runs."""

import argparse
import json
import re
import shlex
import shutil

import pytest

import kvjax
from kvjax import methods, models
from kvjax.budgets import Schedule
from kvjax.configs.experiment import Experiment, Setup
from kvjax.experiments import board, figures, findings, learn, run
from kvjax.experiments.core import setup
from kvjax.experiments.tasks import TASKS
from kvjax.models.embedded import EMBEDDED
from tests.files import contents
from tests.runs import SHORT, one_layer, small


def with_baselines(*argv):
    experiment = run.parse(argv)[0]
    return setup.with_baselines(experiment, models.read_config(experiment.setup.source))


def test_default_baselines_are_those_that_the_models_positions_allow(tmp_path, capsys):
    config = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    baselines = lambda *argv: with_baselines("--config", "snapkv.py", *argv).setup.baselines
    assert baselines() == ("random", "streaming_llm", "h2o", "ada_snapkv")
    assert baselines("--model", str(tmp_path), "--baselines", "streaming_llm") == ("streaming_llm",)
    assert baselines("--baselines", "none") == baselines("--baselines") == ()
    assert not capsys.readouterr().out
    assert baselines("--model", str(tmp_path)) == ("random", "h2o", "ada_snapkv")
    assert capsys.readouterr().out.startswith("baselines: random, h2o, ada_snapkv; without streaming_llm")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = json.loads((EMBEDDED / "config.json").read_text()) | {"rope_scaling": yarn}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert baselines("--model", str(tmp_path)) == ("random", "h2o", "ada_snapkv")
    assert "which this model's rotary scaling cannot follow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--config nope.py", r"no config 'nope.py'; there are ada_pyramid, ada_snapkv, ahakv,"),
        ("", "--config is missing"),
        ("--config snapk.py", r"no config 'snapk.py' \(did you mean snapkv\?\); there are"),
        ("--config snapkv.py --budget 16 --window 32", "budget of 16 tokens cannot hold 0 sinks and 32 recent"),
        ("--config snapkv.py --budget 0", "a budget of 0 tokens is none"),
        ("--config snapkv.py --budget", "budget is empty"),
        ("--config snapkv.py --baselines nope", "no config 'nope'"),
        ("--config snapkv.py --model not/there/at/all", "neither a directory nor a hub id"),
        ("--config snapkv.py --length 100", "facts need .* give --length"),
        ("--config snapkv.py --length 20 --tasks perplexity", "length=20; raise the length to 66"),
        *(
            (f"--config snapkv.py {option} {value}", f"{option[2:].replace('-', '.')}.*{value} must be at {bound}")
            for option in ("--examples", "--length", "--batch-size", "--seed", "--block")
            for value, bound in (("0", "least 1"), ("-1", "least"), (str(10**20), "most 2147483647"))
            if (option, value) != ("--seed", "0")
        ),
        ("--config snapkv.py --window=99999999999", "window=9+ must be at most 2147483647"),
        ("--config expected_attention.py --eps nan", "eps=nan must be a finite number"),
        ("--config snapkv.py --budget 0.25 0.250", "budget has 0.25 twice"),
        ("--config snapkv.py --baseline-budget 1.5", "budget=1.5 must be a number of tokens"),
        ("--config snapkv.py --baselines h2o ./h2o.py", "h2o at budget 0.125 is there twice"),
        ("--config snapkv.py --model 20261122103000", "20261122103000 is neither a directory nor a hub id"),
        ("--config snapkv.py --tasks", "tasks is empty"),
        ("--config snapkv.py --tasks nope", r"no task 'nope'; there are single_needle, .* path\.py:function"),
        ("--config snapkv.py --seed 1 1", "seed has 1 twice"),
        (
            "--config snapkv.py --compress decode --baselines",
            "--compress decode is not for snapkv: it evicts after the",
        ),
        (
            "--config fastgen.py --compress prefill --baselines",
            "--compress prefill is not for fastgen: FastGen has no schedule",
        ),
        (
            "--config fastgen.py --block 64 --length 256 --baselines",
            "FastGen looks at the whole prompt at once, but block=64",
        ),
        ("--policy mine.py:make", "there is no Python file 'mine.py'"),
        ("--policy mine.py:make --config h2o.py", "--config and --policy each say what to run"),
        ("--config snapkv.py --data no.jsonl", "--data no.jsonl: there is no such file"),
        ("--config snapkv.py --tasks key_value key_value", "tasks has 'key_value' twice"),
        ("--config ''", "no config ''"),
        ("--config .", "no config '.'"),
        ("--config snapkv.py --output file", "is a file, not a directory; choose another --output"),
        ("--config snapkv.py --output /proc/nothing", "No such file or directory: '/proc/nothing'"),
        ("--config snapkv.py --output file/x", "Not a directory"),
    ],
)
def test_errors_end_with_one_line(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run.main(shlex.split(argv))
    assert not list(tmp_path.rglob("samples.jsonl"))


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (run.main, "--config snapkv.py --text no.txt", "--text no.txt cannot be read"),
        (board.main, "--policy no.py:make", "there is no Python file 'no.py'"),
        (board.main, "--policy mine.py:broken --examples 1 --length 320", "mine.py, line 3: ZeroDivisionError"),
        (board.main, "--text no.txt", "--text no.txt cannot be read"),
        (figures.main, "loss_bound --text no.txt", "--text no.txt cannot be read"),
        (findings.main, "what_decides --text short.txt", "short.txt: .* of the text, but it has 2"),
        (learn.main, "gates --shares nan", r"shares=\(nan,\) must be a finite number above 0 and at most 1"),
    ],
)
def test_commands_look_at_what_they_are_given_before_they_load_weights(
    main, argv, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    (tmp_path / "short.txt").write_text("a bell")
    (tmp_path / "mine.py").write_text("import kvjax\n\ndef broken(budget): return 1 / 0\n")
    with pytest.raises(SystemExit) as e:
        main(argv.split())
    assert re.search(message, " ".join(f"{e.value} {capsys.readouterr().err}".replace("│", " ").split()))


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
            "from kvjax.configs.experiment import Setup\nget_config = lambda: Setup('x', 3)\n",
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
        setup.runs_of([Experiment("full", ((1.0, window),))], Setup())
    with pytest.raises(ValueError, match="h2o at budget 8 is there twice"):
        setup.runs_of([Experiment("h2o", ((8, window),))] * 2, Setup())


def test_a_default_directory_has_a_name_that_a_disk_takes():
    own = argparse.Namespace(config="snapkv.py")
    name, other = (run.default_directory(own, ["--budget", *["0.25"] * 99, last]).name for last in ("1", "2"))
    assert name != other
    assert run.default_directory(own, ["--x", "-1"]) != run.default_directory(own, ["--x", "1"])
    assert len(name) <= 255


def test_unknown_options_are_named_with_what_they_are_near_to(capsys):
    with pytest.raises(SystemExit) as e:
        run.main(["--config", "snapkv.py", "--windw", "3"])
    assert e.value.code == 2
    assert "--window INT" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as e:
        run.main(["--config", "snapkv.py", "--help"])
    assert e.value.code == 0
    assert "--window" in capsys.readouterr().out
    with pytest.raises(SystemExit) as e:
        run.main(["--help"])
    assert e.value.code == 0
    said = capsys.readouterr().out
    assert "configs: ada_pyramid, ada_snapkv, ahakv" in said
    assert "--baseline-budget" in said


def test_setup_names_all_tasks():
    assert set(Setup().task_names) <= set(TASKS)
    assert Setup(data=("x.jsonl",)).task_names == ()


def test_when_to_compress_is_a_matter_of_the_setup(capsys):

    def policies(*argv):
        experiment = run.parse(argv)[0]
        return {m: p for m, _, p in setup.described(experiment, models.read_config(EMBEDDED), None).runs}

    h2o = policies("--config", "h2o.py", "--budget", "0.5", "--baselines")["h2o"]
    for compress, when in (("prefill", Schedule()), ("decode", Schedule(prefill=False, every=1))):
        found = policies("--config", "h2o.py", "--budget", "0.5", "--compress", compress)
        assert found["h2o"] == kvjax.when(when, h2o)
        assert found["full"] == methods.full()
    think = ["--config", "think.py", "--compress", "prefill", "--channels", "0.5", "--baselines"]
    assert policies(*think)["think"] == methods.think(0.5)
    assert "ada_snapkv" not in found
    assert "ada_snapkv, which --compress decode is not for" in capsys.readouterr().out


def test_rows_beyond_the_models_positions_are_warned_of(tmp_path):
    """Before anything is compiled; pytest makes an error of it."""
    shutil.copytree(one_layer(), tmp_path / "short")
    file = tmp_path / "short" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 128}))
    argv = ["--config", "window.py", *small(model=[str(tmp_path / "short")]), "--max-length", "512", "--baselines"]
    with pytest.raises(
        UserWarning, match=r"tokens and \d+ behind it are \d+, but the model was made for 128 positions"
    ):
        run.main([*argv, "--tasks", "key_value", "--output", str(tmp_path / "out")])


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
