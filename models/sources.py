"""Where checkpoints come from: a directory, a hub id, or the name of a preset."""

import contextlib
import os
import pathlib
import re
from typing import Final

from kvjax.models.embedded import included
from kvjax.models.packaged import PACKAGED, fetched
from kvjax.models.presets import PRESETS, preset

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
TOKENIZER: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
)
# Names in full: "*" would take variants such as model.fp16-00001-of-00002.safetensors as well.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-?????-of-?????.safetensors",
    "model-?????-of-??????.safetensors",
)
_FOLDERS = ("*/*",)  # patterns of the hub cross slashes: of other formats, such as onnx/model.safetensors
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def locate(
    source: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None, weights: bool = True
) -> pathlib.Path:
    """The local directory of a checkpoint, downloading what a hub id or a preset stands for.

    Args:
      source: a directory, which comes first; "embedded" or "varied", a model that comes with kvjax; a GGUF file, or a
        name of `PACKAGED`, which stands for one; a hub id "owner/name" or "owner/name@revision"; a name of `PRESETS`.
      revision: a branch, tag or commit of the hub.
      token: for repositories of the hub that ask for one; the one that is logged in if None.
      weights: whether they are wanted too, or the config and the tokenizer alone.

    Raises:
      ValueError: none of them, a revision of a directory, or a download that failed.
    """
    path = local_path(source)
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise ValueError(f"revision={revision!r} is not the name of a branch, a tag or a commit")
    gguf = str(source).lower() in PACKAGED and not path.exists()
    if path.is_dir() or path.suffix.lower() == ".gguf" or gguf:
        if revision is not None:
            kind = "a directory" if path.is_dir() else "of one version"
            raise ValueError(f"{source} is {kind}, which has no revision {revision!r}; leave revision out")
        if path.is_dir():
            return path
        from kvjax.models.gguf import converted  # Flax is slow to import, and only wanted here

        return converted(fetched(str(source).lower()) if gguf else path)
    name, revision = repository(source, revision)
    from huggingface_hub import snapshot_download  # slow to import, and only wanted here

    wanted = [CONFIG, GENERATION, *TOKENIZER, *(_WEIGHTS if weights else ())]
    try:
        return pathlib.Path(
            snapshot_download(name, revision=revision, token=token, allow_patterns=wanted, ignore_patterns=[*_FOLDERS])
        )
    except Exception as e:
        raise ValueError(f"{source} is not a local directory, and downloading it from the hub failed: {e}") from e


def local_path(source: str | os.PathLike[str]) -> pathlib.Path:
    """`source` as a path, of "embedded" and "varied" where these models are.

    Raises:
      ValueError: what names none.
    """
    if not isinstance(source, str | os.PathLike) or not str(source):
        raise ValueError(f"{source!r} is not the path of a checkpoint directory")
    try:
        path = pathlib.Path(source).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # asks the system whether such a name can be
            return path
    except (RuntimeError, OSError, ValueError) as e:
        raise ValueError(f"{str(source)[:80]!r} is not the path of a checkpoint directory: {e}") from e
    return pathlib.Path(included(str(path)))


def repository(source: str | os.PathLike[str], revision: str | None = None) -> tuple[str, str | None]:
    """The repository of the hub and the revision that a hub id or the name of a preset stands for.

    Raises:
      ValueError: neither, or two revisions.
    """
    path, (name, at, named) = local_path(source), str(source).partition("@")
    if path.exists() or not name or name[0] in "./~" or (at and not named):
        hint = "; it is a file: give the directory that holds it, or a GGUF file as NAME.gguf" if path.is_file() else ""
        raise ValueError(f"{source} is neither a directory nor a hub id like 'owner/name'{hint}")
    if at and revision not in (None, named):
        raise ValueError(f"{source} names another revision than revision={revision!r}; give one of them")
    revision = named or revision
    if "/" not in name:
        found = preset(name, PACKAGED)
        return found.repository, revision or found.revision
    if not _HUB.fullmatch(name):
        raise ValueError(
            f"{source} is neither a directory nor a hub id like 'owner/name', nor one of the presets {sorted(PRESETS)}"
        )
    return name, revision
