"""A grid of runs of the main job: configs x options x seeds x models, a process each.

    python experiments/sweep.py --config snapkv.py h2o.py --budget 0.1 0.2 --seed 0 1
    python experiments/sweep.py --config snapkv.py --budget 64 128 --model DIR OTHER --commands -- --examples 16
    python experiments/sweep.py --config snapkv.py --scheduler slurm --resources slurm_partition=gpu gpus_per_node=1

Every value of an option makes a run of its own, with every value of the others. What stands after `--` is the same for
all runs: options that take several values (--tasks), or none (--baselines). Options are those of `experiments/run.py`,
which each run is a call of; `--commands` prints the calls. A run goes where that call puts it, or into a directory of
the same name in `--output`: so runs that are there are not repeated, and those that were interrupted go on. `report.py`
reads the directories as those of any run.
"""

import ast
import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro

from kvjax import configs
from kvjax.experiments import run, stopping
from kvjax.experiments.core.command import as_command, imported, typed
from kvjax.experiments.core.compiled import HELP, OPTION

_OF_THE_SWEEP = "--output", "--restart", "--shard", "--list-tasks", "--help", "-h"
Ended = tuple["Job", str]  # a job, and why it failed; nothing if it did not


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


# --- which runs ---


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What makes runs, and who runs them; all other options are those of runs.

    Attributes:
      config: files in configs/, by name, or paths.
      policy: functions of a budget, FILE.py:make each, as of run.py.
      output: where runs go; results if not given.
      scheduler: who runs them.
      workers: local processes at a time; if not given, one a GPU, and one without a GPU.
      resources: what a run gets, NAME=VALUE each: parameters of submitit's AutoExecutor, or options of Ray's tasks.
      commands: print the runs, and start none.
    """

    config: tuple[str, ...] = ()
    policy: tuple[str, ...] = ()
    output: pathlib.Path | None = None
    scheduler: Literal["local", "slurm", "ray"] = "local"
    workers: int | None = None
    resources: tuple[str, ...] = ()
    commands: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(aliases=["--dry-run"])] = False


def parse(argv: Sequence[str]) -> tuple[Sweep, list[list[str]]]:
    """The sweep's own options, and the arguments of every run.

    Raises:
      ValueError: an axis without values, no config, an option that is none of the runs', or that the scheduler lacks.
      SystemExit: values that do not fit, after saying which do; or --help.
    """
    words = [text for text in argv if text != OPTION]
    at = words.index("--") if "--" in words else len(words)
    how: dict[str, Any] = {"prog": typed("sweep"), "description": f"{__doc__}\n{HELP}", "return_unknown_args": True}
    (own, rest), fixed = tyro.cli(Sweep, args=words[:at], **how), words[at + 1 :]
    sources = [("--config", x) for x in own.config] + [("--policy", x) for x in own.policy]
    if not sources:
        raise ValueError(f"a sweep needs --config or --policy; configs are {', '.join(configs.available())}")
    if wrong := [x for x in (*rest, *fixed) if x.partition("=")[0] in _OF_THE_SWEEP]:
        raise ValueError(f"{wrong[0]} is no option of the runs of a sweep; run one by experiments/run.py")
    if own.workers is not None and own.workers < 1:
        raise ValueError(f"--workers {own.workers} is no number of processes; give at least 1")
    if own.resources and own.scheduler == "local":
        raise ValueError("--resources are for --scheduler slurm or ray; local processes have --workers")
    if own.workers is not None and own.scheduler != "local":
        raise ValueError(f"--workers are local processes; what {own.scheduler} gives a run is said by --resources")
    if wrong := [x for x in own.resources if not re.fullmatch(r"[^\W\d]\w*=.+", x)]:
        raise ValueError(f"--resources {wrong[0]} is not of the form name=value")
    return own, [[*source, *axes, *fixed] for source, axes in itertools.product(sources, _axes(rest))]


def _axes(words: Sequence[str]) -> list[list[str]]:
    """One value of every option, in all combinations; the last option changes fastest."""
    axes: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            axes.append([part for part in word.split("=", 1) if part])
        elif not axes:
            raise ValueError(f"{word!r} belongs to no option; write --option {word}")
        else:
            axes[-1].append(word)
    if mute := [name for name, *values in axes if not values]:
        raise ValueError(f"{mute[0]} has no value to run; what has none, and is the same for all runs, goes after --")
    each = ([(name, value) for value in values] for name, *values in axes)
    return [[*itertools.chain(*chosen)] for chosen in itertools.product(*each)]


def _resource(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def jobs(runs: Sequence[Sequence[str]], output: pathlib.Path | None, keep: bool = True) -> list[Job]:
    """A job for every run, whose options are tried.

    Args:
      runs: arguments of `experiments/run.py`.
      output: where their directories go; where run.py puts them if None.
      keep: whether programs that they compile are kept.

    Raises:
      ValueError: what run.py refuses of the options, two runs that are one, an `output` that is a file.
      SystemExit: options that do not exist or do not fit, after saying which do.
    """
    existing = None if output is None else next(p for p in (output, *output.absolute().parents) if p.exists())
    if existing is not None and not existing.is_dir():
        raise ValueError(f"--output {output}: {existing} is a file; name a directory, which may be a new one")
    found: dict[pathlib.Path, Job] = {}
    same = set[Any]()
    for arguments in runs:
        try:
            experiment, own, overrides = run.parse(arguments)
        except SystemExit:
            print(f"no run was started; this one's options do not fit: {shlex.join(arguments)}", file=sys.stderr)
            raise
        directory = run.default_directory(own, overrides)
        directory = directory if output is None else output / directory.name
        run.check_apart(directory, own, experiment.setup.source)
        what = experiment, repr(own.mesh)
        if directory in found or what in same:
            raise ValueError(f"two runs are {shlex.join(arguments)}; give every value once")
        same.add(what)
        script = pathlib.Path(run.__file__).absolute()
        command = sys.executable, str(script), *arguments, "--output", str(directory), *([] if keep else [OPTION])
        found[directory] = Job(directory.name, command, directory.parent / "logs" / f"{directory.name}.log")
    return [*found.values()]


# --- who runs them ---


def execute(job: Job, directory: str) -> int:
    """Runs a job to its end; what a scheduler calls on the machine that it chose.

    Args:
      job: the command, and where its output is appended to.
      directory: where it runs.

    Returns:
      Its exit code.
    """
    with _started(job, directory, {}) as process:
        try:
            return process.wait()
        except BaseException:  # a scheduler that cancels
            process.terminate()
            raise


def _started(job: Job, directory: str, environment: Mapping[str, str]) -> subprocess.Popen:
    """The process of a job, in a session of its own: Ctrl-C reaches it through whoever started it, and once.

    Raises:
      OSError: no such program, or a log that cannot be written or is a link.
    """
    log = pathlib.Path(directory, job.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.is_symlink():
        raise OSError(f"{log} is a link, and a log is not written through one; delete it")
    with log.open("a") as output:
        print(time.strftime("# %Y-%m-%d %H:%M:%S"), shlex.join(job.command), file=output, flush=True)
        return subprocess.Popen(
            job.command,
            cwd=directory,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


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


def local(jobs: Sequence[Job], environments: Sequence[Mapping[str, str]]) -> Generator[Ended, None, None]:
    """Runs jobs on this machine, as many at a time as there are environments, one in each.

    A signal is passed on to those that run, which store what is done, and starts no others; a second kills them.

    Yields:
      Jobs as they end.
    """
    waiting, free, running = [*jobs], [*environments], dict[subprocess.Popen, tuple[Job, Mapping[str, str]]]()

    def kill() -> None:
        for process in [*running]:
            process.kill()

    with stopping.ending(kill), stopping.finishing("the examples that run"):
        try:
            while waiting or running:
                stopping.check()
                ended: list[Ended] = []
                for process in [each for each in running if each.poll() is not None]:
                    job, environment = running.pop(process)
                    free.append(environment)
                    ended.append((job, _failure(process.returncode)))
                while waiting and free:
                    job = waiting.pop(0)
                    try:
                        running[_started(job, os.getcwd(), free[-1])] = job, free[-1]
                        free.pop()
                    except OSError as e:
                        ended.append((job, str(e)))
                yield from ended
                time.sleep(0.2)
        except BaseException:
            ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # then they ignore it too
            for process in running:
                process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
            for process in running:
                process.wait()
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
    submitit = imported("submitit", "slurm")
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**resources)
    except (RuntimeError, NameError, TypeError, AssertionError, ValueError) as e:
        raise ValueError(f"submitit refuses {cluster}: {e}") from e
    with executor.batch():
        sent = {executor.submit(execute, job, os.getcwd()): job for job in jobs}
    yield from _as_they_end(sent, lambda: [job.cancel() for job in sent if not job.done()])


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
    ray = imported("ray", "ray")
    try:
        task = ray.remote(**{"max_retries": 0, **resources})(execute)
    except (ValueError, TypeError) as e:
        raise ValueError(f"Ray refuses {dict(resources)}: {e}") from e
    path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}  # where workers find this module
    with ray.init(log_to_driver=False, runtime_env={"env_vars": path}):
        sent = [task.remote(job, os.getcwd()) for job in jobs]

        def cancel() -> None:
            for reference in sent:
                ray.cancel(reference)
            ray.wait(sent, num_returns=len(sent), timeout=30)

        yield from _as_they_end({each.future(): job for each, job in zip(sent, jobs, strict=True)}, cancel)


def _as_they_end(sent: Mapping[Any, Job], cancel: Callable[[], object]) -> Generator[Ended, None, None]:
    """Jobs as the futures of their exit codes are done; where this ends before all are, the others are cancelled."""
    waiting = [*sent]
    try:
        while waiting:
            stopping.check()
            for future in [each for each in waiting if each.done()]:
                waiting.remove(future)
                if (error := future.exception()) is None:
                    yield sent[future], _failure(future.result())
                else:
                    yield sent[future], str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            time.sleep(0.2)
    except BaseException:
        cancel()
        raise


def _failure(code: int) -> str:
    """Why a process failed, by its exit code; nothing for 0."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


