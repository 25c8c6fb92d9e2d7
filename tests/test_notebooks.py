"""Notebooks run from top to bottom, and say what their text says they do."""

import json
import os
import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))

SAID = {
    "budget_curve_by_vmap": ["equal: True", "nothing lost at the full budget: True", "hindsight (model)"],
    "composing_in_jit": [
        "True\nTrue\n",
        "by layer and head [[32, 32, 32, 32], [32, 32, 32, 32], [32",
        "16 -> 16 live; programs so far: 2",
        "[25 26 27 28 29 30 31 24 25",
    ],
    "gradients_through_a_budget": ["gates [0.  1.  0.5 1.  0. ], sum 2.500000", "total 384.0 of 384.0", "total 384\n"],
    "policy_in_ten_lines": [
        "kept, by kv head: [[48 48]]",
        "full cache     10 of 10",
        "the ten lines  0 of 10",
        "SnapKV         10 of 10",
        "with neighbours: 10 of 10",
        "True True False",
        "after 16 new tokens: 48 live tokens a head",
    ],
    "reading_kept_positions": ["StreamingLLM  heads that hold the wanted digits, by layer: [0.12 0.12 0.12 0.12]"],
}


@pytest.mark.slow  # minutes of compilation in all; CI runs them
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that run notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path):
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
    client.execute(env=environment)
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    assert [text for text in SAID[path.stem] if text not in printed] == [], printed
    if path.stem in ("reading_kept_positions", "budget_curve_by_vmap"):
        assert any("image/png" in o.get("data", {}) for o in outputs)


def test_every_notebook_is_known():
    assert [p.stem for p in NOTEBOOKS] == sorted(SAID)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert all(not c["outputs"] and c["execution_count"] is None for c in cells if c["cell_type"] == "code")
    assert path.stat().st_size < 30_000
