"""What a worker does whatever it runs: takes jobs, times them, weighs them.

Requests and answers are JSON objects, one a line. Only the standard library is needed here, as the peers' environment
has no jax.
"""

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ..process import forget_peak, held


class Prepared(NamedTuple):
    """A job that is ready to run.

    Attributes:
      run: runs it once, to the end, and returns the bytes of keys and values that stay afterwards.
      facts: what is known before: `compile_seconds`, and of the compiled program `temp_bytes` and `peak_bytes`.
    """

    run: Callable[[], int]
    facts: dict[str, float]


def weigh(run: Callable[[], int]) -> dict[str, int]:
    """One run's `rss_bytes`, what the process held at its peak more than before, and `kept_bytes`, what stays of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # memory that was freed is no longer held
    if trim is not None:
        trim(0)
    forget_peak()
    before = held("VmRSS")
    kept = run()
    return {"rss_bytes": held("VmHWM") - before, "kept_bytes": kept}


def serve(prepare: Callable[[dict[str, Any]], Prepared], about: dict[str, Any]) -> None:
    """Answers requests until there are no more.

    A request says what to `do`, and of which job by its `key`: "about" (the answer is `about`), "prepare" (a `job`, an
    object for `prepare`; the answer holds its facts), "run" (the answer holds `seconds`), "weigh" (the answer of
    `weigh`), "drop". What fails is answered by `error`, and the traceback goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    jobs: dict[str, Prepared] = {}

    def answer(do: str, key: str = "", job: Any = None) -> dict[str, Any]:
        match do:
            case "about":
                return about
            case "prepare":
                jobs[key] = prepare(job)
                return jobs[key].facts
            case "run":
                start = time.perf_counter()
                jobs[key].run()
                return {"seconds": time.perf_counter() - start}
            case "weigh":
                return weigh(jobs[key].run)
            case "drop":
                jobs.pop(key, None)
                gc.collect()
                return {}
        raise ValueError(f"a worker cannot {do!r}")

    for line in sys.stdin:
        try:
            found = answer(**json.loads(line))
        except Exception as e:  # whatever a library raises ends one job, not the worker
            traceback.print_exc()
            found = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(found) + "\n")
