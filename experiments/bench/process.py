"""Measuring: runs in turns, processes of their own and what they hold (Linux says it), rows that were stored.

Only the standard library is needed here, as the peers' environment has no jax.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def seconds_in_turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, wait: Callable[[Any], Any]
) -> dict[str, list[float]]:
    """Seconds of each run in every round, in which each has its turn.

    Args:
      runs: what is timed, by name.
      rounds: how often; a round before, which warms up, is not counted.
      wait: returns once what a run gave is there, as `jax.block_until_ready`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            wait(run())
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def held(what: str) -> int:
    """Bytes that this process holds ("VmRSS"), or has held at its peak ("VmHWM"); rusage has its parent's among it."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def loading(
    load: Callable[[], Sequence[Any]], read: Callable[[Any], Any], size: Callable[[Any], int]
) -> dict[str, Any]:
    """What loading parameters takes, and reading each number once.

    Args:
      load: the parameters.
      read: looks at every number of one.
      size: its bytes.

    Returns:
      `ready` and `read`: seconds until there are parameters that can be used, and until each has been read once;
      `processor`: seconds of all threads until then; `peak`: bytes that the process has held at most; `before`: those
      that it held before; `size`: those of the parameters.
    """
    before, start, spent = held("VmRSS"), time.perf_counter(), time.process_time()
    params = load()
    ready = time.perf_counter() - start
    for x in params:
        read(x)
    took = {"ready": ready, "read": time.perf_counter() - start, "processor": time.process_time() - spent}
    return took | {"before": before, "peak": held("VmHWM"), "size": sum(map(size, params))}


def forget_peak() -> None:
    """From here on the peak is that of what comes."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def apart(
    module: str,
    function: str,
    *arguments: Any,
    python: Sequence[str] = (sys.executable,),
    where: pathlib.Path | None = None,
    **environment: str,
) -> Any:
    """What a function of a module returns in a process of its own: numbers, texts and what JSON holds of them.

    Args:
      module, function: where it is.
      *arguments: what it is called with.
      python: the command of an interpreter.
      where: the folder that it starts in, this one's if None.
      **environment: variables that the process has beside this one's.

    Raises:
      RuntimeError: it failed, with what it wrote.
    """
    code = f"import json; from {module} import {function} as f; print(json.dumps(f(*{arguments!r})))"
    how: dict[str, Any] = {"cwd": where, "env": {**os.environ, **environment}}
    done = subprocess.run([*python, "-c", code], capture_output=True, text=True, check=False, **how)
    if done.returncode:
        raise RuntimeError(f"{function}{arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def stored_rows(path: pathlib.Path, about: dict[str, Any]) -> dict[str, Any]:
    """The rows of a file that says the same of itself.

    Args:
      path: the file; without one there are no rows.
      about: what it must hold beside "rows".

    Raises:
      ValueError: a file that says something else of itself, or none that this script wrote.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
        there, rows = {name: found[name] for name in about}, dict(found["rows"])
    except (ValueError, TypeError, KeyError) as e:
        wrong = f"{type(e).__name__}: {e}"
        raise ValueError(f"{path} is not a file of this script ({wrong}); choose another --output") from e
    for name, value in about.items():
        if there[name] != value:
            raise ValueError(
                f"{path} holds rows with another {name}: {there[name]} there, {value} now; choose another --output"
            )
    return rows
