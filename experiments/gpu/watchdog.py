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


def followed(
    command: Sequence[str], seconds: float, patience: float, line: Callable[[str], None], environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Calls `line` with every line that a command writes, as it comes.

    Returns:
      Its exit code, None where it was killed after some seconds, or some that brought no line; and what it wrote to
      standard error.
    """
    with tempfile.TemporaryDirectory() as folder:  # a file does not block, as the pipe of what does not die
        out, error = (pathlib.Path(folder, name) for name in ("out", "error"))
        stop, heard, code, said = time.monotonic() + seconds, time.monotonic(), None, ""
        with (
            out.open("w") as to,
            error.open("w") as errors,
            out.open() as lines,
            _started(command, stdout=to, stderr=errors, env=environment) as process,
        ):
            while code is None and time.monotonic() < min(stop, heard + patience):
                time.sleep(0.1)
                code = process.poll()
                *whole, said = (said + lines.read()).split("\n")
                for each in whole:
                    line(each)
                heard = time.monotonic() if whole else heard
        return code, error.read_text(errors="replace")


def too_large(error: str) -> bool:
    """Whether memory did not suffice, as jax or PyTorch says it."""
    return any(x in error for x in ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory"))


def tell(methods: Sequence[str], measure: Callable[[str], dict[str, Any]]) -> None:
    """Prints a line of JSON for each method: what a worker measures of it, or the `reason` why nothing is.

    After an error with which the device may be lost, the methods behind it have no line.

    Raises:
      SystemExit: there was an error.
    """
    failed = False
    for method in methods:
        try:
            found = measure(method)
        except Exception as error:  # the next one may run
            traceback.print_exc()
            found = {"reason": f"{type(error).__name__}: {str(error)[:300]}"}
            failed = True
        print(json.dumps({"method": method} | found), flush=True)
        wrong = found.get("reason", "")
        if ("CUDA" in wrong or "INTERNAL" in wrong) and not too_large(wrong):
            break
    if failed:
        sys.exit(1)


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
