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
from typing import Any

from ..process import forget_peak, held


def weigh(run: Callable[[], int]) -> dict[str, int]:
    """What the process held at the peak of one run `beyond` what it held before, and what stays of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # memory that was freed is no longer held
    if trim is not None:
        trim(0)
    forget_peak()
    before = held("VmRSS")
    kept = run()
    return {"beyond": held("VmHWM") - before - kept}


def serve(prepare: Callable[[dict[str, Any]], Callable[[], int]], about: dict[str, Any]) -> None:
    """Answers requests until there are no more.

    A request says what to `do`, and of which job by its `key`: "about" (the answer is `about`), "prepare" (a `job`, an
    object for `prepare`, which returns what runs it to the end and says how many bytes of keys and values stay), "run"
    (the answer holds `seconds`), "weigh" (the answer of `weigh`), "drop". What fails is answered by `error`, and the
    traceback goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    jobs: dict[str, Callable[[], int]] = {}

    def answer(do: str, key: str = "", job: Any = None) -> dict[str, Any]:
        match do:
            case "about":
                return about
            case "prepare":
                jobs[key] = prepare(job)
                return {}
            case "run":
                start = time.perf_counter()
                jobs[key]()
                return {"seconds": time.perf_counter() - start}
            case "weigh":
                return weigh(jobs[key])
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
