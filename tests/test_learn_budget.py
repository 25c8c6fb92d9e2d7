"""Learning budgets from the command line: small runs, and what is written."""

import dataclasses
import json
import lzma

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import configs, methods
from kvjax.configs.learning import Prompts
from kvjax.experiments import learn, run
from kvjax.experiments.learning import budget, future_rows, job, report
from kvjax.experiments.learning.future_rows import Reader
from kvjax.learning.families import PyramidBeta, Safeguard, Simplex
from kvjax.learning.relax import with_table
from tests.runs import ROOT, samples

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("as_users_run_it")]  # minutes of compilation

PROMPTS = [
    *("--length", "128", "--calibration", "2", "--held-out", "2", "--tasks", "single_needle", "perplexity"),
    *("--batch-size", "2", "--future", "4"),
]
QUICK = ["--budget", "0.25", "--length", "256", "--calibration", "4", "--held-out", "8", "--steps", "40"]
SMALL = [*PROMPTS, "--budget", "0.25", "--window-size", "8", "--steps", "5"]


def experiment(*options):
    return run.parse(["--config", "learned_budget.py", *SMALL, *options], "learn budget")[0]


def learned(what, *options, output):
    """Runs the command; returns where its results are."""
    learn.main([what, "--config", f"learned_{what}.py", *options, "--output", str(output)])
    return output


@pytest.fixture(scope="module")
def finished(tmp_path_factory, as_users_run_it):
    """A finished small run."""
    return learned("budget", *SMALL, output=tmp_path_factory.mktemp("finished") / "learned")


@pytest.fixture(scope="module")
def reading(embedded):
    """One calibration batch."""
    prompts = Prompts(tasks=("single_needle", "perplexity"), calibration=1, length=128, future=4, batch_size=2)
    ((_, found),) = Reader(*embedded, prompts).batches("calibration", [methods.snapkv(0.25, window=8)])
    return found


def test_what_is_written(finished):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["config"]["family"] == "Simplex(over='both', floor=0.05)"
    assert manifest["config"]["prompts"]["calibration"] == 2
    lines = samples(finished)
    assert len(lines) == 4 * 7
    divisions = {"uniform", "pyramid", "ada_static", "ada", "learned"}
    assert {s["method"] for s in lines} == divisions | {"hindsight_heads", "hindsight"}
    for task, index in {(s["task"], s["index"]) for s in lines}:
        group = [s for s in lines if (s["task"], s["index"]) == (task, index)]
        assert index >= future_rows.HELD_OUT
        assert len({s["live"] for s in group}) == 1  # equal totals
        assert all(0 < s["loss"] < 2 for s in group)
        assert all(s["loss"] == pytest.approx(np.mean(s["layers"])) for s in group)
        lost = {s["method"]: s["lost"] for s in group}
        assert all(0 <= lost["hindsight"] <= x + 1e-6 for x in lost.values())  # the oracle is never beaten
        assert lost["hindsight"] < lost["hindsight_heads"] < lost["uniform"]
        for s in group:
            assert s["regret"] == pytest.approx(s["lost"] - lost["hindsight"], abs=1e-6)
    for plot in ("loss_against_budget", "learning"):
        assert (finished / f"{plot}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (bound,) = json.loads((finished / "summary.json").read_text())["theorem_4"]
    assert bound["holds"] == bound["of"] == 4 * 4
    assert bound["ratio"] < 1
    text = (finished / "summary.md").read_text()
    assert "| 0.25 | Ada-KV, per prompt |" in text
    assert "| 0.25 | best mask in hindsight |" in text


def test_the_table_is_the_policys(finished):
    path = finished / "tables" / "0.25.json"
    table = json.loads(path.read_text())
    assert table["total_off"] < 1e-6  # at every step of learning
    assert len(table["losses"]) == 5
    shares = np.array(table["heads"])
    assert shares.shape == (4, 4)
    assert shares.mean() == pytest.approx(1.0, abs=1e-6)
    assert np.abs(shares - 1).max() > 0.05  # something was learned
    assert repr(with_table(methods.snapkv(0.25, window=8), shares)) == table["policy"]


def test_a_finished_run_is_not_repeated(finished, capsys):
    before = (finished / "samples.jsonl").stat().st_mtime_ns
    learned("budget", *SMALL, output=finished)
    assert (finished / "samples.jsonl").stat().st_mtime_ns == before
    assert "is complete; --restart runs it again" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"another config \(learning\.rate: 0\.1 there, 0\.2 now\)"):
        learned("budget", *SMALL, "--rate", "0.2", output=finished)


