"""Gradient steps with checkpoints, after which an interrupted run goes on with the same bits."""

import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree
from tqdm import tqdm

from kvjax.experiments import stopping
from kvjax.experiments.core.locks import Locked

Progress = dict[str, Any]
"""What JSON holds of where learning stands; `step` counts updates."""


def go_through(
    directory: pathlib.Path,
    identity: Any,
    state: PyTree[Any],
    progress: Progress,
    advance: Callable[[PyTree[Any], Progress], tuple[PyTree[Any], Progress, str]],
    *,
    title: str,
    total: int,
    more: Callable[[Progress], bool],
    save_every: int = 50,
) -> tuple[PyTree[Any], Progress]:
    """Takes steps while there are more, or goes on where an interrupted run stopped.

    Args:
      directory: of the checkpoints (orbax); made if absent.
      identity: what a run that goes on must share with the one that stopped; JSON.
      state: parameters and optimiser state at the start.
      progress: at the start.
      advance: one step, a function of state and progress alone: both after it, and what the bar shows of it.
      title: of the bar.
      total: steps at most.
      more: whether a step follows.
      save_every: steps between checkpoints.

    Raises:
      ValueError: a checkpoint that cannot be read or belongs to another run, or another process that writes there.
    """
    import orbax.checkpoint as ocp  # which takes longer to import than --help should

    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    stored = lambda: f"{directory} holds step {manager.latest_step()}, and the same command goes on from there"
    with (
        Locked(directory),
        ocp.CheckpointManager(directory.absolute(), options=options) as manager,
        stopping.noted(stored),
        stopping.finishing("this step, and its checkpoint"),
    ):
        if manager.latest_step() is not None:
            state, progress = _restored(manager, directory, state, identity)
            print(f"resumed at step {progress['step']} from {directory}")
        with tqdm(total=total, initial=progress["step"], desc=title, file=sys.stdout) as bar:
            while more(progress):
                state, progress, shown = advance(state, progress)
                bar.update()
                bar.set_postfix_str(shown)
                if progress["step"] % save_every == 0 or not more(progress) or stopping.asked():
                    saved = {"progress": progress, "identity": identity}
                    both = {"state": ocp.args.StandardSave(state), "progress": ocp.args.JsonSave(saved)}
                    manager.save(progress["step"], args=ocp.args.Composite(**both))
                    stopping.check()
        manager.wait_until_finished()
    return state, progress


def _restored(manager: Any, directory: pathlib.Path, state: Any, identity: Any) -> tuple[Any, Progress]:
    """State, like the one given, and progress of the last checkpoint."""
    from orbax.checkpoint import args

    wanted = args.Composite(state=args.StandardRestore(state), progress=args.JsonRestore())
    try:
        saved: Any = manager.restore(manager.latest_step(), args=wanted)
        there, progress = saved.progress["identity"], saved.progress["progress"]
    except Exception as e:  # whatever the readers of its files raise
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ValueError(
            f"the checkpoint in {directory} cannot be read ({reason}); move that directory away to learn anew"
        ) from e
    if there != json.loads(json.dumps(identity)):
        raise ValueError(
            f"{directory} holds a checkpoint of {there}, not of {identity}; move that directory away to learn anew, or "
            "choose another"
        )
    return saved.state, progress


def check_learns(loss: float, step: int, rate: float) -> None:
    """Stops before a checkpoint holds numbers that are none.

    Raises:
      ValueError: a loss that is not finite.
    """
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} at step {step}; lower rate={rate}, and begin with --restart")
