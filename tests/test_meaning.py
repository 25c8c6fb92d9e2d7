"""What tells two policies, or two models, apart: their runs do not mix in one directory."""

import shutil
import sys

import pytest

from kvjax.experiments import run
from kvjax.models.embedded import EMBEDDED
from tests.runs import SHORT, contents

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
