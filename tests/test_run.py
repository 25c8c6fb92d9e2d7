"""The main job from the command line: results, resuming, errors."""

import inspect
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from kvjax import configs
from kvjax.configs.experiment import Setup
from kvjax.experiments import corpus, run
from kvjax.experiments.core import setup
from kvjax.experiments.core.records import KEY
from tests.runs import ROOT, SHORT, Made, one_layer, samples, small, without_times

TWO_TASKS = "single_needle", "perplexity"
READ_EACH = ("full", "1.0"), ("snapkv", "0.25")


def test_outputs(finished):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["config"]["setup"]["length"] == 256
    assert [(p["method"], p["budget"]) for p in manifest["config"]["policies"]] == [
        ("full", "1.0"),
        ("snapkv", "0.5"),
        ("snapkv", "0.25"),
        ("random", "0.5"),  # where the method runs, too
    ]
    assert "Evict(score=Pooled(" in manifest["config"]["policies"][1]["policy"]
    assert manifest["config"]["setup"]["seed"] == 0
    (made,) = manifest["made"]
    assert set(made["versions"]) >= {"python", "jax", "flax", "transformers", "kvjax"}
    assert made["device"]["platform"] == "cpu"
    assert made["command"]
    assert "git_commit" in made

    lines = samples(finished)
    assert len(lines) == 4 * len(Setup().task_names) * 4
    assert len({tuple(s[k] for k in KEY) for s in lines}) == len(lines)
    for s in lines:
        assert s["id"] == manifest["config"]["ids"][f"{s['method']}@{s['budget']}"]
        assert s["context"] == f"{s['task']}/{s['index']}"
        assert s["live"] <= s["most_live"]
        assert s["slots"] * 2 * 4 * 32 == s["kv_bytes"]
        assert s["kv_bytes"] - 16 * 2 * 4 * 32 * 4 < s["kv_bytes_needed"] <= s["kv_bytes"]
        assert s["live"] * 2 * 4 * 32 * 4 * 4 / 4 <= s["kv_bytes_fitted"] <= s["kv_bytes_needed"]
        assert s["prefill_seconds"] is s["prefill_peak_bytes"] is None  # of the reading that all policies share
        assert min(s["decode_peak_bytes"], s["decode_tokens_per_second"], s["tokens"]) > 0
        if s["method"] == "snapkv":
            assert s["live"] <= float(s["budget"]) * s["prompt_tokens"] + 1e-6
        if s["task"] == "perplexity":
            assert s["nll"] > 0
        else:
            assert (s["score"] == 1) == (s["task"] != "multi_query" and s["references"][0] in s["output"]) or s["score"]
    assert {s["depth"] for s in lines if s["task"] == "single_needle"} > {0}
    assert (finished / "report.html").is_file()


@pytest.mark.slow
def test_long_answers_are_told_of_and_the_full_caches_own_are_read_under_each_policy(tmp_path, capsys):
    sizes = small(length=["320"], examples=["2"], budget=["0.25"])
    more = ["--own-answers", "--baselines", "knorm", "--baseline-budget", "1.0", "--output", str(tmp_path / "x")]
    asked = ["--config", "h2o.py", *sizes, "--tasks", "long_continuation", "key_value", *more]
    run.main(asked)
    lines = {(s["task"], s["method"], s["index"], s["question"]): s for s in samples(tmp_path / "x")}
    assert len(lines) == 2 * 3 * 2 * 2
    for (task, method, index, question), line in lines.items():
        full = lines[task, "full", index, question]
        if question == 1:
            assert line["tokens"] == full["tokens"]
            assert method == "h2o" or line["nll"] == pytest.approx(full["nll"], rel=1e-4)
        elif task == "long_continuation":
            assert line["evictions"] == (line["tokens"] if method == "h2o" else 0)
            assert line["mean_live"] <= line["most_live"]
        else:
            assert "evictions" not in line
    assert lines["key_value", "h2o", 0, 1]["nll"] != lines["key_value", "full", 0, 1]["nll"]
    page = (tmp_path / "x" / "report.md").read_text()
    assert "| h2o | 0.25 | long continuation | 256.0 [" in page
    assert "perplexity of the full cache's |" in page
    capsys.readouterr()
    run.main(asked)
    assert "is complete" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="own_answers asks how likely greedy answers are, and num_beams=2 searches"):
        run.main([*asked, "--num-beams", "2"])