# --- the command ---


def run_all(planned: Sequence[Job], ended: Generator[Ended, None, None]) -> list[tuple[Job, str]]:
    """Says of every run how it ended; those that failed, and why."""
    failed: list[tuple[Job, str]] = []
    start = time.monotonic()
    stored = f"what is done is stored, and the same command goes on from there; logs are in {planned[0].log.parent}"
    with stopping.noted(lambda: stored), contextlib.closing(ended):
        for i, (job, why) in enumerate(ended, start=1):
            failed += [(job, why)] if why else []
            said = f"failed: {why}; {job.log}" if why else "done"
            print(f"[{i}/{len(planned)}] {time.monotonic() - start:.0f} s: {job.name}: {said}", flush=True)
    return failed


def _scheduled(planned: Sequence[Job], own: Sweep) -> Generator[Ended, None, None]:
    resources = dict(map(_resource, own.resources))
    if own.scheduler == "slurm":
        return submitted(planned, planned[0].log.parent / "submitit", resources)
    if own.scheduler == "ray":
        return on_ray(planned, resources)
    return local(planned, places(own.workers, devices(), len(os.sched_getaffinity(0))))


@as_command
def main(argv: Sequence[str]) -> None:
    """Parses, runs, names what failed."""
    own, runs = parse(argv)
    planned = jobs(runs, own.output, OPTION not in argv)
    if own.commands:
        print("\n".join(shlex.join(job.command) for job in planned))
        return
    failed = run_all(planned, _scheduled(planned, own))
    for job, why in failed:
        print(f"failed ({why}): {job.name}, see {job.log}", file=sys.stderr)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(planned)} runs failed; the same command runs them again")
    print(f"{len(planned)} runs are in {planned[0].log.parent.parent}")


if __name__ == "__main__":
    main()
