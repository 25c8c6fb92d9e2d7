"""Numbers of the READMEs are those of the committed results that their commands made.

The ledger of papers stands in `test_reproduce.py`.
"""

import collections
import csv
import functools
import gzip
import inspect
import json
import pathlib
import re
import shutil
import tempfile

import numpy as np
import pytest

from kvjax import methods
from kvjax.experiments import findings
from kvjax.experiments.bench.peers.report import short
from kvjax.experiments.core import page, report_markdown, sources, table, views
from tests.kept import SMOLLM2
from tests.runs import ROOT

STORED = ROOT / "experiments" / "bench_results"


def read(*path):
    return json.loads(STORED.joinpath(*path).read_bytes())


def line(*cells):
    return f"| {' | '.join(cells)} |"


@functools.cache
def main_job():
    """From the run's own lines."""
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "main_job"
        run.mkdir()
        (run / "samples.jsonl").write_bytes(gzip.decompress((STORED / "main_job" / "samples.jsonl.gz").read_bytes()))
        shutil.copy(STORED / "main_job" / "manifest.json", run)
        found = sources.read([run])
    numbers = table.numbers(found.lines)
    text = report_markdown.text(views.views(numbers, found), found, STORED, "")
    assert text.partition("## Runs")[0].strip() == (STORED / "main_job" / "report.md").read_text().strip()
    names = {"full": "full cache", "snapkv": "SnapKV", "ada_snapkv": "Ada-SnapKV", "streaming_llm": "StreamingLLM"}
    by_task = {task: own.to_dict("records") for task, own in numbers.groupby("task")}
    return [
        line(
            {**names, "h2o": "H2O"}.get(row["method"], row["method"]), f"{100 * float(row['budget']):g} %",
            page.scored(row), page.Cell(page.scored(other)).value,
            "100 %" if row["method"] == "full" else f"{100 * row['kv_of_full']:.1f} %",
        )
        for row, other in zip(by_task["average"], by_task["perplexity"], strict=True)
    ]  # fmt: skip


def pooling():
    """What decides beside all methods: runs of one method each."""
    stored = {name: run["retrieval_mean"][1] for name, run in read("main_job", "parts_of_policies.json").items()}
    of = {name: page.percent(row["score"], row["low"], row["high"]) for name, row in stored.items()}
    (whole,) = (row.split(" | ")[2].split()[0] for row in main_job() if row.startswith("| SnapKV | 25 % |"))
    yield f"it falls from {whole} to {of['snapkv_unpooled']} %"
    yield f"reaches the same {of['nacl_voters']} %"


def tables(path):
    """(title, cells of a row) of a page's tables."""
    title = ""
    for text in path.read_text().splitlines():
        title = text if text.startswith("#") else title
        if text.startswith("| "):
            yield title, [cell.strip() for cell in text.strip("| ").split(" | ")]


def boards():
    """A table of some methods on two models, at shares of the bytes, asked in the prompt or after compression."""
    names = (
        "defensivekv", "layer_defensivekv", "chunkkv", "r_kv", "tova", "snapkv", "kvzip", "ada_snapkv", "criticalkv",
        "compactor", "keydiff", "pyramidkv", "ahakv", "streaming_llm", "ada_pyramid", "h2o", "keyformer", "lava",
        "random", "nacl", "roco",
    )  # fmt: skip
    found = collections.defaultdict(dict)
    for model in ("embedded", "smollm2-135m-instruct"):
        for title, cells in tables(STORED / "board" / model / "board.md"):
            found[model, title.removeprefix("## One value, asked ")][cells[0]] = cells[1]
    prompt, after, real = "in the prompt", "after compression", "smollm2-135m-instruct"
    at = [("embedded", prompt, "25"), ("embedded", prompt, "6.25")]
    at += [(real, when, share) for when in (prompt, after) for share in ("50", "25")]
    for name in names:
        yield line(name, *(found[model, f"{when}, {share} % of the bytes"][name] for model, when, share in at))


