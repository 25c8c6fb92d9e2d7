"""Running the papers' tables: what is chosen, what is missing, ours beside theirs, and the ledger."""

import json
import types

import jax
import numpy as np
import pytest

from kvjax import methods, models
from kvjax.experiments import reproduce
from kvjax.experiments.core import job
from kvjax.experiments.core.engine import Engine
from kvjax.experiments.papers import numbers, pages, rows, runs, tables
from kvjax.experiments.papers.picture import named, picture
from kvjax.experiments.papers.runs import Options, Run
from kvjax.experiments.papers.tables import ENTRIES
from tests.runs import one_layer

MISTRAL = types.SimpleNamespace(num_layers=32, embed_dim=4096, num_kv_heads=8, max_position=32768, vocab_size=32000)
SMALL = types.SimpleNamespace(num_layers=1, embed_dim=128, num_kv_heads=4, max_position=2048, vocab_size=389)


class MadeUp(Engine):
    """An engine whose lines are made up from prompts and policies, at once."""

    fails_after = None

    def compile(self, full=None):
        pass

    def run(self, prompts, shown=(), full=None):
        if MadeUp.fails_after == 0:
            raise KeyboardInterrupt
        MadeUp.fails_after = None if MadeUp.fails_after is None else MadeUp.fails_after - 1
        return [[self.made_up(prompt, i)] for i, prompt in enumerate(prompts)], []

    def made_up(self, prompt, i):
        words = " ".join(str(token % 10) for token in prompt.tokens[-prompt.steps :])
        kept = "" if self.policy == methods.full() else " and more"
        times = {"prefill_seconds": 1.0 / (self.block or 1), "decode_tokens_per_second": prompt.steps or 1}
        line = {"question": 0, "kv_bytes": 10**9, "prompt_tokens": len(prompt.tokens), **times}
        if prompt.example.questions[0].continuation or not prompt.steps:
            return {**line, "nll": 1.0 + 0.1 * i}
        return {**line, "output": words + kept, "tokens": prompt.steps}


@pytest.fixture
def real(monkeypatch, tmp_path):
    """Runs the script; returns its folder."""

    def call(*argv, out="out"):
        full = [*argv, "--model", one_layer(), "--output", str(tmp_path / out)]
        monkeypatch.setattr("sys.argv", ["reproduce.py", *full])
        reproduce.main(full)
        return tmp_path / out

    return call


@pytest.fixture
def run(real, monkeypatch, tmp_path):
    """Runs the script with a made-up engine; returns the report as JSON and as text."""
    monkeypatch.setattr(job, "Engine", MadeUp)
    monkeypatch.setattr(pages, "FOLDER", tmp_path)

    def call(*argv, out="out"):
        folder = real(*argv, out=out)
        return json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()

    return call


@pytest.fixture
def every_metric(monkeypatch):
    """All metrics count as installed."""
    monkeypatch.setattr(runs.metrics, "find", lambda name: name)


REDUCED = ("nacl/table2", "--data", "project", "--examples", "3", "--length", "128", "--new-tokens", "8")


def test_a_reduced_run_is_marked_and_stands_beside_the_paper(run, tmp_path, capsys):
    found, text = run(*REDUCED, "--methods", "h2o", "--budget", "0.2", "--record")
    assert found["status"] == "machinery only"
    assert text.index("**Reduced") < text.index("at most 3 rows of a data set") < text.index("## Ours (theirs)")
    full, h2o = (n for n in found["numbers"] if n["column"] == "HotpotQA")
    assert (full["theirs"], h2o["theirs"], h2o["rows"]) == (27.7, 24.5, 3)
    assert h2o["difference"][0] == pytest.approx(h2o["ours"] - 24.5)
    assert h2o["difference"][1] == pytest.approx(h2o["low"] - 24.5)
    assert h2o["theirs_over_full"] == pytest.approx(24.5 - 27.7)
    assert h2o["over_full_low"] <= h2o["over_full"] <= h2o["over_full_high"]
    said = capsys.readouterr().out
    assert "the model has 1 layers of width 128" in said
    assert said.index("about ") < said.index("## Ours (theirs)")
    noted = pages.recorded()["nacl/table2"]
    assert noted[0]["status"] == "machinery only"
    assert noted[0]["command"].startswith("python experiments/reproduce.py nacl/table2 --data project")
    assert str(tmp_path) not in noted[0]["command"]
    assert "machinery only, " in (tmp_path / "README.md").read_text()
    assert "1 machinery only" in pages.listing(pages.recorded())


