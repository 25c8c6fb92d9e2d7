"""Learned scores and what stands of them in the READMEs; errors of the scripts that learn."""

import gzip
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.experiments import learn_budget, learn_scorer
from kvjax.experiments.learning import loop
from kvjax.learning.relax import soften, with_table
from kvjax.models.scorer import TrainedHead
from kvjax.scores.learned import Learned
from tests.test_learn_budget import PROMPTS, samples

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _as_a_script():
    """Scripts run under JAX's own promotion, which optax needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A finished small run of the scorer."""
    directory = tmp_path_factory.mktemp("scored") / "scorer"
    small = [*PROMPTS, "--budget", "0.25", "--window-size", "8", "--steps", "30", "--hidden", "4"]
    with jax.numpy_dtype_promotion("standard"):
        learn_scorer.main(["--config", "learned_scorer.py", *small, "--output", str(directory)])
    return directory


def test_a_learned_score_is_a_score(scored, embedded):
    """Loaded from its file it goes into a policy, a plan and a compiled run; an equal one compiles nothing new."""
    model, params, _ = embedded
    losses = json.loads((scored / "learning.json").read_text())["divergence"]
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:2])
    lines = samples(scored)
    assert {s["method"] for s in lines} == {"snapkv", "learned", "future"}
    by_method = {
        m: {(s["task"], s["index"]): s for s in lines if s["method"] == m} for m in ("snapkv", "learned", "future")
    }
    for key, best in by_method["future"].items():  # nothing keeps more of the attention to come
        assert all(best["kept_attention"] >= group[key]["kept_attention"] - 1e-6 for group in by_method.values())
        assert len({group[key]["live"] for group in by_method.values()}) == 1
    assert "| 0.25 | learned score |" in (scored / "summary.md").read_text()

    make = lambda: kvjax.Evict(Learned(TrainedHead.load(scored / "head.npz"), rows=8), 24, recent=8)
    policy, other = make(), make()
    assert policy == other
    assert hash(policy) == hash(other)
    assert "FrozenArrays(" in repr(policy)
    tokens = np.random.default_rng(0).integers(4, 300, (2, 96), np.int32)
    result = kvjax.generate(model, params, tokens, policy=policy, max_new_tokens=3)
    assert max(int(kv.num_live.max()) for kv in result.state.layers) <= 24 + 3
    table = with_table(policy, np.repeat([[1.6], [1.2], [0.8], [0.4]], 4, 1))
    assert kvjax.generate(model, params, tokens, policy=table, max_new_tokens=2).tokens.shape == (2, 2)
    q, k, v = (np.random.default_rng(n).normal(size=(2, n, 32, 32)).astype(np.float32) for n in (8, 4, 4))
    soft = kvjax.evict_layer(soften(policy, 0.01), q, k, v, layer=1, num_layers=4)
    hard = kvjax.evict_layer(policy, q, k, v, layer=1, num_layers=4)
    np.testing.assert_allclose(np.exp(soft.log_weight), hard.live, atol=1e-6)
    with pytest.raises(
        ValueError, match="trained for 4 layers of 4 kv heads with 70 features, but layer 0 has 2 heads"
    ):
        kvjax.evict_layer(policy, q[:, :4, :, :8], k[:, :2, :, :8], v[:, :2, :, :8], num_layers=4)


