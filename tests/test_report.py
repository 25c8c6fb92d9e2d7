"""The page of results: what it shows of runs, of lm-eval's files and of papers' tables, and what it refuses."""

import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import urllib.parse

import numpy as np
import pandas as pd
import pytest

from kvjax.experiments import report
from kvjax.experiments.core import page as pages
from kvjax.experiments.core import pictures, sources, table, views
from tests.made_runs import make_lm_eval, make_paper, make_run


class Page(html.parser.HTMLParser):
    """Elements with their attributes, checked to be closed in order."""

    VOID = frozenset(("meta", "link", "input", "br", "img"))

    def __init__(self, path):
        super().__init__()
        self.directory, self.open, self.elements = path.parent, [], []
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

    def of(self, tag):
        return [a for t, a in self.elements if t == tag]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs of two methods and of both protocols, lm-eval's files, a paper's table, and directories that are no runs."""
    directory = tmp_path_factory.mktemp("results")
    bad = {"task": "single_needle", "index": 9, "line": 1, "reason": "no <b>JSON"}
    make_run(directory / "snapkv", output="<script>alert(1)</script> & \"'", bad=[bad])
    make_run(directory / "h2o", ["h2o <b>|"], rows=4)
    make_run(directory / "after", protocol="after_compression")
    make_run(directory / "unfinished", lines=5)
    for name, manifest in (
        ("broken", "{"),
        ("old", json.dumps({"config": {}, "git_commit": "abc"})),
        ("other", json.dumps({"config": {"setup": {}, "policies": [], "tasks": {"a": 3}}, "made": [{}]})),
    ):
        (directory / name).mkdir()
        (directory / name / "manifest.json").write_text(manifest)
    (directory / "empty").mkdir()
    make_lm_eval(directory / "lm", "full", [1.0, 1.0, 0.5, 0.25])
    make_lm_eval(directory / "lm", "snapkv", [1.0, 0.0, 0.5, 0.25])
    make_lm_eval(directory / "hf", None, [1.0, 1.0, 0.5, 0.25])
    make_paper(directory / "reproduce" / "roco")
    return directory


@pytest.fixture(scope="module")
def made(results):
    output = results / "report"
    numbers = report.write([*sorted(results.iterdir()), results / "h2o"], output, "report.py <x>")
    assert pd.read_csv(output / "cells.csv")["value"].tolist() == pytest.approx(numbers["value"].tolist())
    return numbers, Page(output / "report.html"), (output / "report.md").read_text()


def of(numbers, **wanted):
    """The one number, by model and protocol besides what names it."""
    for name in ("model", "protocol"):
        if name in wanted:
            value = wanted.pop(name)
            numbers = numbers[[json.loads(s)[name] == value for s in numbers["setting"]]]
    for name, value in wanted.items():
        numbers = numbers[numbers[name] == value]
    (found,) = table.records(numbers)
    return found


def test_the_page_needs_nothing_else_and_shows_text_of_data_as_text(made):
    _, page, text = made
    assert all(a["src"].startswith("data:image/") for _, a in page.elements if "src" in a)
    assert "default-src 'none'" in page.source
    assert "<script>alert" not in page.source
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#34;&#39;" in page.source
    assert "h2o \\<b\\>\\|" in text
    assert r"1 (line 1: no \<b\>JSON)" in text
    assert len({a["id"] for _, a in page.elements if "id" in a}) == sum("id" in a for _, a in page.elements)


def test_every_number_leads_to_its_lines_and_every_file_is_there(made):
    numbers, page, text = made
    ids = {a["id"] for _, a in page.elements if "id" in a}
    links = [a["href"] for a in page.of("a")]
    anchors = {link[1:] for link in links if link.startswith("#")}
    assert anchors <= ids
    assert len([a for a in anchors if re.fullmatch(r"c\d+", a)]) == len(numbers)
    files = {link for link in links if not link.startswith("#")} | set(re.findall(r"\]\((.*?)\)", text))
    assert all((page.directory / urllib.parse.unquote(f)).is_file() for f in files)
    assert {pathlib.PurePath(f).name for f in files} >= {"manifest.json", "samples.jsonl", "report.md"}
    assert re.search(r"samples\.jsonl</a> lines 9-16<", page.source)  # the second task of the full cache
    assert re.search(r'samples_trec_2026-01-01\.jsonl">samples_trec_2026-01-01.jsonl</a> lines 1-4<', page.source)


def test_numbers_stand_beside_the_full_cache_on_the_same_rows(made):
    numbers, page, text = made
    ours = {"model": "embedded", "protocol": "in_prompt"}
    needle = of(numbers, **ours, task="single_needle", method="snapkv", budget="0.25")
    assert needle["value"] == 7 / 8
    assert (needle["difference"], needle["n"], needle["test"]) == (-1 / 8, 8, "McNemar")
    assert of(numbers, **ours, task="key_value", method="full")["n"] == 8  # each row once, of two runs
    assert of(numbers, **ours, task="perplexity", method="snapkv", budget="0.5")["verdict"] == "worse"
    assert f"\N{MULTIPLICATION SIGN}{2.718:.3f}" in page.source
    lm = {"model": "small", "protocol": "in_prompt"}
    trec = of(numbers, **lm, task="trec", method="snapkv")
    assert (trec["value"], trec["difference"]) == (1.75 / 4, -0.25)
    assert of(numbers, **lm, task="trec", method="hf")["value"] == 2.75 / 4
    given = of(numbers, **lm, task="wikitext word_perplexity", method="full")
    assert (given["value"], given["n"]) == (12.5, 0)
    assert not {"trec f1", "group"} & {*numbers["task"]}
    assert "<td>41.25 [40, 42] (43.5)</td>" in page.source
    assert "| snapkv | 0.25 | 87.5 [" in text
    assert "not the defaults of `kvjax.methods`: snapkv(window_size=16), h2o" in text
    assert (
        "The average is over single needle, key value, which are scored by different metrics: contains, f1.\n" in text
    )
    assert page.source.count("They are scored by different metrics: contains, f1.") == sum(numbers["task"] == "average")


def test_tables_are_sorted_and_filtered_by_the_pages_own_script(made, tmp_path):
    """Where there is node, on as much of a document as the script asks for."""
    node = shutil.which("node") or pytest.skip("there is no node")
    script = re.search(r"<script>(.*?)</script>", made[1].source, re.DOTALL)[1]
    (tmp_path / "page.js").write_text(DOCUMENT.replace("SCRIPT", script))
    done = subprocess.run([node, str(tmp_path / "page.js")], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["b,a,d,c", "descending", "d,a,b,c", "ascending", "a,b,c,d", "a", "b"], done.stderr


DOCUMENT = """
const listeners = {};
const cell = (i, text, v) => ({cellIndex: i, textContent: text, dataset: v === undefined ? {} : {v}, childNodes: [text],
  marks: {}, getAttribute(k) { return this.marks[k] ?? null }, setAttribute(k, x) { this.marks[k] = x },
  removeAttribute(k) { delete this.marks[k] }, append(...x) { this.button = x[0] }});
