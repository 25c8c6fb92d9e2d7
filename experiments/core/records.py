"""A results directory: `manifest.json` says what is run, `samples.jsonl` has a line a question, written as it finishes.

A line is flat: `method`, `budget`, `task`, `index` and `question` name it, `id` says what made it, `score` or `nll` is
its value, and the rest says what was answered, what it cost, and by `context` which lines share one; `check` is a
checksum of all that. pandas reads the file as it is. `manifest.json` holds the config and, in `made`, the command,
code, versions and device, with one entry more for every resumption by others.
"""

import hashlib
import io
import json
import math
import os
import pathlib
import sys
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from kvjax.experiments import stopping
from kvjax.experiments.core.command import write_json
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.core.provenance import environment
from kvjax.models.written import BESIDE, naming, write_bytes

Line = dict[str, Any]
Key = tuple[str, str, str, int, int]

KEY: Final = ("method", "budget", "task", "index", "question")
"""What names a line."""
_MAKES: Final = ("code", "versions", "switches", "device")  # what results depend on besides the config
_STARTED: Final = ("manifest.json", "samples.jsonl", "checkpoints")
_KINDS: Final = (str, str, str, int, int)  # of the values of a key


def key(line: Line) -> Key:
    """What names a line."""
    method, budget, task, index, question = (line[name] for name in KEY)
    return method, budget, task, index, question


