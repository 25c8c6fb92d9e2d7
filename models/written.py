"""Files that are replaced in one step, and folders that say whether they are whole."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator
from typing import Final

BESIDE: Final = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)
"""Names of what is written beside a file before it replaces it; a killed process leaves some."""


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the path to errors that come without one, as that of a full disk does."""
    try:
        yield
    except OSError as e:
        if e.filename is not None or e.errno is None:
            raise
        raise OSError(e.errno, os.strerror(e.errno), str(path)) from e


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Replaces a file in one step, so that a killed run or a full disk leaves the old one or the new one.

    What is written beside it first is a new file of a name that nobody can guess: it goes through no link. A link that
    stands at `path` itself is replaced, and what it leads to stays.
    """
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    with naming(path), temporary.open("xb") as f:
        try:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder that appears in one step once the block has filled it: nobody reads it half-written.

    Where several processes make the same folder, that of the first stays.

    Raises:
      ValueError: a place that is full, or where nothing can be written.
    """
    new = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        new.mkdir(parents=True)
        yield new
        for file in (*new.iterdir(), new):
            sync(file)
        new.rename(path)
    except OSError as e:
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            fix = "make room or get the right to write there, or set KVJAX_CACHE to another cache folder"
            raise ValueError(f"{path} cannot be written ({e.strerror or e}); {fix}") from e
    finally:
        shutil.rmtree(new, ignore_errors=True)


DIGESTS: Final = "digests.json"
"""Holds SHA-256 of the other files of a folder, by their names."""


def digest(file: pathlib.Path) -> str:
    """SHA-256 of a file, computed anew once its size or time is another."""
    return _digest(file, file.stat().st_size, file.stat().st_mtime_ns)


@functools.lru_cache(64)
def _digest(file: pathlib.Path, size: int, changed: int) -> str:
    del size, changed
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def seal(path: pathlib.Path) -> None:
    """Writes what tells whether the files of a folder are later what they are now."""
    (path / DIGESTS).write_text(json.dumps({file.name: digest(file) for file in sorted(path.iterdir())}))


def is_whole(path: pathlib.Path) -> bool:
    """Whether a folder that was sealed is there, with its files as they were."""
    try:
        wanted = json.loads((path / DIGESTS).read_bytes())
        return isinstance(wanted, dict) and all(digest(path / name) == of for name, of in wanted.items())
    except (OSError, ValueError, RecursionError):
        return False


def remove(path: pathlib.Path) -> None:
    """Removes a folder, or a link in its place: what that leads to stays.

    Raises:
      ValueError: what cannot be removed.
    """
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    except OSError as e:
        raise ValueError(f"{path} is damaged, and cannot be removed ({e.strerror or e}); remove it by hand") from e


def sync(file: pathlib.Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
