"""Gradient steps with checkpoints, after which an interrupted run goes on with the same bits."""

import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jaxtyping import PyTree
from tqdm import tqdm

from kvjax.experiments import stopping
from kvjax.experiments.core.locks import Locked
from kvjax.models.written import naming

Progress = dict[str, Any]
"""What JSON holds of where learning stands; `step` counts updates."""
Batch = TypeVar("Batch")


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
      OSError: a disk without room for a checkpoint.
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
                    _check_room(directory, state)
                    manager.save(progress["step"], args=ocp.args.Composite(**both))
                    stopping.check()
        manager.wait_until_finished()
    return state, progress


def _check_room(directory: pathlib.Path, state: PyTree[Any]) -> None:
    """Writes as much as a checkpoint takes: on a full disk orbax's threads would print tracebacks, a hundred lines."""
    size = 2 * sum(np.asarray(x).nbytes for x in jax.tree.leaves(state)) + 2**20  # what is merged stands there twice
    with naming(directory), tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(size))
        file.flush()


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


def fit(
    directory: pathlib.Path,
    identity: Any,
    start: PyTree[Any],
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]],
    data: Callable[[int], Sequence[Any]],
    *,
    steps: int,
    rate: float,
    max_steps: int | None = None,
    title: str = "learn",
    within: Callable[[PyTree[Any]], PyTree[Any]] = lambda learned: learned,
) -> tuple[PyTree[Any], dict[str, list[float]]]:
    """Makes a loss small by Adam, or goes on where an interrupted run stopped.

    Args:
      directory, identity: see `go_through`.
      start: what is learned, at the start.
      loss: of what is learned and of a step's data: what is made small, and what is noted, `losses` among it.
      data: of a step, a function of its number alone.
      steps: updates.
      rate: Adam's learning rate at the start; it falls to a tenth of itself along a cosine.
      max_steps: stop, with a checkpoint, after this many steps in all; for trying things out.
      title: of the bar.
      within: puts what was learned back to where it is allowed.

    Returns:
      What was learned, and what was noted at every step.

    Raises:
      ValueError: `losses` that are not finite, or what `go_through` raises.
    """
    tx = optax.adam(optax.cosine_decay_schedule(rate, steps, alpha=0.1))
    last = steps if max_steps is None else min(max_steps, steps)

    @jax.jit
    def update(state, *data):
        (_, noted), grads = jax.value_and_grad(loss, has_aux=True)(state["learned"], *data)
        updates, opt_state = tx.update(grads, state["opt_state"], state["learned"])
        return {"learned": within(optax.apply_updates(state["learned"], updates)), "opt_state": opt_state}, noted

    def advance(state: dict[str, Any], progress: Progress) -> tuple[dict[str, Any], Progress, str]:
        step = progress["step"]
        state, found = update(state, *data(step))
        noted: dict[str, list[float]] = {
            name: [*progress["noted"].get(name, []), float(x)] for name, x in found.items()
        }
        now = noted["losses"][-1]
        if not math.isfinite(now):
            raise ValueError(f"the loss is {now} at step {step}; lower rate={rate}, and begin anew")
        return state, {"step": step + 1, "noted": noted}, f"loss {np.mean(noted['losses'][-10:]):.4f}"

    state, progress = go_through(
        directory,
        identity,
        {"learned": start, "opt_state": tx.init(start)},
        {"step": 0, "noted": {}},
        advance,
        title=title,
        total=steps,
        more=lambda progress: progress["step"] < last,
    )
    return state["learned"], progress["noted"]


def shuffled(batches: Sequence[Batch], seed: int) -> Callable[[int], Batch]:
    """Which batch a step learns from: all of them in an order drawn anew for every round."""

    def of(step: int) -> Batch:
        epoch, place = divmod(step, len(batches))
        return batches[np.random.default_rng([seed, epoch]).permutation(len(batches))[place]]

    return of