def digest(content: Any) -> str:
    """What stands for anything that JSON holds, and for the reprs of other things."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]


class Records:
    """The lines of one run. A directory belongs to one config, and to one process at a time.

    Lines are written and synced as they come. One that a killed run left half written is dropped, and its question runs
    again; none is written twice.

    Attributes:
      directory: where they are.
      config: the resolved config.
      lines: all lines by what names them.
    """

    def __init__(
        self, directory: pathlib.Path, config: dict[str, Any], command: Sequence[str], *, restart: bool = False
    ):
        """Opens a directory, or goes on in it.

        Args:
          directory: made if absent.
          config: the resolved config; if it has `ids`, of every method@budget, lines have one of them.
          command: the command line.
          restart: begin anew; what is there is moved aside, not deleted. A directory that a process writes to stays.

        Raises:
          ValueError: the directory is a file, holds another config, results of an older kvjax or lines that are not
            this run's, or another process writes to it; or --restart would move a running job's directory inside, or
            the one that this process is in.
        """
        self.directory, self.config = directory, json.loads(json.dumps(config))
        self._file, self._manifest = directory / "samples.jsonl", directory / "manifest.json"
        self._lock = Locked(directory)
        try:
            if restart and any((directory / name).exists() for name in _STARTED):
                self._move_aside()
            self._open(environment([*command]))
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> "Records":
        self._noted = stopping.noted(self._stored)
        self._noted.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._lock.close()
        self._noted.__exit__(*error)

    def _stored(self) -> str:
        return (
            f"{self.directory} holds what was finished ({len(self.lines)} lines of samples.jsonl), and the same "
            "command goes on from there, without --restart"
        )

    def _move_aside(self) -> None:
        directory = self.directory.resolve()
        if pathlib.Path.cwd().is_relative_to(directory):
            raise ValueError(f"--restart would move the working directory, {directory}, aside; run it from elsewhere")
        for other in {path.parent for path in directory.rglob(".lock*")} - {directory}:
            Locked(other).close()
        i = 1
        while (old := directory.with_name(f"{directory.name}.old-{i}")).exists():
            i += 1
        directory.rename(old)
        with self._lock:  # held until the new directory is locked
            self._lock = Locked(directory)
        print(f"the earlier run was moved to {old}")

    def _open(self, now: dict[str, Any]) -> None:
        for name in ("kept", "checkpoints", "samples.jsonl"):  # others are replaced, not written to
            if (self.directory / name).is_symlink():
                raise ValueError(f"{self.directory / name} is a link to another place; delete it, or choose --output")
        cut_off = [f for d in (self.directory, self.directory / "kept") for f in d.glob(".*.tmp")]
        for file in (f for f in cut_off if BESIDE.fullmatch(f.name)):  # by a kill
            file.unlink()
        there = [p.name for p in self.directory.iterdir() if p.name not in ("manifest.json", ".lock", ".lock.owner")]
        if not self._manifest.exists() and (lost := [name for name in _STARTED if name in there]):
            raise ValueError(
                f"{self.directory} holds {lost[0]} but no manifest.json, so that nothing says whose they are; choose "
                "another --output, or --restart to move it aside"
            )
        made = [now]
        if self._manifest.exists() and there:
            old = read_manifest(self.directory)
            bare = lambda config: {name: value for name, value in config.items() if name != "ids"}  # made of the rest
            changes = _differences(bare(old["config"]), bare(self.config)) or _differences(old["config"], self.config)
            if changes:
                raise ValueError(
                    f"{self.directory} holds a run with another config ({'; '.join(changes)}); choose another "
                    "--output, or --restart to move it aside"
                )
            made = old["made"]
        self.lines, whole = read_lines(self._file)
        ids = self.config.get("ids", {})
        if strange := [line for line in self.lines.values() if ids and line.get("id") not in ids.values()]:
            raise ValueError(
                f"{self._file} has a line of another run, {key(strange[0])}; delete the line, and its question runs "
                "again, or begin anew with --restart"
            )
        if made == [now]:
            write_json(self._manifest, {"config": self.config, "made": made})
        if self._file.is_file() and whole < self._file.stat().st_size:
            print(f"the last line of {self._file} was cut short; its question runs again", file=sys.stderr)
            os.truncate(self._file, whole)
        self._changed = None
        if changes := "; ".join(d for k in _MAKES for d in _differences(made[-1].get(k), now[k], k)):
            self._changed = now
            print(
                f"{self.directory} holds results that were made otherwise than this run would make them ({changes}); "
                "--restart makes all of them anew",
                file=sys.stderr,
            )

    def _check(self) -> None:
        """Before anything is written: the directory is still this process's own, and says what made the next lines."""
        if not self._lock.holds():
            raise ValueError(
                f"{self.directory} was moved, or its .lock deleted, while this process was writing there; the lines "
                "written so far are where they were written, and the same command goes on from there"
            )
        if self._changed is not None:
            manifest = read_manifest(self.directory)
            made = [*manifest["made"], {"after_lines": len(self.lines), **self._changed}]
            write_json(self._manifest, {**manifest, "made": made})
            self._changed = None

    def append(self, lines: Iterable[Line]) -> None:
        """Writes and syncs the lines that are not there yet.

        Raises:
          ValueError: a directory that was moved away, or whose lock was deleted.
          OSError: a full disk, by the name of the file; what was written before stays.
        """
        new = {key(line): line for line in lines if key(line) not in self.lines}
        self._check()
        with naming(self._file), self._file.open("a") as f:
            f.writelines(json.dumps({**line, "check": _checksum(line)}) + "\n" for line in new.values())
            f.flush()
            os.fsync(f.fileno())
        self.lines |= new

    def keep(self, label: str, layers: Sequence[np.ndarray]) -> None:
        """Keeps the positions "K S" that each layer holds of a prompt, of one method@budget."""
        self._check()
        content = io.BytesIO()
        np.savez_compressed(content, *layers)
        (self.directory / "kept").mkdir(exist_ok=True)
        write_bytes(self.directory / "kept" / f"{label}.npz", content.getvalue())

    def set_bad(self, rows: Sequence[Line]) -> None:
        """Writes the rows of data that cannot be asked to `bad_rows.jsonl`."""
        path, content = self.directory / "bad_rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()
        if content != (path.read_bytes() if path.exists() else b""):
            self._check()
            write_bytes(path, content)

    def take_over(self, label: str, wanted: Collection[Key]) -> int:
        """Takes lines of a method@budget over from directories beside, where there are any that made the same.

        Those are runs with lines of an equal id, made by the same code, versions, switches and device. What is taken
        over is printed, and noted in the manifest. Times are those of the other runs.

        Args:
          label: the method@budget.
          wanted: what the lines are named by that this run wants of it.

        Returns:
          How many lines there were.
        """
        own, (method, _, budget), taken = self.config["ids"][label], label.rpartition("@"), 0
        for there in _beside(self.directory):
            try:
                manifest = read_manifest(there)
                ids = manifest["config"].get("ids", {})
            except (OSError, ValueError):  # no run, or one of an older kvjax
                continue
            theirs = next((name for name, each in ids.items() if each == own), None)
            if theirs is None or not _made_alike(manifest["made"]):
                continue
            try:
                lines = read_lines(there / "samples.jsonl")[0].values()
            except (OSError, ValueError) as e:
                print(f"{label}: nothing is taken over from {there}, an equal run: {e}", file=sys.stderr)
                continue
            found = [{**line, "method": method, "budget": budget} for line in lines if line.get("id") == own]
            found = [line for line in found if key(line) in wanted and key(line) not in self.lines]
            if not found:
                continue
            self._check()
            if theirs in (kept := load_kept(there)):
                self.keep(label, kept[theirs])
            manifest = read_manifest(self.directory)
            noted = [*manifest.get("taken_over", []), {"of": label, "from": str(there), "lines": len(found)}]
            write_json(self._manifest, {**manifest, "taken_over": noted})
            self.append(found)
            print(f"{label}: {len(found)} lines are taken over from {there}, an equal run; --restart runs them")
            taken += len(found)
        return taken