const row = (name, v) => ({cells: [cell(0, name), cell(1, v === undefined ? "" : v + " %", v)], name,
  dataset: {f: name + " x 0." + v}, hidden: false});
const body = {rows: [row("a", "9.5"), row("b", "10"), row("c"), row("d", "-1")],
  append(...rows) { this.rows = rows }};
const heads = [cell(0, "method"), cell(1, "score")];
const table = {tHead: {rows: [{cells: heads}]}, tBodies: [body]};
const filter = {addEventListener(kind, f) { listeners[kind] = f }};
const document = {querySelectorAll: (what) => what === "table" ? [table] : body.rows, createElement: () =>
  ({append() {}, addEventListener(kind, f) { this.click = f }}), getElementById: (id) => id === "filter" && filter};
const window = {addEventListener() {}}, location = {hash: ""};
class HTMLDetailsElement {}
(() => {SCRIPT})();
const names = () => body.rows.filter((r) => !r.hidden).map((r) => r.name).join(",");
heads[1].button.click(); console.log(names(), heads[1].marks["aria-sort"]);
heads[1].button.click(); console.log(names(), heads[1].marks["aria-sort"]);
heads[0].button.click(); console.log(names());
listeners.input({target: {value: " A x"}}); console.log(names());
listeners.input({target: {value: "0.10"}}); console.log(names());
"""


@pytest.mark.slow
def test_pictures_stand_for_every_task_that_has_a_place(made, tmp_path):
    numbers, page, _ = made
    drawn = numbers[numbers["place"].notna() & (numbers["method"] != "full") & (numbers["kind"] != "given")]
    curves = drawn.groupby(["setting", "task"]).ngroups
    maps = 3 + 2  # without the tasks that state no depth: where several lengths are, which four rows have not
    assert len(page.of("img")) == curves + maps - 1
    make_run(tmp_path / "run")
    report.write([tmp_path / "run"], tmp_path / "page", "")
    assert {p.stem for p in (tmp_path / "page").glob("*.png")} == {*pictures.PICTURES[:3]}
    (tmp_path / "run" / "kept").mkdir()
    for label in ("full@1.0", "snapkv@0.5", "other@0.5"):
        np.savez(tmp_path / "run" / "kept" / f"{label}.npz", np.zeros((2, 3), np.int32))
    report.write([tmp_path / "run"], tmp_path / "page", "")
    assert {p.stem for p in (tmp_path / "page").glob("*.png")} == {*pictures.PICTURES}
    make_run(tmp_path / "longer", length=256)
    report.write([tmp_path / "run", tmp_path / "longer"], tmp_path / "page", "")  # of two settings
    names = {"report.html", "report.md", "cells.csv"}
    assert {p.name for p in (tmp_path / "page").iterdir() if not p.name.startswith(".")} == names
    assert "question in the prompt, length 256" in (tmp_path / "page" / "report.html").read_text()


def test_what_is_no_finished_run_is_named_and_the_rest_is_shown(made, results, capsys):
    output = results / "report"
    report.main([*map(str, sorted(results.iterdir())), "--output", str(output)])  # its own directory is no run
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped")]
    reasons = {pathlib.PurePath(line.split(": ")[0]).name: line for line in lines}
    assert set(reasons) == {"unfinished", "broken", "empty", "old", "other"}
    assert "not finished: 67 of 72 examples are missing" in reasons["unfinished"]
    assert "manifest.json is broken" in reasons["broken"]
    assert "results of an older kvjax, which this one does not read; run it anew" in reasons["old"]
    assert all(name in made[1].source and name in made[2] for name in reasons)


@pytest.mark.parametrize(
    ("runs", "existing", "message"),
    [
        (["nowhere"], "", "there is no .*nowhere"),
        (["empty"], "", "no finished run among the directories given(.|\n)*empty"),
        (["old"], "", "no finished run among the directories given(.|\n)*results of an older kvjax"),
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


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take most of the time."""
    monkeypatch.setattr(pictures, "drawn", lambda *_: {"curves": [], "maps": [], "kept": []})