@pytest.fixture(scope="module")
def read_each(tmp_path_factory):
    """A run in which every policy reads the prompts of two tasks by itself."""
    arguments = ["--config", "snapkv.py", *small(budget=["0.25"]), "--baselines", "--tasks", *TWO_TASKS]
    directory = tmp_path_factory.mktemp("each") / "snapkv"
    run.main([*arguments, "--reads", "each", "--output", str(directory)])
    return directory


@pytest.mark.slow
def test_prompts_read_once_give_what_each_policy_reads_by_itself(finished, read_each):
    of_reading = ("id", "prefill_peak_bytes")
    mine = [s for s in samples(finished) if s["task"] in TWO_TASKS and (s["method"], s["budget"]) in READ_EACH]
    near = lambda rows: [
        {**s, "nll": pytest.approx(s["nll"], rel=1e-5)} if "nll" in s else s for s in without_times(rows, of_reading)
    ]
    by = lambda s: [s[k] for k in KEY]
    assert sorted(without_times(samples(read_each), of_reading), key=by) == sorted(near(mine), key=by)
    for s in samples(read_each):
        assert s["prefill_peak_bytes"] > s["decode_peak_bytes"] > 0
        assert s["prefill_seconds"] > 0


@pytest.mark.slow
def test_question_after_compression(tmp_path, finished):
    arguments = ["--config", "full.py", "--length", "256", "--examples", "4", "--batch-size", "2", "--baselines"]
    run.main([*arguments, "--protocol", "after_compression", "--output", str(tmp_path / "x")])
    lines = samples(tmp_path / "x")
    scores = [s["score"] for s in lines if s["task"] != "perplexity"]
    assert np.mean(scores) > 0.9  # read step by step, the question is answered as well as in one pass
    aware = {s["task"]: s["prompt_tokens"] for s in samples(finished)}
    assert {s["task"]: s["prompt_tokens"] for s in lines}["key_value"] < aware["key_value"]


# These need more than a model and a budget: arrays found beside the weights, a second pass, all layers at once.
SLOW = {"headkv", "duo_attention", "expected_attention", "q_filters", "kvzap", "kvzip", "layer_defensivekv"}
QUICK = {"think"}  # other tests run snapkv, h2o and fastgen
MARK = lambda c: () if c in QUICK else pytest.mark.slow if c in SLOW else pytest.mark.exhaustive


@pytest.mark.parametrize("config", [pytest.param(c, marks=MARK(c)) for c in configs.available()])
def test_every_config_runs(config, tmp_path):
    model = "embedded" if config in SLOW else one_layer()
    run.main(
        ["--config", f"{config}.py", "--output", str(tmp_path / config), "--length", "256", "--examples", "2"]
        + ["--model", model]
        + ["--batch-size", "2", "--tasks", "key_value", "--baselines"]
        + (["--budget", "0.25"] if "budget" in inspect.signature(configs.find(config)[1]).parameters else [])
    )
    assert {s["method"] for s in samples(tmp_path / config)} == {"full", config}


LEARNED = """
import numpy as np
from tests.test_checks import LINE

make = lambda budget: LINE
first, last = (lambda budget, x=x: (LINE, [{"score": {"a": np.full(4, x, np.float32)}}]) for x in (-1, 1))
"""


def test_a_policy_with_learned_parameters_runs_with_those_that_its_maker_returns(tmp_path):
    """Read once for all policies or by itself; lines of other parameters are not taken over."""
    (tmp_path / "mine.py").write_text(LEARNED)
    argv = [*small(examples=["1"], budget=["3"]), "--tasks", "key_value", "--baselines", "none"]
    ids = set()
    for reads, maker in (("once", "last"), ("each", "first")):
        out = tmp_path / maker
        run.main(["--policy", f"{tmp_path}/mine.py:{maker}", *argv, "--reads", reads, "--output", str(out)])
        (kept,) = np.load(out / "kept" / f"mine.{maker}@3.npz").values()
        start = samples(out)[0]["prompt_tokens"] - 3 if maker == "last" else 0
        assert [*map(sorted, kept[:, :3].tolist())] == [[start, start + 1, start + 2]] * 4
        ids.add(json.loads((out / "manifest.json").read_text())["config"]["ids"][f"mine.{maker}@3"])
    assert len(ids) == 2


