"""Ctrl-C, SIGTERM and SIGHUP: a script says at once what is stored, and stops after the piece of work that it is at.

Python raises KeyboardInterrupt wherever the main thread is: in a callback, which drops it, or after minutes of
compiling. Here a thread of its own takes signals, which ends a process at any time, and work asks whether to go on.
`core.command` begins it for every command.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_lock = threading.RLock()
_came: list[int] = []
_at_work: list[str] = []
_notes: list[Callable[[], str]] = [lambda: "no result was being written"]
_endings: list[Callable[[], object]] = []
_began = False


class Interrupted(KeyboardInterrupt):
    """An interruption, with a line that says what is stored."""


def begin() -> None:
    """Takes the signals of this process over, but for those that are ignored, as under nohup; once."""
    global _began
    if _began:
        return
    _began = True
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # the system writes its number to the pipe
    threading.Thread(target=_watch, args=(read,), daemon=True).start()


def _watch(pipe: int) -> None:
    while numbers := os.read(pipe, 1):
        if numbers[0] in _SIGNALS:
            _take(numbers[0])


def _take(number: int) -> None:
    with _lock:
        name, first = signal.Signals(number).name, not _came
        _came.append(number)
        if first and _at_work:
            _say(f"{name}: stopping after {_at_work[-1]}; a second signal ends it at once")
            return
        for end in [*_endings]:
            end()
        _say(f"{name}: interrupted; {_notes[-1]()}")
        os._exit(128 + number)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        os.write(2, f"\n{line}\n".encode())


def asked() -> bool:
    """Whether a signal has come."""
    return bool(_came)


def exit_code() -> int:
    """That of an interrupted process: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (_came[0] if _came else signal.SIGINT)


def check() -> None:
    """Goes on, unless a signal has come.

    Raises:
      KeyboardInterrupt: one has.
    """
    if _came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def finishing(what: str) -> Iterator[None]:
    """Work that a first signal lets end: whoever does it asks `asked` or calls `check` where it can stop.

    Args:
      what: is finished, as the line says that tells of the signal.

    Raises:
      KeyboardInterrupt: a signal came, and the work is done.
    """
    with _lock:
        check()
        _at_work.append(what)
    try:
        yield
    finally:
        with _lock:
            _at_work.pop()
    check()


@contextlib.contextmanager
def ending(end: Callable[[], object]) -> Iterator[None]:
    """Where a signal ends the process at once inside, `end` is called before."""
    _endings.append(end)
    try:
        yield
    finally:
        _endings.remove(end)


@contextlib.contextmanager
def noted(note: Callable[[], str]) -> Iterator[None]:
    """Says of an interruption inside what is stored, and how to go on.

    Raises:
      Interrupted: in place of KeyboardInterrupt.
    """
    _notes.append(note)
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as e:
        raise Interrupted(f"interrupted; {note()}") from e
    finally:
        _notes.pop()
