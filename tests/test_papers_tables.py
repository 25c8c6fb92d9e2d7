"""The papers' tables: recorded numbers against the papers' text and against their own means."""

import math
import re
import shutil

import numpy as np
import pytest

from kvjax import models
from kvjax.experiments.papers import FIGURES, pages, tables
from kvjax.experiments.papers.methods import read_methods
from kvjax.experiments.papers.tables import ENTRIES, MEAN, MODELS
from tests.conftest import SHARED_DATA

PAPERS = SHARED_DATA.parent / "papers"
TEXTS = {"ada-kv": "adakv", "ahakv": "ahakv", "keyformer": "keyformer", "nacl": "nacl", "roco": "roco_easykv"}
MEANS = [e for e in ENTRIES.values() if any(c.metric == MEAN for c in e.columns)]


def text(paper):
    path = PAPERS / f"{TEXTS[paper]}.txt"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path.read_text()


@pytest.mark.parametrize("entry", MEANS, ids=lambda e: e.name)
def test_printed_means_are_those_of_the_printed_columns(entry):
    """To the rounding of both; rows that are off are named by the entry, and are off."""
    unit = 0.1 if entry.paper == "nacl" else 0.01
    for row in entry.rows:
        values = dict(zip([c.title for c in entry.columns], row.values, strict=True))
        weights = {c.title: len(c.data) for c in entry.columns}
        mean = lambda of, v=values, w=weights: np.average([v[t] for t in of], weights=[w[t] for t in of])
        means = [(values[c.title], mean(c.of)) for c in entry.columns if c.metric == MEAN]
        assert any(abs(printed - mean) > 1.15 * unit for printed, mean in means) == bool(row.off), row


def test_other_laws_of_the_recorded_numbers():
    """Figure 5 of Ada-KV is Tables 1 and 2; Keyformer's thresholds are 99 % of its full scores; RoCo's win rates."""
    averages = [(r.model, r.method, r.budget, r.values[-1]) for n in (1, 2) for r in ENTRIES[f"ada-kv/table{n}"].rows]
    assert [(r.model, r.method, r.budget, *r.values) for r in ENTRIES["ada-kv/figure5"].rows] == averages
    table3 = ENTRIES["keyformer/table3"]
    np.testing.assert_allclose(
        [value for _, value, _ in table3.claims], 0.99 * np.array(table3.rows[0].values), atol=1.1e-4
    )
    ablation = ENTRIES["ahakv/table2"]
    *without, whole = [r.values[-1] for r in ablation.rows]
    np.testing.assert_allclose([whole - w for w in without], [value for _, value, _ in ablation.claims])
    short, long = (ENTRIES["nacl/table3"].rows[i].values for i in (0, 6))
    assert math.isnan(short[1])
    assert math.isnan(long[0])
    assert short[0] == ENTRIES["nacl/table1"].rows[-1].values[7]
    assert long[1] == next(r.values[-1] for r in ENTRIES["nacl/table2"].rows if (r.method, r.budget) == ("nacl", 0.2))


def lines_of(entry):
    """The recorded numbers as the paper prints them, line by line."""
    rows = [[v for v in r.values if v is not None and v == v] for r in entry.rows]
    match entry.name:
        case "keyformer/table1":
            return [list(filter(None, column)) for column in zip(*(r.values for r in entry.rows), strict=True)]
        case "keyformer/table2":
            return [rows[m][2 * t : 2 * t + 2] + rows[m + 3][2 * t : 2 * t + 2] for t in range(4) for m in range(3)]
        case "keyformer/table4":
            return [[r[0] for r in rows[4 * i : 4 * i + 4]] for i in range(3)]
        case "nacl/table1":
            return [half for row in rows for half in (row[:9], row[9:])]
        case "nacl/table3":
            return [rows[i] + rows[i + 6] for i in range(6)]
        case "roco/table5":  # the full cache's is what the differences lead to
            return [[r[0] for r in rows[i : i + 3]] for i in (1, 4)]
    return rows


@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if "table" in n and e.rows])
def test_recorded_numbers_stand_in_the_papers_text(name):
    """Each line of a table is found in one line of the text, in order."""
    entry = ENTRIES[name]
    printed = [re.findall(r"(?<![\d.])\d+(?:\.\d+)?", line) for line in text(entry.paper).splitlines()]
    printed = [[float(x) for x in line] for line in printed]
    for line in lines_of(entry):
        assert any(_in_order(line, there) for there in printed), line


def _in_order(wanted, there):
    rest = iter(there)
    return all(any(x == y for y in rest) for x in wanted)


