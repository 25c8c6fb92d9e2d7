"""The peers' environment: made where there is none, with what is compared.

`pyproject.toml` names them under `bench`. kvpress comes on top without its own requirements, which would replace them.
"""

import json
import os
import pathlib
import subprocess
import sys
import tomllib

from kvjax.experiments.core.command import write_json

ROOT = pathlib.Path(__file__).resolve().parents[3]
_PRESSES = "kvpress==0.5.5"


def requirements() -> list[str]:
    """What the environment holds, kvpress last."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [text.partition(";")[0].strip() for text in project["optional-dependencies"]["bench"]] + [_PRESSES]


def make_environment(directory: pathlib.Path | None) -> pathlib.Path:
    """The interpreter of the environment in a directory, which is made if it is not there, or not with these versions.

    Args:
      directory: where it is; in the user's cache directory if None.

    Raises:
      ValueError: a directory that holds something else, or packages that cannot be had.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    directory = directory or pathlib.Path(caches) / "kvjax" / "peers"
    python, stamp, wanted = directory / "bin" / "python", directory / "kvjax_peers.json", requirements()
    if stamp.is_file() and python.exists() and json.loads(stamp.read_bytes()) == wanted:
        return python
    ours = stamp.exists() or (directory / "pyvenv.cfg").exists()
    if directory.exists() and (not directory.is_dir() or (any(directory.iterdir()) and not ours)):
        raise ValueError(f"{directory} holds something else than an environment; name another --environment")
    print(f"making the peers' environment in {directory}: {', '.join(wanted)}", flush=True)
    install = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    venv = (sys.executable, "-m", "venv", "--clear", str(directory))
    for command in (venv, (*install, *wanted[:-1]), (*install, "--no-deps", wanted[-1])):
        if wrong := said(*command):
            raise ValueError(
                f"the peers' environment could not be made in {directory}: {wrong}; where one exists elsewhere "
                f"({', '.join(wanted)}), name its interpreter by --peers-python"
            )
    write_json(stamp, wanted)
    return python


def check_interpreter(python: pathlib.Path) -> pathlib.Path:
    """An interpreter that was named, if it has what the peers' worker needs.

    Raises:
      ValueError: none, or one without torch or transformers.
    """
    try:
        wrong = said(str(python), "-c", "import torch, transformers")
    except OSError as e:
        raise ValueError(f"--peers-python {python} cannot be run ({e})") from e
    if wrong:
        raise ValueError(
            f"--peers-python {python} lacks what is compared ({wrong}); leave the option out, and the environment is "
            "made"
        )
    return python


def said(*command: str) -> str:
    """The last line of what a command wrote, if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
    return lines[-1] if done.returncode else ""
