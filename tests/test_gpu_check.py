"""The scripts for GPUs run on a machine without one, as far as that goes."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

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


def test_kernels(tmp_path):
    report = smoke(tmp_path, "--only", "correctness", "repeatability", "ceilings", "timings")
    assert {r["section"] for r in report["rows"]} == {"correctness", "repeatable", "ceilings", "timings"}
    timings = [r for r in report["rows"] if r["section"] == "timings"]
    assert all(r["ms"] > 0 for r in timings)
    assert report["ceilings"]["gemm_tflops"] > 0


@pytest.mark.slow
def test_everything(tmp_path):
    report = smoke(tmp_path)
    assert {"end_to_end", "sweep"} < {r["section"] for r in report["rows"]}


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