def test_numbers_stand_with_the_intervals_that_there_are():
    assert [pages.cell(1.0, 0.5, end) for end in (2.0, None, np.inf)] == ["1.0 [0.5, 2.0]", "1.0", "1.0"]
    assert [pages.percent(x, 0, 1, form=".0f") for x in (0.5, np.nan, None)] == ["50 [0, 100]", "", ""]
    assert pages.difference(True, 0.0, -800.0, 800.0) == "\N{MULTIPLICATION SIGN}1.000"
    assert pages.scored({"kind": "nll", "value": 2e4, "low": 1e4, "high": 3e4}) == "2e+04 [1e+04, 3e+04]"


def test_names_are_no_markup():
    name = r"<img src=x>|\\<b> [a](b) *c* d_e _f_"
    assert pages.escaped(name) == r"\<img src=x\>\|\\\\\<b\> \[a\](b) \*c\* d_e \_f\_"
    rows = [["<i>\nx", pages.Name("*c*"), pages.Cell("1.0 [0.5, 2.0]", bold=True)]]
    made = pages.Table(["a|b", "c", "d"], rows)
    assert made.markdown()[1:] == ["|---|---|---|", r"| \<i> x | \*c\* | **1.0** [0.5, 2.0] |"]
    assert made.without("d").without("c").markdown()[0] == r"| a\|b |"
    assert made.csv().splitlines()[-1] == 'x",*c*,"1.0 [0.5, 2.0]"'


IMPOSSIBLE = [  # by what, where, and which
    ("run", "manifest.json", lambda whole: whole["config"]["tasks"]["mine"].update(examples=10**400)),
    ("run", "samples.jsonl", lambda line: line.update(tokens="x")),
    ("run", "samples.jsonl", lambda line: line.update(prompt_tokens=10**400)),
    ("run", "samples.jsonl", lambda line: line.update(context=["mine/0"])),
    ("run", "samples.jsonl", lambda line: line.update(output=5)),
    ("paper", "report.json", lambda whole: whole.update(numbers=5)),
    ("paper", "report.json", lambda whole: whole.update(reduced=5)),
    ("paper", "report.json", lambda whole: whole["numbers"][0].update(method=["roco"])),
    ("paper", "report.json", lambda whole: whole["numbers"][0].update(ours=10**400)),
    ("lm", "results_2026-01-02.json", lambda of: of["results"]["wikitext"].update({"word_perplexity,none": 10**400})),
    ("lm", "samples_trec_2026-01-02.jsonl", lambda line: line.update(doc_id=10**400)),
]


