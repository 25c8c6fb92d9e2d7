"""Kernels broken on purpose: the tests of the kernels notice."""

import pathlib
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # minutes of interpretation

ROOT = pathlib.Path(__file__).parents[1]

# What is broken, where, what it says, what it says then, and a test that must fail.
MUTATIONS = {
    "a row does not see itself": ("blocks.py", "kv_pos <= q_pos", "kv_pos < q_pos", "test_any_block_size"),
    "logits twice as large": ("blocks.py", "spec.scale * LOG2E", "2.0 * spec.scale * LOG2E", "test_any_block_size"),
    "a block of rows is not summed": (
        "colstats.py",
        "length = jnp.maximum(stop - first, 0)",
        "length = jnp.maximum(stop - first - 1, 0)",
        "test_any_block_size",
    ),
    "a row of every block is not summed": (
        "colstats.py",
        "jnp.sum(f, axis=1)",
        "jnp.sum(f.at[:, 3].set(0.0), axis=1)",
        "test_any_block_size",
    ),
    "the last slots are not read": ("decode.py", "+ (bk - 1), bk)", ", bk)", "test_decode_splits"),
}


def run(tree, test):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", f"tests/test_pallas.py::{test}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project, whose tests pass."""
    copy = tmp_path_factory.mktemp("mutated") / "kvjax"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "__pycache__"))
    for test in sorted({m[3] for m in MUTATIONS.values()}):
        done = run(copy, test)
        assert done.returncode == 0, done.stdout + done.stderr
    return copy


@pytest.mark.parametrize("name", MUTATIONS)
def test_noticed(tree, name):
    file, right, wrong, test = MUTATIONS[name]
    path = tree / "pallas_kernels" / file
    text = path.read_text()
    assert text.count(right) == 1, f"{right!r} stands {text.count(right)} times in {file}"
    path.write_text(text.replace(right, wrong))
    try:
        done = run(tree, test)
    finally:
        path.write_text(text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "AssertionError" in done.stdout, done.stdout
