"""Every method at equal bytes: budgets that cost as much, who is better than whom, and what is written."""

import gzip

import numpy as np
import pytest

from kvjax import methods
from kvjax.experiments import board
from kvjax.experiments.board import PARTS, Board, Found
from kvjax.experiments.core import table
from kvjax.experiments.core.engine import Shape
from kvjax.models import ModelConfig
from kvjax.models.embedded import EMBEDDED

CONFIG = ModelConfig(
    vocab_size=61, embed_dim=32, mlp_dim=32, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8
)
RUN = Shape(96, 32, 1, ())


def number(method, share, value, budget="bytes-0.25"):
    of = {"method": method, "budget": budget, "kind": "score", "value": value, "low": 0.0, "high": 1.0, "live": 1}
    return {**of, "written": 3.0, "kv_of_full": share, "kv_bytes": 100, "kv_bytes_needed": 80}


def found(*numbers, **scores):
    n = len(next(iter(scores.values()), [0]))
    each = {(x["method"], x["budget"]): scores.get(x["method"], [0.0]) for x in numbers}
    return Found(PARTS["in_prompt"], list(numbers), each, None, ["t"] * n)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(methods.h2o, 31), (lambda b: methods.snapkv(b, window=8), None), (lambda b: methods.knorm(b), None)],
)
def test_budgets_that_cost_as_much(make, expected):
    """A quarter of 128 slots is 32: for H2O 31 tokens and one to come; none where 32 are to come."""
    budget = board.budget_for(make, CONFIG, 0.25, RUN)
    assert budget == expected
    if expected is not None:
        assert 0.24 < board.share_of_bytes(CONFIG, make(expected), RUN) <= 0.25
        assert board.share_of_bytes(CONFIG, make(expected + 1), RUN) > 0.25
    assert board.budget_for(lambda b: methods.snapkv(b, window=8), CONFIG, 0.5, RUN) == 64 - 32


def test_one_task_is_asked_alone_of_the_parts_that_have_it():
    one = Board(only=("key_value",))
    assert one.asked == ("in_prompt", "after_compression")
    assert one.setup(PARTS["in_prompt"]).task_names == ("key_value",)


def test_what_a_model_lacks_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    """By default; a method that is named is refused instead. So is what has no tokens that could be protected."""
    for file in EMBEDDED.iterdir():
        if file.suffix not in (".npy", ".npz"):
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.setattr(board.configs, "available", lambda: ["headkv", "fastgen", "window"])
    monkeypatch.setattr(board, "INCLUDED", {str(tmp_path): tmp_path})
    size = {"model": str(tmp_path), "bytes": (0.5,), "examples": 1, "length": 320, "protect": (2, 8)}
    with pytest.raises(ValueError, match=r"there is no .*heads\.npy; make one"):
        board.experiment_of(Board(methods=("headkv",), **size), PARTS["in_prompt"])
    window, *controls = board.experiment_of(Board(**size), PARTS["in_prompt"]).beside
    assert [window.name, *(e.name for e in controls)] == ["window", *board.CONTROLS]
    assert (window.policies[0][1].sinks, window.policies[0][1].recent) == (2, 8)
    said = capsys.readouterr().out
    assert "without headkv: there is no " in said
    assert "without fastgen: FastGen keeps no tokens by position alone" in said


def test_settings_are_those_of_all_or_chosen_on_held_out_examples(tmp_path):
    """A window reaches who lets rows vote; tries are as many for every method; what is held out is in no number."""
    size = {"methods": ("snapkv",), "bytes": (0.5,), "parts": ("perplexity",), "examples": 1, "length": 320}
    (snapkv, *_) = board.experiment_of(Board(window=24, **size), PARTS["perplexity"]).beside
    assert (snapkv.options, snapkv.policies[0][1].recent) == ("window=24", 24)
    tried = board.experiment_of(Board(tune=7, **size | {"length": 480}), PARTS["perplexity"])
    assert tried.setup.seed == (0, 7)
    kept = [(p.sinks, p.recent) for e in tried.beside if e.name.startswith("snapkv protecting ") for _, p in e.policies]
    assert kept == [*board.TRIES[1:]]
    assert [e.name for e in tried.beside[-3:]] == [*board.CONTROLS]
    names = ["a", "a protecting 4 and 16", "b"]
    line = {"setting": "", "budget": "bytes-0.5", "task": "t", "question": 0, "metric": "f1", "tokens": 1, "run": "r"}
    rows = [
        {**line, "method": name, "index": i, "score": score, "policy": name, **({"seed": 7} if i > 1 else {})}
        for name, scores in zip(names, ([1, 0, 0], [0, 0, 1], [0, 1, 0]), strict=True)
        for i, score in enumerate(scores)
    ]
    own, chosen = board.tuned(table.lines(rows), 7)
    scores = {"a": [0, 0], "b": [0, 1]}
    assert own[own["budget"] == "bytes-0.5"].groupby("method")["score"].apply(list).to_dict() == scores
    assert own[own["budget"] == "own-0.5"].groupby("method")["score"].apply(list).to_dict() == {**scores, "a": [1, 0]}
    assert chosen == {("a", "bytes-0.5"): "4 and 16", ("b", "bytes-0.5"): "its own"}