def gates():
    found = read("duo_gates.json")
    above = np.array(found["gates"]) > 0.9
    assert above.sum(1).tolist() == [0, 2, 0, 0]
    assert np.max(found["gates"][0]) < 0.001
    full, *rest = found["retrieval"]
    by_share = collections.defaultdict(dict)
    for row in rest:
        by_share[row["streaming_heads"]][row["policy"]] = row
    for share, of in by_share.items():
        shown = [f"{100 * of[p]['score']:.1f}".replace("100.0", "100") for p in ("learned", "random", "snapkv")]
        yield line(f"{100 * share:g} %", f"{100 * of['learned']['slots'] / full['slots']:.0f} %", *shown)


def of_row(row, names, digits=1):
    """Shares of a row in percent, with their interval."""
    return page.percent(*(row[name] for name in names), form=f".{digits}f")


def learned_scorer():
    """And what is left of it on tasks that it was not trained on."""
    columns = ("learned", "snapkv", "future")
    rows = {(r["budget"], r["method"]): r for r in read("learned_scorer", "summary.json")["rows"]}
    loss = lambda r: of_row(r, ("loss", "low", "high"))
    less = lambda r: of_row(r, ("less", "less_low", "less_high"))
    unseen = read("learned_scorer", "unseen.json")["rows"]
    left = {(r["budget"], r["tasks"]): less(r) for r in unseen if r["method"] == "learned"}
    for b in ("0.0625", "0.125", "0.25"):
        kept = [f"{100 * rows[b, m]['kept_attention']:.0f} %" for m in columns]
        yield line(f"{100 * float(b):g} %", *(loss(rows[b, m]) for m in columns), *kept)
        yield line(f"{100 * float(b):g} %", left[b, "learned from"], left[b, "unseen"])


def learned_budget():
    """The table of learned budgets, and what it is followed by."""
    found, budgets = read("learned_budget", "summary.json"), ("0.0625", "0.125", "0.1875", "0.25")
    rows = {(r["budget"], r["method"]): r for r in found["rows"]}
    columns = ("learned", "uniform", "pyramid", "ada_static", "ada", "hindsight")
    for b in budgets:
        yield line(f"{100 * float(b):g} %", *(of_row(rows[b, m], ("loss", "low", "high")) for m in columns))
    wins = [100 * r["learned_wins"] for r in found["rows"] if "learned_wins" in r]
    yield f"on {min(wins):.0f} to {max(wins):.0f} % of the prompts"
    ratio = [100 * (1 - row["ratio"]) for row in found["theorem_4"]]
    yield f"by {min(ratio):.0f} % (budget 6.25 %) to {max(ratio):.0f} % (25 %)"
    lost = [100 * r["loss"] for r in found["rows"] if r["method"] == "hindsight_heads"]
    yield f"lose {max(lost):.1f} % to {min(lost):.1f} %"
    shares = [np.mean(read("learned_budget", "tables", f"{b}.json")["heads"], 1) for b in budgets]
    first, last = ([f"{end([s[i] for s in shares]):.1f}" for end in (min, max)] for i in (0, -1))
    yield f"on average {' to '.join(first)} of the mean and those of the last {' to '.join(last)}"
    ahead = lambda row: of_row(row, ("ahead", "ahead_low", "ahead_high"), 2)
    parts = [read(f"learned_budget_{of}", "summary.json")["rows"][0] for of in ("layers", "heads")]
    layers, heads, both = map(ahead, (*parts, rows["0.25", "uniform"]))
    yield f"loses {layers} points less than uniform budgets"
    yield f"moves what Ada-KV moves, {heads}, both together {both}"


def curves():
    names = "the same function with the same measures", "`prefill` with the policy and `feed`, divergence and agreement"
    for kind, name in zip(read("curves.json")["kinds"], (names[0], f"{names[1]} alone"), strict=True):
        seconds = [kind[f"{which}first_cpu_seconds"] for which in ("", "one_call_")]
        yield line(
            name, f"{kind['seconds']:.1f} s", f"{kind['one_call_seconds']:.2f} s", f"{kind['ratio']:.1f}x",
            f"{seconds[0]:.0f} s against {seconds[1]:.0f} s, {kind['first_ratio']:.1f}x",
        )  # fmt: skip
    differ = [f"{kind['largest_difference']:.0e}".replace("e-0", "e-") for kind in read("curves.json")["kinds"]]
    yield f"Losses are equal to {differ[0]} ({differ[1]} for the second, another program)"