def test_learned_parameters_that_are_missing_are_named(tmp_path):
    (tmp_path / "mine.py").write_text(LEARNED)
    argv = [*small(examples=["1"], budget=["3"]), "--tasks", "key_value", "--baselines", "none"]
    with pytest.raises(SystemExit, match=r"error: .*has learned parameters: .*; make\(budget\) of a file returns them"):
        run.main(["--policy", f"{tmp_path}/mine.py:make", *argv, "--output", str(tmp_path / "out")])


def test_a_method_without_budgets(made, tmp_path):
    """FastGen: labels are its recovery ratios."""
    command = ["--config", "fastgen.py", *small(budget=[]), "--tasks", "key_value", "--baselines", "random"]
    command.remove("--budget")
    run.main([*command, "--recovery", "0.98", "0.9", "--output", str(tmp_path / "x")])
    found = dict.fromkeys((s["method"], s["budget"]) for s in samples(tmp_path / "x"))
    assert [*found] == [("full", "1.0"), ("fastgen", "T=0.98"), ("fastgen", "T=0.9"), ("random", "0.125")]
    with pytest.raises(SystemExit, match="error: recovery is empty"):
        run.main(["--config", "fastgen.py", "--recovery", "--output", str(tmp_path / "empty")])
    experiment, _, _ = run.parse(["--config", "snapkv.py", "--baselines", "fastgen"])
    runs = setup.described(experiment, None, None).runs
    assert [b for m, b, _ in runs if m == "fastgen"] == [
        "T=0.98",
        "T=0.95",
        "T=0.9",
    ]


@pytest.mark.slow
def test_a_config_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses\n"
        "import kvjax\n"
        "from kvjax.configs.experiment import Common, Experiment, Setup, sweep\n\n\n"
        "@dataclasses.dataclass\n"
        "class Mine:\n"
        "    x: int = 3\n\n\n"
        "def get_config(budget: tuple[float, ...] = (0.25,), setup: Common = Setup()) -> Experiment:\n"
        '    """A mix of layers."""\n'
        "    make = lambda b: kvjax.partition(\n"
        "        {0: kvjax.Policy(), 1: kvjax.methods.h2o(b)}, (0, 0, 1, 1)\n"
        "    )\n"
        '    return Experiment("mine", sweep(make, budget), setup)\n'
    )
    small = ["--length", "256", "--examples", "2", "--batch-size", "2", "--tasks", "key_value", "--baselines"]
    run.main(["--config", "mine.py", *small])
    assert {
        s["method"]
        for s in samples(tmp_path / "results" / "mine-length-256-examples-2-batch-size-2-tasks-key_value-baselines")
    } == {"full", "mine"}


MAKE = """
from kvjax import methods

def make(budget):
    return methods.snapkv(budget, window=4)

def task(task, index):
    from kvjax.experiments.tasks import Example, Question
    said = task.ids("the code for ada is 7 3 .".split())
    asked = [Question(task.ids(["what"]), references=("7",), max_new_tokens=n) for n in (2, 3)]
    return Example("", -1, task.bos + said * (index + 1), tuple(asked))
"""