@pytest.mark.parametrize("paper", TEXTS)
def test_every_table_and_figure_of_the_text_is_an_entry(paper):
    found = re.findall(r"\b(Tab|Table|table|Fig|Figure)s?\.? ?(\d+)", text(paper))
    named = {f"{'table' if kind.lower().startswith('tab') else 'figure'}{n}" for kind, n in found}
    named -= {"table12"} if paper == "nacl" else set()  # "Tab. 12" is Tables 1 and 2
    labels = {e.label for e in ENTRIES.values() if e.paper == paper}
    assert named <= labels
    assert {label for label in labels if label.startswith(("table", "figure"))} <= named


def test_what_entries_name_exists():
    for entry in ENTRIES.values():
        assert set(entry.figures) <= set(FIGURES)
        assert entry.runs == bool(entry.rows or entry.figures), entry.name
        assert len({c.title for c in entry.columns}) == len(entry.columns), entry.name
    assert {m.preset for m in MODELS.values()} - {None} <= set(models.PRESETS)
    assert set(pages.recorded()) <= set(ENTRIES)


def test_every_method_makes_a_policy_at_every_budget_of_its_entry():
    made = {}
    for entry in ENTRIES.values():
        for row in entry.rows:
            budget = 200 if row.budget is None else row.budget
            made[entry.paper, row.method, budget] = entry.methods[row.method].make(budget)
    for policy in made.values():
        assert callable(policy)
        hash(policy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ada-kv/table9", r"no entry of ada-kv 'table9' \(did you mean table\d\?\); there are table1, table2"),
        ("adakv/table1", r"no paper 'adakv' \(did you mean ada-kv\?\); there are ada-kv, ahakv, keyformer, nacl, roco"),
    ],
)
def test_unknown_entries_are_named_with_those_that_exist(name, message):
    with pytest.raises(ValueError, match=message):
        tables.find(name)


@pytest.mark.parametrize(
    ("file", "right", "wrong", "message"),
    [
        ("tables/roco-table6.csv", "46.3,2.0", "46.3", "line 3: a row must have 6 values"),
        ("tables/roco-table6.csv", "41.1", "4l.1", "line 3: could not convert string to float: '4l.1'"),
        ("tables/roco-table6.csv", "block-2", "block-3", "line 3: there is no method 'block-3'; there are full, block"),
        ("tables/roco-table6.csv", "block-2", "block-1", "line 3: llama-2-7b-chat, block-1 at 0.5 stands"),
        ("tables/roco-table6.csv", "BLEU", "Bleu", "line 1 must be model,method,budget,BLEU,.*not .*Bleu"),
        ("catalogue.toml", '"narrativeqa"', '"narrativeq"', "english: there is no data set 'narrativeq'"),
        ("catalogue.toml", "layers", "levels", "mistral-7b-instruct-v0.2: .* unexpected keyword argument 'levels'"),
        ("catalogue.toml", '"rows"', '"row"', "narrativeqa: there is no runner 'row'; there are harness, rows"),
        ("entries.toml", "nothing = ", "kind = ", "ada-kv.table3: .*unexpected keyword argument 'kind'"),
        (
            "entries.toml",
            '"full cache"',
            '"full"',
            "roco.table2: there is no reference 'full'; there are answers, full",
        ),
        (
            "entries.toml",
            'settings = ["roco-reading"]',
            'settings = ["reading"]',
            "roco.table2: there is no setting 're",
        ),
        ("tables/nacl-figure5.csv", "llama-2-7b-chat,full", "llama,full", "line 2: there is no model 'llama'"),
        ("entries.toml", 'columns = ["perplexity"]', "", "roco-figure5.csv is the table of no entry .*without columns"),
        ("entries.toml", 'nothing = "an', 'columns = ["needle"]\nnothing = "an', "ada-kv.figure1: .*No such file"),
        ("entries.toml", "[settings]", "[settings", "entries.toml: .*line 5"),
        ("methods.toml", '"streaming_llm", ', '"streaming", ', "ada-kv.streaming_llm: .*no attribute 'streaming'"),
        ("methods.toml", "title = ", "name = ", "ada-kv.full: .*unexpected keyword argument 'name'"),
    ],
)
def test_what_is_wrong_in_a_data_file_is_said_with_its_place(tmp_path, file, right, wrong, message):
    shutil.copytree(tables.FOLDER / "tables", tmp_path / "tables")
    for name in ("catalogue.toml", "entries.toml", "methods.toml"):
        shutil.copy(tables.FOLDER / name, tmp_path)
    path = tmp_path / file
    path.write_text(path.read_text().replace(right, wrong, 1))
    with pytest.raises(ValueError, match=message):
        [read(tmp_path) for read in (read_methods, tables.read_catalogue, tables.read_entries)]


def test_a_table_of_no_entry_is_named(tmp_path):
    shutil.copytree(tables.FOLDER / "tables", tmp_path / "tables")
    (tmp_path / "entries.toml").write_text("[settings]\n")
    with pytest.raises(ValueError, match=r"ada-kv-figure4.csv is the table of no entry in .*entries.toml"):
        tables.read_entries(tmp_path)
