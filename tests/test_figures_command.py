"""The command that draws the papers' figures: what it writes, and what it refuses."""

import dataclasses
import importlib
import io
import json
import pathlib
import sys
import time
import types

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

from kvjax import models
from kvjax.experiments import figures
from kvjax.experiments.papers import FIGURES, prompts
from kvjax.experiments.papers.base import Arrays, Prompts

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.exhaustive
def test_another_model_and_text(tiny, embedded, tmp_path):
    """A checkpoint directory and a text file; every prompt is a piece of the text with BOS in front."""
    tokenizer = embedded[2]
    text = "the quiet goat crossed the meadow . a rusty bell feared the lake . " * 20
    (tmp_path / "text.txt").write_text(text)
    tokens = prompts.from_file(tokenizer, tmp_path / "text.txt", count=2, length=48)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens.tolist() == [[tokenizer.bos_token_id, *ids[:47]], [tokenizer.bos_token_id, *ids[47:94]]]

    config = dataclasses.replace(tiny[0].config, vocab_size=389, bos_id=1)
    model = models.LanguageModel(config)
    models.save(tmp_path / "model", model, model.init(jax.random.key(0)))
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--prompts", "2"]
    figures.main(["loss_bound", *arguments, "--length", "48", "--output", str(tmp_path / "out")])
    with np.load(tmp_path / "out" / "loss_bound.npz") as arrays:
        assert arrays["bound"].shape == (2, 3, 3, 2)  # three layers: not the embedded model


def test_a_terminal_shows_the_time_that_has_passed(monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", shown)
    with figures.elapsed("reading"):
        time.sleep(1.2)
    assert "reading 00:01" in shown.getvalue()


def test_a_figure_that_is_cut_off_has_no_note_of_an_earlier_one(tmp_path, monkeypatch):
    figure = types.SimpleNamespace(title="about", data=lambda read: Arrays(x=read.tokens), plot=lambda _: plt.figure())
    monkeypatch.setitem(FIGURES, "x", figure)
    draw = lambda n: figures.draw("x", Prompts(None, None, np.ones((1, n), np.int32)), tmp_path, {"length": n})

    def killed(path, content):
        raise KeyboardInterrupt

    draw(3)
    assert json.loads((tmp_path / "x.json").read_text())["length"] == 3
    monkeypatch.setattr(figures, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        draw(4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npz", "x.png"]


def test_help_lists_the_figures(capsys):
    with pytest.raises(SystemExit) as e:
        figures.main(["--help"])
    assert e.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {figure.title}" in out for name, figure in FIGURES.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("no_such_figure", f"there is no figure 'no_such_figure'; there are {', '.join(FIGURES)} and all"),
        ("loss_bound --prompts 0", "prompts=0 must be at least 1"),
        ("loss_bound --length 99999999999", "must be at most 2147483647"),
        ("loss_bound --layers 1", "loss_bound has no layers; those that have are head_concentration"),
        ("loss_bound --seed -1", "seed=-1 must be at least 0"),
        ("loss_bound --output short.txt", "is a file, not a directory"),
        ("loss_bound --no-such-option", "Unrecognized"),
        ("loss_bound --output /proc/nothing", "No such file or directory: '/proc/nothing'"),
        ("loss_bound --model ./no_such_model", "no_such_model"),
        ("loss_bound --text latin.txt", "latin.txt is no text in UTF-8"),
        ("loss_bound --text short.txt --length 1", "length=1; raise the length to 3"),
        ("loss_bound --text short.txt --prompts 9 --length 48", "or give more text"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text("a bell")
    with pytest.raises(SystemExit) as e:
        figures.main(arguments.split())
    assert e.value.code not in (0, None)
    shown = " ".join(f"{e.value} {capsys.readouterr().err}".replace("│", " ").split())
    assert message in shown


def test_the_command_is_not_shadowed_by_the_pictures():
    """`experiments/figures/` holds the README's pictures; it is no package."""
    file = importlib.import_module("kvjax.experiments.figures").__file__
    assert pathlib.Path(file).resolve() == ROOT / "experiments" / "figures.py"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_picture_arrays_and_where_they_come_from(name, tmp_path, capsys):
    figures.main([name, "--output", str(tmp_path), "--prompts=2", "--length=192"])
    printed = capsys.readouterr().out
    assert f"{name}: compiling and reading 2 prompts of 192 tokens ...\n" in printed
    note = json.loads((tmp_path / f"{name}.json").read_text())
    assert f"{name}: {note['title']}" in printed
    of = {"model": "embedded", "text": "project", "seed": 0, "dtype": "float32"}
    assert note["config"] == of | {"count": 2, "length": 192}
    assert note["versions"]["jax"] == jax.__version__
    with np.load(tmp_path / f"{name}.npz") as arrays:
        assert {k: list(x.shape) for k, x in arrays.items()} == note["arrays"]
        assert all(np.isfinite(x).all() for x in arrays.values() if x.dtype.kind == "f")
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
