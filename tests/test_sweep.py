"""A grid of runs: which there are, who runs them, what is left of one that fails or is interrupted."""

import contextlib
import shlex
import sys
import time

import pytest

from kvjax.experiments import sweep
from kvjax.experiments.core.compiled import OPTION
from kvjax.experiments.sweep import Job, devices, local, on_ray, places, submitted
from tests.runs import one_layer, samples

SHARED = ["--", "--examples", "4", "--tasks", "key_value", "needle"]


def planned(*argv):
    own, runs = sweep.parse(argv)
    return sweep.jobs(runs, own.output)


def test_every_value_of_every_option_makes_a_run(tmp_path):
    axes = ["--config", "snapkv.py", "h2o.py", "--budget", "0.1", "64", "--seed=3", "--output", str(tmp_path)]
    found = planned(*axes, *SHARED)
    ends = f"seed-3-{'-'.join(word.removeprefix('--') for word in SHARED[1:])}"
    names = [f"{config}-budget-{budget}-{ends}" for config in ("snapkv", "h2o") for budget in ("0.1", "64")]
    assert [job.name for job in found] == names
    words = ["--config", "h2o.py", "--budget", "64", "--seed", "3", *SHARED[1:], "--output", str(tmp_path / names[3])]
    assert list(found[3].command[2:]) == words
    assert found[3].log == tmp_path / "logs" / f"{names[3]}.log"


def test_a_dry_run_prints_what_run_would_be_called_with(capsys):
    sweep.main(["--config", "window.py", "--commands", OPTION])
    words = shlex.split(capsys.readouterr().out)
    assert words[:1] + words[2:] == [sys.executable, "--config", "window.py", "--output", "results/window", OPTION]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--budget 0.1", "needs --config or --policy; configs are .*snapkv"),
        ("--config nothing.py", "no config 'nothing.py'"),
        ("--config snapkv.py --budget 0.1 0.1", "two runs are --config snapkv.py --budget 0.1; give every value once"),
        (
            "--config snapkv.py --budget 0.1 0.10",
            "two runs are --config snapkv.py --budget 0.10; give every value once",
        ),
        ("--config snapkv.py --baselines", "--baselines has no value to run; .* goes after --"),
        ("--config snapkv.py --shard 1/2", "--shard is no option of the runs"),
        ("--config snapkv.py -- --restart", "--restart is no option of the runs"),
        (f"--config snapkv.py --output {__file__}/new", "test_sweep.py is a file; name a directory"),
        ("--config snapkv.py --workers 0", "--workers 0 is no number of processes"),
        ("--config snapkv.py --resources num_gpus=1", "--resources are for --scheduler slurm or ray"),
        ("--config snapkv.py --scheduler ray --resources gpu", "--resources gpu is not of the form name=value"),
        ("--config snapkv.py --scheduler ray --workers 2", "what ray gives a run is said by --resources"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(argv, message):
    with pytest.raises(ValueError, match=message):
        planned(*argv.split())


def test_options_that_a_config_lacks_are_named_with_the_run(capsys):
    with pytest.raises(SystemExit):
        planned("--config", "snapkv.py", "h2o.py", "--window", "8")
    assert "no run was started; this one's options do not fit: --config h2o.py --window 8" in capsys.readouterr().err


def test_every_local_process_gets_a_device_or_a_share_of_the_threads():
    assert devices({"CUDA_VISIBLE_DEVICES": "2,GPU-5"}) == ["2", "GPU-5"]
    assert devices({"CUDA_VISIBLE_DEVICES": "2", "JAX_PLATFORMS": "cpu"}) == []
    assert places(None, ["2", "GPU-5"], 8) == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "GPU-5"}]
    assert places(None, [], 8) == [{}]
    assert places(3, [], 8) == [{"JAX_PLATFORMS": "cpu", "NPROC": "2", "OMP_NUM_THREADS": "2"}] * 3
    with pytest.raises(ValueError, match="--workers 3 processes need a device each, but there are 2 GPUs"):
        places(3, ["0", "1"], 8)
    with pytest.raises(ValueError, match="there are 8 CPU threads; give at most --workers 8"):
        places(9, [], 8)


def python(directory, *codes):
    return [Job(f"job{i}", (sys.executable, "-S", "-c", x), directory / f"{i}.log") for i, x in enumerate(codes)]


