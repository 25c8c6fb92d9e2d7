"""The scripts for GPUs run on a machine without one, as far as that goes."""

import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from kvjax.experiments import aot_check, gpu_check
from kvjax.experiments.gpu import correct, watchdog
from kvjax.experiments.gpu.gpu_report import POISONED, SHARES, Report, served_by
from kvjax.pallas_kernels import Columns, attention

pytestmark = pytest.mark.slow  # minutes of interpretation

ROOT = pathlib.Path(__file__).parents[1]


def run(*arguments):
    command = [sys.executable, ROOT / "experiments" / "gpu_check.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def smoke(tmp_path, *arguments):
    done = run("--smoke", "--output", tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert all(row["ok"] for row in report["rows"])
    return report


def test_everything(tmp_path):
    report = smoke(tmp_path)
    of = lambda *sections: [r for r in report["rows"] if r["section"] in sections]
    assert [s for s, _ in itertools.groupby(r["section"] for r in report["rows"])] == list(SHARES)
    assert not report["not_reached"]
    assert not report["stopped"]
    assert report["device"]["platform"] == jax.default_backend()
    assert all(r["served_by"] for r in report["rows"])
    assert {r["served_by"] for r in of("correctness", "repeatability")} == {"interpret"}
    names = " ".join(r["name"] for r in report["rows"])
    assert all(x in names for x in ("softcap=5.0 window=50", "bias, row", "pool decode and statistics"))
    assert all(r["ms"] > 0 for r in of("timings", "sweep"))
    assert report["ceilings"]["gemm_tflops"] > 0
    swept = {r["name"].split(" float32")[0] for r in of("sweep")}
    assert swept == {"flash", "colstats", "decode", "pool decode"}


def test_a_table_beside_peers(tmp_path):
    report = smoke(tmp_path, "--only", "end_to_end", "--peers")
    of = lambda library: [r for r in report["rows"] if r["name"].startswith(f"{library} ")]
    ours = of("kvjax")
    assert [r["name"].split()[1].strip(",") for r in ours] == [*gpu_check.BESIDE_PEERS] * 2
    assert [r["batch"] for r in ours] == [1] * 6 + [2] * 6
    assert {r["prompt"] for r in ours} == {160}
    full, *evicting = [r["cache_bytes"] for r in ours[:6]]
    assert all(held < full / 2 for held in evicting)
    assert all(r["peak_bytes"] > r["parameter_bytes"] + r["cache_bytes"] for r in ours)
    pytest.importorskip("torch")
    theirs = of("transformers")
    assert [r["name"].split()[1] for r in theirs] == ["transformers,", "compiled,"] * 2
    assert {r["parameter_bytes"] for r in theirs} == {r["parameter_bytes"] / 2 for r in ours}  # bfloat16 and float32


def test_what_a_process_of_the_table_dies_at_is_a_row_and_another_measures_the_rest(tmp_path):
    """One that says why it cannot go on is not blamed twice; memory that does not suffice is no failure."""
    report = Report(tmp_path, 1000.0, True, ["end_to_end"])
    code = """if 1:
        import os, sys, time
        from experiments.gpu.watchdog import tell
        def measure(method):
            match method:
                case "hangs": time.sleep(1000)
                case "dies": os._exit(7)
                case "large": raise RuntimeError("CUDA out of memory")
                case "lost": raise RuntimeError("CUDA error: an illegal memory access")
            return {"pid": os.getpid()}
        print("a library's word", flush=True)
        tell(sys.argv[1:], measure)"""
    methods = ["one", "large", "two", "lost", "dies", "three", "hangs"]
    how = {"patience": 10.0, "environment": {**os.environ, "PYTHONPATH": str(ROOT)}}
    gpu_check._rows(report, "{}", methods, functools.partial(watchdog.told, [sys.executable, "-c", code], **how))
    assert [(r["name"], r["ok"]) for r in report.rows] == [(m, m not in ("lost", "dies", "hangs")) for m in methods]
    assert "code 7" in report.rows[4]["reason"]
    assert report.rows[6]["reason"] == "killed at its limit"
    one, two, three = (r["pid"] for r in report.rows if "pid" in r)
    assert one == two != three


def test_what_is_not_reached_is_said(tmp_path):
    report = smoke(tmp_path, "--only", "correctness", "sweep", "--budget", "0")
    assert report["rows"] == []
    assert report["not_reached"] == ["correctness: all of it", "sweep: all of it"]
    assert report["made"]["command"][-2:] == ["--budget", "0"]


def test_sections_keep_to_their_share_of_the_time(tmp_path):
    report = Report(tmp_path, 1000.0, False, list(SHARES))
    assert [round(t - report.start) for t in report.until.values()] == [250, 290, 310, 560, 950, 1000]
    only = Report(tmp_path, 1000.0, False, ["sweep"])
    assert round(only.until["sweep"] - only.start) == 1000
    report.until["timings"] = report.start
    assert report.reaches("correctness", "x")
    assert not report.reaches("timings", "y")
    assert json.loads(report.file.read_text())["not_reached"] == ["timings: y"]


def test_a_kernel_that_stops_leaves_the_other_cases(tmp_path, monkeypatch):
    monkeypatch.setattr(correct, "served_by", lambda *_: ["mosaic_gpu", "triton"])

    def broken(*_, implementation, **__):
        if implementation == "mosaic_gpu":
            raise RuntimeError("no such layout")
        return jnp.zeros(3)

    monkeypatch.setattr(correct, "attention", broken)
    monkeypatch.setattr(correct, "pooled_attention", broken)
    report = Report(tmp_path, 1000.0, True, ["repeatability"])
    correct.repeatability(report, ("mosaic_gpu", "triton"))
    assert [r["ok"] for r in report.rows] == [False] * 3 + [True] * 3
    assert "no such layout" in json.loads(report.file.read_text())["rows"][0]["error"]


METHODS = "snapkv", "full", "h2o"
FINISHED = subprocess.CompletedProcess([], 0, '{"prefill_s": 1.0}\n', "")


@pytest.fixture
def end_to_end(tmp_path, monkeypatch):
    """The section's report, where a function runs its commands."""

    def run(worker, budget):
        monkeypatch.setattr(watchdog, "captured", worker)
        report = Report(tmp_path, budget, False, ["end_to_end"])
        gpu_check.end_to_end(report, ("triton",))
        return report

    return run


@pytest.mark.parametrize(
    ("stderr", "failures"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate", []),
        ("Segmentation fault", [f"end_to_end: {method}, 32 layers" for method in METHODS]),
        (None, []),  # killed
    ],
)
def test_all_layers_run_behind_few_and_may_not_fit(end_to_end, stderr, failures):
    def worker(command, seconds):
        assert 0 < seconds <= 1000
        fits = command[command.index("--layers") + 1] == "8"
        return FINISHED if fits else stderr and subprocess.CompletedProcess(command, 1, "", stderr)

    report = end_to_end(worker, 1000.0)
    tried = [(r["name"], r["finished"]) for r in report.rows]
    assert tried == [(f"{method}, {n} layers", n == 8) for n in (8, 32) for method in METHODS]
    assert report.failures == failures


def test_few_layers_that_do_not_finish_have_failed(end_to_end):
    """Each gets its share of the time; without them all layers are not tried."""
    given = []
    report = end_to_end(lambda command, seconds: given.append((command[2], round(seconds))), 90.0)
    assert given == [("snapkv", 30), ("full", 45), ("h2o", 90)]
    assert report.failures == [f"end_to_end: {method}, 8 layers" for method in METHODS]


def test_what_needs_more_time_than_is_left_does_not_begin(end_to_end, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    report = end_to_end(lambda *_: (clock.__setitem__(0, clock[0] + 40.0), FINISHED)[1], 230.0)
    assert [r["name"] for r in report.rows] == [*(f"{method}, 8 layers" for method in METHODS), "snapkv, 32 layers"]
    assert report.not_reached == ["end_to_end: full, 32 layers", "end_to_end: h2o, 32 layers"]


CASES = """
import json, os, pathlib, sys, time
file, sections = pathlib.Path(sys.argv[1]), sys.argv[2:]
report = json.loads(file.read_text())
def save():
    file.with_suffix(".x").write_text(json.dumps(report))
    os.replace(file.with_suffix(".x"), file)
for section in sections:
    for case in ("fine", "hangs", "crashes", "poisons", "last"):
        key = f"{section}: {case}"
        if key in report["begun"] or key in report["stopped"]:
            continue
        report["begun"].append(key)
        save()
        if case == "hangs":
            time.sleep(1000)
        if case == "crashes":
            os.abort()
        report["rows"].append({"section": section, "name": case, "ok": case != "poisons"})
        save()
        if case == "poisons":
            sys.exit(3)
"""


@pytest.mark.parametrize("most", [9, 2])
def test_what_hangs_or_crashes_has_failed_and_the_rest_runs(tmp_path, monkeypatch, most):
    monkeypatch.setattr(gpu_check, "MOST_INTERRUPTIONS", most)
    report = Report(tmp_path, 1000.0, False, ["correctness", "timings"])
    report.save()
    command = [sys.executable, "-c", CASES, str(report.file)]
    assert gpu_check.supervise(report, command, ["correctness", "timings"], 4.0) == 0
    rows = {(r["section"], r["name"]): r for r in report.rows}
    names = ("fine", "hangs", "crashes", "poisons", "last") if most == 9 else ("fine", "hangs", "crashes")
    assert list(rows) == [(section, name) for section in ("correctness", "timings") for name in names]
    for section in ("correctness", "timings"):
        assert rows[section, "fine"]["ok"]
        assert rows[section, "hangs"]["error"] == "no sign of life for 4 s"
        assert "the process ended with code -" in rows[section, "crashes"]["error"]
    rest = [f"{section}: the rest, after 2 interruptions" for section in ("correctness", "timings")]
    assert report.not_reached == ([] if most == 9 else rest)
    assert json.loads(report.file.read_text())["rows"] == report.rows


def test_a_process_goes_on_behind_another(tmp_path):
    """Not at what the other died at, again where it only passed, and never at what it has done."""
    first = Report(tmp_path, 1000.0, False, ["timings"])
    assert first.reaches("timings", "n=8", again=True)
    assert first.reaches("timings", "forward", again=True)
    assert first.reaches("timings", "sum p")
    first.row("timings", "sum p")
    first.stopped.append("timings: forward")
    first.save()
    second = Report(tmp_path, 1000.0, False, ["timings"], first.start)
    second.resume()
    assert second.rows == first.rows
    asked = [second.reaches("timings", n, again=n != "sum p") for n in ("n=8", "forward", "sum p")]
    assert asked == [True, False, False]
    assert not second.not_reached
    with pytest.raises(SystemExit) as ended:
        second.row("timings", "p2", ok=False, error="XlaRuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS: ...")
    assert ended.value.code == POISONED
    assert json.loads(second.file.read_text())["failures"] == ["timings: p2"]


def test_a_process_that_does_not_end_is_killed():
    began = time.monotonic()
    assert watchdog.captured([sys.executable, "-c", "import time; time.sleep(1000)"], 1.0) is None
    assert time.monotonic() - began < 30
    done = watchdog.captured([sys.executable, "-c", "print(3)"], 100.0)
    assert done is not None
    assert (done.returncode, done.stdout) == (0, "3\n")


def test_what_is_watched_ends_with_its_watcher(tmp_path):
    """On SIGTERM, as a batch system sends it at the end of its time."""
    sleeper = f"import os, time, pathlib; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
    command = [sys.executable, "-c", sleeper + "time.sleep(1000)"]
    file = tmp_path / "rows.json"
    code = "import pathlib; from kvjax.experiments.gpu import watchdog; watchdog.end_with_children(); "
    code += f"watchdog.watched({command!r}, pathlib.Path({str(file)!r}), 1000.0)"
    watcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
        assert watcher.poll() is None
    watcher.terminate()
    assert watcher.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_models_of_other_processes_find_memory():
    """The parent must not hold most of the GPU: it says so before jax is there."""
    source = (ROOT / "experiments" / "gpu_check.py").read_text()
    said = source.index('os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")')
    assert said < source.index("import jax\n")


def test_the_recorder_sees_who_served():
    q, pos = jnp.ones((1, 2, 8, 64)), jnp.arange(8, dtype=jnp.int32)
    arrays = q, q, q, pos[None], jnp.broadcast_to(pos, (1, 2, 8))
    run = lambda *x: attention(*x, columns=(Columns(), Columns(summed=False)), implementation="interpret")
    assert served_by(run, *arrays) == ["interpret", "xla"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--output", tmp_path)
    assert done.returncode == 2
    assert "--smoke" in done.stdout


def test_aot_check_names_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(aot_check, "NEEDED", ("no_such_plugin", "nvidia.no_such_compiler"))
    assert aot_check.main() == 2
    said = capsys.readouterr().out
    assert all(name in said for name in aot_check.NEEDED)
    assert "pip install jax-cuda13-plugin" in said
