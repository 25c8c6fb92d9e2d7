"""The benchmarks: what they refuse, their tables, and rows that are stored as they come."""

import json
import pathlib
import time
import typing

import numpy as np
import pytest

from kvjax.experiments.bench import codecs, compiling, curves, loading, memory, sharding, soak, speed, stream
from kvjax.experiments.bench.peers import __main__ as peers
from kvjax.experiments.bench.process import apart, seconds_in_turns, stored_rows
from kvjax.experiments.learning import gates

ROW = {
    "storage": "dense",
    "state": {"predicted": 2048, "arrays": 2048, "full": 8192},
    "prefill": {"predicted": 3 * 2**20, "compiled": 2 * 2**20, "outputs": 2048, "measured": 2**21},
    "step": {"compiled": 512, "measured": 0},
}


def test_tables():
    text = memory.table({"h2o, query heads@4096": ROW})
    assert "| - | dense | 4,096 | 2 KiB | 2 KiB | 25.0% | 3 MiB |  | 2 MiB |  | 512 B |" in memory.table(
        {"-@4096": {**ROW, "prefill": {**ROW["prefill"], "compiled": None}}}
    )
    row = "| h2o, query heads | dense | 4,096 | 2 KiB | 2 KiB | 25.0% | 3 MiB | 2 MiB | 2 MiB | 1.50 | 512 B | 0 B |"
    assert text.splitlines()[2] == row
    took = {"median_us": 50.0, "min_us": 49.0}
    windows = [took | {"tokens": n, "held": 2**20} for n in (10240, 20480, 30720)]
    marks = [took | {"tokens": n, "ratio": x, "processor_ratio": 1.0} for n, x in ((10752, 1.0), (31232, 1.003))]
    rows = {name: {"windows": windows, "marks": marks, "growth": n} for name, n in (("h2o", 4096), ("tova", -4096))}
    assert stream.table(rows).splitlines()[2:] == [
        f"| {name} | 50.0 | 50.0 | 1.003 | 1.000 | {growth} |" for name, growth in (("h2o", "4 KiB"), ("tova", "0 B"))
    ]
    assert len(stream.figure(rows).axes) == 2


def test_rows_of_another_setup_are_refused(tmp_path):
    path = tmp_path / "rows.json"
    assert stored_rows(path, {"setup": {"budget": 1}}) == {}
    path.write_text(json.dumps({"setup": {"budget": 1}, "rows": {"a": 1}}))
    assert stored_rows(path, {"setup": {"budget": 1}}) == {"a": 1}
    with pytest.raises(ValueError, match=r"another setup: \{'budget': 1\} there, \{'budget': 2\} now; choose another"):
        stored_rows(path, {"setup": {"budget": 2}})
    path.write_text("[]")
    with pytest.raises(ValueError, match="is not a file of this script"):
        stored_rows(path, {"setup": {"budget": 1}})


def test_a_process_of_its_own():
    assert apart("math", "gcd", 12, 18) == 6
    with pytest.raises(RuntimeError, match=r"gcd\('a',\) failed"):
        apart("math", "gcd", "a")


BENCHES = (
    *(compiling.bench, curves.main, loading.bench, memory.bench, peers.bench, sharding.main, soak.soak),
    *(speed.answers, speed.decode, speed.prefill, stream.bench, gates.run),
)
BAD = {int: (-1,), float: (np.nan, -1.0), tuple[int, ...]: ((4, -1),), tuple[float, ...]: ((np.nan,), (-1.0,))}


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [
        *(  # every option that is a number
            (bench, {name: x}, rf"{name}=.*must be (at least|a finite)|--cores .* are not among")
            for bench in BENCHES
            for name, kind in typing.get_type_hints(bench).items()
            for x in BAD.get(kind, ())
        ),
        *((f, {"budget": b}, f"budget={b}") for f in (speed.decode, speed.prefill) for b in (0.0, 1.5)),
        (compiling.bench, {"depths": ()}, "depths is empty"),
        (speed.decode, {"only": ("nope",)}, "no methods"),
        *((bench, {"only": ("h3o",)}, "--only 'h3o' is not one of") for bench in (memory.bench, stream.bench)),
        (curves.main, {"rows": 65}, "rows=65, but examples go on for 64 tokens"),
        *(
            (f, {"output": pathlib.Path("/")}, "--output / is a directory; name a file in it")
            for f in (speed.answers, speed.decode, speed.prefill, curves.main)
        ),
    ],
)
def test_a_benchmark_refuses_what_it_cannot_do_before_it_starts(bench, options, message):
    with pytest.raises(ValueError, match=message):
        bench(**options)


