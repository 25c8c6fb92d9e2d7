"""What `gpu_check.py` writes down: rows of every section as they finish, and what its time did not suffice for."""

import contextlib
import dataclasses
import json
import logging
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.experiments.bench.process import seconds_in_turns
from kvjax.experiments.core.command import write_json

# The share of the time that each section may use, in their order: a slow one must not use up what others need.
SHARES = {
    "correctness": 0.25,
    "repeatability": 0.04,
    "ceilings": 0.02,
    "timings": 0.25,
    "end_to_end": 0.39,
    "sweep": 0.05,
}


POISONED = 3  # the exit code of a process whose GPU context is lost: whatever it ran next would fail too
_LOST = ("CUDA_ERROR_ILLEGAL", "CUDA_ERROR_MISALIGNED", "CUDA_ERROR_LAUNCH", "CUDA_ERROR_ASSERT", "illegal memory")


@dataclasses.dataclass
class Saved:
    """What a report's file holds.

    Attributes:
      device: what this runs on, once a process has asked the device.
      made: by which command, when, and of which code.
      smoke: whether shapes are tiny.
      ceilings: what the machine can do.
      failures: names of rows that are not ok.
      not_reached: what the time did not suffice for, as "section: name".
      served_elsewhere: what one implementation leaves to another, which has rows of its own.
      begun: what has been begun, as "section: name"; the last of it is what a process was at when it died.
      stopped: what a process died at.
      rows: the rows.
    """

    device: dict[str, Any] = dataclasses.field(default_factory=dict)
    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    smoke: bool = False
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    not_reached: list[str] = dataclasses.field(default_factory=list)
    served_elsewhere: list[str] = dataclasses.field(default_factory=list)
    begun: list[str] = dataclasses.field(default_factory=list)
    stopped: list[str] = dataclasses.field(default_factory=list)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Report(Saved):
    """Rows of every section, in a file as soon as they are known. Several processes may write it, one after another."""

    def __init__(
        self, folder: pathlib.Path, budget: float, smoke: bool, sections: Sequence[str], start: float | None = None
    ):
        """An empty report.

        Args:
          folder: made if absent; gets `gpu_check.json`.
          budget: seconds for everything.
          smoke: whether shapes are tiny.
          sections: what will run. Those that do not leave their time to the others.
          start: when it started, on the clock `time.monotonic`; now if None.
        """
        super().__init__(smoke=smoke)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "gpu_check.json"
        self._before: frozenset[str] = frozenset()
        self.start = time.monotonic() if start is None else start
        asked = [name for name in SHARES if name in sections]
        until = np.cumsum([SHARES[name] for name in asked])
        parts = np.ones(len(asked)) if smoke else until / until[-1]
        self.until = dict(zip(asked, (self.start + budget * parts).tolist(), strict=True))

    def resume(self) -> None:
        """Goes on with what another process wrote: what was begun there is not begun again."""
        found = json.loads(self.file.read_text())
        for field in dataclasses.fields(Saved):
            setattr(self, field.name, found[field.name])
        self._before = frozenset(self.begun)

    def row(self, section: str, name: str, *, ok: bool = True, **values: Any) -> None:
        """Adds a row, prints it and saves all."""
        self.rows.append({"section": section, "name": name, "ok": ok, **values})
        if not ok:
            self.failures.append(f"{section}: {name}")
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
        print(f"{'ok  ' if ok else 'FAIL'} {section:13s} {name:56s} {shown}", flush=True)
        self.save()
        if any(lost in str(values.get("error", "")) for lost in _LOST):
            raise SystemExit(POISONED)

    def save(self) -> None:
        """Writes everything that is known; a process that is killed meanwhile leaves the old file."""
        write_json(self.file, dataclasses.asdict(self) | {"seconds": time.monotonic() - self.start})

    @contextlib.contextmanager
    def guarded(self, section: str, name: str) -> Iterator[None]:
        """One case of a section: what stops it is a row that failed, and the next case runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.row(section, name, ok=False, error=f"{type(error).__name__}: {str(error)[:300]}")

    def seconds_left(self, section: str) -> float:
        """Until the section must end."""
        return self.until[section] - time.monotonic()

    def reaches(self, section: str, name: str, *, again: bool = False, needs: float = 0.0) -> bool:
        """Whether there is time to begin something; what there is not is said in the report.

        Args:
          section: of the report.
          name: what begins.
          again: whether it may begin again after another process died: not at this, but at something inside.
          needs: seconds.
        """
        key = f"{section}: {name}"
        if key in self.stopped or (key in self._before and not again):
            return False
        if self.seconds_left(section) > needs:
            self.begun.append(key)
            self.save()
            return True
        self.not_reached.append(key)
        print(f"     {section:13s} {name:56s} not reached", flush=True)
        self.save()
        return False

    def elsewhere(self, section: str, name: str, reason: str) -> None:
        """Says that something has no row because another implementation, with rows of its own, serves it."""
        self.served_elsewhere.append(f"{section}: {name}: {reason}")
        self.save()


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The implementations that served what is traced in this context, each once."""
    found: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        by = getattr(record, "by", None)
        found.extend([by] if by is not None and by not in found else [])
        return False  # it goes nowhere else

    log = logging.getLogger("kvjax.pallas_kernels")
    level = log.level
    log.addFilter(note)
    log.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        log.removeFilter(note)
        log.setLevel(level)


def served_by(f: Callable[..., Any], *args: Any) -> list[str]:
    """The implementations that serve a call, without running it."""
    with recorded() as found:
        jax.eval_shape(lambda *x: f(*x), *args)
    return found


def timed(
    f: Callable[..., Any], *args: Any, smoke: bool, launches: int = 10, samples: int = 15, sets: int = 1
) -> dict[str, Any]:
    """Median milliseconds `ms` of a call, and what `served_by` it; many launches a sample hide the dispatch.

    What takes less time than its dispatch is called once for each of some `sets` of the arrays in one compiled program.
    Together they are larger than what a cache keeps. What does not run has no milliseconds, but an `error`.
    """
    launches, samples, sets = (1, 2, 1) if smoke else (launches, samples, sets)
    many = [args, *(jax.tree.map(jnp.copy, args) for _ in range(sets - 1))]
    compiled = jax.jit(lambda many: [f(*x) for x in many])
    with recorded() as found:
        try:
            jax.block_until_ready([compiled(many) for _ in range(2)])
            runs = {"calls": lambda: [compiled(many) for _ in range(launches)][-1]}
            seconds = seconds_in_turns(runs, samples, jax.block_until_ready)["calls"]
        except Exception as error:  # a kernel that does not run is a row of the report
            how = {"ms": None, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        else:
            how = {"ms": float(np.median(seconds)) * 1e3 / launches / sets}
    return how | ({"served_by": "+".join(found)} if found else {})
