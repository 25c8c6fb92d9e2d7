"""Notebooks run from top to bottom, and say what their text says they do and what is stored with them."""

import json
import os
import re

import nbclient
import nbformat
import numpy as np
import pytest

from tests import kept
from tests.runs import ROOT

NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
README = (ROOT / "experiments" / "README.md").read_text()

SAID = {
    "a_real_model": ["134,515,008 parameters", "KVzip, a quarter   106.0 live tokens", "is 31 meters tall."],
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
    "thinking_aloud": ["full cache         100, leading 100       100, leading 100", "window             100"],
    "reading_kept_positions": ["StreamingLLM  heads that hold the wanted digits, by layer: [0.12 0.12 0.12 0.12]"],
}
PICTURES = {"a_real_model": 2, "budget_curve_by_vmap": 2, "reading_kept_positions": 2, "thinking_aloud": 1}
CODE = re.compile(r":[0-9a-f]{8}\b| at 0x[0-9a-f]+")  # of a function: another Python compiles it otherwise
NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e-?\d+)?")


def executed(path):
    """The notebook of a file as a kernel of its own leaves it."""
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}})
    return client.execute(env=environment)


def outputs(notebook):
    return [o for cell in notebook["cells"] if cell["cell_type"] == "code" for o in cell["outputs"]]


def printed(notebook):
    return "".join(
        "".join(o["text"]) for o in outputs(notebook) if o["output_type"] == "stream" and o["name"] == "stdout"
    )


def pictures(notebook):
    return sum("image/png" in o.get("data", {}) for o in outputs(notebook))


# The README's blocks and the tests of curves and of the reasoner do what they do.
LONG = {"a_real_model", "budget_curve_by_vmap", "thinking_aloud"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that run notebooks
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.exhaustive if p.stem in LONG else pytest.mark.slow) for p in NOTEBOOKS],
    ids=lambda p: p.stem,
)
def test_a_run_prints_what_is_stored(path):
    """Words are equal, and numbers but for what another processor rounds otherwise."""
    if path.stem == "a_real_model":
        kept.fetched_or_skip(kept.SMOLLM2)
    now, stored = executed(path), json.loads(path.read_text())
    ours, theirs = (CODE.sub("", printed(notebook)) for notebook in (now, stored))
    assert [text for text in SAID[path.stem] if text not in ours] == [], ours
    words = lambda text: NUMBER.sub("", text).split()
    assert words(ours) == words(theirs), "run the notebooks as experiments/README.md says, and look at what has changed"
    numbers = (np.array([float(x) for x in NUMBER.findall(text)]) for text in (ours, theirs))
    np.testing.assert_allclose(*numbers, rtol=0.02, atol=0.02)
    assert pictures(now) == PICTURES.get(path.stem, 0)


def test_every_notebook_is_known_and_in_the_readme():
    assert [p.stem for p in NOTEBOOKS] == sorted(SAID)
    assert sorted(re.findall(r"\(notebooks/(\w+)\.ipynb\)", README)) == sorted(SAID)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_as_run_from_top_to_bottom(path):
    text = path.read_text()
    notebook = json.loads(text)
    assert notebook["cells"][0]["cell_type"] == "markdown"
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    assert [text for text in SAID[path.stem] if text not in printed(notebook)] == []
    assert pictures(notebook) == PICTURES.get(path.stem, 0)
    assert {o.get("name") for o in outputs(notebook)} <= {"stdout", None}, "a warning is no output"
    without_pictures = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.search(r"site-packages|/(?:home|root|tmp|usr|work)\b", without_pictures)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert len(text) < 150 * 1024