def test_a_crash_costs_one_run(tmp_path):
    jobs = python(tmp_path, "import os; print(os.environ['ONE'])", "raise SystemExit(3)", "1 / 0", "pass")
    jobs.append(Job("job4", ("/no/such/program",), tmp_path / "4.log"))
    jobs += [Job("job5", jobs[3].command, tmp_path / "5.log")]
    jobs[5].log.symlink_to(tmp_path / "elsewhere")
    found = {job.name: why for job, why in local(jobs, [{"ONE": "a"}, {"ONE": "a"}])}
    assert [found[f"job{i}"] for i in range(4)] == ["", "exit code 3", "exit code 1", ""]
    assert len(found) == len(jobs)
    assert "No such file" in found["job4"]
    assert found["job5"] == f"{jobs[5].log} is a link, and a log is not written through one; delete it"
    assert not (tmp_path / "elsewhere").exists()
    assert jobs[0].log.read_text().splitlines()[-1] == "a"
    assert "ZeroDivisionError" in jobs[2].log.read_text()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_reaches_what_runs_and_starts_nothing(tmp_path):
    waits = "import time\ntry:\n  print('here')\n  time.sleep(60)\nexcept KeyboardInterrupt: print('stored')"
    jobs = python(tmp_path, "pass", waits, "print('never')")
    with contextlib.closing(local(jobs, [{}])) as ended:
        assert next(ended) == (jobs[0], "")
        while "here" not in (jobs[1].log.read_text() if jobs[1].log.exists() else "")[-10:]:
            time.sleep(0.01)
    assert jobs[1].log.read_text().endswith("stored\n")
    assert not jobs[2].log.exists()


@pytest.mark.parametrize(("module", "call"), [("submitit", submitted), ("ray", on_ray)])
def test_a_scheduler_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, module, call):
    monkeypatch.setitem(sys.modules, module, None)
    rest = ([], tmp_path, {}) if call is submitted else ([], {})
    with pytest.raises(ValueError, match=rf"{module} cannot be imported .*; pip install 'kvjax\[(slurm|ray)\]'"):
        next(call(*rest))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["submitit", "ray"])
def test_other_schedulers_run_the_same_jobs(tmp_path, name):
    pytest.importorskip(name)
    jobs = python(tmp_path, "print('one')", "raise SystemExit(3)")
    if name == "ray":
        ended, refused = on_ray(jobs, {"num_cpus": 1}), on_ray(jobs, {"no_such_option": 1})
    else:
        run = lambda **resources: submitted(jobs, tmp_path / "submitit", resources, cluster="local")
        ended, refused = run(timeout_min=1), run(no_such_option=1)
    assert dict(ended) == {jobs[0]: "", jobs[1]: "exit code 3"}
    assert jobs[0].log.read_text().splitlines()[-1] == "one"
    with pytest.raises(ValueError, match="no_such_option"):
        next(refused)


FILE = """
import os
from kvjax import from_fn, methods

def make(budget):
    return methods.window(budget)

def broken(budget):
    return from_fn(lambda kv, stats, ctx: -(kv.k**2).sum(-1) * len(os.environ["MENDED"]), budget=budget)
"""


@pytest.mark.slow
def test_a_sweep_runs_crashes_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    argv = ["--policy", f"{file}:make", f"{file}:broken", "--budget", "32", "--output", str(tmp_path / "runs")]
    argv += ["--workers", "1", "--", "--length", "256", "--examples", "2", "--tasks", "key_value", "--baselines"]
    argv += ["--model", one_layer()]
    good, bad = (tmp_path / "runs" / job.name for job in planned(*argv))
    log = tmp_path / "runs" / "logs" / f"{bad.name}.log"

    with pytest.raises(SystemExit, match="1 of 2 runs failed; the same command runs them again"):
        sweep.main(argv)
    assert f"failed (exit code 1): {bad.name}, see {log}" in capsys.readouterr().err
    assert "KeyError: 'MENDED'" in log.read_text()
    before = (good / "samples.jsonl").stat().st_mtime_ns
    assert not (bad / "report.html").exists()

    monkeypatch.setenv("MENDED", "1")
    sweep.main(argv)
    assert (good / "samples.jsonl").stat().st_mtime_ns == before
    assert f"{good} is complete" in (tmp_path / "runs" / "logs" / f"{good.name}.log").read_text()
    assert {line["method"] for d in (good, bad) for line in samples(d)} == {"full", "mine.make", "mine.broken"}
