"""Commands, each a process of its own, on local devices, on SLURM through submitit, or on Ray."""

import dataclasses
import errno
import importlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import threading
import time
import types
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Final

from kvjax.experiments import stopping

Ended = tuple["Job", str]  # a job, and why it failed; nothing if it did not

_CANCELLED: Final = "cancelled"


@dataclasses.dataclass(frozen=True)
class Job:
    """A command, and the file that its output is appended to.

    Attributes:
      name: what it is called.
      command: program and arguments.
      log: where its output goes; the folder is made.
    """

    name: str
    command: tuple[str, ...]
    log: pathlib.Path


def execute(command: Sequence[str], log: str, directory: str, environment: Mapping[str, str] | None = None) -> int:
    """Runs a command to its end; what a scheduler calls on the machine that it chose.

    Args:
      command: program and arguments.
      log: where its output is appended to.
      directory: where it runs.
      environment: variables beside those of this process.

    Returns:
      Its exit code.
    """
    with _started(command, log, directory, environment or {}) as process:
        try:
            return process.wait()
        except BaseException:  # a scheduler that cancels
            process.terminate()
            process.wait()
            raise


def _started(command: Sequence[str], log: str, directory: str, environment: Mapping[str, str]) -> subprocess.Popen:
    """The process of a command, in a session of its own: Ctrl-C reaches it through whoever started it, and once."""
    pathlib.Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", opener=_no_link) as output:
        print(time.strftime("# %Y-%m-%d %H:%M:%S"), shlex.join(command), file=output, flush=True)
        everything = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            command,
            cwd=directory,
            env=everything,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _no_link(path: str, flags: int) -> int:
    """Opens a file, but none that a link leads to.

    Raises:
      OSError: the path is a link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        raise OSError(f"{path} is a link, and a log is not written through one; delete it") from e


def devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that local processes may use, by the names that `CUDA_VISIBLE_DEVICES` takes; none without a GPU."""
    if environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(i) for i, line in enumerate(x for x in listed.stdout.splitlines() if x.startswith("GPU "))]


def places(workers: int | None, gpus: Sequence[str], cpus: int) -> list[dict[str, str]]:
    """What the environment of each local process says: one GPU each, or a share of the CPU's threads.

    Args:
      workers: processes at a time; as many as there are GPUs if None, and one without a GPU.
      gpus: those that may be used (`devices`).
      cpus: threads to divide where there are none.

    Raises:
      ValueError: more processes than GPUs, or than CPU threads.
    """
    most = len(gpus) or cpus
    workers = (len(gpus) or 1) if workers is None else workers
    if workers > most:
        raise ValueError(
            f"--workers {workers} processes need a device each, but there are {most} "
            f"{'GPUs; set JAX_PLATFORMS=cpu, or' if gpus else 'CPU threads;'} give at most --workers {most}"
        )
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": name} for name in gpus[:workers]]
    if workers == 1:
        return [{}]
    threads = str(cpus // workers)
    return [{"JAX_PLATFORMS": "cpu", "NPROC": threads, "OMP_NUM_THREADS": threads}] * workers


def cpu_threads() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local(jobs: Sequence[Job], environments: Sequence[Mapping[str, str]]) -> Generator[Ended, None, None]:
    """Runs jobs on this machine, as many at a time as there are environments, one in each.

    A signal is passed on to those that run, which store what is done, and starts no others; a second kills them.

    Yields:
      Jobs as they end.
    """
    free, running = [*environments], dict[subprocess.Popen, Mapping[str, str]]()
    lock, stopped = threading.Lock(), threading.Event()

    def kill() -> None:
        for process in [*running]:
            process.kill()

    def run(job: Job) -> str:
        with lock:
            if stopped.is_set():
                return _CANCELLED
            process = _started(job.command, str(job.log), os.getcwd(), free[-1])
            running[process] = free.pop()
        code = process.wait()
        with lock:
            free.append(running.pop(process))
        return _failure(code)

    with (
        stopping.ending(kill),
        stopping.finishing("the examples that run"),
        ThreadPoolExecutor(len(environments)) as pool,
    ):
        futures = {pool.submit(run, job): job for job in jobs}
        try:
            yield from _as_they_end(futures)
        except BaseException:
            ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # then they ignore it too
            with lock:
                stopped.set()
                for process in running:
                    process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
            raise


def submitted(
    jobs: Sequence[Job], folder: pathlib.Path, resources: Mapping[str, Any], cluster: str = "slurm"
) -> Generator[Ended, None, None]:
    """Runs jobs through submitit. Ctrl-C cancels those that have not ended.

    Args:
      jobs: what to run.
      folder: where submitit writes what it needs, on a file system that all machines share.
      resources: parameters of submitit's `AutoExecutor`, such as `slurm_partition` or `gpus_per_node`.
      cluster: of submitit's, "slurm", or "local" and "debug" to try it.

    Yields:
      Jobs as they end.

    Raises:
      ValueError: submitit is not installed, there is no SLURM, or a parameter that it does not know.
    """
    submitit = _imported("submitit", "slurm")
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**resources)
    except (RuntimeError, NameError, TypeError, AssertionError, ValueError) as e:
        raise ValueError(f"submitit refuses {cluster}: {e}") from e
    with executor.batch():
        sent = [executor.submit(execute, job.command, str(job.log.absolute()), os.getcwd()) for job in jobs]
    names = dict(zip(sent, jobs, strict=True))
    try:
        while names:
            stopping.check()
            for done in [each for each in names if each.done()]:
                error, job = done.exception(), names.pop(done)
                yield job, _failure(done.result()) if error is None else f"{type(error).__name__}: {error}"
            time.sleep(1)
    except BaseException:
        for job in sent:
            if not job.done():
                job.cancel()
        raise


