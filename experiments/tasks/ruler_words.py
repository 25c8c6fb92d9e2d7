"""The words that RULER draws: nouns, adjectives and verbs of the package wonderwords."""

import functools
import importlib


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """All words of a kind, "noun", "adjective" or "verb", in alphabetical order.

    Raises:
      ValueError: wonderwords is not installed.
    """
    try:
        wonderwords = importlib.import_module("wonderwords")
    except ImportError as e:
        raise ValueError(f"RULER draws words of the package wonderwords ({e}); pip install 'kvjax[eval]'") from e
    return tuple(sorted(set(wonderwords.RandomWord().filter("", include_categories=[kind]))))
