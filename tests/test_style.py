"""The house rules that a machine can check."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import kvjax

ROOT = pathlib.Path(__file__).parents[1]
BIN = pathlib.Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["lint-imports", "--no-cache"],
        ["pyrefly", "check"],
    ],
    ids=" ".join,
)
def test_tool(command):
    tool = BIN / command[0]
    done = subprocess.run([tool, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_mutant_has_its_place():
    for mutant in map(json.loads, (ROOT / "tests" / "tools" / "mutants" / "mutants.jsonl").read_text().splitlines()):
        assert (ROOT / mutant["file"]).read_text().count(mutant["right"]) == 1, mutant


def test_the_citation_is_of_this_version():
    assert f"\nversion: {kvjax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


READMES = [
    ROOT / name / "README.md"
    for name in (".", "kvjax", "pallas_kernels", "models", "experiments", "kvjax/methods", "experiments/papers",
                 "experiments/tasks", "experiments/harness", "experiments/bench_results")
]  # fmt: skip
READMES += sorted((ROOT / "experiments" / "bench_results").glob("*/README.md"))


@pytest.mark.parametrize("file", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_python_of_a_readme_runs(file):
    """That of kvjax is run by `test_readme.py`, a model from the package index by `test_real_models.py`."""
    for block in re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL):
        if file.parent != ROOT / "kvjax" and "smollm2" not in block:
            exec(compile(block, file, "exec"), {})


@pytest.mark.parametrize("file", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_readme_lead_somewhere(file):
    for link in re.findall(r"\]\((?!http)([^)#]+)", file.read_text()):
        assert (file.parent / link).exists(), link
