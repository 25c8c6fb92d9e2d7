"""Files that are replaced in one step."""

import contextlib
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
    """Fills a new folder that appears in one step, so that nobody reads it half-written.

    What the block fills is a folder of another name beside it, which is renamed once all is on the disk. Of several
    processes that make the same folder at once, the first one's stays.

    Raises:
      ValueError: a place that cannot be written to, or is full.
    """
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        with naming(temporary):
            temporary.mkdir(parents=True)
            yield temporary
            for file in (*temporary.iterdir(), temporary):
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            try:
                temporary.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
    except OSError as e:
        raise ValueError(
            f"{path} cannot be written ({e.strerror or e}); make room or rights there, or name another cache folder in "
            "the variable KVJAX_CACHE"
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
