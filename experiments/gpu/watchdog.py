"""Runs what may hang, a GPU's driver above all, in processes that are killed: nothing here touches a device."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_DYING = 10.0  # seconds until a killed process is given up: one that waits for a driver may not even die


def end_with_children() -> None:
    """From now on SIGTERM, as a batch system sends it, kills what is watched here too and ends with exit code 143."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def _started(command: Sequence[str], **pipes: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed where it outlives the block."""
    process = subprocess.Popen(command, **pipes)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_DYING)


def captured(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """The finished command with its output, or None where it was killed after some seconds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with _started(command, **pipes) as process, contextlib.suppress(subprocess.TimeoutExpired):
        out, error = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(command, process.returncode, out, error)
    return None


def told(
    command: Sequence[str], methods: Sequence[str], seconds: float, patience: float, environment: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """What `tell` says of methods in a process, as it comes, and whether each is `ok`: memory may not suffice.

    A process that dies has a `reason` of the method that it was at, unless its last line says why it cannot go on.

    Args:
      command: the methods are added to it.
      methods: in their order.
      seconds: after which it is killed.
      patience: seconds without a line after which it is killed.
      environment: its variables.
    """
    left, said, wrong, code = [*methods], "", "", None
    with (
        tempfile.NamedTemporaryFile() as out,  # a file does not block, as the pipe of what does not die
        tempfile.TemporaryFile("w+", errors="replace") as error,
        pathlib.Path(out.name).open() as lines,
        _started([*command, *left], stdout=out, stderr=error, env=environment) as process,
    ):
        stop, heard = time.monotonic() + seconds, time.monotonic()
        while code is None and time.monotonic() < min(stop, heard + patience):
            time.sleep(0.1)
            code = process.poll()
            *whole, said = (said + lines.read()).split("\n")
            heard = time.monotonic() if whole else heard
            for found in (json.loads(line) for line in whole if line.startswith('{"method": ')):  # libraries print, too
                left.remove(found["method"])
                wrong = found.get("reason", "")
                yield {"ok": not wrong or too_large(wrong)} | found
        if left and not wrong:
            error.seek(0)
            ended = f"the process ended with code {code}: {error.read()[-400:]}"
            yield {"ok": False, "method": left[0], "reason": "killed at its limit" if code is None else ended}


def too_large(error: str) -> bool:
    """Whether memory did not suffice, as jax or PyTorch says it."""
    return any(x in error for x in ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory"))


def tell(methods: Sequence[str], measure: Callable[[str], dict[str, Any]]) -> None:
    """Prints a line of JSON for each method: what a worker measures of it, or the `reason` why nothing is.

    After an error with which the device may be lost, the methods behind it have no line.

    Raises:
      SystemExit: always; with code 1 if there was an error.
    """
    failed = False
    for method in methods:
        try:
            found, why = measure(method), ""
        except Exception as error:  # the next one may run
            traceback.print_exc()
            failed, why = True, f"{type(error).__name__}: {str(error)[:300]}"
            found = {"reason": why}
        print(json.dumps({"method": method} | found), flush=True)
        if ("CUDA" in why or "INTERNAL" in why) and not too_large(why):
            break
    sys.exit(failed)


def watched(command: Sequence[str], file: pathlib.Path, patience: float) -> int | None:
    """The exit code of a command, or None where it was killed because it left a file unchanged for so many seconds."""
    began = time.time()
    with _started(command) as process:
        while True:
            changed = file.stat().st_mtime if file.exists() else 0.0
            left = max(began, changed) + patience - time.time()
            if left <= 0:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=left)
