"""The option of scripts that says to compile anew."""

import sys
from collections.abc import Sequence
from typing import Any, Final

import jax

import kvjax

OPTION: Final = "--no-compilation-cache"
HELP: Final = f"{OPTION} compiles anew; else programs are kept for later runs, too (kvjax.keep_compiled)."


def read_cache_option(argv: Sequence[str]) -> list[str]:
    """Keeps compiled programs (`kvjax.keep_compiled`), unless a script's arguments say not to; returns the others.

    A folder that cannot be written to is named, and the run goes on without.
    """
    config: Any = jax.config
    others = [text for text in argv if text != OPTION]
    if len(others) < len(argv):
        config.update("jax_enable_compilation_cache", False)
    try:
        kvjax.keep_compiled()
    except ValueError as e:
        print(e, file=sys.stderr)
    return others