def _beside(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    here = directory.resolve()
    for path in sorted(here.parent.glob("*/manifest.json")):
        if path.parent != here and ".old-" not in path.parent.name:
            yield path.parent


def _made_alike(made: Sequence[dict[str, Any]]) -> bool:
    now = environment([])
    return all(each.get(k) == now[k] for each in made for k in _MAKES)


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
    """What a directory's manifest holds: `config` and `made`.

    Raises:
      ValueError: a manifest that cannot be read, or one of an older kvjax.
    """
    path = directory / "manifest.json"
    fix = "with another --output, or with --restart, which moves the directory aside"
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest["config"], dict):
            raise TypeError("its config is no object")
        ids, taken = manifest["config"].get("ids", {}), manifest.get("taken_over", [])
        if not isinstance(ids, dict) or not isinstance(taken, list):
            raise TypeError("its ids are no object, or what was taken over is no list")
        made = manifest.get("made")
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(
            f"{path} is broken ({type(e).__name__}: {e}), so that nothing says which config was run; run it anew {fix}"
        ) from e
    if not isinstance(made, list) or not made or not all(isinstance(each, dict) for each in made):
        raise ValueError(
            f"{directory} holds results of an older kvjax, which this one does not read; run it anew {fix}"
        )
    return manifest


def read_lines(file: pathlib.Path) -> tuple[dict[Key, Line], int]:
    """The whole lines of a file by what names them, and how many bytes they are; none of a file that is not there.

    Raises:
      ValueError: a line that no run wrote, or that stands there twice; an end that is more than a line cut short.
    """
    *whole, rest = (file.read_bytes() if file.exists() else b"").split(b"\n")
    found: dict[Key, Line] = {}
    for number, text in enumerate(whole, 1):
        try:
            line = _line(text)
            if key(line) in found:
                raise ValueError("stands there twice")
        except ValueError as e:
            raise ValueError(
                f"line {number} of {file} {e}: {text[:60].decode(errors='replace')!r}; delete the line, and its "
                "question runs again, or begin anew with --restart"
            ) from e
        found[key(line)] = line
    if rest.count(b'"method": ') > 1:
        raise ValueError(
            f"{file} ends in {len(rest)} bytes without a line break that are not one line cut short: {rest[:60]!r}; if "
            "its line breaks were changed, put them back, or begin anew with --restart"
        )
    return found, sum(len(text) + 1 for text in whole)


def _line(text: bytes) -> Line:
    """What a line holds. One without a checksum is of an older kvjax.

    Raises:
      ValueError: one that no run wrote, or that is another than was written.
    """
    try:
        line = json.loads(text)
        check = line.pop("check", None)
        values = [line[name] for name in ("score", "nll") if name in line]
        named = [*map(type, key(line))] == [*_KINDS]
        if not named or not all(map(math.isfinite, values)) or not 0 <= line.get("score", 0) <= 1:
            raise TypeError(line)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        raise ValueError("is no line that a run wrote") from e
    if check not in (None, _checksum(line)):
        raise ValueError("is not as it was written")
    return line


def _checksum(line: Line) -> int:
    return zlib.crc32(json.dumps(line, sort_keys=True).encode())


def load_kept(directory: pathlib.Path) -> dict[str, list[np.ndarray]]:
    """The positions "K S" of every layer that were kept, by method@budget; files that are broken are left out."""
    found = {}
    for path in sorted((directory / "kept").glob("*.npz")):
        try:
            with np.load(path) as data:
                found[path.name.removesuffix(".npz")] = [data[name] for name in data.files]
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error):
            continue
    return found


def read_bad(directory: pathlib.Path) -> list[Line]:
    """The rows of data that a run could not ask: task, index, line and reason."""
    path = directory / "bad_rows.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """The leaves in which two configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        inside = lambda k: f"{name}.{k}".lstrip(".")
        return [d for k in sorted({*old, *new}) for d in _differences(old.get(k), new.get(k), inside(k))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in _differences(a, b, f"{name}[{i}]")]
    return [] if old == new else [f"{name}: {old!r} there, {new!r} now"]
