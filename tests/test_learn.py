"""Learned scores and DuoAttention's gates; going on after a stop, and errors, of all that learns."""

import gzip
import json
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.configs.learning import Prompts
from kvjax.experiments import learn
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.learning import gates, loop, report
from kvjax.experiments.learning.future_rows import examples
from kvjax.learning.relax import soften, with_table
from kvjax.models.scorer import TrainedHead
from kvjax.pallas_kernels import Logits
from kvjax.scores.learned import Learned
from tests.runs import ROOT, samples
from tests.test_learn_budget import PROMPTS, QUICK, learned

pytestmark = pytest.mark.usefixtures("as_users_run_it")
STORED = ROOT / "experiments" / "bench_results"
SMALL = [*PROMPTS, "--budget", "0.25", "--window-size", "8", "--steps", "30", "--hidden", "4"]


@pytest.fixture(scope="module")
def scored(tmp_path_factory, as_users_run_it):
    """A finished small run of the scorer."""
    return learned("scorer", *SMALL, output=tmp_path_factory.mktemp("scored") / "scorer")


@pytest.mark.slow
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


@pytest.mark.exhaustive
def test_the_scorer_resumes(scored, tmp_path):
    directory = tmp_path / "again"
    shutil.copytree(scored, directory)
    (directory / "summary.json").unlink()
    learned("scorer", *SMALL, output=directory)
    assert (directory / "summary.md").read_text() == (scored / "summary.md").read_text()
    a, b = (TrainedHead.load(d / "head.npz") for d in (directory, scored))
    assert a == b


def test_a_full_disk_is_one_error_and_no_log_of_another_library(tmp_path, caplog):
    start, stages = jnp.asarray(np.random.default_rng(0).normal(size=10_000)), [loop.Stage(2)]
    loss = lambda x: ((x**2).sum(), {"losses": x[0]})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # as a full disk, an error of each write
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}'"):
            loop.fit(tmp_path, {}, start, optax.sgd(0.1), loss, lambda *_: (), stages)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--config nope.py", r"no config 'nope.py'; there are learned_budget,"),
        ("--config snapkv.py", "no config 'snapkv.py'"),
        ("--config learned_scorer.py", "is a config of kvjax learn scorer, not of kvjax learn bu"),
        ("--config learned_budget.py --budget", "budget is empty"),
        ("--config learned_budget.py --budget 8", "budget of 8 tokens cannot hold 0 sinks and 16 recent"),
        ("--config learned_budget.py --steps 0", "steps=0 must be at least 1"),
        ("--config learned_budget.py --floor 2", "floor=2.0 must be a number from 0 to 1"),
        ("--config learned_budget.py --held-out 1", "held_out=1 must be at least 2"),
        ("--config learned_budget.py --tasks", "tasks is empty"),
        ("--config learned_budget.py --future 65", "future=65 rows, but perplexity has 64"),
        ("--config learned_budget.py --temperature 4 0", "temperatures are positive"),
        ("--config learned_budget.py --objective task_loss --future 1", "future=1 row predicts no"),
        ("--config learned_budget.py --tasks key_value key_value", "tasks has 'key_value' twice"),
        ("--config learned_budget.py --tasks key_value --unseen key_value", "must be some, and not all"),
        ("--config learned_budget.py --budget 0.25 0.25", "budget has 0.25 twice"),
        (f"--config learned_budget.py --seed {2**32}", "seed=4294967296 must be at most 2147483647"),
        (f"--config learned_budget.py --length {10**20}", "must be at most 2147483647"),
        *((f"--config learned_budget.py --rate {x}", f"rate={x} must be a finite number") for x in ("inf", "-inf")),
        ("--config learned_budget.py --temperature inf 1", r"temperature=\(inf, 1.0\) must be a finite"),
        ("--config learned_budget.py --ada-alpha inf", "ada_alpha=inf must be a finite number"),
        ("--config learned_budget.py --pyramid-beta inf", "pyramid_beta=inf must be a finite number"),
        ("--config learned_budget.py --kernel-size 4", "odd"),
    ],
)
def test_errors_end_with_one_line(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        learn.main(["budget", *argv.split()])
    assert not list(tmp_path.rglob("samples.jsonl"))


def test_a_checkpoint_that_is_broken_or_another_runs_is_refused(tmp_path, capsys):
    """And one of the same run goes on."""

    loss = lambda x, aim: (((x - aim) ** 2).sum(), {"losses": abs(x - aim).max(), "aim": aim})

    def run(steps, identity="this", folder=tmp_path, aim=float):
        data, stages = lambda step, stage: (jnp.float32(aim(step)),), [loop.Stage(2), loop.Stage(3)]
        return loop.fit(folder, identity, jnp.arange(3.0), loop.adam(0.1, 5), loss, data, stages, max_steps=steps)

    assert run(3)[0] is None
    x, noted = run(None)
    assert "resumed at step 3" in capsys.readouterr().out
    assert noted["aim"] == [0, 1, 2, 3, 4]
    whole = run(None, folder=tmp_path / "whole")
    np.testing.assert_array_equal(x, whole[0])
    assert noted == whole[1]
    with pytest.raises(ValueError, match=r"the loss is nan at step 1; lower the learning rate, and"):
        run(None, folder=tmp_path / "nan", aim=lambda step: np.nan if step else 0.0)
    with pytest.raises(ValueError, match=f"{tmp_path} holds a checkpoint of this, not of that; move"):
        run(5, "that")
    with Locked(tmp_path), pytest.raises(ValueError, match=f"another process is writing to {tmp_path}"):
        run(5)
    for file in (tmp_path / "5").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:3])
    with pytest.raises(ValueError, match=f"the checkpoint in {tmp_path} cannot be read .*; move that directory"):
        run(5)


