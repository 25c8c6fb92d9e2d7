"""Numbers of the READMEs are those of the committed results that their commands made.

The ledger of papers stands in `test_reproduce.py`.
"""

import csv
import gzip
import inspect
import json
import pathlib
import re

import numpy as np
import pytest

from kvjax import Policy, methods, models, plan_memory
from kvjax.experiments import report
from kvjax.experiments.core import page, readme, stats
from kvjax.models.deepseek_v3 import LatentConfig
from kvjax.models.families import FAMILIES
from kvjax.models.rope import Rope
from tests.kept import SMOLLM2
from tests.runs import ROOT

STORED = ROOT / "experiments" / "bench_results"


def read(*path):
    return json.loads(STORED.joinpath(*path).read_bytes())


def pooling():
    """What decides beside all methods: runs of one method each."""
    stored = {name: run["retrieval_mean"][1] for name, run in read("main_job", "parts_of_policies.json").items()}
    of = {name: page.percent(row["score"], row["low"], row["high"]) for name, row in stored.items()}
    report = readme.rows(STORED / "main_job" / "report.md", "question")
    (whole,) = (row[2].split(" ")[0] for row in report if row[:2] == ["snapkv", "0.25"] and row[-1].endswith("%"))
    yield f"it falls from {whole} to {of['snapkv_unpooled']} %"
    yield f"reaches the same {of['nacl_voters']} %"


def global_layers():
    """What is left where the layers without a window alone are evicted."""
    every = read("board", "gemma-3-270m-passages", "global_layers.json")["scores"]
    of = {name: page.percent(*stats.wilson([*scores.values()])) for name, scores in every.items()}
    yield f"KVzip finds {of['kvzip']} %, SnapKV {of['snapkv']}, H2O {of['h2o']} and random tokens {of['random']} % "


def learned_budget():
    """What its table is followed by."""
    found, budgets = read("learned_budget", "summary.json"), ("0.0625", "0.125", "0.1875", "0.25")
    rows = {(r["budget"], r["method"]): r for r in found["rows"]}
    wins = [100 * r["learned_wins"] for r in found["rows"] if "learned_wins" in r]
    yield f"on {min(wins):.0f} to {max(wins):.0f} % of the prompts"
    ratio = [100 * (1 - row["ratio"]) for row in found["theorem_4"]]
    yield f"by {min(ratio):.0f} % (budget 6.25 %) to {max(ratio):.0f} % (25 %)"
    lost = [100 * r["loss"] for r in found["rows"] if r["method"] == "hindsight_heads"]
    yield f"lose {max(lost):.1f} % to {min(lost):.1f} %"
    shares = [np.mean(read("learned_budget", "tables", f"{b}.json")["heads"], 1) for b in budgets]
    first, last = ([f"{end([s[i] for s in shares]):.1f}" for end in (min, max)] for i in (0, -1))
    yield f"on average {' to '.join(first)} of the mean and those of the last {' to '.join(last)}"
    ahead = lambda row: page.percent(*(row[name] for name in ("ahead", "ahead_low", "ahead_high")), form=".2f")
    parts = [read(f"learned_budget_{of}", "summary.json")["rows"][0] for of in ("layers", "heads")]
    layers, heads, both = map(ahead, (*parts, rows["0.25", "uniform"]))
    yield f"loses {layers} points less than uniform budgets"
    yield f"moves what Ada-KV moves, {heads}, both together {both}"


def curves():
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
    growth = [row["growth"] / 2**20 for row in read("stream", "stream.json")["rows"].values()]
    yield f"990,000 tokens leave {min(growth):.1f} to {max(growth):.1f} MiB more"
    windows = [w["median_us"] for w in read("stream", "stream.json")["rows"]["roco"]["windows"]]
    taken = sum(70 <= round(x) <= 89 for x in windows)
    assert len(windows) - taken == 3
    yield "windows take between 70 and 89 µs a token in no order (three take longer"


def ratio(x):
    return f"1/{1 / x:.0f}" if x < 0.1 else f"{x:.2f}" if x < 9.995 else f"{x:.1f}"


def results_in_short():
    rows = {name: row["ratio"]["median"] for name, row in read("peers", "peers.json")["rows"].items()}
    decode = [x for name, x in rows.items() if "/decode/" in name]
    prefill = [ratio(x) for name, x in rows.items() if "/prefill/" in name]
    yield f"is {min(decode):.1f} to {max(decode):.1f} times as fast as kvpress"
    yield f"prefill {min(prefill)} to {max(prefill)} times as fast as transformers"
    yield "{1} of {0} hold in retrieval and {2} are not so here".format(*readme.claims(readme.RETRIEVED))
    yield "by likelihood {1} of {0} hold and {2} are not (".format(*readme.claims(readme.LIKELY))


