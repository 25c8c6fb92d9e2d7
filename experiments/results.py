"""A results directory: what was run, every example as it finished, and where to go on."""

import datetime
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterable
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax-checkpoint", "transformers", "kvjax")

Key = tuple[str, str, str, int]


def sample_key(sample: dict[str, Any]) -> Key:
    """(method, budget label, task, index) of a line."""
    return sample["method"], sample["budget"], sample["task"], sample["index"]


class Results:
    """`manifest.json`, `samples.jsonl` and `costs.json` of one run; everything else is made from them.

    Lines are written and synced as examples finish. A line that a killed run left half written is dropped; its example
    runs again.
    """

    def __init__(self, directory: pathlib.Path, config: dict[str, Any], command: list[str], *, restart: bool = False):
        """Opens or resumes a directory.

        Args:
          directory: made if absent.
          config: the resolved config; a directory belongs to one config.
          command: the command line.
          restart: begin anew; what is there is moved aside, not deleted.

        Raises:
          ValueError: the directory holds another config, or another process writes to it.
        """
        if restart and (directory / "manifest.json").is_file():
            directory.rename(_free_name(directory))
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._lock = (directory / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._lock.close()
            raise ValueError(f"another process is writing to {directory}; wait for it, or choose --output") from e
        try:
            self._open(config, command)
        except ValueError:
            self._lock.close()
            raise

    def _open(self, config: dict[str, Any], command: list[str]) -> None:
        manifest = self.directory / "manifest.json"
        config = json.loads(json.dumps(config))
        self.samples = {sample_key(s): s for s in self._read_samples()}
        old = json.loads(manifest.read_text())["config"] if manifest.is_file() else None
        if self.samples and old is not None and old != config:
            changes = "; ".join(_differences(old, config))
            raise ValueError(
                f"{self.directory} holds a run with another config ({changes}); choose another --output, or "
                "--restart to move it aside"
            )
        if old != config:  # nothing there, or a start that came to nothing
            write_json(manifest, {"config": config, **environment(command)})
        costs = self.directory / "costs.json"
        self.costs: dict[str, Any] = json.loads(costs.read_text()) if costs.is_file() else {}

    def close(self) -> None:
        """Lets other processes write to the directory."""
        self._lock.close()

    def _read_samples(self) -> list[dict[str, Any]]:
        path = self.directory / "samples.jsonl"
        if not path.is_file():
            return []
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with path.open("r+b") as f:
                f.truncate(end)
        return [json.loads(line) for line in data[:end].splitlines()]

    def append(self, samples: Iterable[dict[str, Any]]) -> None:
        """Writes the lines that are not there yet."""
        new = [s for s in samples if sample_key(s) not in self.samples]
        with (self.directory / "samples.jsonl").open("a") as f:
            f.writelines(json.dumps(s) + "\n" for s in new)
            f.flush()
            os.fsync(f.fileno())
        self.samples |= {sample_key(s): s for s in new}

    def set_cost(self, method: str, budget: str, cost: dict[str, Any]) -> None:
        """Writes the sizes of one policy."""
        self.costs[f"{method}@{budget}"] = cost
        write_json(self.directory / "costs.json", self.costs)


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """The leaves in which two configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        inside = lambda k: f"{name}.{k}".lstrip(".")
        return [d for k in sorted({*old, *new}) for d in _differences(old.get(k), new.get(k), inside(k))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in _differences(a, b, f"{name}[{i}]")]
    return [] if old == new else [f"{name}: {old!r} there, {new!r} now"]


def write_json(path: pathlib.Path, content: Any) -> None:
    """Replaces a file in one step, so that a killed run leaves the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def _free_name(directory: pathlib.Path) -> pathlib.Path:
    i = 1
    while (new := directory.with_name(f"{directory.name}.old-{i}")).exists():
        i += 1
    return new


def device_info() -> dict[str, Any]:
    """What this runs on, and with which versions."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
    }


def environment(command: list[str]) -> dict[str, Any]:
    """How to make the same results again: the command, the commit, versions and the device."""
    device = device_info()
    return {
        "command": command,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": device.pop("versions"),
        "device": device,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str | None:
    here = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout, or no git: the manifest says null
    return done.stdout.strip()
