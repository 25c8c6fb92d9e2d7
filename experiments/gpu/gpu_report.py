"""What `gpu_check.py` writes down: rows of every section as they finish, and what its time did not suffice for."""

import contextlib
import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.written import write_bytes

# Until which share of the time each section may run, in their order: a slow one must not use up what others need.
UNTIL = {
    "correctness": 0.25,
    "repeatability": 0.29,
    "ceilings": 0.31,
    "timings": 0.56,
    "end_to_end": 0.95,
    "sweep": 1.0,
}


POISONED = 3  # the exit code of a process whose GPU context is lost: whatever it ran next would fail too
_LOST = ("CUDA_ERROR_ILLEGAL", "CUDA_ERROR_MISALIGNED", "CUDA_ERROR_LAUNCH", "CUDA_ERROR_ASSERT", "illegal memory")
_SAVED = (
    "device",
    "made",
    "smoke",
    "ceilings",
    "failures",
    "not_reached",
    "served_elsewhere",
    "begun",
    "stopped",
    "rows",
)


@dataclasses.dataclass(frozen=True)
class Timed:
    """Median milliseconds of a call, or why there are none; and which implementations served it."""

    ms: float | None
    error: str = ""
    served_by: str = ""


class Report:
    """Rows of every section, in a file as soon as they are known. Several processes may write it, one after another.

    Attributes:
      device: what this runs on, once a process has asked the device.
      made: by which command, when, and of which code.
      failures: names of rows that are not ok.
      rows: the rows.
      not_reached: what the time did not suffice for, as "section: name".
      served_elsewhere: what one implementation leaves to another, which has rows of its own.
      ceilings: what the machine can do.
      begun: what has been begun, as "section: name"; the last of it is what a process was at when it died.
      stopped: what a process died at.
    """

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
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "gpu_check.json"
        self.device: dict[str, Any] = {}
        self.made: dict[str, Any] = {}
        self.smoke = smoke
        self.failures: list[str] = []
        self.ceilings: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self.not_reached: list[str] = []
        self.served_elsewhere: list[str] = []
        self.begun: list[str] = []
        self.stopped: list[str] = []
        self._before: frozenset[str] = frozenset()
        self.start = time.monotonic() if start is None else start
        shares = [UNTIL[name] - before for name, before in zip(UNTIL, (0.0, *UNTIL.values()), strict=False)]
        asked = {name: share for name, share in zip(UNTIL, shares, strict=True) if name in sections}
        until, total = 0.0, sum(asked.values())
        self.until: dict[str, float] = {}
        for name, share in asked.items():
            until += share
            self.until[name] = self.start + budget * (1.0 if smoke else until / total)

    def resume(self) -> None:
        """Goes on with what another process wrote: what was begun there is not begun again."""
        found = json.loads(self.file.read_text())
        for name in _SAVED:
            setattr(self, name, found[name])
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
        data = {name: getattr(self, name) for name in _SAVED} | {"seconds": time.monotonic() - self.start}
        write_bytes(self.file, (json.dumps(data, indent=1) + "\n").encode())

    def timing(
        self, name: str, run: Timed, *, floor_ms: float | None = None, forward_ms: float | None = None, **values: Any
    ) -> None:
        """A row of the section "timings", in parts of a floor and of a forward pass; one that stops has failed."""
        given: dict[str, Any] = {"floor_ms": floor_ms} if floor_ms is not None else {}
        if run.ms:
            given |= {"of_floor": floor_ms / run.ms} if floor_ms is not None else {}
            given |= {"of_forward": run.ms / forward_ms} if forward_ms is not None else {}
        given |= {name: text for name, text in (("error", run.error), ("served_by", run.served_by)) if text}
        self.row("timings", name, ok=not run.error, ms=run.ms, **(given | values))

    @contextlib.contextmanager
    def guarded(self, section: str, name: str) -> Iterator[None]:
        """One case of a section: what stops it is a row that failed, and the next case runs."""
        try:
            yield
        except Exception as error:
            self.row(section, name, ok=False, error=f"{type(error).__name__}: {str(error)[:300]}")

    def seconds_left(self, section: str) -> float:
        """Until the section must end."""
        return self.until[section] - time.monotonic()

    def reaches(self, section: str, name: str, *, again: bool = False) -> bool:
        """Whether there is time to begin something; what there is not is said in the report.

        Args:
          section: of the report.
          name: what begins.
          again: whether it may begin again after another process died: not at this, but at something inside.
        """
        key = f"{section}: {name}"
        if key in self.stopped or (key in self._before and not again):
            return False
        if self.seconds_left(section) > 0:
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

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            by = getattr(record, "by", None)
            if by is not None and by not in found:
                found.append(by)

    log, handler = logging.getLogger("kvjax.pallas_kernels"), Recorder()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


def served_by(f: Callable[..., Any], *args: Any) -> list[str]:
    """The implementations that serve a call, without running it."""
    with recorded() as found:
        jax.eval_shape(lambda *x: f(*x), *args)
    return found


def timed(
    f: Callable[..., Any], *args: Any, smoke: bool, launches: int = 10, samples: int = 15, sets: int = 1
) -> Timed:
    """Median time of a call; many launches a sample hide the dispatch.

    What takes less time than its dispatch is called once for each of some `sets` of the arrays in one compiled program.
    Together they are larger than what a cache keeps.
    """
    launches, samples, sets = (1, 2, 1) if smoke else (launches, samples, sets)
    many = [args, *(jax.tree.map(jnp.copy, args) for _ in range(sets - 1))]
    compiled = jax.jit(lambda many: [f(*x) for x in many])
    with recorded() as found:
        try:
            for _ in range(3):
                jax.block_until_ready(compiled(many))
            seconds = []
            for _ in range(samples):
                start = time.perf_counter()
                jax.block_until_ready([compiled(many) for _ in range(launches)][-1])
                seconds.append((time.perf_counter() - start) / launches / sets)
        except Exception as error:  # a kernel that does not run is a row of the report
            return Timed(None, f"{type(error).__name__}: {str(error)[:200]}", "+".join(found))
    return Timed(float(np.median(seconds)) * 1e3, served_by="+".join(found))
