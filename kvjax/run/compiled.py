"""Compiled programs that later processes find again."""

import os
import pathlib
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

_DIRECTORY = "jax_compilation_cache_dir"
_THRESHOLD = "jax_persistent_cache_min_compile_time_secs"
_LEAST = 0.05  # seconds of compiling from which on a program is kept; jax's own choice is 1


def cache_folder() -> pathlib.Path:
    """Where what was fetched, converted or compiled stays: KVJAX_CACHE, or `kvjax` in XDG_CACHE_HOME or ~/.cache."""
    usual = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kvjax")
    return pathlib.Path(os.environ.get("KVJAX_CACHE") or usual).expanduser()


def keep_compiled(folder: str | os.PathLike[str] | None = None) -> pathlib.Path | None:
    """Keeps compiled programs in a folder, by jax's persistent cache, so that later processes need not compile them.

    Whoever can write to the folder decides what such a process runs.

    Args:
      folder: where. If None, what jax was told (`JAX_COMPILATION_CACHE_DIR`), or else `compiled` in the cache folder;
        and nothing is kept where jax was told so (`JAX_ENABLE_COMPILATION_CACHE=0`).

    Returns:
      The folder; None if nothing is kept.

    Raises:
      ValueError: no local folder, or one that cannot be made or written to.
    """
    config: Any = jax.config
    there = getattr(config, _DIRECTORY)
    if folder is None and (there or not config.jax_enable_compilation_cache):
        return pathlib.Path(there) if config.jax_enable_compilation_cache else None
    if folder is not None and (not isinstance(folder, str | os.PathLike) or not (text := str(folder)) or "://" in text):
        raise ValueError(f"folder={folder!r} is no local folder; give its path")
    place = pathlib.Path(cache_folder() / "compiled" if folder is None else folder).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(place, os.W_OK | os.X_OK) else "it is not writable"
    except (OSError, ValueError) as e:  # such as a name with a zero byte
        reason = getattr(e, "strerror", None) or str(e)
    if reason:
        raise ValueError(f"compiled programs cannot be kept in {place}: {reason}; set JAX_COMPILATION_CACHE_DIR")
    config.update("jax_enable_compilation_cache", True)
    config.update(_DIRECTORY, str(place))
    if _THRESHOLD.upper() not in os.environ:
        config.update(_THRESHOLD, _LEAST)
    reset_cache()  # what has compiled already has found that there is none
    return place
