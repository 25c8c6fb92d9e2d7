"""Directories that one process writes to at a time."""

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from kvjax.experiments import stopping


def locked(directory: pathlib.Path) -> "IO[str] | _Owned":
    """The directory, made if absent, as this process's own until what is returned is closed.

    Raises:
      ValueError: a file of this name, or a directory that another process writes to.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, not a directory; choose another --output")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    lock = path.open("a")  # a file of this name that another program made keeps what is in it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = holds_lock(lock, directory)  # unless it was moved between the opening and the lock
    except BlockingIOError:
        ours = False
    except OSError:  # a file system without locks
        lock.close()
        return _Owned(directory / ".lock.owner")
    if not ours:
        lock.close()
        raise ValueError(f"another process is writing to {directory}; wait for it, or choose another directory")
    return lock


def holds_lock(lock: "IO[str] | _Owned", directory: pathlib.Path) -> bool:
    """Whether what `locked` returned is of the directory that is there now."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (directory / pathlib.Path(lock.name).name).stat())
    except FileNotFoundError:
        return False


class _Owned:
    """A lock where the file system has none: a file that one process alone can make, which names it and its host.

    One that a process of this host left behind when it was killed is replaced. Of other hosts, and of containers that
    number processes themselves, nothing is known.
    """

    def __init__(self, path: pathlib.Path):
        """Makes the file.

        Raises:
          ValueError: it is there, and its process lives, or is of another host.
        """
        self.name = str(path)
        owner = _owner(path)
        if _here().items() <= owner.items() and not _lives(owner):
            _remove(path, owner)
        with contextlib.ExitStack() as stack:
            self._folder = os.open(path.parent, os.O_RDONLY)  # which stays the same where it is moved
            stack.callback(os.close, self._folder)
            try:
                self._file = stack.enter_context(path.open("x"))
            except FileExistsError as e:
                owner = {"host": "some host", "process": "one", **_owner(path)}
                raise ValueError(
                    f"another process is writing to {path.parent}: {owner['process']} on {owner['host']}, as {path} "
                    "says, since the file system has no locks; wait for it, or delete that file if the process has "
                    "ended"
                ) from e
            stack.callback(self._delete)
            stack.enter_context(stopping.ending(self.close))
            me = {**_here(), "process": os.getpid(), "started": _started(os.getpid())}
            self._file.write(json.dumps(me))
            self._file.flush()
            self._stack = stack.pop_all()

    def __enter__(self) -> "_Owned":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def fileno(self) -> int:
        """Of the file."""
        return self._file.fileno()

    def close(self) -> None:
        """Deletes the file, if it is still this one."""
        self._stack.close()

    def _delete(self) -> None:
        name = pathlib.Path(self.name).name
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.fileno()), os.stat(name, dir_fd=self._folder)):
                os.unlink(name, dir_fd=self._folder)


def _here() -> dict[str, str]:
    """What a process's number is of: the host, and where the system has such, the namespace of its processes."""
    try:
        return {"host": platform.node(), "namespace": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"host": platform.node(), "namespace": ""}


def _remove(path: pathlib.Path, owner: dict[str, Any]) -> None:
    """Removes the file of an owner that has ended, and none that another process has made since it was read."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.rename(aside)  # of all processes that try, one alone has it now
    except FileNotFoundError:
        return
    if _owner(aside) != owner:
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            aside.rename(path)
    aside.unlink(missing_ok=True)


def _owner(path: pathlib.Path) -> dict[str, Any]:
    """Whom a file says that a directory belongs to; nothing where it does not say."""
    try:
        found = json.loads(path.read_bytes())
        return found if isinstance(found["process"], int) else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _started(process: int) -> str:
    """When a process began, which tells it from later ones of its number; nothing where the system does not say."""
    if not pathlib.Path("/proc/self/stat").is_file():
        return ""
    return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


def _lives(owner: dict[str, Any]) -> bool:
    try:
        os.kill(owner["process"], 0)
        return _started(owner["process"]) == owner["started"]
    except (ProcessLookupError, OverflowError):
        return False
    except (OSError, KeyError):  # of somebody else
        return True


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
            stack.enter_context(_awaited(directory / ".writing.owner"))
        yield


def _awaited(path: pathlib.Path) -> _Owned:
    """As `_Owned`, once the process that has it has ended."""
    said = False
    while True:
        try:
            return _Owned(path)
        except ValueError as e:
            said or print(f"waiting: {e}", file=sys.stderr)
            said = True
            time.sleep(0.2)
