"""Parameters of which the default run asks some, and CI or `pytest -m exhaustive` the others."""

import functools

import pytest


def marks(name, asked, quick):
    """Of a name that CI asks if it is `asked`, and the default run if it is `quick` too."""
    if name not in asked:
        return pytest.mark.exhaustive
    return () if name in quick else pytest.mark.slow


def slow_but(values, *quick, mark=pytest.mark.slow):
    """All values for `parametrize`, tuples of several parameters: tests of those that are not `quick` are slow."""
    each = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*parts, marks=() if value in quick else mark) for value, parts in each]


exhaustive_but = functools.partial(slow_but, mark=pytest.mark.exhaustive)