def test_an_interrupted_run_goes_on_to_the_same_numbers(run, monkeypatch):
    options = (*REDUCED, "--methods", "h2o", "--budget", "0.2")
    whole, _ = run(*options, out="whole")
    for stop in (3, 4):
        monkeypatch.setattr(MadeUp, "fails_after", stop)
        with pytest.raises(SystemExit):
            run(*options, out="parts")
        MadeUp.fails_after = None
    again, _ = run(*options, out="parts")
    assert again["numbers"] == whole["numbers"]


def test_seeds_are_pooled_and_a_row_that_several_read_counts_once(run, monkeypatch, tmp_path):
    """The interval is that of the rows' means; the project's own text has other rows for each seed."""
    right = lambda p: p.seed == 0 or p.example.index % 4 < 2
    made = lambda self, p, i, of=MadeUp.made_up: {**of(self, p, i), "output": "d" if right(p) else "x"}
    monkeypatch.setattr(MadeUp, "made_up", made)
    (tmp_path / "hotpotqa.jsonl").write_text("".join(f'{{"context": "a {i}", "answers": "d"}}\n' for i in range(4)))
    options = ("nacl/table2", "--methods", "h2o", "--budget", "0.2", "--seed", "0", "5", "6", "--data")
    found, text = run(*options, str(tmp_path))
    h2o = found["numbers"][-1]
    means = np.array([1, 1, 1 / 3, 1 / 3])
    half = 3.18244631 * means.std(ddof=1) / 2  # Student's t of three degrees of freedom, of four rows
    assert (h2o["column"], h2o["rows"]) == ("HotpotQA", 12)
    assert "HotpotQA: 4 of 200 rows" in found["reduced"]
    assert [h2o["ours"], h2o["low"], h2o["high"]] == pytest.approx([200 / 3, 100 * (2 / 3 - half), 100])
    assert "seeds 0, 5, 6 are pooled; a row that several read counts once" in text
    own, _ = run(*options, "project", "--examples", "2", "--length", "64", out="own")
    lines = [json.loads(x) for x in (tmp_path / "own/samples.jsonl").read_text().splitlines()]
    assert {n["rows"] for n in own["numbers"] if n["column"] == "HotpotQA"} == {6}
    assert len({x["context"] for x in lines if x["task"] == "hotpotqa"}) == 6


def test_outputs_are_compared_with_those_of_the_full_cache(run):
    pytest.importorskip("rouge_score")
    found, text = run("roco/table6", "--data", "project", "--examples", "2", "--length", "64", "--new-tokens", "6")
    by_cell = {(n["method"], n["column"]): n for n in found["numbers"]}
    assert ("full", "ROUGE-2") not in by_cell
    assert 0 < by_cell["block-1", "ROUGE-2"]["ours"] < 100
    assert by_cell["block-4", "Speed up"]["ours"] == pytest.approx(4.0)
    assert "what the full cache generates from the same prompt" in text


def test_speeds_and_likelihoods_have_their_units(run):
    speeds, _ = run(
        "ahakv/figure8", "--examples", "3", "--length", "64", "--new-tokens", "8", "--budget", "32", out="a"
    )
    by_column = {n["column"]: n for n in speeds["numbers"] if n["method"] == "ahakv"}
    assert by_column["32K + 512"]["ours"] == pytest.approx(4.0)  # 8 tokens in 2 seconds, one of them for the prompt
    assert by_column["cache"]["ours"] == pytest.approx(1.0)
    assert by_column["inference time"]["ours"] == pytest.approx(2.0)
    options = ("--data", "project", "--examples", "2", "--length", "128", "--methods", "roco", "--budget", "0.5")
    texts, _ = run("roco/figure5", *options, out="b")
    assert texts["numbers"][1]["ours"] == pytest.approx(np.exp(1.05))


