"""Orbax checkpoints that say whose they are."""

import hashlib
import json
import math
import pathlib
from typing import Any


def opened(directory: pathlib.Path) -> Any:
    """Orbax's manager of a directory that holds the last checkpoint."""
    import orbax.checkpoint as ocp  # which takes longer to import than --help should

    options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
    return ocp.CheckpointManager(directory.absolute(), options=options)


def save_progress(manager: Any, step: int, state: Any, progress: dict[str, Any]) -> None:
    """Writes state and progress at a step; the progress, which orbax does not check, with a seal of its own."""
    from orbax.checkpoint import args

    sealed = {**progress, "seal": _seal(step, progress)}
    manager.save(step, args=args.Composite(state=args.StandardSave(state), progress=args.JsonSave(sealed)))


def _seal(step: int | None, progress: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([step, progress], sort_keys=True).encode()).hexdigest()[:16]


def read(manager: Any, directory: pathlib.Path, state: Any) -> tuple[Any, Any]:
    """State, like the one given, and progress of the last checkpoint in a directory.

    Raises:
      ValueError: a checkpoint that cannot be read.
    """
    from orbax.checkpoint import args

    wanted = args.Composite(state=args.StandardRestore(state), progress=args.JsonRestore())
    try:
        saved: Any = manager.restore(manager.latest_step(), args=wanted)
        saved.progress["identity"]
        if saved.progress.pop("seal", None) != _seal(manager.latest_step(), saved.progress):
            raise ValueError(f"its progress is not what was written at step {manager.latest_step()}")
    except Exception as e:  # whatever the readers of its files raise
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ValueError(
            f"the checkpoint in {directory} cannot be read ({reason}); move that directory away to learn anew"
        ) from e
    return saved.state, saved.progress


def restored(manager: Any, directory: pathlib.Path, state: Any, identity: str) -> tuple[Any, Any]:
    """As `read`, of a run that is known by its identity, which the progress is given without.

    Raises:
      ValueError: a checkpoint that cannot be read, or that belongs to another run.
    """
    found, progress = read(manager, directory, state)
    if (there := progress.pop("identity")) != identity:
        raise ValueError(
            f"{directory} holds a checkpoint of {there}, not of {identity}; move that directory away to learn anew, or "
            "begin with --restart"
        )
    return found, progress


def check_learns(loss: float, step: int, rate: float) -> None:
    """Stops before a checkpoint holds numbers that are none.

    Raises:
      ValueError: a loss that is not finite.
    """
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} at step {step}; lower rate={rate}, and begin with --restart")
