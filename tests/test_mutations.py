"""Kernels broken on purpose: the tests of the kernels notice."""

import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from kvjax.pallas_kernels import mosaic

pytestmark = pytest.mark.exhaustive  # minutes of interpretation

ROOT = pathlib.Path(__file__).parents[1]

# What is broken, where, what it says, what it says then, and a test that must fail.
MUTATIONS = {
    "a row does not see itself": (
        "blocks.py",
        "kv_pos <= q_pos",
        "kv_pos < q_pos",
        "test_pallas.py::test_any_block_size",
    ),
    "logits twice as large": (
        "blocks.py",
        "spec.scale * LOG2E",
        "2.0 * spec.scale * LOG2E",
        "test_pallas.py::test_any_block_size",
    ),
    "a block of rows is not summed": (
        "colstats.py",
        "length = jnp.maximum(stop - first, 0)",
        "length = jnp.maximum(stop - first - 1, 0)",
        "test_pallas.py::test_any_block_size",
    ),
    "a row of every block is not summed": (
        "colstats.py",
        "jnp.sum(f, axis=1)",
        "jnp.sum(f.at[:, 3].set(0.0), axis=1)",
        "test_pallas.py::test_any_block_size",
    ),
    "the last slots are not read": ("decode.py", "+ (bk - 1), bk)", ", bk)", "test_pallas.py::test_decode_splits"),
    "half of a bias is added": (
        "blocks.py",
        "x = x + bias",
        "x = x + 0.5 * bias",
        "test_pallas.py::test_bias",
    ),
    "the bias of another head": (
        "flash.py",
        "bias.astype(jnp.float32), pl.BlockSpec((None, None, S), lambda i, h, b: (b, h, 0))",
        "bias.astype(jnp.float32), pl.BlockSpec((None, None, S), lambda i, h, b: (b, 0, 0))",
        "test_pallas.py::test_bias",
    ),
    "XLA: rows count twice": (
        "xla.py",
        "sums[j] = add_prefix(sums[j], ",
        "sums[j] = add_prefix(sums[j], 2.0 * ",
        "test_kernels.py::test_against_numpy",
    ),
    "XLA: a segment reads too few keys": (
        "loops.py",
        "self.offset + stop * self.block)",
        "self.offset + stop * self.block - 1)",
        "test_kernels.py::test_against_numpy",
    ),
    "XLA: a tile is left unmasked for its first row alone": (
        "tiles.py",
        "newest[:, j] <= here.min()",
        "newest[:, j] <= here.max()",
        "test_kernels.py::test_tiles_of_rows_that_no_statistic_reads",
    ),
    "Mosaic: a row does not see itself": (
        "blocks.py",
        "kv_pos <= q_pos",
        "kv_pos < q_pos",
        "test_mosaic.py::test_against_numpy",
    ),
    "Mosaic: old mass is not rescaled": (
        "mosaic_flash.py",
        "mass = mass * shrink",
        "mass = mass",
        "test_mosaic.py::test_against_numpy",
    ),
    "Mosaic: a tile of rows is not summed": (
        "mosaic_colstats.py",
        'ref["stop"][b, kv, j] - ref["first"][b, kv, j]',
        'ref["stop"][b, kv, j] - ref["first"][b, kv, j] - 1',
        "test_mosaic.py::test_against_numpy",
    ),
}


def runs(name):
    return not name.startswith("Mosaic") or jax.__version_info__ >= mosaic.MIN_JAX


def run(tree, test):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", f"tests/{test}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project. That its tests pass unless something is broken, they say where they are."""
    copy = tmp_path_factory.mktemp("mutated") / "kvjax"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "__pycache__"))
    done = run(copy, "test_pallas.py::test_any_block_size")  # a copy is as good as the project
    assert done.returncode == 0, done.stdout + done.stderr
    return copy


@pytest.mark.parametrize("name", MUTATIONS)
def test_noticed(tree, name):
    if not runs(name):
        pytest.skip("needs jax >= 0.11.2")
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
