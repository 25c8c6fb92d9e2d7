"""Modules under the names that they had before they got rooms."""

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
    if name != "relax":  # a name that stays
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


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="no attribute 'nowhere'"):
        kvjax.nowhere  # noqa: B018
