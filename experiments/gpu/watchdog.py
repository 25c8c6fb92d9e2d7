"""Runs what may hang, a GPU's driver above all, in processes that are killed: nothing here touches a device."""

import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_DYING = 10.0  # seconds until a killed process is given up: one that waits for a driver may not even die


def end_with_children() -> None:
    """From now on SIGTERM, as a batch system sends it, kills what is watched here too and ends with exit code 143."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def captured(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """The finished command with its output, or None where it was killed after some seconds."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        return None
    except BaseException:
        _kill(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def watched(command: Sequence[str], file: pathlib.Path, patience: float) -> int | None:
    """The exit code of a command, or None where it was killed because it left a file unchanged for so many seconds."""
    started = time.time()
    process = subprocess.Popen(command)
    try:
        while True:
            changed = file.stat().st_mtime if file.exists() else 0.0
            left = max(started, changed) + patience - time.time()
            if left <= 0:
                _kill(process)
                return None
            try:
                return process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                continue
    except BaseException:
        _kill(process)
        raise


def _kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    try:
        process.communicate(timeout=_DYING)
    except subprocess.TimeoutExpired:
        return