@pytest.mark.usefixtures("undrawn")
def test_impossible_words_cost_their_own_directory_alone(tmp_path, capsys):
    """They are named, each in one line."""
    make_run(tmp_path / "good", tasks=("mine",), rows=2)
    makers = {"run": lambda d: make_run(d, tasks=("mine",), rows=2), "paper": make_paper}
    makers["lm"] = lambda d: make_lm_eval(d, "full", [0.5, 1.0])
    broken = [tmp_path / f"{kind}-{i}" for i, (kind, *_) in enumerate(IMPOSSIBLE)]
    for directory, (kind, file, change) in zip(broken, IMPOSSIBLE, strict=True):
        makers[kind](directory)
        first, *others = (path := directory / file).read_text().splitlines(keepends=True)
        word = json.loads(first)
        change(word)
        path.write_text("".join([json.dumps(word) + "\n", *others]))
    report.main([*map(str, (tmp_path / "good", *broken)), "--output", str(tmp_path / "page")])
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"skipped {directory}") for line, directory in zip(said, broken, strict=True))


@pytest.mark.usefixtures("undrawn")
def test_prompts_that_were_kept_whole_are_named(tmp_path):
    run = make_run(tmp_path / "run", ["window"], ("1.5", "0.5", "T=1"), tasks=("mine",), rows=2)
    found = sources.read([run])
    report.write([run], tmp_path / "page", "")
    (view,) = views.views(table.numbers(found.lines), found)
    assert "as with the full cache: window at 1.5 (2 of 2). " in views.whole(view.numbers)
    for name in ("report.md", "report.html"):  # in its own row
        (row,) = [x for x in (tmp_path / "page" / name).read_text().splitlines() if "100.0 % (2 of 2 prompts kept" in x]
        assert "window" in row
        assert "1.5" in row


@pytest.mark.usefixtures("undrawn")
def test_runs_of_one_name_are_told_apart_by_their_paths_and_shards_are_one_run(tmp_path):
    runs = [make_run(tmp_path / "first", rows=2), make_run(tmp_path / "other" / "first", rows=2, block=32)]
    numbers = report.write(runs, tmp_path / "page", "")
    assert {*numbers["method"]} == {"full", *(f"snapkv ({run})" for run in runs)}
    parts = [make_run(tmp_path / f"x-{i}", rows=9, shard=(i, 3)) for i in (1, 2, 3)]
    whole = report.write([make_run(tmp_path / "x", rows=9)], tmp_path / "page", "")
    sharded = report.write([*reversed(parts)], tmp_path / "page", "")
    pd.testing.assert_frame_equal(whole.drop(columns="runs"), sharded.drop(columns="runs"), rtol=1e-14)
    missing = report.write(parts[:2], tmp_path / "page", "")
    assert {*missing[missing["task"] != "average"]["n"]} == {6}


def test_questions_are_counted_by_the_device_that_answered_them(tmp_path):
    """Of a run that went on elsewhere, from the line on where it did."""
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "manifest.json"
    manifest = json.loads(file.read_text())
    (first,) = manifest["made"]
    first |= {"device": {"platform": "cpu", "kind": "cpu", "cpus": 2}, "versions": {"jax": "0.10.2"}}
    gpu = {"after_lines": 5, "device": {"platform": "gpu", "kind": "NVIDIA H200"}, "versions": {"jax": "0.11.2"}}
    file.write_text(json.dumps(manifest | {"made": [first, gpu]}))
    runs = sources.read([tmp_path / "run"]).runs
    rest = len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) - 5
    said = f"Questions were answered on 2 cores with jax 0.10.2 (5), NVIDIA H200 with jax 0.11.2 ({rest})."
    assert views.devices(runs) == said


def test_a_page_says_what_prompts_were(tmp_path):
    """Tokens, the text and its digest, the template, and contexts that examples share; of older runs, too."""
    make_run(tmp_path / "run", text="data/some.txt", template="chat")
    file, samples = tmp_path / "run" / "manifest.json", tmp_path / "run" / "samples.jsonl"
    file.write_text(file.read_text().replace('"text": null', '"text": "0123456789abcdef"'))
    lines = [json.loads(x) for x in samples.read_text().splitlines()]
    lines = [x | {"context": f"passage/{x['index'] // 2}", "prompt_tokens": 100 + x["index"]} for x in lines]
    samples.write_text("".join(json.dumps(x) + "\n" for x in lines))
    report.write([tmp_path / "run"], tmp_path / "page", "report.py")
    assert (
        "Prompts have 100 to 107 tokens, 104 on average; questions are asked within the model's chat template; "
        "the text is some.txt, whose SHA-256 begins with 0123456789abcdef; 24 examples have 4 contexts, which "
        "intervals and tests draw whole."
    ) in (tmp_path / "page" / "report.md").read_text()
    settings = [{"model": "x", "protocol": "in_prompt", **how} for how in ({"chat": False}, {"template": "raw"})]
    make_run(tmp_path / "old", chat=False)
    assert {run.setup["template"] for run in sources.read([tmp_path / "old"]).runs} == {"raw"}
    assert len({sources.setting_of(s | {"template": "raw"}) for s in settings}) == 1