def test_a_cache_is_planned_without_a_run_for_four_sequences(run, tmp_path):
    found, _ = run("nacl/figure4")
    sizes = {(n["method"], n["budget"], n["column"]): n["ours"] * 1e9 for n in found["numbers"]}
    width = 4 * 2 * 4 * 32 * 4  # four sequences, keys and values, kv heads, head_dim, bytes
    assert sizes["full", 1.0, "32K"] == pytest.approx(32768 * width)
    assert sizes["h2o", 0.1, "1K"] == pytest.approx(104 * width)  # 102 tokens in whole tiles
    assert len(sizes) == 5 * 6
    assert (tmp_path / "out/figure.png").stat().st_size > 10_000


def test_latency_grows_with_length_and_so_does_the_caches_share_of_what_a_step_moves(run, monkeypatch, tmp_path):
    class Timed(MadeUp):
        def made_up(self, prompt, i):
            return super().made_up(prompt, i) | {"prefill_seconds": len(prompt.tokens) / 256 + prompt.example.index}

    monkeypatch.setattr(job, "Engine", Timed)
    found, _ = run("keyformer/figure1", "--examples", "2", "--new-tokens", "8")
    assert "positions for 2040 tokens of speed_2048_batch_4, speed_4096_batch_4" in " ".join(found["reduced"])
    ours = {n["column"]: n["ours"] for n in found["numbers"]}
    growth = [ours[f"latency at {n}"] for n in ("512", "1K", "2K", "4K", "8K")]
    wanted = (np.array([256, 512, 1024, 2040, 2040]) / 256 + 1.5) / 2.5  # half a second, and one to generate
    assert growth == pytest.approx(wanted)
    _, params = models.load(one_layer())
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    assert ours["the model"] == pytest.approx(weights / 1e9)
    for name, n in (("512", 512), ("8K", 8192)):
        cache = 4 * 2 * 4 * 32 * 4 * n  # four sequences, keys and values, kv heads, head_dim, bytes
        assert ours[f"cache at {name}"] == pytest.approx(cache / 1e9)
        assert ours[f"cache's share at {name}"] == pytest.approx(cache / (cache + weights))
    theirs = {n["column"]: n["theirs"] for n in found["numbers"] if n["theirs"] is not None}
    assert theirs == {"latency at 8K": 50, "cache's share at 8K": 0.4}
    assert (tmp_path / "out/figure.png").stat().st_size > 10_000


def test_examples_stand_before_a_text_of_which_its_own_tokens_are_predicted(monkeypatch, tmp_path):
    monkeypatch.setattr(job, "Engine", MadeUp)
    rows_ = [json.dumps({"question_stem": "the red key of Anna is 1234 ."}), json.dumps({"question_stem": "a b"})]
    (tmp_path / "openbookqa_text.jsonl").write_text("\n".join(rows_ * 3))
    options = Options("nacl/table1", model=one_layer(), data=str(tmp_path), methods=("nacl",))
    (made := Run(ENTRIES["nacl/table1"], options, SMALL)).prepare()
    five, most = (made.prompts[f"openbookqa_text {n}-shot"] for n in (5, 25))
    ids = [made.tokenizer(json.loads(line)["question_stem"], add_special_tokens=False).input_ids for line in rows_]
    assert [list(p.example.questions[0].continuation) for p in five[:2]] == ids
    assert [len(p.tokens) for p in five] == [len(p.tokens) for p in most]  # there are but five others
    assert len(five[1].tokens) > len(ids[0]) * 3
    assert [x for x in made.reduced if "stand before" in x] == ["5 rows stand before each of openbookqa_text, not 25"]
    (tmp_path / "openbookqa_text.jsonl").write_text("\n".join(rows_ * 13))
    (more := Run(ENTRIES["nacl/table1"], options, SMALL)).prepare()
    longer = [len(more.prompts[f"openbookqa_text {n}-shot"][0].tokens) for n in (5, 25)]
    twenty = 10 * (len(ids[0]) + len(ids[1]))
    assert twenty <= longer[1] - longer[0] <= twenty + 20