def about_curves():
    yield f"is about {read('curves.json')['kinds'][1]['ratio']:.0f} times as fast as 64 separate runs"


def blocks():
    rows = read("memory_blocks.json")["rows"]
    at_once, short, long = (rows[f"roco{key}"] for key in ("@16384", ", in blocks@16384", ", in blocks@131072"))
    size = lambda row: f"{row['prefill']['measured'] / 2**20:.1f} MiB"
    yield f"takes {size(long)} at its peak, 16,384 tokens take {size(short)} (at once: {size(at_once)})"


def stream():
    for name, row in read("stream", "stream.json")["rows"].items():
        first, *later = row["marks"]
        yield line(name, f"{first['median_us']:.1f}", *(f"{mark['ratio']:.3f}" for mark in later))
    growth = [row["growth"] / 2**20 for row in read("stream", "stream.json")["rows"].values()]
    yield f"990,000 tokens leave {min(growth):.1f} to {max(growth):.1f} MiB more"
    windows = [w["median_us"] for w in read("stream", "stream.json")["rows"]["roco"]["windows"]]
    taken = sum(70 <= round(x) <= 89 for x in windows)
    assert len(windows) - taken == 3
    yield "windows take between 70 and 89 µs a token in no order (three take longer"


def ratio(x):
    return f"1/{1 / x:.0f}" if x < 0.1 else f"{x:.2f}" if x < 9.995 else f"{x:.1f}"


def peers():
    yield "\n".join(short(read("peers", "peers.json")).markdown()) + "\n"


def results_in_short():
    rows = {name: row["ratio"]["median"] for name, row in read("peers", "peers.json")["rows"].items()}
    decode = [x for name, x in rows.items() if "/decode/" in name]
    prefill = [ratio(x) for name, x in rows.items() if "/prefill/" in name]
    yield f"is {min(decode):.1f} to {max(decode):.1f} times as fast as kvpress"
    yield f"prefill {min(prefill)} to {max(prefill)} times as fast as transformers"
    hold, against, _, total = words("replication.md", without="where kept tokens stand")
    likely, unlikely, *_ = words("perplexity/replication.md", without="where kept tokens stand")
    yield f"Of {total} tries of papers' claims {hold} hold and {against} are reversed in retrieval"
    yield f"retrieval, {likely} and {unlikely} by likelihood"


def words(page, without="nothing"):
    """How many tries of claims hold, are reversed and undecided, and all."""
    found = [cells[-1] for _, cells in tables(STORED / "replication" / page) if without not in cells]
    count = [found.count(word) for word in ("holds", "reversed", "undecided")]
    return *count, sum(count)


def claims_in_short():
    yield "Of {3} tries {0} hold, {1} are reversed and {2} undecided".format(*words("replication.md"))
    likely = words("perplexity/replication.md")
    yield "{0} of {3} tries hold, the same 3 among them, and {1} are reversed".format(*likely)


def claims_by_likelihood():
    yield "Of {3} tries {0} hold, {1} are reversed and {2} undecided".format(*words("perplexity/replication.md"))


def scores_in_use():
    """What decides where scores that nobody would choose are left out."""

    def shares(model, scores):
        with np.load(STORED / "findings" / f"what_decides-{model}.npz") as data:
            sizes = map(len, (findings.SCORES, findings.PROTECTIONS, findings.DIVISIONS))
            logs = np.log(data["kl"][:, 0]).mean(-1).reshape(*sizes)
        found = findings.shares(logs[[name in scores for name in findings.SCORES]])
        return [f"{100 * found[factor]:.1f}" for factor in ("score", "division", "protection")]

    six, four = {*findings.SCORES} - {"random", "key norm"}, {"accumulated", "mean", "expected", "votes"}
    yield f"Of the six others the score explains {shares(SMOLLM2, six)[0]} %"
    yield f"(accumulated, mean and expected attention, votes) {shares(SMOLLM2, four)[0]} %, and on the embedded model"
    yield "{} %, where division explains {} and protection {} %".format(*shares("embedded", four))


