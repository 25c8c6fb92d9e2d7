"""Runs what may hang, a GPU's driver above all, in processes that are killed: nothing here touches a device."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
