"""Two processes of two devices each, which the other tests have not, and what `--mesh` refuses."""

import os
import socket
import subprocess
import sys

import pytest

from kvjax.experiments import run
from tests.runs import ROOT


def start(*command):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **how)


@pytest.mark.slow
def test_two_processes_share_a_batch_and_heads():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [start("-m", "tests.two_processes", str(i), port) for i in range(2)]
    for process in processes:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
        assert said.rstrip().endswith("equal")


@pytest.mark.parametrize("mesh", ["data=4;heads=2", "data=0", "rows=2", "data=2,data=2", ""])
def test_what_is_no_mesh_is_refused(mesh, capsys):
    with pytest.raises(SystemExit):
        run.main(["--config", "h2o.py", "--mesh", mesh])
    assert "is no mesh such as data=4,heads=2" in capsys.readouterr().err
