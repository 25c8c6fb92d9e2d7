"""Compiled programs that later processes find again: on for scripts, never set by importing the library."""

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Final

import jax

OPTION: Final = "--no-compilation-cache"
_HELP: Final = f"{OPTION}  compile anew; else programs are kept in {{}}, for later runs too"
_LEAST: Final = 0.1  # seconds of compiling from which on a program is kept; jax's own choice is 1
_DIRECTORY: Final = "jax_compilation_cache_dir"
_THRESHOLD: Final = "jax_persistent_cache_min_compile_time_secs"


def keep_compiled(argv: Sequence[str]) -> list[str]:
    """Keeps compiled programs in the user's cache directory, so that a later process does not compile them again.

    Where jax was told a directory (`JAX_COMPILATION_CACHE_DIR`), or to keep none (`JAX_ENABLE_COMPILATION_CACHE=0`), it
    does as it was told. A directory that cannot be written to is named, and the run goes on without.

    Args:
      argv: a script's arguments, in which `--no-compilation-cache` says to keep none.

    Returns:
      The other arguments.
    """
    config: Any = jax.config
    others = [text for text in argv if text != OPTION]
    directory = pathlib.Path(getattr(config, _DIRECTORY, None) or default_directory())
    if {"-h", "--help"} & set(others):
        print(_HELP.format(directory), end="\n\n")
    if len(others) < len(argv):
        config.update("jax_enable_compilation_cache", False)
    elif config.jax_enable_compilation_cache and getattr(config, _DIRECTORY, None) is None and _writable(directory):
        config.update(_DIRECTORY, str(directory))
        if _THRESHOLD.upper() not in os.environ:
            config.update(_THRESHOLD, _LEAST)
    return others


def default_directory() -> pathlib.Path:
    """Where programs are kept if nobody says otherwise: `kvjax/compiled` in `XDG_CACHE_HOME`, or else in `~/.cache`."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(caches) / "kvjax" / "compiled"


def _writable(directory: pathlib.Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return True
        reason = "it is not writable"
    except OSError as e:
        reason = e.strerror or str(e)
    print(f"compiled programs are not kept: {directory}: {reason}; set JAX_COMPILATION_CACHE_DIR", file=sys.stderr)
    return False
