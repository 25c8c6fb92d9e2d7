"""Every method at equal bytes: budgets that cost as much, points that none beats, and what is written."""

import pytest

from kvjax import methods
from kvjax.experiments import figures, frontier
from kvjax.experiments.core.engine import Shape
from kvjax.experiments.frontier import Frontier
from kvjax.models import ModelConfig
from kvjax.models.embedded import EMBEDDED

CONFIG = ModelConfig(
    vocab_size=61, embed_dim=32, mlp_dim=32, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8
)
RUN = Shape(96, 32, 1, ())


def number(method, share, value, budget="bytes-0.25"):
    return {"method": method, "budget": budget, "value": value, "low": 0.0, "high": 1.0, "kv_of_full": share, "live": 1}


@pytest.mark.parametrize(
    ("make", "expected"),
    [(methods.h2o, 31), (lambda b: methods.snapkv(b, window=8), None), (lambda b: methods.knorm(b), None)],
)
def test_budgets_that_cost_as_much(make, expected):
    """A quarter of 128 slots is 32: for H2O 31 tokens and one to come; none where 32 are to come."""
    found = frontier.budget_for(make, CONFIG, 0.25, RUN)
    assert found == expected
    if expected is not None:
        assert 0.24 < frontier.share_of_bytes(CONFIG, make(expected), RUN) <= 0.25
        assert frontier.share_of_bytes(CONFIG, make(expected + 1), RUN) > 0.25
    assert frontier.budget_for(lambda b: methods.snapkv(b, window=8), CONFIG, 0.5, RUN) == 64 - 32


def test_what_a_model_lacks_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    """By default; a method that is named is refused instead."""
    for file in EMBEDDED.iterdir():
        if file.suffix not in (".npy", ".npz"):
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.setattr(frontier.configs, "available", lambda: ["headkv", "window"])
    size = {"model": str(tmp_path), "bytes": (0.5,), "examples": 1, "length": 320}
    with pytest.raises(ValueError, match=r"there is no .*heads\.npy; make one"):
        frontier.experiments_of(Frontier(methods=("headkv",), **size), "in_prompt")
    assert set(frontier.experiments_of(Frontier(**size), "in_prompt")) == {"window"}
    assert capsys.readouterr().out.startswith("without headkv: there is no ")


def test_a_table_has_the_best_first_and_what_costs_less():
    found = [
        number("a", 0.25, 0.5),
        number("b", 0.25, 0.6),
        number("think", 0.2, 0.7, "channels-0.5"),
        number("fastgen", 0.6, 0.9, "T=0.98"),
        number("full", 1.0, 1.0, "1.0"),
    ]
    scores = {(n["method"], n["budget"]): [0.0, 1.0] for n in found}
    lines = frontier.table(frontier.ranked(found, scores, 0.25), 0.25)
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["think channels-0.5", "b", "a"]
    assert "points beside think channels-0.5" in lines[0]
    assert frontier.table(frontier.ranked(found, scores, 0.1), 0.1) == ["No method runs at 10.0% of the bytes."]
    assert [n["method"] for n in frontier.beyond(found, (0.1, 0.25))] == ["fastgen", "full"]


def test_what_the_best_beats_is_hollow():
    found = [number("a", 0.25, 1.0), number("b", 0.25, 0.0), number("c", 0.25, 0.9)]
    scores = {"a": [1.0] * 12, "b": [0.0] * 12, "c": [1.0] * 11 + [0.0]}
    of = {(method, "bytes-0.25"): own for method, own in scores.items()}
    here = {"in_prompt": {0.25: frontier.ranked(found, of, 0.25)}}
    figure = frontier.plot(here)
    assert figure.get_suptitle().endswith("not significantly worse than the best:\n2 with the question in the prompt")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "c", "a"]
    filled = {int(c[0].get_ydata()[0]): c[0].get_markerfacecolor() != "white" for c in axes.containers}
    assert filled == {0: False, 1: True, 2: True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ("snapvk",)}, "there is no config 'snapvk'"),
        ({"bytes": (0.25, 1.5)}, "must be shares of the full cache between 0 and 1"),
        ({"examples": 0}, "examples"),
    ],
)
def test_what_cannot_be_run_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Frontier(**given)


@pytest.mark.slow
def test_a_frontier_is_written_and_goes_on(tmp_path, capsys):
    command = ["frontier", "--methods", "window", "--bytes", "0.5", "--examples", "1", "--length", "320"]
    figures.main([*command, "--output", str(tmp_path)])
    text = (tmp_path / "frontier.md").read_text()
    assert "## Question after compression, 50.0% of the bytes" in text
    assert text.count("| window |") == 2
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    capsys.readouterr()
    figures.main([*command, "--output", str(tmp_path)])
    assert capsys.readouterr().out.count("is complete") == 2