def lengths():
    """Of SmolLM2's prompts of retrieval, which the full cache holds."""
    rows = gzip.decompress((STORED / "board" / SMOLLM2 / "scores.csv.gz").read_bytes()).decode().splitlines()
    held = [x for x in csv.DictReader(rows) if x["method"] == "full"]
    asked, after = ([int(x["live"]) for x in held if x["part"] == y] for y in ("in_prompt", "after_compression"))
    yield f"(on SmolLM2 {min(asked)} to {max(asked)} without it; asked after compression, {min(after)} to {max(after)}"


def loading():
    found = read("loading.json")
    parts = ("until the call returns, s", "until each number has been read once, s", "processor time until then, s")
    for dtype, both in found["loading"].items():
        ours, theirs = both["kvjax"], both["transformers"]
        for first, (text, key) in enumerate(zip(parts, ("ready", "read", "processor"), strict=True)):
            head = f"{dtype}, {ours['size'] / 1e9:.2f} GB" if not first else ""
            times = ours[key] / theirs[key]
            shown = f"{times:.0f}" if times >= 9.95 else f"{times:.1f}"
            yield line(head, text, f"{ours[key]:.2f}", f"{theirs[key]:.2f}", shown).replace("|  |", "| |")
        peaks = [each["peak"] / each["size"] for each in (ours, theirs)]
        yield f"| peak memory, of the parameters | {peaks[0]:.2f} | {peaks[1]:.2f} | {peaks[0] / peaks[1]:.1f} |"


def compiling():
    found = read("compiling.json")
    names = {"prefill, called": "`prefill`, called"} | {
        f"{what} in your jit": f"`{what}` in your jit" for what in ("prefill", "decode_step")
    }
    for method, programs in found["compiling"].items():
        for what, seconds in programs.items():
            yield line(f"{method}, {names[what]}", *(f"{x:.1f}" for x in seconds.values()))
    each, within = found["programs"].values()
    yield f"compiles {each} programs, a layer's and a loop for each budget, and {within} within the largest"


def kernels():
    _, *rows = [cells for _, cells in tables(ROOT / "experiments" / "gpu_results" / "aot.md") if len(cells) == 5]
    summary = {cells[0]: cells for cells in rows}
    count = {arch: int(summary[arch][1]) for arch in ("sm_80", "sm_90", "sm_100")}
    stored = json.loads(gzip.decompress((ROOT / "experiments" / "gpu_results" / "aot.json.gz").read_bytes()))
    assert len(stored["rows"]) == sum(count.values())
    assert summary["sm_80"][4] == summary["sm_90"][4] == "0"
    yield f"a row for each of {sum(count.values()):,} compilations"
    spill = count["sm_100"] - int(summary["sm_100"][2])
    yield f"on A100 ({count['sm_80']:,} combinations of kernel, options and sizes)"
    yield f"and H100 ({count['sm_90']:,}) none spills"
    yield f"on B200 {'two' if spill == 2 else spill} of {count['sm_100']} spill {summary['sm_100'][4]} bytes"


