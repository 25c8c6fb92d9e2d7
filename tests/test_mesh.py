"""Meshes: what is refused, and eight devices, which the other tests have not, in a process of their own."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import kvjax
from tests.runs import ROOT


def test_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/sharded.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("mesh", "error"),
    [
        (
            jax.make_mesh((1,), ("batch",)),
            r"mesh has the axes \('batch',\), not \('data', 'heads'\); make it with kvjax.make_mesh",
        ),
        (jax.devices(), "mesh is a list, not a mesh; make one with kvjax.make_mesh"),
    ],
    ids=["axis", "list"],
)
def test_what_is_no_mesh_of_these_axes_is_refused(mesh, error, shallow):
    model, params = shallow
    for call in (
        lambda: kvjax.generate(model, params, np.ones((1, 4), np.int32), max_new_tokens=1, mesh=mesh),
        lambda: kvjax.shard_params(model, params, mesh),
    ):
        with pytest.raises(ValueError, match=error):
            call()


@pytest.mark.parametrize("sizes", [{"data": 0}, {"heads": 1.0}, {"data": True}], ids=str)
def test_an_axis_has_a_whole_number_of_devices(sizes):
    with pytest.raises(ValueError, match="must be a whole number from 1"):
        kvjax.make_mesh(**sizes)