def on_ray(jobs: Sequence[Job], resources: Mapping[str, Any]) -> Generator[Ended, None, None]:
    """Runs jobs on the Ray cluster that `RAY_ADDRESS` names, or on one that Ray starts here. Ctrl-C cancels them.

    Args:
      jobs: what to run.
      resources: options of Ray's tasks, such as `num_gpus` or `num_cpus`.

    Yields:
      Jobs as they end.

    Raises:
      ValueError: Ray is not installed, or an option that it does not know.
    """
    ray = _imported("ray", "ray")
    try:
        task = ray.remote(**{"max_retries": 0, **resources})(execute)
    except (ValueError, TypeError) as e:
        raise ValueError(f"Ray refuses {dict(resources)}: {e}") from e
    ours = not ray.is_initialized()
    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, runtime_env={"env_vars": _path()})
        sent = {task.remote(job.command, str(job.log.absolute()), os.getcwd()): job for job in jobs}
        waiting = [*sent]
        try:
            while waiting:
                ended, waiting = ray.wait(waiting, timeout=1)
                stopping.check()
                for done in ended:
                    try:
                        yield sent[done], _failure(ray.get(done))
                    except ray.exceptions.RayError as e:
                        yield sent[done], f"{type(e).__name__}: {e}"
        except BaseException:
            for reference in waiting:
                ray.cancel(reference)
            ray.wait(waiting, num_returns=len(waiting), timeout=30) if waiting else None
            raise
    finally:
        if ours:
            ray.shutdown()


def _path() -> dict[str, str]:
    """Where workers find this module, where it is not installed."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


def _as_they_end(futures: Mapping[Future, Job]) -> Generator[Ended, None, None]:
    waiting = {*futures}
    while waiting:
        ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
        stopping.check()
        for future in ended:
            try:
                yield futures[future], future.result()
            except OSError as e:
                yield futures[future], str(e)


def _failure(code: int) -> str:
    """Why a process failed, by its exit code; nothing for 0."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _imported(module: str, extra: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ValueError(f"{module} is not installed ({e}); pip install 'kvjax[{extra}]'") from e