def test_the_geometric_mean_of_scores_has_an_interval():
    """Its rows' parts are nearly the jackknife's; they may lie outside of [0, 1]."""
    scores = [{0: 0.2, 1: 0.4, 2: 0.9}, {0: 0.5, 1: 0.1, 2: 0.6}]
    parts = numbers._geometric(scores)
    mean = lambda held: np.prod([np.mean([each[i] for i in held]) for each in scores]) ** 0.5
    assert np.mean([*parts.values()]) == pytest.approx(mean(range(3)))
    jackknife = {i: 3 * mean(range(3)) - 2 * mean([j for j in range(3) if j != i]) for i in range(3)}
    assert parts == pytest.approx(jackknife, abs=0.08)
    assert np.mean([*numbers._geometric([{0: 0.1, 1: 0.3}, {0: 0.3}]).values()]) == pytest.approx((0.2 * 0.3) ** 0.5)
    lines = lambda scores: {i: {"scores": {"x": score}} for i, score in scores.items()}
    cells = {("roco", "0.5", t): lines({i: float(i == 0) for i in range(20)}) for t in "ab"}
    cells |= {("full", "1.0", t): lines(dict.fromkeys(range(20), 0.1)) for t in "ab"}
    column = tables.Column("mean", tables.GEOMETRIC)
    _, ours, over = numbers._ours(None, "roco", "0.5", column, [("a", "x"), ("b", "x")], cells)
    assert ours[0] == pytest.approx(5.0)
    assert ours[1] < 5.0 < ours[2]
    assert over[0] == pytest.approx(-5.0)