def test_unseen_tasks_are_not_learned_from(embedded):
    prompts = Prompts(
        tasks=("single_needle", "key_value"), unseen=("key_value",), calibration=2, held_out=2, length=256
    )
    of = lambda split: {e.task for e in examples(prompts, embedded[2], split)}
    assert (of("calibration"), of("held_out")) == ({"single_needle"}, {"single_needle", "key_value"})


def test_the_committed_lines_give_the_committed_page_and_its_head_scores(tmp_path):
    directory = STORED / "learned_scorer"

    def page(name, *unseen):
        lines = gzip.decompress((directory / f"{name}.jsonl.gz").read_bytes()).splitlines()
        return report.of_scores(tmp_path, "learned_scorer", unseen, [*map(json.loads, lines)])

    assert page("samples") == (directory / "summary.md").read_text()
    assert "| 0.25 | unseen | learned score |" in page("unseen", "key_value", "perplexity")
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found == json.loads((directory / "unseen.json").read_text())
    head = TrainedHead.load(directory / "head.npz")
    assert np.isfinite(head(jnp.ones((1, 4, 3, 70)), 2)).all()


@pytest.mark.exhaustive
def test_the_learned_score_keeps_more_of_the_attention_to_come(tmp_path):
    learned("scorer", *QUICK, output=tmp_path / "x")
    rows = {r["method"]: r for r in json.loads((tmp_path / "x" / "summary.json").read_text())["rows"]}
    kept = {method: row["kept_attention"] for method, row in rows.items()}
    assert kept["snapkv"] < kept["learned"] < kept["future"]


# --- gates ---


def needing_one_head(params, ids, attend):
    """A layer whose first head reads the token at position 3 from everywhere, and whose second reads its own row."""
    del params
    (B, n), eye = ids.shape, jnp.eye(ids.shape[1])
    first = jnp.broadcast_to(eye[3], (n, n))
    q = 10 * jnp.broadcast_to(jnp.stack([first, eye])[None], (B, 2, n, n))
    k = jnp.broadcast_to(eye[None, None], (B, 2, n, n))
    v = jnp.broadcast_to(jax.nn.one_hot(ids, n)[:, None], (B, 2, n, n))
    out = attend(None, q, k, v, layer=0, rotate=lambda x, _: x, logits=Logits(1.0))[0]
    return 4 * out.swapaxes(1, 2).reshape(B, n, 2 * n)


def test_a_head_that_has_to_retrieve_keeps_its_gate(tmp_path):
    """What it reads lies outside of sinks and window; the other head streams."""
    how = gates.Learning(steps=60, rate=0.1, sinks=2, recent=4, length=16, batch=2)
    late = np.broadcast_to(np.arange(16)[None] >= 10, (2, 16))
    texts = lambda step: (np.random.default_rng(step).integers(0, 16, (2, 16)).astype(np.int32), late)
    found, moved = gates.learn(needing_one_head, None, (1, 2), how, texts, tmp_path)
    assert found[0, 0] > 0.9
    assert found[0, 1] < 0.05
    assert moved[0] < 1e-9
    assert len(moved) == 60
