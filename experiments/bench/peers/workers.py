"""The two sides as processes of their own, which are asked in turns."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvjax.experiments.bench.peers.environment import ROOT, said
from kvjax.experiments.bench.peers.rows import Job, Side

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
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        # A group of its own: Ctrl-C is the parent's, and a stopped worker whose parent died is ended.
        self._process = subprocess.Popen(command, env=environment, process_group=0, text=True, cwd=ROOT, **pipes)
        self.signal = self._process.send_signal

    def ask(self, do: str, job: Job | None = None) -> dict[str, Any]:
        """The answer to a request.

        Raises:
          JobError: the job failed, or the process ended before it answered.
        """
        request = {"do": do} | ({} if job is None else {"key": repr(job), "job": dataclasses.asdict(job)})
        stdin, stdout = self._process.stdin, self._process.stdout
        line = ""
        if stdin is not None and stdout is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(json.dumps(request) + "\n")
                stdin.flush()
                line = stdout.readline()
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
        threads, model = len(cores), (str(checkpoint), dtype)
        # The peers' environment has no kvjax, whose folder `experiments` it finds where it is started.
        ours = lambda module: [sys.executable, "-m", f"kvjax.experiments.bench.peers.{module}", *model]
        theirs = lambda module: [str(python), "-m", f"experiments.bench.peers.{module}", *model]
        self._first = {"kvjax": ours("first_ours"), "peer": theirs("first_theirs")}
        self._commands = commands or {"kvjax": ours("ours"), "peer": [*theirs("theirs"), str(threads)]}
        self._cores, self._folder, self._environments = cores, folder, _environments(threads)
        self._workers: dict[Side, Worker] = {}

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends both; they are started anew when they are asked again."""
        while self._workers:
            self._workers.popitem()[1].close()

    def ask(self, do: str, job: Job) -> dict[str, Any]:
        """The answer of a job's worker (`Worker.ask`), or of a process of its own for a user's first run."""
        if job.kind != "first":
            return self._worker(job.side).ask(do, job)
        return self._run_first(job, timed=do == "run") if do in ("prepare", "run") else {}

    def about(self, side: Side) -> dict[str, Any]:
        """What a side says of itself.

        Raises:
          ValueError: its worker does not start.
        """
        try:
            return self._worker(side).ask("about")
        except JobError as e:
            raise ValueError(f"{' '.join(self._commands[side])} does not start: {e}") from e

    @contextlib.contextmanager
    def alone(self, side: Side) -> Iterator[None]:
        """One side alone; the other is stopped, threads that wait by spinning included."""
        others = [worker for name, worker in self._workers.items() if name != side]
        for worker in others:
            worker.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for worker in others:
                worker.signal(signal.SIGCONT)

    def _worker(self, side: Side) -> Worker:
        if side not in self._workers:
            # kvjax's time to compile is measured, so that nothing is taken from an earlier process.
            kept = {"JAX_ENABLE_COMPILATION_CACHE": "0"} if side == "kvjax" else {}
            with on_cores(self._cores):
                self._workers[side] = Worker(self._commands[side], self._environments[side] | kept)
        return self._workers[side]

    def _run_first(self, job: Job, *, timed: bool) -> dict[str, Any]:
        """Seconds of a process from its start to its end.

        One that is not timed comes first, so that files lie in the machine's memory and a warm compilation cache is
        warm.
        """
        command = [*self._first[job.side], str(job.length), str(job.steps)]
        with tempfile.TemporaryDirectory(dir=self._folder) as new, on_cores(self._cores):
            compiled = str(self._folder / "warm") if job.how == "warm" else new
            variables = self._environments[job.side] | {"JAX_COMPILATION_CACHE_DIR": compiled}
            start = time.perf_counter()
            wrong = said(*command, env=variables, cwd=ROOT)
            seconds = time.perf_counter() - start
        if wrong:
            raise JobError(wrong)
        return {"seconds": seconds} if timed else {}


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


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """What this thread starts runs on these cores, which a process inherits before its libraries count them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