def test_tasks_of_lm_eval_are_told_apart_by_their_shots_and_one_that_fails_stops_no_other(run, monkeypatch):
    def accuracies(name, shots, examples, tasks, **how):
        if name == "piqa":
            raise ValueError("piqa cannot be loaded")
        return [1.0, 0.0, 1.0, float(shots == 5)]

    monkeypatch.setattr(runs, "has_lm_eval", lambda: True)
    monkeypatch.setattr(rows, "accuracies", accuracies)
    found, _ = run("keyformer/table2", "--methods", "keyformer")
    by_column = {n["column"]: n for n in found["numbers"] if n["method"] == "keyformer"}
    assert (by_column["COPA 0-shot"]["ours"], by_column["COPA 5-shot"]["ours"]) == (50.0, 75.0)
    assert (by_column["COPA 0-shot"]["theirs"], by_column["COPA 0-shot"]["rows"]) == (70.0, 4)
    assert "PIQA 0-shot" not in by_column
    assert "keyformer at 0.5: piqa cannot be loaded" in found["faults"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ada-kv/table1", "--methods", "h3o"], "has no method 'h3o'; there are full, h2o"),
        (["ada-kv/table1", "--stands-for", "gpt-j-6b"], "has no model 'gpt-j-6b'; there are mistral"),
        (["ada-kv/table1", "--data", "nowhere"], "--data nowhere does not exist"),
        (["ada-kv/table1"], "nothing of ada-kv/table1 can run here"),
        (["ada-kv/figure4", "--data", "project"], "does not state its budget; give --budget"),
        (["ada-kv/table3"], "nothing to run"),
        (["ahakv/figure5", "--data", __file__, "--seed", "0", "1"], "one text for all 2 seeds; ask for more prompts"),
        (["roco/table5", "--data", "project"], "nothing of roco/table5 can run here"),
        (["roco/table5", "--plan"], "roco/table5 measures no policy on a data set, which is all that is planned"),
        (["roco/figure1", "--plan"], "roco/figure1 measures no policy on a data set"),
        (["nacl/figure7", "--plan", "--stands-for", "gpt-5"], "has no model 'gpt-5'; there are llama-2-7b"),
        (["nacl/table2", "--examples", "0"], "examples=0 must be at least 1"),
        (["nacl/table2", "--seed", "1", "2", "1"], "seed has 1 twice; give each once"),
        (["nacl/table2", "--budget", "64", "0"], "--budget 0 must be at least 1 token"),
        (["nacl/table2", "--budget", "1.5"], "--budget 1.5 must be at least 1 token, or a share above 0 and at most"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(run, argv, message, capsys):
    with pytest.raises(SystemExit) as e:
        run(*argv)
    assert message in " ".join(f"{e.value} {capsys.readouterr().err}".replace("│", " ").split())


def test_an_entry_on_the_papers_model_and_whole_data_is_not_reduced(tmp_path, every_metric):
    entry = ENTRIES["ada-kv/table1"]
    for name in entry.data:
        (tmp_path / f"{name}.jsonl").write_text('{"context": "a", "answers": ["b"]}\n')
    whole = Run(entry, Options(entry.name, data=str(tmp_path)), MISTRAL)
    assert (whole.reduced, whole.missing, len(whole.lines)) == ([], [], 25)
    assert pages.outcome(whole.reduced) == "as published"
    (tmp_path / "lcc.jsonl").unlink()
    part = Run(entry, Options(entry.name, data=str(tmp_path)), SMALL)
    assert "lcc: no lcc.jsonl, .json or .txt" in part.missing[0]
    assert len(part.reduced) == 2


def test_a_missing_column_leaves_its_mean_out_and_sets_weigh_the_same(every_metric):
    entry = ENTRIES["ahakv/table1"]
    chosen = Run(entry, Options(entry.name, data="project", methods=("tova",)), SMALL)
    assert chosen.model == "llama-3-8b-instruct"
    lines = [
        {"method": "full", "budget": "1.0", "task": task, "index": i, "scores": {metric: score}}
        for c, score in zip(chosen.columns, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), strict=True)
        for task, metric in c.parts
        for i in range(2)
    ]
    found = {n.column: n for n in numbers.numbers(chosen, lines)}
    assert found["Average"].ours == pytest.approx(100 * np.dot([2, 4, 4, 4, 4, 3], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) / 21)
    partial = [line for line in lines if line["task"] != "lcc"]
    assert "Average" not in {n.column for n in numbers.numbers(chosen, partial)}


def rows_of(name, data):
    found, _ = rows.files((name,), str(data))
    return rows.prompt_rows(name, found[name], None, types.SimpleNamespace(seed=0), 0)


def test_rows_that_are_none_are_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "qasper.jsonl"
    lines = ['{"context": "a b", "question": "c?", "answers": "d"}', "{not JSON", '{"question": ""}', "[1]"]
    path.write_text("\n".join([*lines, '{"context": "e", "answers": [3]}', '{"origin_prompt": "p", "gold": ["q"]}']))
    found, faults = rows_of("qasper", tmp_path)
    assert [(r.prompt, r.answers) for r in found] == [("a b\nc?", ("d",)), ("p", ("q",))]
    assert [f.split(":")[0] for f in faults] == [f"qasper.jsonl, row {i}" for i in (2, 3, 4, 5)]
    (tmp_path / "hotpotqa.txt").write_text("one part\nof two lines\n\nanother")
    texts, _ = rows_of("hotpotqa", tmp_path)
    assert [r.prompt for r in texts] == ["one part\nof two lines", "another"]
    path.write_text("nothing")
    with pytest.raises(ValueError, match="has no row that can be read"):
        rows_of("qasper", path)


def test_rows_of_longbench_itself_get_the_prompts_that_lm_eval_has(tmp_path, monkeypatch):
    task = tmp_path / "qasper.yaml"
    task.write_text('doc_to_text: "Article: {{context}}\\nQuestion: {{question}}\\n\\nAnswer:"\n')
    monkeypatch.setattr(rows, "available", lambda: {"qasper": task})
    rows._template.cache_clear()
    row = {"context": "a {{question}}", "input": "b?", "answers": ["c"], "all_classes": None}
    (tmp_path / "qasper.json").write_text(json.dumps([row, {**row, "context": 3}]))
    found, faults = rows_of("qasper", tmp_path)
    assert [r.prompt for r in found] == ["Article: a {{question}}\nQuestion: b?\n\nAnswer:"]
    assert "row 2: the text for {{context}} is 3" in faults[0]
    monkeypatch.setattr(rows, "available", dict)
    rows._template.cache_clear()
    with pytest.raises(ValueError, match="lm-eval has no prompt for qasper; give whole prompts as origin_prompt"):
        rows_of("qasper", tmp_path)
    rows._template.cache_clear()


def test_rows_of_the_hub_are_read_as_they_are(tmp_path):
    """Every set of the catalogue by its own fields, with what is asked about the text."""
    summary = "Summarize the following {}.\n\nText.\n\nSummary:".format
    given = {
        "cnn_dailymail": ({"article": "Text.", "highlights": "h"}, (summary("article"), ("h",))),
        "cnn_dailymail_context": ({"article": "Text."}, ("Text.\n\nRepeat the article above.", ("Text.",))),
        "gov_report_summaries": ({"report": "Text.", "summary": "s"}, (summary("report"), ("s",))),
        "alpaca_eval": ({"instruction": "Why?", "output": "So."}, ("Why?", ("So.",))),
        "openwebtext": ({"text": "Text."}, ("Text.", ())),
        "soda": ({"dialogue": ["A: Hi.", "B: Hello.", "A: Bye."]}, ("A: Hi.\nB: Hello.", ("A: Bye.",))),
    }
    for name, (row, wanted) in given.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        found, faults = rows_of(name, tmp_path)
        assert ([(r.prompt, r.answers) for r in found], faults) == ([wanted], [])
    (tmp_path / "xsum.jsonl").write_text('{"document": " ", "summary": "s"}\n{"document": "d", "summary": "s"}')
    found, faults = rows_of("xsum", tmp_path)
    assert (len(found), len(faults)) == (1, 1)


def test_the_template_of_a_model_without_a_preset():
    assert tables.MODELS["wizardlm-7b"].place.endswith("### Instruction:\n{prompt}\n\n### Response:")
    assert "[INST]" in tables.MODELS["llama-2-7b-chat"].place


def test_an_entrys_page_has_its_numbers_and_the_policies_that_kvjax_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reproduce.py"])
    reproduce.main(["nacl/table2", "--published"])
    text = capsys.readouterr().out
    assert "| LLaMA2-7B-Chat | NaCl | 0.2 | 7 | 9.4 | 51.6 | 27.2 | 17.1 | 82.5 | 20.8 | 30.8 |" in text
    assert "Table4(" in text
    assert "PR-En is printed as 43.0; 4.3 gives the printed mean" in text
    for entry in ENTRIES.values():
        assert pages.published(entry).startswith(f"# {entry.name}: ")


def test_classification_is_that_of_longbench():
    """A class that is named beside the right one halves the score; a part of its name does not."""
    classes = ("Food", "Date", "Currency name", "Currency")
    assert rows.classification("it is Food", "Food", classes) == 1
    assert rows.classification("Food or Date", "Food", classes) == 0.5
    assert rows.classification("a Currency name", "Currency name", classes) == 1
    assert rows.classification("Date", "Food", classes) == 0


def test_the_list_has_every_entry_and_the_ledgers_table_is_made_from_it():
    text = pages.listing(pages.recorded())
    assert [line.split(":")[0] for line in text.splitlines() if line[:1].isalpha()] == [*ENTRIES]
    assert (pages.FOLDER / "README.md").read_text() == pages.markdown(pages.recorded())


@pytest.mark.slow
def test_tasks_of_lm_eval_that_the_extra_has_run_end_to_end(real, tmp_path):
    """AhaKV's Figure 4, with one of its tasks; those that are not there stop nothing."""
    pytest.importorskip("lm_eval")
    rows_ = [{"q": f"the number {i} . the number", "choices": [f" {i}", " 9"], "label": 0} for i in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows_))
    task = {
        "task": "openbookqa", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "choices",
        "doc_to_target": "label", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "openbookqa.yaml").write_text(json.dumps(task))
    argv = f"ahakv/figure4 --methods ahakv --budget 0.5 --examples 3 --length 64 --data {tmp_path}"
    found = json.loads((real(*argv.split()) / "report.json").read_text())
    run = {(n["method"], n["column"], n["rows"]) for n in found["numbers"]}
    assert run == {("full", "OpenBook", 3), ("ahakv", "OpenBook", 3)}
    assert any("wic of lm-eval cannot be run under" in fault for fault in found["faults"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("nacl/figure2", "nacl/figure7", "nacl/figure8", "nacl/figure9", "nacl/section-6-4"),
        *("keyformer/figure4", "ada-kv/figure6"),
    ],
)
def test_a_drawn_entry_ends_as_pictures(real, name):
    folder = real(name, "--examples", "1", "--length", "128", "--seed", "0", "3")  # a prompt of each
    for figure in ENTRIES[name].figures:
        config = json.loads((folder / f"{figure}.json").read_text())["config"]
        assert (config["length"], config["count"], config["seed"]) == (128, 1, [0, 3])
        assert (folder / f"{figure}.png").stat().st_size > 10_000


