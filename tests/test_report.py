"""The page of results: what it shows of runs, of lm-eval's files and of papers' tables, and what it refuses."""

import html.parser
import json
import pathlib
import random
import re
import urllib.parse

import pytest

from kvjax.experiments import report
from kvjax.experiments.evaluation.results import Results
from kvjax.experiments.evaluation.summary import TIMED, summarise
from tests.runs import samples

TASKS = ("single_needle", "key_value", "perplexity")


def right_but_the_first(method, task, index):
    return float(method == "full" or index > 0)


def make_run(
    directory,
    method="snapkv",
    protocol="in_prompt",
    rows=8,
    output="12",
    lines=None,
    score_of=right_but_the_first,
    **setup,
):
    """A finished run of the full cache and a method at two budgets, whose every answer but the first is right."""
    names = [("full", "1.0"), (method, "0.5"), (method, "0.25")]
    config = {
        "name": method,
        "policies": [
            {"method": m, "budget": b, "policy": f"{m} {b}", **({} if m == "full" else {"options": "window_size=16"})}
            for m, b in names
        ],
        "setup": {"model": "embedded", "protocol": protocol, "length": 128, "examples": rows, "block": None, **setup},
        "tasks": {task: {"examples": rows, "builder": task} for task in TASKS},
        "text": None,
        "checkpoint": "abc",
    }
    with Results(directory, config, ["python", "run.py"]) as results:
        for m, b in names:
            results.set_cost(m, b, {"kv_bytes": int(1000 * float(b))})
            made = []
            for task in TASKS:
                for i in range(rows):
                    key = {"method": m, "budget": b, "task": task, "index": i}
                    sizes = {"prompt_tokens": 100, "live": 100 * float(b)}
                    if task == "perplexity":
                        made.append({**key, **sizes, "nll": 1 + i / 10 + (m != "full"), "answers": []})
                        continue
                    score, metric = score_of(m, task, i), {"key_value": "f1"}.get(task, "contains")
                    answer = {"score": score, "metric": metric, "output": output, "references": ["12"], "tokens": 2}
                    meta = {"depth": (i % 2) / 2, "length": 64.0 * (1 + i // 4)}
                    made.append({**key, **meta, **sizes, "score": score, "answers": [answer]})
            results.append(made[:lines])


class Page(html.parser.HTMLParser):
    """Elements with their attributes, checked to be closed in order."""

    VOID = frozenset(("meta", "link", "input", "br", "path", "use"))

    def __init__(self, path):
        super().__init__()
        self.directory, self.open, self.elements, self.inside = path.parent, [], [], {}
        self.source = path.read_text()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        for tag in self.open:
            self.inside[tag] = self.inside.get(tag, "") + data

    def of(self, tag, **attributes):
        return [a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in attributes.items())]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs of two methods and of both protocols, lm-eval's files, a paper's table, and directories that are no runs."""
    directory = tmp_path_factory.mktemp("results")
    make_run(directory / "snapkv", output="<script>alert(1)</script> & \"'")
    make_run(directory / "h2o", method="h2o <b>|", rows=4)
    make_run(directory / "after", protocol="after_compression")
    make_run(directory / "unfinished", lines=5)
    (directory / "broken").mkdir()
    (directory / "broken" / "manifest.json").write_text("{")
    (directory / "empty").mkdir()
    (directory / "other").mkdir()
    (directory / "other" / "manifest.json").write_text(
        json.dumps({"config": {"setup": {}, "policies": [], "tasks": {"a": 3}}})
    )
    write_lm_eval(directory / "lm", "full", [1.0, 1.0, 0.5, 0.25])
    write_lm_eval(directory / "lm", "snapkv", [1.0, 0.0, 0.5, 0.25])
    write_lm_eval(directory / "hf", None, [1.0, 1.0, 0.5, 0.25])
    paper = directory / "reproduce" / "roco"
    paper.mkdir(parents=True)
    (paper / "manifest.json").write_text("{}")
    numbers = [
        {
            "method": "roco",
            "budget": 0.5,
            "column": "R-1",
            "rows": 4,
            "ours": 41.25,
            "low": 40,
            "high": 42,
            "theirs": 43.5,
        }
    ]
    content = {"entry": "roco/table4", "status": "machinery only", "reduced": ["4 rows"], "numbers": numbers}
    (paper / "report.json").write_text(json.dumps(content))
    (paper / "samples.jsonl").write_text("")
    (paper / "report.md").write_text("")
    return directory


def write_lm_eval(directory, policy, values):
    """What lm-eval writes of one task with rows, under two names of one metric, and one without; its own model's if
    there is no policy."""
    directory.mkdir(exist_ok=True)
    given = {"pretrained": "/models/small", "policy": policy, **({} if policy == "full" else {"budget": 0.25})}
    ours = {"model": "kvjax", "model_args": given, "kvjax": {"policy": policy, "block": None, "seed": 0}}
    content = {
        "results": {
            "trec": {"alias": "trec", "score,none": 0.5, "score_stderr,none": 0.1},
            "wikitext": {"word_perplexity,none": 12.5, "word_perplexity_stderr,none": "N/A"},
            "group": {"score,none": 0.5},
        },
        "group_subtasks": {"group": ["trec"], "trec": []},
        "config": ours if policy else {"model": "hf", "model_args": "pretrained=/models/small,dtype=float32"},
    }
    stamp = f"2026-01-0{1 + (policy == 'full')}"
    (directory / f"results_{stamp}.json").write_text(json.dumps(content))
    lines = [
        {"doc_id": i, "prompt_hash": str(i), "filter": "none", "metrics": ["score", "f1"], "score": v, "f1": v,
         "target": ["yes"], "filtered_resps": ["no"]}
        for i, v in enumerate(values)
    ]  # fmt: skip
    (directory / f"samples_trec_{stamp}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def made(results):
    output = results / "report"
    board = report.build([*sorted(results.iterdir()), results / "h2o"], output, "report.py <x>")
    return board, Page(output / "report.html"), (output / "report.md").read_text()


def test_the_page_needs_nothing_else_and_shows_text_of_data_as_text(made):
    _, page, text = made
    assert not page.of("script", src=None)[0].keys() - {"type", "id"}
    assert [a for _, a in page.elements if "src" in a] == []
    assert page.of("b", onclick=None)
    assert "<script>alert" not in page.source
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#34;&#39;" in page.source
    assert "h2o \\<b\\>\\|" in text
    assert len({a["id"] for _, a in page.elements if "id" in a}) == sum("id" in a for _, a in page.elements)


def test_every_number_leads_to_its_rows_and_every_file_is_there(made):
    board, page, text = made
    ids = {a["id"] for _, a in page.elements if "id" in a}
    links = [a["href"] for a in page.of("a")]
    anchors = {link[1:] for link in links if link.startswith("#")}
    assert anchors <= ids
    assert set(board.anchors.values()) <= anchors
    files = {link for link in links if not link.startswith("#")} | set(re.findall(r"\]\((.*?)\)", text))
    assert all((page.directory / urllib.parse.unquote(f)).is_file() for f in files)
    assert {pathlib.PurePath(f).name for f in files} >= {"manifest.json", "samples.jsonl", "report.md"}
    assert re.search(r"samples\.jsonl</a>, lines 9-16<", page.source)  # the second task of the full cache


def test_filters_offer_and_mark_everything(made):
    board, page, _ = made
    settings = json.loads(page.source.split('id="settings">')[1].split("</script>")[0])
    assert {(s["model"], s["protocol"]) for s in settings} == {
        ("embedded", "in_prompt"), ("embedded", "after_compression"), ("small", "in_prompt")
    }  # fmt: skip
    values = {a["value"] for a in page.of("option") if a.get("value")}
    assert {str(i) for i in range(len(board.tasks))} | {"in_prompt", "after_compression"} <= values
    assert len(page.of("input", name="method")) == len(board.methods) == 3
    assert len([a for a in page.of("details") if "id" in a]) == len(board.cells)
    rows = [a for _, a in page.elements if a.keys() & {"data-s", "data-t", "data-m", "data-b"}]
    for key, count in (("data-s", len(settings)), ("data-t", len(board.tasks)), ("data-b", len(board.budgets))):
        assert {a[key] for a in rows if key in a} == {str(i) for i in range(count)}
    assert {a["data-m"] for a in rows if "data-m" in a} == {"full", "0", "1", "2"}


def test_numbers_stand_beside_the_full_cache_on_the_same_rows(made):
    board, page, text = made
    assert len(board.found.runs) == 3 + 2 * 3 + 1  # lm-eval's for each task
    by_key = {(c.setting.model, c.setting.protocol, c.task, c.method, c.budget): c for c in board.cells}
    needle = by_key["embedded", "in_prompt", "single_needle", "snapkv", "0.25"]
    assert needle.value.mean == 7 / 8
    assert (needle.against.difference, needle.against.n, needle.against.test) == (-1 / 8, 8, "McNemar")
    assert (needle.live, needle.kv, needle.place) == (0.25, 0.25, 0.25)
    average = by_key["embedded", "in_prompt", "average", "h2o <b>|", "0.5"]
    assert average.parts == ("single_needle", "key_value")
    assert (average.value.mean, average.against.difference, average.against.n) == (0.75, -0.25, 8)
    assert len(by_key["embedded", "in_prompt", "key_value", "full", "1.0"].lines) == 8  # each row once, of two runs
    perplexity = by_key["embedded", "in_prompt", "perplexity", "snapkv", "0.5"]
    assert perplexity.against.verdict == "worse"
    assert f"\N{MULTIPLICATION SIGN}{2.718:.3f}" in page.source
    ours = by_key["small", "in_prompt", "trec", "snapkv", "0.25"]
    assert (ours.value.mean, ours.against.difference) == (1.75 / 4, -0.25)
    assert by_key["small", "in_prompt", "trec", "hf", "1.0"].value.mean == 2.75 / 4
    given = by_key["small", "in_prompt", "wikitext word_perplexity", "full", "1.0"]
    assert (given.value.mean, given.lines) == (12.5, ())
    assert not [c for c in board.cells if c.task in ("trec f1", "group")]
    assert "41.25</a>" in page.source
    assert "(43.5)" in page.source
    assert "| snapkv | 25 % | 87.5 [" in text
    assert "not the defaults of `kvjax.methods`: snapkv(window_size=16), h2o" in text
    assert (
        "not the defaults of <code>kvjax.methods</code>: <code>snapkv(window_size=16)</code>, <code>h2o" in page.source
    )


def test_the_page_has_the_intervals_of_the_run_whatever_the_order_of_rows(tmp_path):
    """`run.py` and `report.py` say one thing of the same rows."""
    thirds = lambda method, task, index: (index * (7 if task == "key_value" else 5) + len(method)) % 4 / 3
    make_run(tmp_path / "run", rows=24, score_of=thirds)
    lines = samples(tmp_path / "run")
    for line in lines:
        line |= {"most_live": 1, **dict.fromkeys(TIMED, 1.0)}
    cost = dict.fromkeys(("slots", "kv_bytes", "prefill_peak_bytes", "decode_peak_bytes"), 1)
    costs = dict.fromkeys(("full@1.0", "snapkv@0.5", "snapkv@0.25"), cost)
    random.Random(0).shuffle(lines)
    run = summarise(lines, costs)
    cells = report.build([tmp_path / "run"], tmp_path / "page", "").cells
    page = {(c.task.replace("average", "retrieval_mean"), c.method, c.budget): c for c in cells}
    rows = [*run["rows"], *run["retrieval_mean"]]
    assert len(rows) == len(page) == 4 * 3
    for row in rows:
        cell = page[row["task"], row["method"], row["budget"]]
        assert tuple(cell.value[1:]) == (row["low"], row["high"]), row
        if row["method"] != "full":
            found, expected = cell.against, row["against_full"]
            assert {name: getattr(found, name) for name in expected} == expected


def test_an_average_of_different_metrics_says_so(made):
    board, page, text = made
    said = "which are scored by different metrics: contains, f1"
    assert f"The average is over single needle, key value, {said}.\n" in text
    assert page.source.count("They are scored by different metrics: contains, f1.") == sum(
        len(c.metrics) > 1 for c in board.cells
    )


def test_plots_and_maps_show_every_number_that_has_a_place(made):
    board, page, _ = made
    assert len(page.of("figure", **{"class": "curve"})) == len({(c.setting, c.task) for c in board.cells})
    points = [a for a in page.of("use") if a["class"] == "mark" and "x" in a and a["x"] != "10"]
    assert len(points) == sum(c.place is not None and c.method != "full" for c in board.cells)
    maps = page.of("figure", **{"class": "heat"})
    of = [c for c in board.cells if c.task in ("single_needle", "key_value")]
    assert len(maps) == sum(len({x.sample["length"] for x in c.lines}) > 1 for c in of)


def test_what_is_no_finished_run_is_named_and_the_rest_is_shown(made, results, capsys):
    board, page, text = made
    reasons = {path.name: why for path, why in board.found.skipped}
    assert set(reasons) == {"unfinished", "broken", "empty", "other"}
    assert "57 of 72 lines of samples.jsonl are missing" in reasons["unfinished"]
    assert "manifest.json is broken" in reasons["broken"]
    assert reasons["other"].startswith("broken (")
    assert all(name in page.source and name in text for name in reasons)
    output = results / "report"
    before = (output / "report.html").read_bytes()
    report.main([*map(str, sorted(results.iterdir())), "--output", str(output)])  # its own directory is no run
    assert capsys.readouterr().err.count("skipped") == 4
    assert len((output / "report.html").read_bytes()) >= len(before)


@pytest.mark.parametrize(
    ("runs", "existing", "message"),
    [
        (["nowhere"], "", "there is no .*nowhere"),
        (["empty"], "", "no finished run among the directories given(.|\n)*empty"),
        (["snapkv"], "mine", ".*report.md is there and was not made by experiments/report.py"),
    ],
)
def test_errors(results, tmp_path, runs, existing, message):
    output = tmp_path / "page"
    if existing:
        output.mkdir()
        (output / "report.md").write_text(existing)
    with pytest.raises(SystemExit, match=f"error: {message}"):
        report.main([*(str(results / name) for name in runs), "--output", str(output)])
    assert [p.read_text() for p in output.glob("*")] == ([existing] if existing else [])


def test_policies_and_tasks_of_one_name_that_differ_are_told_apart(tmp_path):
    make_run(tmp_path / "first", rows=2)
    make_run(tmp_path / "blocks", rows=2, block=64)
    make_run(tmp_path / "longer", rows=2, length=256)
    board = report.build([tmp_path / "first", tmp_path / "blocks", tmp_path / "longer"], tmp_path / "page", "")
    assert board.methods == ("snapkv (first)", "snapkv (blocks)", "snapkv")
    assert len(board.settings) == 2
    assert '"details": "length 256"' in (tmp_path / "page" / "report.html").read_text()


def test_numbers_of_a_leaderboard_stand_beside_a_run_without_rows(tmp_path, capsys):
    make_run(tmp_path / "run", rows=2)
    row = {"low": 0.1, "high": 0.9, "live_tokens": 50.0, "live_of_prompt": 0.5, "kv_bytes_of_full": 0.5}
    of = lambda method, task, live=50.0: {**row, "method": method, "budget": "0.5", "task": task, "kv_budget": 0.5} | {
        "perplexity" if task == "perplexity" else "score": 0.75, "live_tokens": live, "code": "commit abc"
    }  # fmt: skip
    rows = [of("h2o", task) for task in (*TASKS, "retrieval_mean")] + [of("snapkv", "key_value")]
    config = json.loads((tmp_path / "run" / "manifest.json").read_text())["config"]
    write = lambda rows, **changes: (tmp_path / "board" / "leaderboard.json").write_text(
        json.dumps({"setup": {**config["setup"], **{k: config[k] for k in ("tasks", "text", "checkpoint")}, **changes},
                    "rows": rows})
    )  # fmt: skip
    (tmp_path / "board").mkdir()
    write(rows)
    board = report.build([tmp_path / "run"], tmp_path / "page", "", leaderboards=[tmp_path / "board"])
    given = {(c.task, c.method): c for c in board.cells if not c.lines}
    assert set(given) == {(t, "h2o") for t in TASKS} | {("key_value", "snapkv (board)")}  # no such average
    assert [(c.value.mean, c.against, c.setting) for c in given.values()] == [(0.75, None, board.settings[0])] * 4
    assert len(board.settings) == 1
    page = Page(tmp_path / "page" / "report.html")
    assert "commit abc" in page.inside["td"]
    report.main([str(tmp_path / "run"), str(tmp_path / "board"), "--output", str(tmp_path / "page")])
    assert "a leaderboard without rows; give it by --with" in capsys.readouterr().err
    for changed, message in (
        ({"checkpoint": "xyz"}, "cannot be compared with run: checkpoint='xyz' against 'abc'"),
        ({"rows": [of("full", "key_value", 7.0)]}, "prompts of key_value have 7 tokens on average against 100"),
    ):
        write(changed.pop("rows", rows), **changed)
        with pytest.raises(SystemExit, match=f"error: .*{message}"):
            report.main([str(tmp_path / "run"), "--with", str(tmp_path / "board"), "--output", str(tmp_path / "page")])
