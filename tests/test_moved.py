"""What is found under the names that it had before."""

import importlib
import pickle
import sys

import pytest

import kvjax
from kvjax._moved import MOVED


@pytest.mark.parametrize("name", MOVED)
def test_an_old_name_is_the_module_and_warns(name):
    new = importlib.import_module(MOVED[name])
    sys.modules.pop(f"kvjax.{name}", None)
    if name not in ("relax", "sampling"):  # names that stay
        vars(kvjax).pop(name, None)  # what an import of the old name has left
        with pytest.warns(DeprecationWarning, match=rf"kvjax\.{name} is {MOVED[name]} now"):
            assert getattr(kvjax, name) is new
    with pytest.warns(DeprecationWarning, match=rf"kvjax\.{name} is {MOVED[name]} now"):
        assert importlib.import_module(f"kvjax.{name}") is new
    assert new.__spec__.name == new.__name__ == MOVED[name]


def test_what_was_pickled_before_is_read():
    """Policies lie in pickles under the module that their class was in."""
    stored = pickle.dumps(kvjax.Tokens(5), protocol=0).replace(b"kvjax.sizes.budget", b"kvjax.budget")
    sys.modules.pop("kvjax.budget", None)
    with pytest.warns(DeprecationWarning, match=r"kvjax\.budget"):
        assert pickle.loads(stored) == kvjax.Tokens(5)


def test_compositions_are_found_where_they_were():
    with pytest.warns(DeprecationWarning, match=r"kvjax\.policy\.chain is kvjax\.algebra\.chain now"):
        assert kvjax.policy.chain is kvjax.chain
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        kvjax.policy.nowhere  # noqa: B018


def test_a_name_that_changed_is_found_under_the_old_one():
    with pytest.warns(DeprecationWarning, match=r"kvjax\.analysis\.grid\.Family is kvjax\.analysis\.grid\.Method now"):
        assert kvjax.analysis.grid.Family is kvjax.analysis.grid.Method


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        kvjax.nowhere  # noqa: B018


def test_an_old_option_warns_and_is_the_new_one():
    snapkv = kvjax.methods.snapkv
    with pytest.warns(DeprecationWarning, match=r"snapkv\(normalise=...\) is snapkv\(softmax_over=...\) now"):
        assert snapkv(64, normalise="outside_window") == snapkv(64, softmax_over="outside_window")
    with pytest.raises(ValueError, match="normalise is softmax_over now, but both were given"):
        snapkv(64, normalise="all", softmax_over="all")
