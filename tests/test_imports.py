"""What takes long to import is imported when it is used: `--help` and `import kvjax` need none of it."""

import ast
import pathlib
import subprocess
import sys

from kvjax import models

HEAVY = (
    "matplotlib",
    "flax",
    "scipy.stats",
    "scipy.special",
    "scipy.optimize",
    "orbax.checkpoint",
    "pandas",
    "transformers",
    "torch",
)
SCRIPTS = "kvjax.experiments.run, kvjax.experiments.report, kvjax.experiments.learn, kvjax.experiments.learning.budget"


def test_scripts_import_nothing_heavy():
    code = f"import sys, kvjax.models, {SCRIPTS}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


EXTRAS = {
    "kvjax.plot": "plot",
    "kvjax.configs": "experiments",
    "kvjax.experiments.board": "experiments",
}


def test_what_extras_install_is_named_by_what_needs_it_and_the_library_does_without():
    code = f"""
import importlib, sys
sys.modules.update(dict.fromkeys(("filelock", "matplotlib", "pandas", "tyro")))
import kvjax, kvjax.learning.relax, kvjax.models.embedded
kvjax.models.load(kvjax.models.embedded.EMBEDDED)
for name in {[*EXTRAS]}:
    try:
        importlib.import_module(name)
    except ImportError as e:
        print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert said == [f"pip install 'kvjax[{extra}]'" for extra in EXTRAS.values()], done.stdout + done.stderr


def test_names_of_models_are_those_that_type_checkers_see():
    tree = ast.parse(pathlib.Path(models.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert {name: f"kvjax.models.{module}" for name, module in models._MODULES.items()} == seen
    assert all(callable(getattr(models, name)) or name == "PRESETS" for name in seen)
    assert set(seen) <= set(dir(models))
