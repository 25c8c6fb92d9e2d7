"""Directories that one process writes to at a time."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

import filelock


class Locked:
    """A directory, made if absent, that is this process's own until it is closed.

    The file `.lock` stays; one that another program made keeps what is in it. Where the file system has no locks, the
    file `.lock.owner` says which process of which host has the directory; what a killed process of this host left is
    replaced.
    """

    def __init__(self, directory: pathlib.Path):
        """Takes the directory.

        Raises:
          ValueError: a file of this name, or a directory that another process writes to.
          OSError: a directory that cannot be made or written to.
        """
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file, not a directory; choose another --output")
        directory.mkdir(parents=True, exist_ok=True)
        self._held = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._path = directory / ".lock"
            lock = stack.enter_context(self._path.open("a"))
            busy = ValueError(f"another process is writing to {directory}; wait for it, or choose another directory")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file = os.fstat(lock.fileno())
                if not self.holds():  # it was moved between the opening and the lock
                    raise busy
            except BlockingIOError as e:
                raise busy from e
            except OSError:  # a file system without locks
                self._path = directory / ".lock.owner"
                try:
                    stack.enter_context(filelock.SoftFileLock(self._path).acquire(timeout=0.5))
                except filelock.Timeout as e:
                    raise ValueError(f"{busy}; if that process has ended, delete {self._path}") from e
                self._file = self._path.stat()
            self._held = stack.pop_all()

    def holds(self) -> bool:
        """Whether the directory is still there and this process's own: neither was moved nor its lock deleted."""
        try:
            return os.path.samestat(self._file, self._path.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Lets other processes write to the directory."""
        self._held.close()

    def __enter__(self) -> "Locked":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def alone_in(directory: pathlib.Path) -> Iterator[None]:
    """Waits until no other process writes files that belong together to a directory, which is made if absent."""
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        descriptor = os.open(directory, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            stack.enter_context(filelock.SoftFileLock(directory / ".writing.owner"))
        yield