def on_a_gpu():
    """Of the tables of the kernels' page, every row; and what its text says of the runs."""
    stored = ROOT / "experiments" / "gpu_results" / "h200"
    read = {file.stem: json.loads(file.read_text()) for file in stored.iterdir()}
    for row in read["timings"]["rows"]:
        if row["section"] == "timings" and row["n"] == 32768 and row["name"] in KERNELS_SHOWN:
            digits = 3 if row["ms"] < 1 else 1
            part = f"{row['of_floor']:.2f} " if "of_floor" in row else ""
            yield f"| {row['name']} | {row['ms']:.{digits}f} | {part}|"
    for row in (*read["timings"]["rows"], *read["layers_8"]["rows"]):
        if row["section"] == "end_to_end" and row["ok"]:
            speed, peak = f"{row['decode_tokens_s']:.0f}", f"{row['peak_bytes'] / 1e9:.1f}"
            yield f"| {row['name']} | {row['prefill_s']:.2f} | {speed} | {peak} |"
    count = {name: sum(row["section"] == "correctness" for row in found["rows"]) for name, found in read.items()}
    failed = [name for name in ("triton", "cudnn", "mosaic_gpu") if read[name]["failures"]]
    assert not failed
    ceilings = read["timings"]["ceilings"]
    yield f"at {ceilings['gemm_tflops']:.0f} TFLOP/s or the bytes at {ceilings['copy_gb_s']:,.0f} GB/s"
    behind = sum("cudnn own" in row["name"] for row in read["cudnn"]["rows"])
    yield f"float16 ({count['triton']} rows), Mosaic's in both types of 16 bits ({count['mosaic_gpu']} rows"
    yield f"behind it ({behind} rows)"
    before = {row["name"]: row for row in read["before"]["rows"] if row["section"] == "end_to_end"}
    prefill = [before[f"{name}, 8 layers"]["prefill_s"] for name in ("snapkv", "h2o")]
    yield "with 8 layers SnapKV's prefill took {:.2f} s before, H2O's {:.2f}".format(*prefill)


KERNELS_SHOWN = {
    *("cudnn forward", "triton forward with logsumexp", "mosaic_gpu forward with logsumexp", "mosaic_gpu sum p"),
    *("triton sum p", "triton sum p, last 64 rows", "triton decode", "triton pool decode"),
    "blockwise XLA: attention, sum p",
}


@pytest.mark.parametrize(
    ("readme", "said"),
    [
        *((page, said) for page, many in (
            ("experiments", (main_job, claims_in_short, scores_in_use)),
            ("experiments/bench_results", (pooling, boards, gates, learned_scorer, learned_budget, curves,
                                           blocks, stream, peers, claims_by_likelihood, scores_in_use, lengths)),
            (".", (results_in_short,)), ("kvjax", (about_curves,)), ("models", (loading, compiling)),
            ("pallas_kernels", (kernels, on_a_gpu)),
        ) for said in many)
    ],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
def test_the_numbers_are_those_of_the_committed_results(readme, said):
    text = (ROOT / readme / "README.md").read_text()
    missing = [part for part in said() if part not in text]
    assert not missing, "\n".join(["the README lacks", *missing])


def test_findings_on_the_first_page_stand_on_committed_pages():
    """Every number with an interval, whatever its sign, as it is rounded there."""
    triple = re.compile(r"(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]")
    shown = lambda text: triple.findall(text.replace("+", ""))
    sizes = lambda found: sorted(abs(float(x)) for x in found)
    pages = [p for folder in ("board", "replication", "findings") for p in (STORED / folder).rglob("*.md")]
    known = np.array([sizes(found) for page in pages for found in shown(page.read_text())])
    said = shown((ROOT / "README.md").read_text())
    results = (STORED / "README.md").read_text()
    for title in ("The papers' claims, one by one", "What decides", "How far from hindsight"):
        said += shown(results.split(f"## {title}\n")[1].split("\n## ")[0])
    assert len(said) > 40
    unit = lambda found: 10.0 ** -len(found[0].partition(".")[2])
    lost = [found for found in said if not (np.abs(known - sizes(found)) <= 0.501 * unit(found)).all(-1).any()]
    assert not lost


def test_what_was_found_is_said_twice_alike():
    """Intervals of the first page stand on the experiments' page, and those, but for its main job's, in the results."""
    names = "README.md", "experiments/README.md", "experiments/bench_results/README.md"
    first, page, results = ({*re.findall(r"\d+\.\d \[[^\]]+\]", (ROOT / name).read_text())} for name in names)
    assert first <= page <= results | {cell for row in main_job() for cell in row.split(" | ")}


def test_every_method_stands_on_the_first_page_beside_its_paper():
    text = (ROOT / "README.md").read_text()
    for name, method in inspect.getmembers(methods, inspect.isfunction):
        paper = re.search(r"arXiv (\d{4}\.\d{5})", inspect.getdoc(method))
        if name != "token_classes":
            assert f"[{name}](https://arxiv.org/abs/{paper[1]})" in text if paper else name in text, name
