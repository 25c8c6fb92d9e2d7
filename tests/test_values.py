"""Values: which are equal, and so share programs."""

import copy
import dataclasses
import math
import pickle

import kvjax
from kvjax import methods
from tests import table


def values_in(x):
    """A value and all that it is made of."""
    if isinstance(x, tuple):
        return [y for each in x for y in values_in(each)]
    if not dataclasses.is_dataclass(x):
        return []
    return [x, *(y for f in dataclasses.fields(x) for y in values_in(getattr(x, f.name)))]


def test_numbers_of_other_kinds_make_other_values():
    """Programs are shared by equal values; 1 row and the share 1.0 of all rows are two, though equal to Python."""
    tried = 0
    for one in {v for name in table.MAKE for v in values_in(table.Case(name).policy)}:
        same = pickle.loads(pickle.dumps(one)) if picklable(one) else dataclasses.replace(one)
        assert (same, hash(same)) == (one, hash(one))
        for f in dataclasses.fields(one):
            x = getattr(one, f.name)
            if f.compare and type(x) in (int, float) and math.isfinite(x) and x == int(x):
                other = copy.copy(one)
                object.__setattr__(other, f.name, int(x) if isinstance(x, float) else float(x))
                assert other != one
                tried += 1
    assert tried > 100


def test_what_is_no_count_is_a_float():
    """A temperature of 1 is one of 1.0; 1 token is not all of them."""
    assert kvjax.Sample(temperature=1) == kvjax.Sample(temperature=1.0)
    assert isinstance(kvjax.Sample(temperature=1).temperature, float)
    assert methods.h2o(1) != methods.h2o(1.0)


def picklable(x):
    try:
        pickle.dumps(x)
    except (AttributeError, pickle.PicklingError):  # functions within functions
        return False
    return True
