"""The two sides as processes of their own, which are asked in turns."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from kvjax.experiments.bench.peers.environment import ROOT
from kvjax.experiments.bench.peers.rows import Job, Side
from kvjax.experiments.bench.process import apart

SIDES: tuple[Side, ...] = ("kvjax", "peer")


class JobError(Exception):
    """A job that cannot be run."""


class Worker:
    """A process that answers requests (`kvjax.experiments.bench.peers.protocol.serve`).

    Args:
      command: how it is started.
      environment: its variables.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker lives
        how: dict[str, Any] = {"env": environment, "cwd": ROOT, "text": True, "bufsize": 1, "stderr": self._log}
        how |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # A group of its own: Ctrl-C is the parent's, and a stopped worker whose parent died is ended.
        self._process: Any = subprocess.Popen(command, process_group=0, **how)

    def ask(self, do: str, job: Job | None = None) -> dict[str, Any]:
        """The answer to a request.

        Raises:
          JobError: the job failed, or the process ended before it answered.
        """
        request = {"do": do} | ({} if job is None else {"key": repr(job), "job": dataclasses.asdict(job)})
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            line = self._process.stdout.readline()
        if not line.endswith("\n"):
            code = self._process.wait()
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise JobError(f"the worker ended with code {code}: {lines[-1]}")
        answer = json.loads(line)
        if "error" in answer:
            raise JobError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        with self._process:  # closes the pipes and waits
            self._log.close()


class Sides:
    """Both workers, on the same cores, started when they are first asked.

    Args:
      checkpoint: a model's directory.
      dtype: of its parameters, activations and caches.
      python: the interpreter of the peers' environment.
      cores: one for each thread.
      folder: for compiled programs of first runs.
      commands: other workers in place of the usual ones, by side.
    """

    def __init__(
        self,
        checkpoint: pathlib.Path,
        dtype: str,
        python: pathlib.Path,
        cores: Sequence[int],
        folder: pathlib.Path,
        commands: dict[Side, list[str]] | None = None,
    ):
        self._model, self._folder, threads = (str(checkpoint), dtype), folder, str(len(cores))
        # The peers' environment has no kvjax, whose folder `experiments` it finds where it is started.
        ours, theirs = (f"{package}experiments.bench.peers" for package in ("kvjax.", ""))
        self._first = {"kvjax": f"{ours}.first_ours", "peer": f"{theirs}.first_theirs"}
        here = {"kvjax": [sys.executable, "-m", f"{ours}.ours"], "peer": [str(python), "-m", f"{theirs}.theirs"]}
        self._commands = commands or {side: [*here[side], *self._model, threads] for side in SIDES}
        # Set before libraries count them.
        self._on_cores = ["taskset", "--cpu-list", ",".join(map(str, cores))]
        self._environments = _environments(len(cores))
        self._workers: dict[Side, Worker] = {}

    def close(self) -> None:
        """Ends both; they are started anew when they are asked again."""
        while self._workers:
            self._workers.popitem()[1].close()

    def ask(self, do: str, job: Job) -> dict[str, Any]:
        """The answer of a job's worker (`Worker.ask`), or of a process of its own for a user's first run."""
        if job.kind in ("prefill", "decode"):
            return self._worker(job.side).ask(do, job)
        self.close()  # which leaves it the memory
        return self._run_first(job) if do == "run" else {}

    def about(self, side: Side) -> dict[str, Any]:
        """What a side says of itself.

        Raises:
          ValueError: its worker does not start.
        """
        try:
            return self._worker(side).ask("about")
        except JobError as e:
            raise ValueError(f"{' '.join(self._commands[side])} does not start: {e}") from e

    def _worker(self, side: Side) -> Worker:
        if side not in self._workers:
            command = [*self._on_cores, *self._commands[side]]
            self._workers[side] = Worker(command, self._environments[side])
        return self._workers[side]

    def _run_first(self, job: Job) -> dict[str, Any]:
        """Seconds of a process from its start to its end, or of loading alone, and what it held at its peak.

        A cold one leaves its compiled programs to those that follow.
        """
        programs = self._folder / f"programs-{job.what}"
        if job.how == "cold":
            shutil.rmtree(programs, ignore_errors=True)
        elif job.how == "kept" and not programs.exists():
            self._run_first(dataclasses.replace(job, how="cold"))
        given = (job.length, job.steps, job.what, job.budget, str(programs)) if job.kind == "first" else ()
        what = self._first[job.side], "answer" if job.kind == "first" else "load"
        how = {"python": [*self._on_cores, self._commands[job.side][0]], "where": ROOT}
        start = time.perf_counter()
        try:
            found = apart(*what, *self._model, *given, **how, **self._environments[job.side])
        except RuntimeError as e:
            raise JobError(str(e).strip().splitlines()[-1]) from e
        return found | {"seconds": found.get("read", time.perf_counter() - start)}


def _environments(threads: int) -> dict[Side, dict[str, str]]:
    """Variables of each side, for a number of threads; both run on the CPU, and neither asks a network."""
    ours = {**os.environ, "HF_HUB_OFFLINE": "1"}
    theirs = {**ours, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    ours["JAX_PLATFORMS"] = "cpu"
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    theirs["PYTHONPATH"] = str(ROOT)  # what else is there belongs to the other environment
    if threads == 1:
        ours["XLA_FLAGS"] = f"{ours.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    return {"kvjax": ours, "peer": theirs}
