"""The papers' tables: recorded numbers against the papers' text and against their own means."""

import math
import re

import numpy as np
import pytest

from kvjax import models
from kvjax.experiments.papers import FIGURES, tables
from kvjax.experiments.papers.tables import ENTRIES
from kvjax.experiments.papers.tables.base import MEAN, Row, number, read
from kvjax.experiments.papers.tables.catalogue import DATA, MODELS
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
    titles = [c.title for c in entry.columns]
    off = {(m, name, b) for m, name, b, _ in entry.off}
    found = set()
    for row in entry.rows:
        values = dict(zip(titles, row.values, strict=True))
        for column in entry.columns:
            if column.metric == MEAN and values[column.title] is not None:
                unit = 0.1 if entry.paper == "nacl" else 0.01
                if abs(entry.mean(column, values) - values[column.title]) > 1.15 * unit:
                    found.add((row.model, row.method, row.budget))
    assert found == off


def test_other_laws_of_the_recorded_numbers():
    """Figure 5 of Ada-KV is Tables 1 and 2; Keyformer's thresholds are 99 % of its full scores; RoCo's win rates."""
    figure5 = {(r.model, r.method, r.budget): r.values[0] for r in ENTRIES["ada-kv/figure5"].rows}
    assert figure5[("mistral-7b-instruct-v0.2", "ada_snapkv", 128)] == 36.71
    assert len(figure5) == 50
    table3 = ENTRIES["keyformer/table3"]
    np.testing.assert_allclose([c.value for c in table3.claims], 0.99 * np.array(table3.rows[0].values), atol=1.1e-4)
    ablation = ENTRIES["ahakv/table2"]
    *without, whole = [r.values[-1] for r in ablation.rows]
    np.testing.assert_allclose([whole - w for w in without], [c.value for c in ablation.claims])
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
    assert {label for label in labels if "appendix" not in label} <= named


def test_what_entries_name_exists():
    for entry in ENTRIES.values():
        assert set(entry.models) <= set(MODELS)
        assert set(entry.data) <= set(DATA)
        assert set(entry.figures) <= set(FIGURES)
        assert entry.runs == bool(entry.rows or entry.figures), entry.name
        assert {(m, name, b) for m, name, b, _ in entry.off} <= {(r.model, r.method, r.budget) for r in entry.rows}
    assert {m.preset for m in MODELS.values()} - {None} <= set(models.PRESETS)


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
        ("ada-kv/table9", "ada-kv has no entry 'table9'; there are table1, table2"),
        ("adakv/table1", "there is no entry .*papers are ada-kv, ahakv, keyformer, nacl, roco.*did you mean ada-kv/"),
    ],
)
def test_unknown_entries_are_named_with_those_that_exist(name, message):
    with pytest.raises(ValueError, match=message):
        tables.find(name)


def test_tables_are_read_as_they_are_written():
    rows = read("model: a\nfull 1.0 -\nbudget: 0.5\nh2o x 2\nbudget: ?\nh2o 3 4")
    assert rows[0] == Row("a", "full", 1.0, (1.0, None))
    assert rows[1].budget == 0.5
    assert math.isnan(rows[1].values[0])
    assert rows[2] == Row("a", "h2o", None, (3.0, 4.0))
    assert (number("64"), number("0.5")) == (64, 0.5)
    with pytest.raises(ValueError, match="before any model"):
        read("h2o 1")