def beside_others():
    """The first page's table."""
    every = [name for name, _ in inspect.getmembers(methods, inspect.isfunction) if name != "token_classes"]
    rows = [cells for cells in readme.rows(ROOT / "kvjax" / "methods" / "peers.md", "kvpress") if "Press" in cells[0]]
    classes, same = (
        sum(len(re.findall(r"`\w+Press", c[0])) for c in x) for x in (rows, [c for c in rows if c[1] != "-"])
    )
    yield f"{len(every)}, and [a call for {same} of kvpress's {classes} classes]"
    yield f"[{len({a.lower() for family in FAMILIES for a in family.architectures})} architectures]"  # MPT's are one
    every = json.loads((readme.ON_GPUS / "h200" / "beside_kvpress.json").read_text())["rows"]
    of = {row["name"].split(",")[0]: row for row in every if row.get("prompt") == 32768}
    for name, cell in {
        "kvjax streaming_llm": "| StreamingLLM {:.3f} s, {:.0f} |",
        "kvpress StreamingLLMPress": "| {:.3f} s, {:.0f} |",
        "kvpress transformers": "| full cache, not compiled: {:.3f} s, {:.0f} |",
    }.items():
        yield cell.format(of[name]["prefill_s"], of[name]["decode_tokens_s"])
    held = {name: f"{of[name]['cache_bytes'] / 1e6:,.0f}" for name in of}
    yield f"{held['kvjax ada_snapkv']} of {held['kvjax full']} MB]"
    yield f"{held['kvpress AdaKVPress']} of {held['kvpress transformers']} MB stay"


def claims_in_short():
    yield "{1} of {0} tries on three models hold, three of these among them, and {2} are not so here".format(
        *readme.claims(readme.LIKELY)
    )


def lengths():
    """Of SmolLM2's prompts of retrieval, which the full cache holds."""
    rows = gzip.decompress((STORED / "board" / SMOLLM2 / "scores.csv.gz").read_bytes()).decode().splitlines()
    held = [x for x in csv.DictReader(rows) if x["method"] == "full"]
    asked, after = ([int(x["live"]) for x in held if x["part"] == y] for y in ("in_prompt", "after_compression"))
    yield f"(prompts of {min(asked)} to {max(asked)} tokens), after compression ({min(after)} to {max(after)})"


def compiling():
    each, within = read("compiling.json")["programs"].values()
    yield f"compiles {each} programs, a layer's and a loop for each budget, and {within} within the largest"


def kernels():
    _, *rows = [cells for cells in readme.rows(readme.ON_GPUS / "aot.md") if len(cells) == 5]
    summary = {cells[0]: cells for cells in rows}
    count = {arch: int(summary[arch][1]) for arch in ("sm_80", "sm_90", "sm_100")}
    stored = json.loads(gzip.decompress((readme.ON_GPUS / "aot.json.gz").read_bytes()))
    assert len(stored["rows"]) == sum(count.values())
    assert summary["sm_80"][4] == summary["sm_90"][4] == "0"
    yield f"a row for each of {sum(count.values()):,} compilations"
    spill = count["sm_100"] - int(summary["sm_100"][2])
    yield f"on A100 ({count['sm_80']:,} combinations of kernel, options and sizes)"
    yield f"and H100 ({count['sm_90']:,}) none spills"
    yield f"on B200 {'two' if spill == 2 else spill} of {count['sm_100']} spill {summary['sm_100'][4]} bytes"


def on_a_gpu():
    """What the text of the kernels' page says of the runs."""
    read = {file.stem: json.loads(file.read_text()) for file in (readme.ON_GPUS / "h200").iterdir()}
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


def test_numbers_in_marked_parts_are_those_that_are_written():
    """Otherwise `python experiments/report.py --readme` writes them."""
    for path, text in readme.changed().items():
        assert text == path.read_text(), path
    every = "".join((ROOT / name).read_text() for name in readme.PAGES)
    assert sorted(re.findall(r"<!-- numbers: (\S+) -->", every)) == sorted(readme.VIEWS)
    assert every.count("<!-- end -->") == len(readme.VIEWS)


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("claims", ["3", "1"], r"claims has the 2 numbers \['3', '1'\], .* 'Of 69 tries 8 hold"),
        ("gates", [("25 %", "1"), ("50 %", "1")], r"gates has no rows \['75 %', '87.5 %'\], which the README shows"),
    ],
)
def test_what_does_not_fit_a_part_is_refused(monkeypatch, name, found, message):
    monkeypatch.setitem(readme.VIEWS, name, lambda: found)
    with pytest.raises(ValueError, match=message):
        readme.changed()


