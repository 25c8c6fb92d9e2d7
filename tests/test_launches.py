"""What decode steps launch on a GPU, compiled without one."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from kvjax.experiments import aot_check
from kvjax.experiments.gpu import launches

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """HloModule step

%product (x: bf16[8], w: bf16[8,8]) -> bf16[8] {
  ROOT %dot.1 = bf16[8]{0} dot(%x, %w), metadata={op_name="jit(step)/dot_general"}
}

%written_out (x: bf16[8], w: bf16[8,8]) -> bf16[8,8] {
  ROOT %m = bf16[8,8]{1,0} multiply(%x, %w), metadata={op_name="jit(step)/dot_general"}
}

%some (p: (s32[])) -> (s32[]) {
  ROOT %add = s32[] add(%p, %p)
}

%other (p: (s32[])) -> (s32[]) {
  %copied = s32[] copy(%p)
  ROOT %kernel = s32[] custom-call(%copied), custom_call_target="__gpu$xla.gpu.triton"
}

ENTRY %main (x: bf16[8], w: bf16[8,8]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  %gemm = bf16[8]{0} fusion(%x, %w), kind=kCustom, calls=%product
  %pair = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) fusion(%x, %w), kind=kLoop, calls=%written_out
  %cublas = bf16[8]{0} custom-call(%x, %w), custom_call_target="__cublas$gemm"
  %branches = (s32[]) conditional(%p, %a, %b), true_computation=%some, false_computation=%other
  ROOT %bitcast = bf16[8]{0} bitcast(%gemm)
}
"""


def test_what_a_program_launches():
    found = launches.launched(PROGRAM)
    assert found == {
        "product": 2,
        "product by multiplying and adding": 1,
        "conditional": 1,
        "add": 1,
        "copy": 1,
        "kernel": 1,
    }


@pytest.mark.slow  # a minute of compiling
def test_a_layer_launches_no_more_than_it_did(tmp_path):
    """Compiled for an H100, by Triton kernels."""
    if lacking := aot_check.missing():
        pytest.skip(f"cannot compile for a GPU without {', '.join(lacking)}")
    most = {"full": 16, "h2o": 18, "streaming_llm": 21, "roco": 26}
    command = [sys.executable, ROOT / "experiments" / "aot_check.py", "--steps", "--arch", "sm_90"]
    command += ["--only", rf"^({'|'.join(map(re.escape, most))}) \(triton", "--output", tmp_path / "report"]
    subprocess.run(command, check=True)
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["policy"] for row in rows} == set(most)
    assert not [row for row in rows if row["launches"]["all"] > most[row["policy"]]]
    unwanted = {"while", "conditional", "product by multiplying and adding"}
    assert not unwanted & {kind for row in rows for kind in row["launches"]}
