"""Committed pages are what the records give: by code of their own (`tests.tools.referee`), and by what made them."""

import gzip
import json
import pathlib
import shutil

import numpy as np
import pandas as pd
import pytest

from kvjax.experiments import findings, replication
from kvjax.experiments.core import report_markdown, sources, stats, table, views
from tests.runs import ROOT
from tests.tools import referee

STORED = ROOT / "experiments" / "bench_results"
CLAIMS = [file.parent for file in (STORED / "replication").rglob("replication.md")]


def test_pages_are_what_other_code_finds_in_the_records(capsys):
    assert referee.main([]) == 0, capsys.readouterr().out


def test_planted_errors_are_found(tmp_path, capsys):
    """A mean of a board, a word of a claim, an end of a difference's interval, and what is said of another page."""
    shutil.copytree(ROOT / "experiments" / "papers", tmp_path / "experiments" / "papers")
    for page, told, planted in (
        ("board/smollm2-135m-instruct-4k/board.md", "| 82.8 [", "| 82.9 ["),
        ("replication/perplexity/replication.md", "| holds |", "| undecided |"),
        ("replication/smollm2-135m-instruct-perplexity/replication.md", "1.164 [1.141, ", "1.164 [1.151, "),
        ("findings/long_outputs-reasoner.md", "| 72.4 [", "| 12.4 ["),
    ):
        file = tmp_path / "experiments" / "bench_results" / page
        left = shutil.ignore_patterns(
            "lost*", "to_hindsight*", "reasoner*", "what_decides-embedded*", "long_outputs-smollm2*"
        )
        shutil.copytree((STORED / page).parent, file.parent, ignore=left)
        file.write_text(file.read_text().replace(told, planted, 1))
    assert referee.main(["--root", str(tmp_path)]) == 1
    board, claim, interval, beside, said = capsys.readouterr().out.splitlines()
    assert "chunkkv, score, % or perplexity: '82.9 [75.6, 88.6]' is '82.8125, " in board
    assert claim.endswith(", word: 'undecided' is 'holds' by the records")
    assert "1.164 [1.151, 1.190]' is 'an interval whose end is from 1.1" in interval
    assert "after a prefill, 25 % of the prompt: '12.4 [69.5, 76.3]' is '72.4, 69.5, 76.3'" in beside
    assert said.endswith("of 5 pages: 4 differ")


@pytest.mark.parametrize("folder", CLAIMS, ids=lambda f: f.name)
def test_claims_are_decided_again(folder):
    """The page's title and tables."""
    shown = lambda text: [line for line in text.splitlines() if line.startswith(("#", "|"))]
    committed = (folder / "replication.md").read_text()
    papers = tuple(paper for paper, title in replication.PAPERS.items() if f"## {title}" in committed)
    every, made = [claim for claim in replication.claims() if claim.paper in papers], []
    for model, rows in pd.read_csv(folder / "scores.csv.gz", dtype={"budget": str}).groupby("model", sort=False):
        ((part, rows),) = rows.sort_values(["task", "index"]).groupby("part")
        each = {key: own["value"].to_numpy() for key, own in rows.groupby(["method", "budget"])}
        full = rows[rows["method"] == "full"]
        measured = replication.Scores(each, part == "perplexity", full["context"].tolist())
        own = [replication.Row(c, model, part, *measured.decided(c)) for c in every if c.kind != "early"]
        for claim in [c for c in every if c.kind == "early"]:
            (of,) = json.loads((folder / f"early-{model}.json").read_text()).values()
            beside = stats.compare(of["share"], [0.5] * len(of["share"]), of["context"])
            means = f"{100 * np.mean(of['share']):.1f} to 50.0"
            own.append(replication.Row(claim, model, part, beside, 1.0, means))
        made += own
    words = stats.adjusted([row.comparison for row in made])
    made = [row._replace(comparison=c) for row, c in zip(made, words, strict=True)]
    made.sort(key=lambda row: every.index(row.claim))
    assert shown(replication.page(made, replication.Replication(papers=papers))) == shown(committed)


def test_the_page_of_the_main_job_is_made_again(tmp_path):
    """All but its list of runs."""
    run = tmp_path / "main_job"
    run.mkdir()
    (run / "samples.jsonl").write_bytes(gzip.decompress((STORED / "main_job" / "samples.jsonl.gz").read_bytes()))
    shutil.copy(STORED / "main_job" / "manifest.json", run)
    found = sources.read([run])
    text = report_markdown.text(views.views(table.numbers(found.lines), found), found, STORED, "")
    assert text.partition("## Runs")[0].strip() == (STORED / "main_job" / "report.md").read_text().strip()


@pytest.mark.parametrize("file", sorted((STORED / "findings").glob("*.npz")), ids=lambda f: f.stem)
def test_findings_are_made_again(file):
    with np.load(file) as data:
        record, options = dict(data), json.loads(str(data["options"]))
    del options["contents"]
    tuples = {name: tuple(x) for name, x in options.items() if isinstance(x, list)}
    text, of_facts = options["text"] and pathlib.Path(options["text"]), options["name"] == "lost"
    own = (findings.Lost if of_facts else findings.Findings)(**options | tuples | {"text": text})
    page, _ = getattr(findings, own.name)(own, record if of_facts else record["kl"].astype(float))
    assert page == file.with_suffix(".md").read_text()