@pytest.mark.slow
def test_a_policy_and_a_task_of_ones_own_over_seeds_and_text(tmp_path, monkeypatch, capsys):
    """Of each seed there are all examples; one's own text is the haystack."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MAKE)
    rng = np.random.default_rng(0)
    told = "\n\n".join(" ".join(corpus.filler(rng, "train")) for _ in range(120))
    (tmp_path / "text.txt").write_text(told)
    command = ["--policy", "mine.py:make", *small(budget=["0.5"], examples=["2"]), "--baselines", "--seed", "0", "5"]
    run.main(
        [*command, "--tasks", "mine.py:task", "single_needle", "perplexity", "--text", "text.txt", "--output", "x"]
    )
    found = {(s["method"], s["task"], s["index"], s["question"]): s for s in samples(tmp_path / "x")}
    asked = [("task", 0), ("task", 1), ("single_needle", 0), ("perplexity", 0)]
    assert set(found) == {(m, t, i, q) for m in ("full", "mine.make") for t, q in asked for i in range(4)}
    assert found["mine.make", "task", 3, 1]["seed"] == 5
    outputs = lambda i: [found["full", "task", i, q]["output"] for q in range(2)]
    assert outputs(0) == outputs(2)  # this task draws nothing
    assert found["full", "perplexity", 0, 0]["tokens"] == 64
    (tmp_path / "two.py").write_text("def two(budget, window): ...")
    with pytest.raises(ValueError, match=r"two\.py:two is not called as make\(budget\): missing .*'window'"):
        run.parse(["--policy", "two.py:two"])
    for argv in (["--list-tasks"], ["--config", "snapkv.py", "--tasks", "list"]):
        with pytest.raises(SystemExit) as e:
            run.main(argv)
        assert e.value.code == 0
        assert re.search(r"key_value +A table of bare pairs", capsys.readouterr().out)


@pytest.mark.slow
def test_runs_from_another_directory(tmp_path):
    """As installed, with no repository around: paths do not depend on the working directory."""
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_prompts_read_in_blocks(read_each, tmp_path):
    """Less memory than at once, the full cache's results where nothing is evicted, and a setting in the manifest."""
    arguments = ["--config", "snapkv.py", *small(budget=["0.25"]), "--baselines", "--tasks", *TWO_TASKS]
    run.main([*arguments, "--block", "64", "--output", str(tmp_path / "blocks")])
    blocks, whole = tmp_path / "blocks", read_each
    assert json.loads((blocks / "manifest.json").read_text())["config"]["setup"]["block"] == 64
    peak = lambda directory: {
        (s["method"], s["budget"]): s["prefill_peak_bytes"] for s in samples(directory) if s["task"] == "single_needle"
    }
    full = lambda directory: [
        (s["task"], s["index"], s.get("score"))
        for s in samples(directory)
        if s["method"] == "full" and s["task"] in TWO_TASKS
    ]
    assert peak(blocks)["snapkv", "0.25"] < peak(whole)["snapkv", "0.25"]
    assert full(blocks) == full(whole)


def test_a_task_that_is_complete_for_a_policy_is_not_asked_again(made, tmp_path):
    """Where tasks have programs of their own, since their answers are of other lengths."""
    arguments = [*SHORT, "--tasks", "key_value", "perplexity", "--output", str(tmp_path)]
    run.main(arguments)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(x for x in lines if '"key_value"' in x))
    run.main(arguments)
    again = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    assert sorted(again) == sorted(lines)


def test_the_full_cache_of_an_equal_run_beside_is_taken_over(made, tmp_path, capsys, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    other = ["--config", "h2o.py", *SHORT[2:]]
    run.main([*SHORT, "--output", str(first)])
    ran = []
    monkeypatch.setattr(Made, "run", lambda self, *a, work=Made.run: ran.append(self.size) or work(self, *a))
    run.main([*other, "--output", str(second)])
    assert f"full@1.0: 4 lines are taken over from {first}, an equal run" in capsys.readouterr().out
    assert len({*ran}) == 1  # h2o's
    run.main([*other, "--output", str(second)])
    assert "is complete" in capsys.readouterr().out
    for here, options in ((second, ["--restart"]), (tmp_path / "third", ["--seed", "1"])):
        run.main([*other, "--output", str(here), *options])
        assert "taken over" not in capsys.readouterr().out


def test_examples_that_have_the_same_context_are_one_cluster(embedded, tmp_path):
    """A text's stretches are those of every seed."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"the code for ada is {' '.join(str(i))} ." for i in range(400)))
    given = Setup(tasks=("perplexity",), text=str(text), examples=3, length=100, seed=(0, 1))
    prompts, _ = setup.build(given, setup.find_builders(given), embedded[2], embedded[0].config)
    labels = [dict(p.example.meta).get("same_context", f"perplexity/{p.example.index}") for p in prompts]
    assert labels == [f"perplexity/{i}" for i in (0, 1, 2, 0, 1, 2)]
