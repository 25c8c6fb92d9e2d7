"""The contract stays as small as it is said to be, and names stay where users import them."""

import importlib
import json
import subprocess
import sys

import pytest

from tests import contract
from tests.runs import ROOT

LIMITS = {
    "members of Policy": 14,
    "members of Score": 4,
    "fields of Evict": 12,
    "parameters of a method, on average": 145 / 46,
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_contract_stays_small(name):
    assert contract.sizes()[name] <= LIMITS[name]


NAMES = json.loads((ROOT / "tests/golden/names.json").read_text())


@pytest.mark.parametrize("module", NAMES)
def test_names_that_users_import_stay(module):
    """A name that goes is taken from the list, and listed in CHANGELOG."""
    there = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(there, name)] == []


@pytest.mark.slow
def test_generating_enters_few_functions():
    """In a process of its own, whose state no other test has changed. Limits are a fifth above what was measured."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.contract"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entered = {name.strip(): float(n) for n, name in (line.strip().split(" ", 1) for line in said.splitlines())}
    assert entered["functions that generate enters"] <= 266
    assert entered["functions that it enters again"] <= 145
    assert entered["lines of code in functions that generate enters"] <= 1220
