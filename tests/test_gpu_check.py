"""The scripts for GPUs run on a machine without one, as far as that goes."""

import itertools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.gpu_report import UNTIL, Report, served_by
from pallas_kernels import Columns, attention

pytestmark = pytest.mark.slow  # minutes of interpretation

ROOT = pathlib.Path(__file__).parents[1]


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "experiments" / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def smoke(tmp_path, *arguments):
    done = run("gpu_check.py", "--smoke", "--out", str(tmp_path), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert all(row["ok"] for row in report["rows"])
    return report


def test_everything(tmp_path):
    report = smoke(tmp_path)
    of = lambda *sections: [r for r in report["rows"] if r["section"] in sections]
    assert [s for s, _ in itertools.groupby(r["section"] for r in report["rows"])] == list(UNTIL)
    assert not report["not_reached"]
    assert all(r["served_by"] for r in report["rows"])
    assert {r["served_by"] for r in of("correctness", "repeatability")} == {"interpret"}
    names = " ".join(r["name"] for r in report["rows"])
    assert all(x in names for x in ("softcap=5.0 window=50", "bias, row", "pool decode and statistics"))
    assert all(r["ms"] > 0 for r in of("timings", "sweep"))
    assert report["ceilings"]["gemm_tflops"] > 0
    swept = {r["name"].split(" float32")[0] for r in of("sweep")}
    assert swept == {"flash", "colstats", "decode", "pool decode"}


def test_what_is_not_reached_is_said(tmp_path):
    report = smoke(tmp_path, "--only", "correctness", "sweep", "--budget", "0")
    assert report["rows"] == []
    assert report["not_reached"] == ["correctness: all of it", "sweep: all of it"]


def test_sections_keep_to_their_share_of_the_time(tmp_path):
    report = Report(tmp_path, 1000.0, False, list(UNTIL))
    assert [round(report.until[name] - report.start) for name in UNTIL] == [round(1000 * x) for x in UNTIL.values()]
    only = Report(tmp_path, 1000.0, False, ["sweep"])
    assert round(only.until["sweep"] - only.start) == 1000
    report.until["timings"] = report.start
    assert report.reaches("correctness", "x")
    assert not report.reaches("timings", "y")
    assert json.loads(report.file.read_text())["not_reached"] == ["timings: y"]


def test_a_kernel_that_stops_leaves_the_other_cases(tmp_path, monkeypatch):
    from experiments import gpu_check

    monkeypatch.setattr(gpu_check, "served_by", lambda *_: ["mosaic_gpu", "triton"])

    def broken(*_, implementation, **__):
        if implementation == "mosaic_gpu":
            raise RuntimeError("no such layout")
        return jnp.zeros(3)

    monkeypatch.setattr(gpu_check, "attention", broken)
    monkeypatch.setattr(gpu_check, "pooled_attention", broken)
    report = Report(tmp_path, 1000.0, True, ["repeatability"])
    gpu_check.repeatability(report, ("mosaic_gpu", "triton"))
    assert [r["ok"] for r in report.rows] == [False] * 3 + [True] * 3
    assert "no such layout" in json.loads(report.file.read_text())["rows"][0]["error"]


@pytest.mark.parametrize(
    ("stderr", "failures"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate", []),
        ("Segmentation fault", [f"end_to_end: {method}, 32 layers" for method in ("snapkv", "h2o", "full")]),
    ],
)
def test_fewer_layers_are_no_failure_where_all_do_not_fit(tmp_path, monkeypatch, stderr, failures):
    from experiments import gpu_check

    def worker(command, **_):
        fits = command[command.index("--layers") + 1] == "8"
        return subprocess.CompletedProcess(command, 0 if fits else 1, '{"prefill_s": 1.0}\n', "" if fits else stderr)

    monkeypatch.setattr(gpu_check.subprocess, "run", worker)
    report = Report(tmp_path, 1000.0, False, ["end_to_end"])
    gpu_check.end_to_end(report, ("triton",))
    tried = [(r["name"], r["finished"]) for r in report.rows]
    assert tried[:2] == [("snapkv, 32 layers", False), ("snapkv, 8 layers", True)]
    assert len(tried) == 6
    assert report.failures == failures


def test_models_of_other_processes_find_memory():
    """The parent must not hold most of the GPU: it says so before jax is there."""
    code = "import os, experiments.gpu_check; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["false"]
    source = (ROOT / "experiments" / "gpu_check.py").read_text()
    assert source.index("XLA_PYTHON_CLIENT_PREALLOCATE") < source.index("import jax\n")


def test_the_recorder_sees_who_served():
    q, pos = jnp.ones((1, 2, 8, 64)), jnp.arange(8, dtype=jnp.int32)
    arrays = q, q, q, pos[None], jnp.broadcast_to(pos, (1, 2, 8))
    run = lambda *x: attention(*x, columns=(Columns(), Columns(summed=False)), implementation="interpret")
    assert served_by(run, *arrays) == ["interpret", "xla"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run("gpu_check.py", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--smoke" in done.stdout


def test_aot_check_names_what_is_missing():
    from experiments import aot_check

    lacking = aot_check.missing()
    if not lacking:
        pytest.skip("everything that it needs is installed: run experiments/aot_check.py itself")
    done = run("aot_check.py")
    assert done.returncode == 2
    assert all(name in done.stdout for name in lacking)
    assert "pip install jax-cuda13-plugin" in done.stdout