@pytest.mark.parametrize(
    ("objective", "family"),
    [
        *((name, Simplex()) for name in ("eviction_loss", "output_kl", "task_loss")),
        *(("eviction_loss", family) for family in (Simplex("layers"), Simplex("heads"), PyramidBeta(), Safeguard())),
    ],
    ids=str,
)
def test_every_objective_falls_and_every_family_hardens(objective, family, reading, embedded, tmp_path):
    """Learned and measured on one batch at one temperature: what optimisation promises."""
    model, params, _ = embedded
    setting = dataclasses.replace(experiment("--objective", objective), family=family, steps=12, temperature=(4.0, 4.0))
    numbers, noted = budget.learn(setting, 0.25, [reading], model, params, tmp_path)
    assert noted["losses"][-1] < noted["losses"][0]
    assert max(noted["off"]) < 1e-6
    policy, shares = budget.learned_policy(family, numbers, setting.method(0.25), [reading])
    live = [np.asarray(job.kept(reading, p)).sum((1, 2, 3)).tolist() for p in (policy, setting.method(0.25))]
    assert live[0] == live[1]
    assert shares.mean() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", ["window", "nacl", "ahakv"])
def test_parameters_of_methods(name, tmp_path):
    """From the command line to a hard policy of the same total, measured on held-out prompts."""
    learned("budget", *SMALL, "--parametrisation", name, output=tmp_path / name)
    table = json.loads((tmp_path / name / "tables" / "0.25.json").read_text())
    assert table["total_off"] < 1e-6
    assert set(table["learned"]) <= {"window_share", "protect", "best", "random", "k"}
    assert table["heads"] == [[1.0] * 4] * 4
    rows = json.loads((tmp_path / name / "summary.json").read_text())["rows"]
    assert len({r["live"] for r in rows}) == 1


@pytest.mark.parametrize("name", ["nacl", "ahakv"])
def test_cold_gates_are_the_hard_method(name, reading, embedded):
    """With parameters that mean whole numbers of tokens, nothing is rounded: gates become the hard policy's mask."""
    setting = experiment("--parametrisation", name)
    prompts = dataclasses.replace(setting.prompts, calibration=1)
    family, policy = setting.family, setting.method(40)
    with jax.enable_x64(True):
        start = {"nacl": jnp.log(jnp.asarray([1.0, 4.0, 5.0])), "ahakv": jnp.log(jnp.asarray(24.0))}[name]
        hard = family.harden(start, policy, reading.view(policy))
    ((_, found),) = Reader(*embedded, prompts).batches("calibration", [policy, hard], setting.measured)
    keep = np.asarray(job.kept(found, hard))
    assert (keep.sum(-1) == 40).all()
    with jax.enable_x64(True):
        gates = jax.jit(family.gates)
        distances = []
        for temperature in (1.0, 1e-2, 1e-7):
            gate = np.asarray(gates(start, found.view(policy), temperature))
            np.testing.assert_allclose(gate.sum(-1), 40, rtol=1e-9)
            distances.append(np.abs(gate - keep).sum())
    assert ((gate > 0.5) == keep).all()
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-3


def test_a_policy_that_keeps_everything_costs_nothing(reading):
    costs = job.costs(reading, job.kept(reading, methods.snapkv(128, window=8)))
    for name in ("layers", "lost", "regret"):
        np.testing.assert_allclose(costs[name], 0, atol=1e-5)
    assert costs["live"].tolist() == (16 * np.asarray(reading.full.lengths)).tolist()


@pytest.mark.parametrize("size", [0.0625, 0.25, 64, 127, 500])
def test_gates_keep_as_many_tokens_as_hard_policies(size, reading):
    """Where the budget is less than the window, where it fits, and where it is more than some or all prompts have."""
    assert 0.0625 * np.asarray(reading.full.lengths).min() < 8
    assert np.asarray(reading.full.lengths).min() < 127
    policy = methods.snapkv(size, window=8)
    live = np.asarray(job.kept(reading, policy)).sum((1, 2, 3))
    with jax.enable_x64(True):
        seen, family = reading.view(policy), Simplex()
        gates = family.gates(0.3 * jax.random.normal(jax.random.key(0), (4, 4)), seen, 2.0)
        np.testing.assert_allclose(gates.sum((1, 2, 3)), live, rtol=1e-9)
        np.testing.assert_allclose(seen.total, live, rtol=1e-12)


