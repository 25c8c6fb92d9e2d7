"""The two sides of `experiments/bench/peers.py` as processes of their own, which are asked in turns."""

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

from kvjax.experiments.bench.peer_environment import ROOT
from kvjax.experiments.bench.peer_rows import Job, Side

SIDES: tuple[Side, ...] = ("kvjax", "peer")
# The peers' environment has no kvjax, whose folder `experiments` it finds where it is started.
_FIRST_RUNS: dict[Side, str] = {
    "kvjax": "kvjax.experiments.bench.first_run_kvjax",
    "peer": "experiments.bench.first_run_torch",
}


class JobError(Exception):
    """A job that cannot be run; its worker goes on."""


class WorkerDied(JobError):
    """A worker that ended, with the last line that it wrote."""


class Worker:
    """A process that answers requests.

    Args:
      command: how it is started.
      cores: on which it runs.
      environment: its variables.
    """

    def __init__(self, command: Sequence[str], cores: Sequence[int], environment: dict[str, str]):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the worker lives
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        with on_cores(cores):  # which the process inherits before its libraries count them
            # A group of its own: Ctrl-C is the parent's, and a stopped worker whose parent died is ended.
            self._process = subprocess.Popen(command, env=environment, process_group=0, text=True, cwd=ROOT, **pipes)

    def ask(self, do: str, job: Job | None = None) -> dict[str, Any]:
        """The answer to a request (`kvjax.experiments.bench.peer_protocol.serve`).

        Raises:
          JobError: the job failed.
          WorkerDied: the process ended before it answered.
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
            raise WorkerDied(f"the worker ended with code {self._process.wait()}: {self._said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise JobError(answer["error"])
        return answer

    def pause(self) -> None:
        """Stops the process, threads that wait by spinning included."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        with self._process:  # closes the pipes and waits
            self._log.close()

    def _said(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class FirstRuns:
    """Answers requests for a user's first run: each is a process of its own, timed from its start to its end.

    One that is not timed comes first, so that files lie in the machine's memory and a warm compilation cache is warm.

    Args:
      command: the script and its checkpoint.
      cores: on which it runs.
      environment: its variables.
      folder: for compiled programs.
    """

    def __init__(self, command: Sequence[str], cores: Sequence[int], environment: dict[str, str], folder: pathlib.Path):
        self._command, self._cores, self._environment, self._folder = command, cores, environment, folder

    def ask(self, do: str, job: Job) -> dict[str, Any]:
        """As `Worker.ask`.

        Raises:
          JobError: the process failed.
        """
        if do not in ("prepare", "run"):
            return {}
        with tempfile.TemporaryDirectory(dir=self._folder) as new:
            compiled = str(self._folder / "warm") if job.how == "warm" else new
            start = time.perf_counter()
            with on_cores(self._cores):
                done = subprocess.run(
                    [*self._command, str(job.length), str(job.steps)],
                    env=self._environment | {"JAX_COMPILATION_CACHE_DIR": compiled},
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=False,
                )
            seconds = time.perf_counter() - start
        if done.returncode:
            raise JobError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
        return {} if do == "prepare" else {"seconds": seconds}


class Sides:
    """Both workers, on the same cores, started when they are first asked.

    Args:
      checkpoint: a model's directory.
      python: the interpreter of the peers' environment.
      cores: one for each thread.
      folder: for compiled programs of first runs.
      commands: other workers in place of the usual ones, by side.
    """

    def __init__(
        self,
        checkpoint: pathlib.Path,
        python: pathlib.Path,
        cores: Sequence[int],
        folder: pathlib.Path,
        commands: dict[Side, list[str]] | None = None,
    ):
        threads = str(len(cores))
        modules = {"kvjax": [sys.executable, "-m"], "peer": [str(python), "-m"]}
        self._commands = commands or {
            "kvjax": [*modules["kvjax"], "kvjax.experiments.bench.peer_kvjax", str(checkpoint)],
            "peer": [*modules["peer"], "experiments.bench.peer_torch", str(checkpoint), threads],
        }
        self._cores = cores
        self._workers: dict[Side, Worker] = {}
        self._environments = _environments(len(cores))
        self._first = {
            side: FirstRuns(
                [*modules[side], module, str(checkpoint)],
                cores,
                self._environments[side],
                folder,
            )
            for side, module in _FIRST_RUNS.items()
        }

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends both; they are started anew when they are asked again."""
        while self._workers:
            self._workers.popitem()[1].close()

    def ask(self, do: str, job: Job) -> dict[str, Any]:
        """The answer of a job's worker (`Worker.ask`)."""
        return self._first[job.side].ask(do, job) if job.kind == "first" else self._worker(job.side).ask(do, job)

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
        """One side alone, the other stopped."""
        others = [worker for name, worker in self._workers.items() if name != side]
        for worker in others:
            worker.pause()
        try:
            yield
        finally:
            for worker in others:
                worker.resume()

    def _worker(self, side: Side) -> Worker:
        if side not in self._workers:
            # kvjax's time to compile is measured, so that nothing is taken from an earlier process.
            kept = {"JAX_ENABLE_COMPILATION_CACHE": "0"} if side == "kvjax" else {}
            self._workers[side] = Worker(self._commands[side], self._cores, self._environments[side] | kept)
        return self._workers[side]


def _environments(threads: int) -> dict[Side, dict[str, str]]:
    """Variables of each side, for a number of threads; both run on the CPU, and neither asks a network."""
    common = dict(os.environ)
    common["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    common["HF_HUB_OFFLINE"] = "1"
    flags = common.get("XLA_FLAGS", "") + (" --xla_cpu_multi_thread_eigen=false" if threads == 1 else "")
    return {
        "kvjax": {**common, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()},
        "peer": {
            **common,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "PYTHONPATH": str(ROOT),  # what else is there belongs to the other environment
        },
    }


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """What this thread starts runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
