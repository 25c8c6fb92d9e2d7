"""The contest of policies: its table, and that all of them can be asked."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

import kvjax
from kvjax.configs.learned_scorer import get_config
from kvjax.configs.learning import Prompts
from kvjax.experiments import contest
from kvjax.experiments.contest import Contest
from kvjax.experiments.learn_scorer import untrained

STORED = pathlib.Path(__file__).parents[1] / "experiments" / "bench_results" / "contest"


def test_the_stored_table_is_that_of_the_stored_losses():
    stored = json.loads((STORED / "contest.json").read_text())
    setup = {name: tuple(x) if isinstance(x, list) else x for name, x in stored["setup"].items()}
    assert contest.summary(Contest(**setup), stored) == (STORED / "contest.md").read_text()


def test_what_stands_beside_the_best_published():
    losses = {"snapkv": [0.2, 0.3], "h2o": [0.4, 0.4], "ours: x": [0.1, 0.2]}
    run = {"prompts": [], "loss": losses, "live": {"snapkv": 10, "h2o": 10, "ours: x": 9}}
    text = contest.summary(Contest(("m",), (0,), (0.5,)), {"runs": {"m, seed 0, 0.5": run}})
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip("| ") for row in rows] == ["ours: x", "snapkv", "h2o"]
    assert rows[0][2].startswith("10.00 [10.00, 10.00]")
    assert rows[0][3].startswith("90.0%")
    assert rows[1][2] == "the best published"


def test_every_policy_of_the_contest_can_be_planned(embedded):
    model, _, _ = embedded
    experiment = dataclasses.replace(get_config(prompts=Prompts()), budgets=(0.125,))
    every = contest.published(experiment.prompts, 16, 7) | contest.ours(experiment, untrained(experiment, model.config))
    for make in every.values():
        policy = make(0.125)
        plan = kvjax.make_plan(model.config, policy, np.array([1024]), 1024, 16)
        budgets = []
        for i, (layer, info) in enumerate(zip(plan.layers, plan.infos, strict=True)):
            hparams = policy.at(i, len(plan.infos)).sizes(info, np.array([1024])).hparams
            own = hparams[0] if isinstance(hparams, tuple) else hparams
            budgets.append(int(own.budget[0]))
            assert layer.layout.positions == "original"
        np.testing.assert_allclose(np.mean(budgets), 128, atol=1)


@pytest.mark.exhaustive
def test_a_contest_goes_on(tmp_path, monkeypatch):
    """Two prompts a task, by an untrained head; what is measured is not measured again."""
    monkeypatch.setattr(contest, "_head", lambda experiment, model, *rest: untrained(experiment, model.config))
    few = lambda every: dict(list(every.items())[:2])
    published, ours = contest.published, contest.ours
    monkeypatch.setattr(contest, "published", lambda *a: few(published(*a)))
    monkeypatch.setattr(contest, "ours", lambda *a: few(ours(*a)))
    own = Contest(("embedded",), (0,), (0.25,), 2, tmp_path)
    contest.run_one(own, "embedded", 0)
    lines = (tmp_path / "embedded-0" / "samples.jsonl").read_text()
    assert lines.count("\n") == 5 * 2 * 4
    contest.run_one(own, "embedded", 0)
    assert (tmp_path / "embedded-0" / "samples.jsonl").read_text() == lines
    assert "## embedded, 25.0% of the prompt, 10 prompts" in contest.summary(own, contest.losses(own))