def test_bytes_that_no_method_can_work_at_are_refused():
    board_ = Board(methods=("snapkv",), bytes=(0.01,), examples=1, length=320)
    with pytest.raises(ValueError, match=r"no method can work at 0\.01 of the full cache's bytes; give larger --bytes"):
        board.experiment_of(board_, PARTS["in_prompt"])


def test_a_table_has_the_best_first_and_what_costs_less():
    every = [number("a", 0.25, 0.5), number("b", 0.25, 0.6), number("think", 0.2, 0.7, "channels-0.5")]
    every += [number("fastgen", 0.6, 0.9, "T=0.98"), number("full", 1.0, 1.0, "1.0")]
    of = found(*every)
    made = board.table(of, 0.25)
    assert [row[0] for row in made.rows] == ["think channels-0.5", "b", "a"]
    assert made.head[-1] == "beside think channels-0.5"
    assert made.rows[1][2:4] == ["25.0%", "20.0%"]
    assert board.table(of, 0.1) == "No method runs at 0.1 of the bytes."
    assert [n["method"] for n in board.beyond(of, (0.1, 0.25))] == ["fastgen", "full"]


def test_wins_are_counted_over_all_pairs_and_what_the_best_beats_is_hollow():
    scores = {"a": 1.0, "b": 0.0, "c": 0.9}
    numbers = number("full", 1.0, 1.0, "1.0"), *(number(name, 0.25, value) for name, value in scores.items())
    of = found(*numbers, full=[1.0] * 12, a=[1.0] * 12, b=[0.0] * 12, c=[1.0] * 11 + [0.0])
    assert [n["method"] for n in of.at(0.25)] == ["a", "c", "b"]
    assert board.wins(of, 0.25)[0] == [(1, 0), (1, 0), (0, 2)]
    figure = board.curves({"in_prompt": of}, [0.25])
    assert figure.get_suptitle().endswith("worse than the best:\n2 by one value, asked in the prompt")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "c", "a"]
    filled = {int(c[0].get_ydata()[0]): c[0].get_markerfacecolor() != "white" for c in axes.containers}
    assert filled == {0: False, 1: True, 2: True}
    (axes,) = board.heat({"in_prompt": of}, [0.25]).axes
    np.testing.assert_allclose(axes.images[0].get_array()[:, 0], [0, 90, 100])


def test_the_title_is_of_a_share_of_bytes_that_was_fixed_before():
    numbers = [number("full", 1.0, 1.0, "1.0"), number("a", 0.25, 1.0), number("b", 0.25, 0.9)]
    numbers.append(number("a", 0.1, 0.5, "bytes-0.1"))
    of = found(*numbers, full=[1.0] * 12, a=[1.0] * 12, b=[0.9] * 12)
    page = board.page(Board(bytes=(0.25, 0.1, 0.01)), {"in_prompt": of})
    assert page.startswith("# Of 2 methods at 25 % of the bytes")


def test_where_the_full_cache_scores_nothing_the_map_is_empty():
    numbers = number("full", 1.0, 0.0, "1.0"), number("a", 0.25, 0.0)
    (axes,) = board.heat({"in_prompt": found(*numbers, full=[0.0], a=[0.0])}, [0.25]).axes
    assert np.isnan(axes.images[0].get_array().filled(np.nan)).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ("snapvk",)}, "there is no 'snapvk' among methods"),
        ({"parts": ("retrieval",)}, "there is no 'retrieval' among parts"),
        ({"bytes": (0.25, 1.5)}, "must be shares of the full cache between 0 and 1"),
        ({"examples": 0}, "examples"),
        ({"parts": ("summary",)}, "summary cannot be asked of embedded, whose language has no words for it"),
        ({"only": ("niah",)}, "no part asks 'niah' of embedded; its tasks are single_needle, several_"),
        (
            {"parts": ("perplexity",), "only": ("key_value",)},
            "no part asks 'key_value' of embedded; its tasks are perplexity$",
        ),
        (
            {"parts": ("in_prompt", "perplexity"), "only": ("key_value",)},
            "perplexity cannot be asked of embedded, of whose tasks none is in only",
        ),
        ({"metrics": ("rogue_l",)}, "rogue_l"),
        ({"metrics": ("bleu", "bleu")}, r"metrics has 'bleu' twice; give each once"),
        ({"tune": 0}, r"tune=0 .* without protect and live, and is none of the seeds 0$"),
        ({"protect": (400, 700)}, r"protect 400 700 must be two numbers from 0 on, below length=1024 together"),
    ],
)
def test_what_cannot_be_run_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Board(**given)


