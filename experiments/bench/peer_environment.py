"""The peers' environment of `experiments/bench/peers.py`: made where there is none, with what is compared.

`pyproject.toml` names them under `bench`. kvpress comes on top without its own requirements, which would replace them.
"""

import json
import os
import pathlib
import subprocess
import sys
import tomllib
from collections.abc import Sequence

from kvjax.experiments.core.command import write_json

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PRESSES = "kvpress==0.5.5"
_STAMP = "kvjax_peers.json"


def requirements() -> list[str]:
    """What the environment holds, kvpress last."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [text.partition(";")[0].strip() for text in project["optional-dependencies"]["bench"]] + [_PRESSES]


def default_directory() -> pathlib.Path:
    """In the user's cache directory."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "kvjax" / "peers"


def make_environment(directory: pathlib.Path) -> pathlib.Path:
    """The interpreter of the environment in a directory, which is made if it is not there, or not with these versions.

    Raises:
      ValueError: a directory that holds something else, or packages that cannot be had.
    """
    python, stamp, wanted = directory / "bin" / "python", directory / _STAMP, requirements()
    if stamp.is_file() and python.exists() and json.loads(stamp.read_bytes()) == wanted:
        return python
    ours = stamp.exists() or (directory / "pyvenv.cfg").exists()
    if directory.exists() and (not directory.is_dir() or (any(directory.iterdir()) and not ours)):
        raise ValueError(f"{directory} holds something else than an environment; name another --environment")
    print(f"making the peers' environment in {directory}: {', '.join(wanted)}", flush=True)
    _call([sys.executable, "-m", "venv", "--clear", str(directory)], directory)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _call([*install, *wanted[:-1]], directory)
    _call([*install, "--no-deps", wanted[-1]], directory)
    write_json(stamp, wanted)
    return python


def check_interpreter(python: pathlib.Path) -> pathlib.Path:
    """An interpreter that was named, if it has what the peers' worker needs.

    Raises:
      ValueError: none, or one without torch or transformers.
    """
    try:
        code = "import torch, transformers"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as e:
        raise ValueError(f"--peers-python {python} cannot be run ({e})") from e
    if done.returncode:
        raise ValueError(
            f"--peers-python {python} lacks what is compared ({_last(done.stderr)}); leave the option out, and the "
            "environment is made"
        )
    return python


def _call(command: Sequence[str], directory: pathlib.Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(
            f"the peers' environment could not be made in {directory}: {_last(done.stderr or done.stdout)}; where one "
            f"exists elsewhere ({', '.join(requirements())}), name its interpreter by --peers-python"
        )


def _last(text: str) -> str:
    """The last line of what a program said."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]
