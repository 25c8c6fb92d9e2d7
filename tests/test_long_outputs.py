"""Eviction while answers are written: what is crossed, and what the page says of made-up lines."""

import dataclasses
import itertools

import numpy as np
import pytest

import kvjax
from kvjax.configs.probed import probed_arrays
from kvjax.experiments.core import table
from kvjax.experiments.papers import long_outputs
from kvjax.experiments.papers.long_outputs import METHODS, Cell, LongOutputs, label

SMALL = LongOutputs(
    methods=("h2o", "tova"), every=(1, 8), more=(40, 64), tasks=("cups", "sorting"), examples=6, model="embedded"
)


@pytest.mark.parametrize("method", METHODS)
def test_no_head_has_room_for_more_than_was_asked_for(method, embedded):
    """With slots rounded up to eight; the last 16 stay, and half of what is left with H2O, 30 % with Keyformer."""
    for prompt, every in itertools.product((True, False), (1, 16)):
        policy = Cell(method, prompt, every).policy(60, probed_arrays(SMALL.setup, "", "centres"))
        plan = kvjax.make_plan(embedded[0].config, policy, np.array([100, 80]), 100, 300)
        assert 156 <= max(plan.capacities) <= 160
        assert policy.recent == max(
            long_outputs.LAST, int({"h2o": 0.5, "keyformer": 0.3}.get(method, 0) * (60 - every))
        )
        assert policy.when == kvjax.budgets.Schedule(over=every)


def line(method, budget, task, index, question, **more):
    named = {"method": method, "budget": budget, "task": task, "index": index, "question": question}
    where = {"setting": "s", "run": "r", "line": 1, "variant": "v", "policy": method + budget, "averaged": True}
    sizes = {"prompt_tokens": 9.0, "live": 9.0, "kv_bytes": 8.0, "context": f"{task}/{index}", "tokens": 200}
    return named | where | sizes | more


def lines(right):
    """Of every policy the answers, right where `right(cell)` says, and the full cache's own ones."""
    runs = [("full", "1.0", True), *((c.name, label(n), right(c)) for c in SMALL.cells for n in SMALL.more)]
    told = {"ended": 1, "compressed": 0.5, "repeated": 0.1, "mean_live": 7.0, "evictions": 3}
    made = []
    for (method, budget, ok), task, index in itertools.product(runs, SMALL.tasks, range(SMALL.examples)):
        answer = {
            "score": float(ok),
            "metric": "final_step",
            "output": "a ; b" if ok else "a ; c",
            "references": ["a ; b"],
        }
        made.append(line(method, budget, task, index, 0, **answer, **told))
        made.append(line(method, budget, task, index, 1, nll=0.1 if ok else 0.3 + index / 100))
    return table.lines(made)


def test_the_page_says_what_decides():
    text, figure = long_outputs.page(SMALL, lines(lambda cell: cell.prompt), "Asked here.")
    assert figure.get_suptitle() == "While the model writes, what decides most is whether the prompt stays"
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "| prompt | 100.0 [100.0, 100.0] | 100.0 [100.0, 100.0] |" in rows
    assert "| method | 0.0 [0.0, 0.0] | 0.0 [0.0, 0.0] |" in rows
    assert sum(row.startswith("| random | stays | 100.0 [") and "the control" in row for row in rows) == 2
    (first, _) = [row for row in rows if row.startswith("| h2o | competes | 0.0 [")]
    assert "worse, p = 0.004" in first
    assert f"{np.exp(0.325):.3f}" in first
    assert "| cups | 100.0 [61.0, 100.0] | 100.0 [" in text
    assert "--methods h2o tova --every 1 8 --more 40 64 --tasks cups sorting --examples 6`" in text


def test_where_nothing_differs_nothing_decides():
    text, _ = long_outputs.page(SMALL, lines(lambda cell: True), "")
    assert "| interactions | 0.0 [0.0, 0.0] | 0.0 [0.0, 0.0] |" in text


def test_a_record_of_something_else_is_refused_before_anything_runs(tmp_path):
    np.savez(tmp_path / "other.npz", kl=np.ones((3, 1, 2)), options='{"budget": [0.25]}')
    options = dataclasses.replace(SMALL, prefill=tmp_path / "other.npz", output=tmp_path / "out")
    with pytest.raises(ValueError, match=r"other\.npz is no record that `findings\.py what_decides` wrote"):
        long_outputs.run(options, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("snapkv",)}, "methods has 'snapkv'; those that go on"),
        ({"every": (0,)}, "every=0 must be at least 1"),
        ({"every": (1, 60)}, r"more=64 has no room for the last 16 tokens, .* of every=60; give --more 76 or more"),
        ({"more": (64, 64)}, "more has 64 twice"),
        ({"prefill": long_outputs.pathlib.Path("none.npz")}, "prefill=none.npz is no file; `findings.py what_decides`"),
    ],
)
def test_what_cannot_be_crossed_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LongOutputs(**options)