def test_methods_of_ones_own_that_share_a_name_are_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import kvjax\n\n\ndef make(budget):\n    return kvjax.methods.window(budget)\n")
    size = {"methods": ("window",), "bytes": (0.5,), "parts": ("perplexity",), "examples": 1, "length": 320}
    with pytest.raises(ValueError, match=r"--policy has two methods called mine\.make; rename one or its file"):
        board.run(Board(policy=(f"{file}:make",) * 2, output=tmp_path, **size), [])
    assert not (tmp_path / "runs").exists()


def test_learned_parameters_stand_beside_a_policy_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import kvjax\n\n\ndef make(budget):\n    return kvjax.methods.window(budget), [budget]\n")
    board_ = Board(policy=(f"{file}:make",), bytes=(0.5,), examples=1, length=320, protect=(2, 8))
    (mine,) = board.experiment_of(board_, PARTS["in_prompt"], board_.policy[0]).beside
    ((_, (policy, own)),) = mine.policies
    assert (policy.sinks, policy.recent) == (2, 8)
    assert own == [policy.budget]


@pytest.mark.slow
def test_a_board_is_written_and_goes_on(tmp_path, capsys):
    parts = ["in_prompt", "after_compression", "perplexity", "continuation"]
    command = ["--methods", "window", "h2o", "--bytes", "0.5", "--examples", "1", "--length", "320", "--parts", *parts]
    board.main([*command, "--metrics", "f1", "--output", str(tmp_path)])
    text = (tmp_path / "board.md").read_text()
    measures = text.split("how far answers are the full cache's, %")[1].split("\n")
    assert measures[2] == "| bytes | method | same | prefix | edit_similarity | f1 |"
    assert sorted(line.split("|")[2].strip() for line in measures[4:9]) == sorted(["h2o", "window", *board.CONTROLS])
    assert "## One value, asked after compression, 50 % of the bytes" in text
    assert text.count("\n| window |") == 4
    assert min((tmp_path / name).stat().st_size for name in ("heat.png", "curves.png")) > 10_000
    rows = gzip.decompress((tmp_path / "scores.csv.gz").read_bytes()).decode().splitlines()
    assert len(rows) == 1 + 6 * (3 + 3 + 1 + 1)
    file = tmp_path / "mine.py"
    file.write_text("import kvjax\n\n\ndef make(budget):\n    return kvjax.methods.streaming_llm(budget)\n")
    capsys.readouterr()
    board.main([*command[: -len(parts)], "continuation", "--policy", f"{file}:make", "--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert "is complete" in said
    assert "full@1.0: 1 lines are taken over" in said
    assert "| mine.make |" in (tmp_path / "board.md").read_text()


def test_methods_at_equal_live_tokens_have_a_column_beside(tmp_path):
    """Ranks are those of equal bytes; policies without a budget have no place there."""
    of = found(number("a", 0.2, 0.5), number("b", 0.2, 0.25), number("a", 0.3, 0.75, "live-0.25"), a=[0.5], b=[0.25])
    made = board.table(of, 0.25)
    at = made.head.index("at equal live tokens")
    assert "fitted" not in made.head, "a column without a number"
    assert [(row[0], row[at]) for row in made.rows] == [("a", "75.0 [0.0, 100.0]"), ("b", "")]
    assert "at equal live tokens" not in board.table(found(number("a", 0.2, 0.5), a=[0.5]), 0.25).head
    size = {"methods": ("window",), "bytes": (0.5,), "parts": ("perplexity",), "examples": 1, "length": 320}
    window, *_ = board.experiment_of(Board(live=True, **size), PARTS["perplexity"]).beside
    assert [name for name, _ in window.policies] == ["bytes-0.5", "live-0.5"]
    assert window.policies[1][1].budget == 0.5
