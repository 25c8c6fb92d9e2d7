"""Meshes: what is refused, and several devices, which the other tests have not, in processes of their own."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax.experiments import run
from tests.runs import ROOT


def start(devices, *command):
    """A process of Python with so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **how)


def test_eight_devices():
    done = start(8, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/sharded.py")
    said, _ = done.communicate(timeout=600)
    assert done.returncode == 0, said


def test_what_is_no_mesh_of_these_axes_is_refused(shallow):
    (model, params), mesh = shallow, jax.make_mesh((1,), ("batch",))
    for call in (
        lambda: kvjax.generate(model, params, np.ones((1, 4), np.int32), max_new_tokens=1, mesh=mesh),
        lambda: kvjax.shard_params(model, params, mesh),
    ):
        with pytest.raises(ValueError, match=r"mesh has the axes \('batch',\), not \('data', 'heads'\); make it with"):
            call()


@pytest.mark.slow
def test_two_processes_share_a_batch_and_heads():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [start(2, "-m", "tests.two_processes", str(i), port) for i in range(2)]
    for process in processes:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
        assert said.rstrip().endswith("equal")


@pytest.mark.parametrize("mesh", ["data=4;heads=2", "data=0", "rows=2", "data=2,data=2", ""])
def test_what_is_no_mesh_of_the_main_job_is_refused(mesh, capsys):
    with pytest.raises(SystemExit):
        run.main(["--config", "h2o.py", "--mesh", mesh])
    assert "is no mesh such as data=4,heads=2" in capsys.readouterr().err
