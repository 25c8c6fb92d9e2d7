"""A results directory: what was run, every example as it finished, and where to go on."""

import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.experiments import stopping
from kvjax.experiments.core.command import write_json
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.core.provenance import environment
from kvjax.models.written import BESIDE, naming, write_bytes

Key = tuple[str, str, str, int]


def sample_key(sample: dict[str, Any]) -> Key:
    """(method, budget label, task, index) of a line."""
    return sample["method"], sample["budget"], sample["task"], sample["index"]


def planned_keys(config: dict[str, Any], bad: Iterable[dict[str, Any]] = ()) -> list[Key]:
    """The keys of all lines that a run of a config has when it is complete: of all rows of its shard but bad ones.

    A policy with `tasks` runs these alone.
    """
    without = {(row["task"], row["index"]) for row in bad}
    shard, shards = config.get("shard") or (1, 1)
    return [
        (p["method"], p["budget"], task, i)
        for p in config["policies"]
        for task, of in config["tasks"].items()
        if task in p.get("tasks", config["tasks"])
        for i in range(of["examples"])
        if i % shards == shard - 1 and (task, i) not in without
    ]


class Results:
    """`manifest.json`, `samples.jsonl` and `costs.json` of one run; everything else is made from them.

    Lines are written and synced as examples finish. A line that a killed run left half written is dropped; its example
    runs again. Every line, the costs and the kept positions carry a seal (`seal`), which shows that this run wrote them
    and that nobody changed them since.
    """

    def __init__(self, directory: pathlib.Path, config: dict[str, Any], command: list[str], *, restart: bool = False):
        """Opens or resumes a directory.

        Args:
          directory: made if absent.
          config: the resolved config; a directory belongs to one config.
          command: the command line.
          restart: begin anew; what is there is moved aside, not deleted. A directory that a process writes to stays.

        Raises:
          ValueError: the directory is a file, holds another config or lines that are not this run's, or another process
            writes to it; or --restart would move a running job's directory inside, or the one that this process is in.
        """
        self.directory = directory
        self.config = json.loads(json.dumps(config))
        self._lock = Locked(directory)
        try:
            if restart and _holds(directory, ("manifest.json", *_PRODUCTS)):
                self._move_aside()
            self._open(environment(command))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Results":
        self._noted = stopping.noted(self._stored)
        self._noted.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        self._noted.__exit__(*error)

    def _stored(self) -> str:
        return (
            f"{self.directory} holds what was finished ({len(self.samples)} lines of samples.jsonl), and the same "
            "command goes on from there, without --restart"
        )

    def _move_aside(self) -> None:
        directory = self.directory.resolve()
        if pathlib.Path.cwd().is_relative_to(directory):
            raise ValueError(f"--restart would move the working directory, {directory}, aside; run it from elsewhere")
        for other in {path.parent for path in directory.rglob(".lock")} - {directory}:
            Locked(other).close()
        directory.rename(old := _free_name(directory))
        with self._lock:  # held until the new directory is locked
            self._lock = Locked(directory)
        print(f"the earlier run was moved to {old}")

    def _open(self, now: dict[str, Any]) -> None:
        manifest = self.directory / "manifest.json"
        there = _holds(self.directory, _PRODUCTS)
        if not manifest.exists() and there:
            raise ValueError(
                f"{self.directory} holds {', '.join(there)} but no manifest.json, so that nothing says whose they are; "
                "choose another --output, or --restart to move it aside"
            )
        old = read_config(self.directory) if manifest.exists() else None
        if there and old != self.config:
            changes = "; ".join(_differences(old, self.config))
            raise ValueError(
                f"{self.directory} holds a run with another config ({changes}); choose another --output, or "
                "--restart to move it aside"
            )
        self.samples, whole = read_samples(self.directory, self.config)
        self.costs = read_costs(self.directory, self.config)
        self.bad = read_bad(self.directory, self.config)
        if old != self.config:  # nothing there, or a start that came to nothing
            write_json(manifest, {"config": self.config, **now})
        for cut_off in (f for d in (self.directory, self.directory / "kept") for f in d.glob(".*.tmp")):
            if BESIDE.fullmatch(cut_off.name):  # by a kill
                cut_off.unlink()
        lines = self.directory / "samples.jsonl"
        if lines.is_file() and whole < lines.stat().st_size:
            print(f"the last line of {lines} was cut short; its example runs again", file=sys.stderr)
            os.truncate(lines, whole)
        self._changed = self._compare(now) if there else None

    def _compare(self, now: dict[str, Any]) -> dict[str, Any] | None:
        """The environment as it is now, if what is there was made in another, which is said."""
        manifest = json.loads((self.directory / "manifest.json").read_bytes())
        last = [manifest, *resumptions(manifest)][-1]
        changes = [d for k in _MAKES for d in _differences(last.get(k), now[k], k)]
        if changes:
            print(
                f"{self.directory} holds results that were made otherwise than this run would make them "
                f"({'; '.join(changes)}); --restart makes all of them anew",
                file=sys.stderr,
            )
        return now if changes else None

    def _check(self) -> None:
        """Before anything is written: the directory is still this process's own, and says what made the next lines.

        Raises:
          ValueError: a directory that was moved away, or whose lock was deleted.
        """
        if not self._lock.holds():
            raise ValueError(
                f"{self.directory} was moved, or its .lock deleted, while this process was writing there; the lines "
                "written so far are where they were written, and the same command goes on from there"
            )
        if self._changed is not None:
            manifest = json.loads((self.directory / "manifest.json").read_bytes())
            resumed = [*resumptions(manifest), {"after_lines": len(self.samples), **self._changed}]
            write_json(self.directory / "manifest.json", {**manifest, "resumed": resumed})
            self._changed = None

    def close(self) -> None:
        """Lets other processes write to the directory."""
        self._lock.close()

    def append(self, samples: Iterable[dict[str, Any]]) -> None:
        """Writes the lines that are not there yet."""
        new = [s for s in samples if sample_key(s) not in self.samples]
        self._check()
        path = self.directory / "samples.jsonl"
        with naming(path), path.open("a") as f:
            f.writelines(json.dumps({**s, "seal": seal(self.config, s)}) + "\n" for s in new)
            f.flush()
            os.fsync(f.fileno())
        self.samples |= {sample_key(s): s for s in new}

    def take_over(self, label: str, source: str, samples: Sequence[dict[str, Any]]) -> None:
        """Writes the lines of one method and budget that another run has made, and notes in the manifest which run."""
        self._check()
        path = self.directory / "manifest.json"
        manifest = json.loads(path.read_bytes())
        noted = {**manifest.get("taken_over", {}), label: {"from": source, "lines": len(samples)}}
        write_json(path, {**manifest, "taken_over": noted})
        self.append(samples)

    def set_bad(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of data that cannot be asked."""
        self.bad = list(rows)
        if self.bad or (self.directory / "bad_rows.jsonl").exists():
            self._check()
            sealed = ({**row, "seal": seal(self.config, row)} for row in self.bad)
            write_bytes(self.directory / "bad_rows.jsonl", "".join(json.dumps(row) + "\n" for row in sealed).encode())

    def expected(self) -> list[Key]:
        """The keys of all lines that the run has when it is complete."""
        return planned_keys(self.config, self.bad)

    def lines(self) -> list[dict[str, Any]]:
        """All lines of a complete run, in order."""
        return [self.samples[key] for key in self.expected()]

    def set_cost(self, method: str, budget: str, cost: dict[str, Any]) -> None:
        """Writes the sizes of one policy."""
        self._check()
        self.costs[f"{method}@{budget}"] = cost
        write_json(self.directory / "costs.json", {**self.costs, "seal": seal(self.config, self.costs)})


# What an environment holds that results depend on.
_MAKES = ("code", "versions", "switches", "device")
# What a run leaves beside its manifest.
_PRODUCTS = (
    "samples.jsonl",
    "bad_rows.jsonl",
    "costs.json",
    "kept",
    "checkpoints",
    "tables",
    "head.npz",
    "summary.json",
    "summary.md",
)


def _holds(directory: pathlib.Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if (directory / name).exists()]


def seal(config: dict[str, Any], content: Any) -> str:
    """What shows that content belongs to a config and is whole: a digest of both."""
    text = f"{json.dumps(config, sort_keys=True)}\n{json.dumps(content)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """The config of a directory's run.

    Raises:
      ValueError: a manifest that cannot be read.
    """
    path = directory / "manifest.json"
    try:
        config = json.loads(path.read_bytes())["config"]
        if not isinstance(config, dict):
            raise TypeError("its config is no object")
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(
            f"{path} is broken ({type(e).__name__}: {e}), so that nothing says which config was run; choose another "
            "--output, or --restart to move the directory aside"
        ) from e
    return config


def resumptions(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What a manifest notes of resumptions, less what is none."""
    noted = manifest.get("resumed")
    return [each for each in noted if isinstance(each, dict)] if isinstance(noted, list) else []


def read_samples(directory: pathlib.Path, config: dict[str, Any]) -> tuple[dict[Key, dict[str, Any]], int]:
    """The lines of a config's run by their keys, without seals, and how many bytes of the file are whole lines.

    Raises:
      ValueError: a line that this run did not write, or wrote twice; an end that is more than a line cut short.
    """
    path = directory / "samples.jsonl"
    *lines, rest = (path.read_bytes() if path.exists() else b"").split(b"\n")
    samples: dict[Key, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        sample, fault = _unsealed(line, config)
        if not fault and sample_key(sample) in samples:
            fault = "stands there twice"
        if fault:
            shown = line[:60].decode(errors="replace")
            raise ValueError(
                f"line {number} of {path} {fault}: {shown!r}; delete the line, and its example runs again, or begin "
                "anew with --restart"
            )
        samples[sample_key(sample)] = sample
    if not _cut_short(rest):
        raise ValueError(
            f"{path} ends in {len(rest)} bytes without a line break that are not one line cut short: {rest[:60]!r}; if "
            "its line breaks were changed, put them back, or begin anew with --restart"
        )
    return samples, sum(len(line) + 1 for line in lines)


def _cut_short(rest: bytes) -> bool:
    """Whether bytes are the beginning of one line, behind which a crash may have left zeros."""
    start, written = b'{"method": ', rest.rstrip(b"\0")
    return written[: len(start)] == start[: len(written)] and written.count(b'"seal": ') < 2


def _unsealed(
    line: bytes, config: dict[str, Any], fields: Sequence[str] = ("method", "budget", "task", "index")
) -> tuple[dict[str, Any], str]:
    """A line without its seal, and what is wrong with it."""
    try:
        sample = json.loads(line)
        mark = sample.pop("seal")
        _ = [sample[field] for field in fields]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}, "is no line that this run wrote"
    return sample, "" if mark == seal(config, sample) else "was changed, or was written by another run"


def read_costs(directory: pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a config's policies; those of a broken file are missing, which is said."""
    path = directory / "costs.json"
    try:
        costs = json.loads(path.read_bytes())
        if costs.pop("seal") == seal(config, costs):
            return costs
        fault = "it was changed, or was written by another run"
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        fault = f"{type(e).__name__}: {e}"
    print(f"{path} cannot be used ({fault}); what it held is found anew", file=sys.stderr)
    return {}


def read_bad(directory: pathlib.Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of data that a config's run could not ask; none of them if any was changed, which finds them anew."""
    path = directory / "bad_rows.jsonl"
    found = [_unsealed(line, config, ("task", "index", "line", "reason")) for line in _lines(path)]
    return [] if any(fault for _, fault in found) else [row for row, _ in found]


def _lines(path: pathlib.Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """The leaves in which two configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        inside = lambda k: f"{name}.{k}".lstrip(".")
        return [d for k in sorted({*old, *new}) for d in _differences(old.get(k), new.get(k), inside(k))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in _differences(a, b, f"{name}[{i}]")]
    return [] if old == new else [f"{name}: {old!r} there, {new!r} now"]


def _free_name(directory: pathlib.Path) -> pathlib.Path:
    i = 1
    while (new := directory.with_name(f"{directory.name}.old-{i}")).exists():
        i += 1
    return new