def test_runs_have_their_turn_in_every_round():
    order = []
    runs = {name: lambda name=name: order.append(name) or name for name in "ab"}
    seconds = seconds_in_turns(runs, 2, lambda name: time.sleep(0.02 if name == "a" else 0))
    assert order == ["a", "b"] * 3
    assert [len(each) for each in seconds.values()] == [2, 2]
    assert min(seconds["a"]) >= 0.02 > min(seconds["b"])


@pytest.mark.exhaustive
def test_both_measure(tmp_path):
    """The smallest runs: what is stored is not measured again."""
    for _ in range(2):
        memory.bench(lengths=(64,), only=("window", "roco, in blocks"), output=tmp_path / "memory")
        stream.bench(tokens=20_480, rounds=2, only=("random",), output=tmp_path / "stream")
    row = json.loads((tmp_path / "memory" / "memory.json").read_bytes())["rows"]["window@64"]
    assert row["state"]["predicted"] == row["state"]["arrays"]
    row = json.loads((tmp_path / "stream" / "stream.json").read_bytes())["rows"]["random"]
    assert [mark["tokens"] for mark in row["marks"]] == [10752, 20992]


@pytest.mark.slow
def test_speeds_are_measured_and_written_with_how_to_make_them_again(tmp_path, capsys):
    speed.prefill(48, 1, 0.25, memory_lengths=(32,), depths=(1,), output=tmp_path / "prefill.json")
    speed.decode(48, 2, rounds=1, random=True, only=("h2o",), output=tmp_path / "decode.json")
    read, decoded = (json.loads((tmp_path / f"{name}.json").read_bytes()) for name in ("prefill", "decode"))
    assert [row["method"] for row in decoded["rows"]] == ["full", "h2o", "snapkv"]
    assert decoded["rows"][0]["of_full"] == read["timings"][0]["median_of_paired_ratios"] == 1
    assert {"command", "git_commit", "versions", "device"} <= {*read} & {*decoded}
    assert "h2o's statistics, all kept" in capsys.readouterr().out
    small: dict = {"length": 24, "steps": 8, "more": 24, "every": (2,), "rounds": 1, "methods": ("triattention",)}
    speed.answers("embedded", **small, output=tmp_path / "answers.json")
    window, other = json.loads((tmp_path / "answers.json").read_bytes())["rows"]
    assert [window["of_window"], window["milliseconds_per_eviction_beyond_window"]] == [1, 0]
    assert [other["method"], other["every"]] == ["triattention", 2]


def test_codecs_are_measured_beside_none(tmp_path, capsys):
    (tmp_path / "text").write_text("a b " * 40)
    small: dict = {"model": "embedded", "passages": 2, "length": 24, "prompt": 12, "output": tmp_path / "found.json"}
    codecs.main(tmp_path / "text", **small, only=("int8",))
    none, int8 = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [none["bits"], int8["bits"]] == [32, 8.5]
    assert 0 < np.abs(np.subtract(none["nll"], int8["nll"])).max() < 0.1
    assert "| none | 32.00 | " in capsys.readouterr().out
    for wrong, message in (({"only": ("int9",)}, "only has 'int9'; there are float8"), ({"passages": 9}, "need 216")):
        with pytest.raises(ValueError, match=message):
            codecs.main(tmp_path / "text", **small | wrong)


@pytest.mark.slow
def test_what_lengths_hold_is_measured():
    found = compiling.held_by_lengths("snapkv", 0.25, 2)
    assert found["layers"] == 2
    assert found["MiB"] > 0


def test_a_short_soak_says_what_is_held(capsys, tmp_path):
    soak.soak(8, 4, 2, tmp_path / "soak.json")
    found = json.loads((tmp_path / "soak.json").read_text())
    assert list(found["held"]) == ["2", "4", "8"]
    assert f"from 4 to 8: {found['growth']:+.1%}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="warm=3 must be at least 4"):
        soak.soak(8, 3, 4)
