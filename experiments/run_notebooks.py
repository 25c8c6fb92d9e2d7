"""Runs the notebooks from top to bottom and stores what they print and draw.

    python experiments/run_notebooks.py
    python experiments/run_notebooks.py policy_in_ten_lines

Needs `pip install -e '.[notebook]'`. Only what depends on the code is stored: no times, versions or addresses.
"""

import argparse
import os
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import nbclient
import nbformat

import kvjax
from kvjax.experiments.core.command import plain_errors
from kvjax.models.written import write_bytes

HERE = pathlib.Path(__file__).parent / "notebooks"
_ROOT = pathlib.Path(kvjax.__file__).parents[1]
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: pathlib.Path) -> Any:
    """The notebook of a file with the outputs of a run in a process of its own, and nothing else that a run leaves.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell that fails.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    found = [str(_ROOT), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in found if p),
        "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "PYTHONWARNINGS": "ignore:IProgress not found",  # a library's advice to install widgets, with a path
    }
    resources = {"metadata": {"path": str(path.parent)}}
    options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}
    client = nbclient.NotebookClient(notebook, kernel_name="python3", resources=resources, **options)
    manager = client.create_kernel_manager()
    try:
        client.execute(env=environment)
    finally:
        left: Any = manager.provisioner and getattr(manager.provisioner, "process", None)
        if left is not None:  # a kernel that ended later than the library waits for it
            left.kill()
            left.wait()
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = re.sub(r" at 0x[0-9a-f]+", "", output.text)  # where a function was in memory
            else:
                output.metadata = {}
            if "image/png" in output.get("data", {}):
                output.data.pop("text/plain", None)  # the picture's size, in other words
    return notebook


def main(argv: Sequence[str]) -> None:
    """Runs the notebooks named, or all."""
    names = sorted(path.stem for path in HERE.glob("*.ipynb"))
    parser = argparse.ArgumentParser(prog="experiments/run_notebooks.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones, all if none: {', '.join(names)}")
    with plain_errors():
        chosen = parser.parse_args(argv).names or names
        if unknown := [name for name in chosen if name not in names]:
            raise ValueError(f"there is no notebook {unknown[0]!r}; there are {', '.join(names)}")
        for name in chosen:
            start = time.perf_counter()
            path = HERE / f"{name}.ipynb"
            text = nbformat.writes(execute(path), indent=1, ensure_ascii=False)
            write_bytes(path, f"{text.rstrip()}\n".encode())
            size = path.stat().st_size / 2**10
            print(f"{name}: {size:.0f} KiB, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