def test_the_command_writes_what_changed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(readme, "changed", lambda: {tmp_path / "README.md": "54"})
    report.main(["--readme"])
    assert (tmp_path / "README.md").read_text() == "54"
    assert "README.md" in capsys.readouterr().out


def test_two_heads_of_the_second_layer_are_open():
    above = np.array(read("duo_gates.json")["gates"]) > 0.9
    assert above.sum(1).tolist() == [0, 2, 0, 0]
    assert np.max(read("duo_gates.json")["gates"][0]) < 0.001


@pytest.mark.parametrize(
    ("file", "said"),
    [
        *((page, said) for page, many in (
            ("experiments/FINDINGS.md", (claims_in_short,)),
            ("experiments/bench_results/board/README.md", (pooling, lengths, global_layers)),
            ("experiments/bench_results/learned_budget/README.md", (learned_budget,)),
            ("experiments/bench_results/peers/README.md", (curves, blocks, stream)),
            ("README.md", (results_in_short, beside_others)), ("kvjax/README.md", (about_curves,)),
            ("models/README.md", (compiling,)), ("pallas_kernels/README.md", (kernels, on_a_gpu)),
        ) for said in many)
    ],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
def test_the_numbers_are_those_of_the_committed_results(file, said):
    text = (ROOT / file).read_text()
    missing = [part for part in said() if part not in text]
    assert not missing, "\n".join([f"{file} lacks", *missing])


def test_caches_of_presets_take_what_a_plan_says():
    text = (ROOT / "models" / "README.md").read_text().partition("## What a cache takes")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| [a-z]+[-.\d]", line)]
    assert len(rows) > 15
    of_latents = LatentConfig(9, 8, 8, 1, 1, 1, 576, rope=Rope(channels=64), dtype="bfloat16")
    for name, layers, heads, channels, *shown in rows:
        K, H = int(heads), int(channels)
        config = of_latents if H == 576 else models.ModelConfig(9, 8, 8, 1, K, K, H, dtype="bfloat16")
        for policy, gib in zip((Policy(), methods.snapkv(0.25)), shown, strict=True):
            plan = plan_memory(config, policy, prompt_len=131072, max_new_tokens=0)
            assert f"{int(layers) * plan.keys_values / 2**30:.1f}" == gib, name
        assert models.preset(name)


def test_findings_on_the_first_page_stand_on_committed_pages():
    """Every number with an interval, whatever its sign, as it is rounded there."""
    triple = re.compile(r"(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]")
    shown = lambda text: triple.findall(text.replace("+", ""))
    sizes = lambda found: sorted(abs(float(x)) for x in found)
    every = (p for folder in ("board", "replication", "findings") for p in (STORED / folder).rglob("*.md"))
    pages = [p for p in every if p.name != "README.md"]
    told = (*map(pathlib.Path.read_text, pages), *pooling(), *global_layers())
    known = np.array([sizes(found) for text in told for found in shown(text)])
    by_hand = ROOT / "README.md", *(STORED / name / "README.md" for name in ("board", "replication", "findings"))
    made = re.compile("<!-- numbers: beside-each -->.*?<!-- end -->", re.DOTALL)  # on no page, but of their records
    said = [found for page in by_hand for found in shown(made.sub("", page.read_text()))]
    assert len(said) > 300
    unit = lambda found: 10.0 ** -len(found[0].partition(".")[2])
    lost = [found for found in said if not (np.abs(known - sizes(found)) <= 0.501 * unit(found)).all(-1).any()]
    assert not lost


def test_what_was_found_is_said_twice_alike():
    """Intervals of the first page stand among the findings, and those, and those of the list, beside the results."""
    intervals = lambda path: {*re.findall(r"\d+\.\d+ \[[^\]]+\]", path.read_text().replace("*", ""))}
    first, found = map(intervals, (ROOT / "README.md", ROOT / "experiments" / "FINDINGS.md"))
    results = set().union(*map(intervals, STORED.glob("*/README.md")))
    assert first <= found <= results
    assert intervals(STORED / "README.md") <= results | intervals(STORED / "main_job" / "report.md")


def test_every_method_stands_on_the_first_page_and_beside_its_paper():
    first, papers = ((ROOT / name).read_text() for name in ("README.md", "kvjax/methods/README.md"))
    table = papers.split("| family |")[1].split("\n\n")[0]
    for name, method in inspect.getmembers(methods, inspect.isfunction):
        paper = re.search(r"arXiv (\d{4}\.\d{5})", inspect.getdoc(method))
        if name != "token_classes":
            assert re.search(rf"\b{name}\b", first), name
            after = table.split(f"`{name}`")[1]
            assert not paper or re.search(r"abs/([\d.]+)", after)[1] == paper[1], name
