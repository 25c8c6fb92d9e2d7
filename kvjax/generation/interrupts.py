"""Delays Ctrl-C to the end of a step."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C to the end of the `with` block; only the main thread gets it."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *what: came.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
