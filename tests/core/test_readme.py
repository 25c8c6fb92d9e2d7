"""The Python of the core's README runs."""

import pathlib
import re

import jax
import pytest

import kvjax.core

README = pathlib.Path(kvjax.core.__file__).with_name("README.md")
BLOCKS = re.findall(r"## ([^\n]*)\n[^#]*?```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_block_runs(name, block):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(block, f"{README}: {name}", "exec"), {})


def test_every_block_is_found():
    assert len(BLOCKS) == README.read_text().count("```python")