ROUGE = (
    *(f"keyformer/{x}" for x in ("table3", "table4", "section-4", "appendix-a1")),
    *(f"keyformer/figure{i}" for i in (3, 5, 7, 8, 12, 13, 16)),
    *(f"roco/table{i}" for i in (2, 3, 4, 6, 7, 8, 9)),
    *("roco/figure4", "nacl/figure5"),
)
GROWTH = {c.title for c in ENTRIES["keyformer/figure1"].columns}
GIVEN = "--data project --budget 40 --methods"


@pytest.mark.parametrize(
    ("argv", "columns"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (
            *((f"{n} --data project --budget 0.5 --methods {ENTRIES[n].rows[-1].method}", None) for n in ROUGE),
            ("keyformer/figure1", GROWTH),
            ("nacl/appendix-a5", {"Speed up"}),
            ("nacl/table1 --data project --methods nacl", {"log PPL 5-shot", "log PPL 25-shot"}),
            ("roco/figure5 --data project --budget 0.3 --methods roco", {"perplexity"}),
            ("ahakv/limitations --data project --budget 40", None),
            ("ahakv/figure7 --data project --budget 40 0.2", None),
            ("ahakv/figure8 --budget 40", None),
            (f"ada-kv/figure4 {GIVEN} snapkv", {"average score"}),
            (f"ada-kv/figure5 {GIVEN} snapkv", {"Ave. Score"}),
        )),
        pytest.param(f"ada-kv/figure4 {GIVEN} ada_pyramid", {"average score"}, marks=pytest.mark.exhaustive),
        pytest.param("keyformer/figure10", {"4096 + 4096 (BS=1)"}, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_entries_run_end_to_end_at_reduced_size(real, argv, columns):
    name = argv.split()[0]
    entry = ENTRIES[name]
    if name in (*ROUGE, "ada-kv/figure5"):
        pytest.importorskip("rouge" if name.startswith("ada") else "rouge_score", reason="needs the extra eval")
    folder = real(*argv.split(), *"--examples 2 --length 128 --new-tokens 4 --batch-size 2".split())
    found = json.loads((folder / "report.json").read_text())
    assert columns is None or {n["column"] for n in found["numbers"]} == columns
    assert {n["method"] for n in found["numbers"]} - {"full"} or columns == GROWTH
    assert all(np.isfinite(n["ours"]) for n in found["numbers"])
    assert (found["status"], found["faults"]) == ("machinery only", [])
    assert (folder / "figure.png").is_file() == (not entry.label.startswith("table"))
    assert all((folder / f"{figure}.png").is_file() for figure in entry.figures)


@pytest.mark.slow
def test_a_question_that_a_paper_prints_needs_no_data_and_its_responses_are_shown(real):
    """RoCo's Figure 6: shares are of the prompt and the tokens to come."""
    folder = real(*"roco/figure6 --new-tokens 24 --budget 0.3 --batch-size 1".split())
    lines = {x["method"]: x for x in map(json.loads, (folder / "samples.jsonl").read_text().splitlines())}
    tokens = lines["full"]["prompt_tokens"] + 24
    assert lines["full"]["most_live"] == lines["full"]["prompt_tokens"] + lines["full"]["tokens"]
    assert lines["roco"]["live"] == int(0.3 * tokens)
    text = (folder / "report.md").read_text()
    assert text.count("\n- RoCo") == 2
    assert lines["roco"]["output"].splitlines()[0] in text.split("## Responses")[1]


def test_how_often_paragraphs_are_named():
    """By the first number of an output; one that no answer has, or none, names no paragraph."""
    right = [rows.PromptRow("", (f"段落{n}",)) for n in (1, 3, 3, 4)]
    outputs = "段落3, not 1", "1", "段落30", "no"
    lines = [{"method": "h2o", "budget": "1000", "output": text} for text in outputs]
    chosen = Run(ENTRIES["ahakv/figure7"], Options("ahakv/figure7", data="project"), SMALL)
    chosen.rows = {"passage_retrieval_zh": right}
    truth, found = named(chosen, lines)
    assert truth.tolist() == [1, 0, 2, 1]
    assert found["H2O at 1000"].tolist() == [1, 0, 1, 0]


def test_named_paragraphs_have_their_counts_and_quantiles(run):
    found, text = run(*"ahakv/figure7 --data project --examples 7 --length 64 --new-tokens 6 --budget 40".split())
    each = sorted(n for n, count in enumerate(found["paragraphs"]["right"], 1) for _ in range(count))
    quantiles = " | ".join(str(each[i]) for i in (0, 1, 3, 5, 6))
    assert f"| right | 7 | {quantiles} |" in text


def test_a_measured_figures_curve_has_ours_and_the_papers_numbers_at_every_budget(every_metric):
    entry, column = ENTRIES["ada-kv/figure5"], "Ave. Score"
    chosen = Run(entry, Options(entry.name, data="project", methods=("snapkv",)), SMALL)
    printed = {(r.method, r.budget): r.values[0] for r in entry.rows if r.model == chosen.model}
    made = lambda x, line: numbers.Number(*line, column, 3, x, x - 1, x + 1, printed[line])
    found = [made(30 + i, line) for i, line in enumerate(chosen.lines)]
    (axes,) = picture(chosen, found, []).axes
    line = next(c for c in axes.containers if c.get_label() == "SnapKV")[0]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([128, 256, 512, 1024], [31, 32, 33, 34])
    assert axes.collections[-1].get_offsets().tolist() == [[b, printed["snapkv", b]] for b in (128, 256, 512, 1024)]


@pytest.mark.slow
def test_a_drawn_entry_has_the_papers_layer_and_budget(real):
    sizes = "--examples", "1", "--length", "192"
    folder = real("ada-kv/figure3", *sizes)
    assert json.loads((folder / "loss_bound.json").read_text())["config"]["budgets"] == [128]
    with pytest.raises(SystemExit, match=r"layers=\(8,\): the model has layers 0 to 0"):
        real("ada-kv/figure2", *sizes)
    real("ada-kv/figure2", *sizes, "--layers", "0")
    with np.load(folder / "head_concentration.npz") as arrays:
        assert arrays["layers"].tolist() == [0]
