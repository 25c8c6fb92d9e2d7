"""Parameters of which the default run asks some, and CI or `pytest -m exhaustive` the others."""

import functools

import pytest


def marks(name, asked, quick):
    """Of a name that CI asks if it is `asked`, and the default run if it is `quick` too."""
    if name not in asked:
        return pytest.mark.exhaustive
    return () if name in quick else pytest.mark.slow


def slow_but(values, *quick, mark=pytest.mark.slow):
    """All values of a parameter, for `parametrize`: tests of those that are not `quick` are slow."""
    return [pytest.param(value, marks=() if value in quick else mark) for value in values]


exhaustive_but = functools.partial(slow_but, mark=pytest.mark.exhaustive)