def test_prompts_that_are_kept_whole_have_no_shares(reading):
    """Their tables are uniform, whatever the logits are and whatever Ada-KV chooses."""
    policy = methods.snapkv(0.0625, window=8)
    logits = jnp.arange(16.0).reshape(4, 4)
    hard, shares = budget.learned_policy(Simplex(), logits, policy, [reading])
    assert hard == with_table(policy, np.ones((4, 4)))
    ada = dataclasses.replace(policy, heads=kvjax.Adaptive(1.0))
    for found in (shares, budget.average_table(ada, [reading])):
        np.testing.assert_array_equal(found, np.ones((4, 4)))


def test_calibration_and_held_out_prompts_are_apart(embedded):
    prompts = Prompts(calibration=5, held_out=7, length=256)
    splits = [future_rows.examples(prompts, embedded[2], s) for s in ("calibration", "held_out")]
    assert [len(s) for s in splits] == [25, 35]
    asked = [{(e.context, e.questions) for e in split} for split in splits]
    assert not asked[0] & asked[1]
    assert len({e.task for e in splits[1][:10]}) > 2  # batches mix tasks


def test_future_rows_are_the_models_own(embedded):
    """What the model generates with the full cache, or the text that goes on."""
    model, params, tokenizer = embedded
    prompts = Prompts(tasks=("key_value", "perplexity"), calibration=1, length=200, future=4, batch_size=3)
    policy = methods.snapkv(0.25, window=8)
    ((found, reading),) = Reader(model, params, tokenizer, prompts).batches("calibration", [policy])
    assert reading.weight.tolist() == [1, 1, 0]
    for row, e in enumerate(found):
        (question,) = e.questions
        if question.continuation:
            expected = list(question.continuation[:4])
        else:
            tokens = np.array([e.context + question.ids])
            expected = kvjax.generate(model, params, tokens, max_new_tokens=4, eos_ids=()).tokens[0].tolist()
        assert reading.full.continuation[row].tolist() == expected


# --- the command line ---


def test_the_main_job_points_to_the_other_scripts():
    with pytest.raises(SystemExit, match=r"error: learned_budget\.py is a config of kvjax learn budget"):
        run.main(["--config", "learned_budget.py"])
    assert "learned_budget" not in configs.available()
    assert configs.available("learn budget") == ["learned_budget"]


# --- the whole thing ---


def test_learned_budgets_lose_less_on_held_out_prompts(tmp_path):
    """A small run of the default config: less than uniform and pyramid on the same prompts, more than the oracle."""
    learned("budget", *QUICK, output=tmp_path / "x")
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    rows = {r["method"]: r for r in summary["rows"]}
    for name in ("uniform", "pyramid"):
        assert rows[name]["ahead_low"] > 0, rows
    assert all(rows["hindsight"]["lost_high"] < r["lost_low"] for n, r in rows.items() if "hindsight" not in n)
    assert all(row["holds"] == row["of"] for row in summary["theorem_4"])


def test_the_committed_lines_give_the_committed_summary():
    """Of Theorem 4; `tests.tools.referee` has the others. And it meets what the default run was made for."""
    directory = ROOT / "experiments" / "bench_results" / "learned_budget"
    columns = json.loads(lzma.decompress((directory / "samples.json.xz").read_bytes()))
    lines = [dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True)]
    found = report.divisions([{n: x for n, x in line.items() if x is not None} for line in lines])
    summary = json.loads((directory / "summary.json").read_text())
    rows = {(r["budget"], r["method"]): r for r in summary["rows"]}
    assert {(r["budget"], r["method"]) for r in found["rows"]} == set(rows)
    for row, same in zip(found["theorem_4"], summary["theorem_4"], strict=True):
        assert row == pytest.approx(same)
    assert list(dict.fromkeys(b for b, _ in rows)) == ["0.0625", "0.125", "0.1875", "0.25"]
    assert all(rows[b, name]["disjoint"] for b, _ in rows for name in ("uniform", "pyramid"))
    assert all(row["holds"] == row["of"] == 4 * 480 for row in summary["theorem_4"])