def test_the_scorer_resumes(scored, tmp_path):
    directory = tmp_path / "again"
    shutil.copytree(scored, directory)
    (directory / "summary.json").unlink()
    small = [*PROMPTS, "--budget", "0.25", "--window-size", "8", "--steps", "30", "--hidden", "4"]
    learn_scorer.main(["--config", "learned_scorer.py", *small, "--output", str(directory)])
    assert (directory / "summary.md").read_text() == (scored / "summary.md").read_text()
    a, b = (TrainedHead.load(d / "head.npz") for d in (directory, scored))
    assert a == b


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "nope.py"], r"no config 'nope.py'; there are learned_budget,"),
        (["--config", "snapkv.py"], "no config 'snapkv.py'"),
        (["--config", "learned_scorer.py"], "is a config of experiments/learn_scorer.py, not of experiments/learn_bud"),
        (["--config", "learned_budget.py", "--budget"], "budget is empty"),
        (["--config", "learned_budget.py", "--budget", "8"], "budget of 8 tokens cannot hold 0 sinks and 16 recent"),
        (["--config", "learned_budget.py", "--steps", "0"], "steps=0 must be at least 1"),
        (["--config", "learned_budget.py", "--floor", "2"], "floor=2.0 is no share of the average"),
        (["--config", "learned_budget.py", "--held-out", "1"], "held_out=1 must be at least 2"),
        (["--config", "learned_budget.py", "--tasks"], "tasks is empty"),
        (["--config", "learned_budget.py", "--future", "65"], "future=65 rows, but perplexity has 64"),
        (["--config", "learned_budget.py", "--temperature", "4", "0"], "temperatures are positive"),
        (["--config", "learned_budget.py", "--objective", "task_loss", "--future", "1"], "future=1 row predicts no"),
        (["--config", "learned_budget.py", "--tasks", "key_value", "key_value"], "tasks has 'key_value' twice"),
        (["--config", "learned_budget.py", "--budget", "0.25", "0.25"], "budget has 0.25 twice"),
        (["--config", "learned_budget.py", "--seed", str(2**32)], "seed: 4294967296 must be at most 2147483647"),
        (["--config", "learned_budget.py", "--window-size", str(10**20)], "window-size: 10{20} must be at most"),
        (["--config", "learned_budget.py", "--length", str(10**20)], "must be at most 2147483647"),
        *(
            (["--config", "learned_budget.py", "--rate", x], f"rate={x} must be a finite number")
            for x in ("inf", "-inf")
        ),
        (["--config", "learned_budget.py", "--temperature", "inf", "1"], r"temperature=\(inf, 1.0\) must be a finite"),
        (["--config", "learned_budget.py", "--ada-alpha", "inf"], "ada_alpha=inf must be a finite number"),
        (["--config", "learned_budget.py", "--pyramid-beta", "inf"], "pyramid_beta=inf must be a finite number"),
        (["--config", "learned_budget.py", "--floor", "nan"], "--floor: nan is no number that"),
        (["--config", "learned_budget.py", "--floor", "inf"], "floor=inf is no share"),
        (["--config", "learned_budget.py", "--kernel-size", "4"], "odd"),
    ],
)
def test_errors_end_with_one_line(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        learn_budget.main(argv)
    assert not list(tmp_path.rglob("samples.jsonl"))


def test_a_checkpoint_that_is_broken_or_another_runs_is_refused(tmp_path, capsys):
    """And one of the same run goes on."""

    def run(steps, identity="this"):
        step = lambda state, progress: ({"x": state["x"] + 1}, {"step": progress["step"] + 1}, "")
        how = {"title": "learn", "total": steps, "more": lambda progress: progress["step"] < steps}
        return loop.go_through(tmp_path, identity, {"x": np.arange(3.0)}, {"step": 0}, step, **how)

    run(2)
    state, progress = run(5)
    assert "resumed at step 2" in capsys.readouterr().out
    assert (state["x"].tolist(), progress) == ([5.0, 6.0, 7.0], {"step": 5})
    with pytest.raises(ValueError, match=f"{tmp_path} holds a checkpoint of this, not of that; move"):
        run(5, "that")
    for file in (tmp_path / "5").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:3])
    with pytest.raises(ValueError, match=f"the checkpoint in {tmp_path} cannot be read .*; move that directory"):
        run(5)


def test_unknown_options_list_the_known_ones(capsys):
    with pytest.raises(SystemExit) as e:
        learn_budget.main(["--config", "learned_budget.py", "--budgets", "3"])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert "parameters of learned_budget: --output --restart --budget --parametrisation --objective --floor" in err
    assert "--calibration --held-out --length" in err


QUICK = ["--budget", "0.25", "--length", "256", "--calibration", "4", "--held-out", "8", "--steps", "40"]


def test_the_committed_scorer_is_what_the_readme_says(tmp_path):
    """The default run's lines give its summary, which has the README's numbers; its head scores."""
    directory = ROOT / "experiments" / "bench_results" / "learned_scorer"
    with gzip.open(directory / "samples.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    assert learn_scorer.write(tmp_path, "learned_scorer", lines) == (directory / "summary.md").read_text()
    rows = {(r["budget"], r["method"]): r for r in json.loads((tmp_path / "summary.json").read_text())["rows"]}
    readme = (ROOT / "experiments" / "bench_results" / "README.md").read_text()
    shown = ("learned", "snapkv", "future")
    for b in ("0.0625", "0.125", "0.25"):
        cells = [
            "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * rows[b, m][x] for x in ("loss", "low", "high"))) for m in shown
        ]
        cells += [f"{100 * rows[b, m]['kept_attention']:.0f} %" for m in shown]
        assert f"| {100 * float(b):g} % | {' | '.join(cells)} |" in readme
    head = TrainedHead.load(directory / "head.npz")
    assert np.isfinite(head(jnp.ones((1, 4, 3, 70)), 2)).all()


def test_the_learned_score_keeps_more_of_the_attention_to_come(tmp_path):
    learn_scorer.main(["--config", "learned_scorer.py", *QUICK, "--output", str(tmp_path / "x")])
    rows = {r["method"]: r for r in json.loads((tmp_path / "x" / "summary.json").read_text())["rows"]}
    kept = {method: row["kept_attention"] for method, row in rows.items()}
    assert kept["snapkv"] < kept["learned"] < kept["future"]
