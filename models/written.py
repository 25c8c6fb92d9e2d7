"""Files that are replaced in one step."""

import contextlib
import os
import pathlib
import re
import secrets
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
