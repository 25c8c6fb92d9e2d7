"""What tells two policies, or two models, apart: their runs do not mix in one directory."""

import functools
import json
import shutil
import types

import numpy as np
import pytest

from kvjax.contract import FrozenArrays
from kvjax.experiments import run
from kvjax.experiments.core.provenance import definition
from kvjax.models.embedded import EMBEDDED
from tests.files import contents
from tests.runs import SHORT

MINE = """
import kvjax
from kvjax.configs.experiment import Common, Experiment, Setup, sweep

def make(budget, power=2):
    return kvjax.from_fn(lambda kv, stats, ctx: -(kv.k**power).sum(-1), budget=budget)

def get_config(budget: tuple[float, ...] = (0.5,), power: int = 2, setup: Common = Setup()) -> Experiment:
    return Experiment("mine", sweep(lambda b: make(b, power), budget), setup)
"""
TASK = """
from kvjax.experiments.tasks.base import Question, example

def odd(task, index):
    return example("odd", index, (1, 2, 5), Question((4,), references=("5",), max_new_tokens=2))
"""
METRIC = "def half(output, references):\n    return 0.5\n"


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        (MINE, ["--config", "FILE"], "policies\\[1\\].policy"),
        (MINE, ["--policy", "FILE:make"], "policies\\[1\\].policy"),
        (TASK, ["--config", "window.py", "--tasks", "FILE:odd"], "tasks.odd.builder"),
        (METRIC, ["--config", "window.py", "--data", "ROWS", "--metrics", "FILE:half"], "tasks.rows.builder"),
    ],
)
def test_results_of_another_file_of_the_user_do_not_mix(made, tmp_path, text, options, named):
    file, rows, here = tmp_path / "mine.py", tmp_path / "rows.jsonl", tmp_path / "here"
    file.write_text(text)
    rows.write_text(json.dumps({"context": "a b", "question": "", "answers": "b", "metric": f"{file}:half"}))
    options = [x.replace("FILE", str(file)).replace("ROWS", str(rows)) for x in options]
    command = [*SHORT[2:], *options, "--output", str(here)]
    run.main(command)
    before = contents(here)
    run.main(command)  # functions have other addresses now, and are the same
    assert contents(here) == before
    file.write_text(text + "# another\n")
    with pytest.raises(SystemExit, match=rf"another config \({named}: .* mine.py \w+.* there, .* mine.py \w+"):
        run.main(command)
    assert contents(here) == before


def test_results_of_another_option_do_not_mix_and_are_not_taken_over(made, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    command = ["--config", str(tmp_path / "mine.py"), *SHORT[2:], "--output"]
    run.main([*command, str(tmp_path / "two")])
    with pytest.raises(SystemExit, match=r"another config \(policies\[1\].policy: .*'power': 2.* there, .*'power': 3"):
        run.main([*command, str(tmp_path / "two"), "--power", "3"])
    capsys.readouterr()
    run.main([*command, str(tmp_path / "three"), "--power", "3"])
    said = capsys.readouterr().out
    assert "full@1.0: 4 lines are taken over" in said
    assert "mine@0.5: 4 lines" not in said


def test_arrays_count_by_what_is_in_them():
    table = lambda middle: np.where(np.arange(5000) == 2500, middle, 0.0)  # a repr leaves the middle out
    for hold in (lambda x: functools.partial(print, x), lambda x: {"w": [x]}, lambda x: types.SimpleNamespace(w=x)):
        assert definition(hold(table(1.0))) == definition(hold(table(1.0))) != definition(hold(table(2.0)))
    assert definition(frozen := FrozenArrays({"w": table(1.0)})) == repr(frozen)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_results_of_other_weights_in_the_same_place_do_not_mix(made, tmp_path, file):
    model, here = tmp_path / "model", tmp_path / "here"
    shutil.copytree(EMBEDDED, model)
    run.main([*SHORT, "--model", str(model), "--output", str(here)])
    (model / file).write_bytes((model / file).read_bytes() + b" ")
    with pytest.raises(SystemExit, match=r"another config \(checkpoint: '\w+' there, '\w+' now\)"):
        run.main([*SHORT, "--model", str(model), "--output", str(here)])
