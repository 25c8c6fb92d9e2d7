"""Gradient steps with checkpoints, after which an interrupted run goes on with the same bits."""

import dataclasses
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

Noted = dict[str, list[float]]
"""What the loss notes, a number a step."""
RECENT = 20  # steps whose mean decides whether a stage has been learned
Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of learning.

    Attributes:
      steps: at most this many.
      until: advance when the mean of what is noted as `accuracy` over 20 steps exceeds this; None for all steps.
      rate: what updates are multiplied by at the beginning and the end; None leaves them.
    """

    steps: int
    until: float | None = dataclasses.field(default=None, kw_only=True)
    rate: tuple[float, float] | None = dataclasses.field(default=None, kw_only=True)

    def rate_at(self, step: int) -> float | None:
        """What the updates of one of its steps are multiplied by."""
        if self.rate is None:
            return None
        first, last = self.rate
        return first + (last - first) * (step / self.steps)

    def ends(self, steps: int, noted: Noted) -> bool:
        """Whether it ends after so many steps of it."""
        learned = self.until is not None and steps >= RECENT and np.mean(noted["accuracy"][-RECENT:]) > self.until
        return steps == self.steps or bool(learned)


def fit(
    directory: pathlib.Path,
    identity: Any,
    params: PyTree[Any],
    tx: optax.GradientTransformation,
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]],
    data: Callable[[int, Any], Sequence[Any]],
    stages: Sequence[Stage],
    *,
    max_steps: int | None = None,
    title: str = "learn",
    within: Callable[[PyTree[Any]], PyTree[Any]] = lambda params: params,
    save_every: int = 50,
) -> tuple[Any, Noted]:
    """Makes a loss small by gradient, or goes on where an interrupted run stopped.

    Args:
      directory: of the checkpoints (orbax); made if absent.
      identity: what a run that goes on must share with the one that stopped; JSON.
      params: what is learned, at the start.
      tx: the optimiser.
      loss: of what is learned and of a step's data: what is made small, and what is noted, `losses` among it.
      data: of a step and its stage, a function of these alone.
      stages: one after the other.
      max_steps: stop, with a checkpoint, after this many steps in all; for trying things out.
      title: of the bar.
      within: puts what was learned back to where it is allowed.
      save_every: steps between checkpoints.

    Returns:
      What was learned, None if `max_steps` came first; and what was noted at every step.

    Raises:
      ValueError: a loss that is not finite, a checkpoint that cannot be read or belongs to another run, or another
        process that writes there.
      OSError: a disk without room for a checkpoint.
    """
    import orbax.checkpoint as ocp  # which takes longer to import than --help should

    @jax.jit
    def update(state, rate, *data):
        (_, noted), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], *data)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        updates = updates if rate is None else optax.tree.scale(rate, updates)
        params = optax.apply_updates(state["params"], updates)
        return {"params": within(params), "opt_state": opt_state}, noted

    steps = sum(stage.steps for stage in stages)
    state = {"params": params, "opt_state": tx.init(params)}
    at: dict[str, Any] = {"step": 0, "stage": 0, "step_in_stage": 0, "noted": {}}
    more = lambda: at["stage"] < len(stages) and (max_steps is None or at["step"] < max_steps)
    stored = lambda: f"{directory} holds step {manager.latest_step()}, and the same command goes on from there"
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with (
        Locked(directory),
        ocp.CheckpointManager(directory.absolute(), options=options) as manager,
        stopping.noted(stored),
        stopping.finishing("this step, and its checkpoint"),
    ):
        if manager.latest_step() is not None:
            state, at = _restored(manager, directory, state, identity)
            print(f"resumed at step {at['step']} from {directory}")
        with tqdm(total=steps, initial=at["step"], desc=title, file=sys.stdout) as bar:
            while more():
                step, number, i, before = at.values()
                stage = stages[number]
                state, found = update(state, stage.rate_at(i), *data(step, stage))
                noted: Noted = {name: [*before.get(name, []), float(x)] for name, x in found.items()}
                if not math.isfinite(now := noted["losses"][-1]):
                    raise ValueError(f"the loss is {now} at step {step}; lower the learning rate, and begin anew")
                at = {"step": step + 1, "stage": number, "step_in_stage": i + 1, "noted": noted}
                if stage.ends(i + 1, noted):
                    at |= {"stage": number + 1, "step_in_stage": 0}
                bar.update()
                lately = {name: f"{np.mean(x[-10:]):.4f}" for name, x in noted.items()}
                bar.set_postfix(lately, stage=f"{number + 1}/{len(stages)}")
                if at["step"] % save_every == 0 or not more() or stopping.asked():
                    _check_room(directory, state)
                    progress = ocp.args.JsonSave({"progress": at, "identity": identity})
                    both = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=progress)
                    manager.save(at["step"], args=both)
                    stopping.check()
        manager.wait_until_finished()
    return (None if at["stage"] < len(stages) else state["params"]), at["noted"]


def _check_room(directory: pathlib.Path, state: PyTree[Any]) -> None:
    """Writes as much as a checkpoint takes: on a full disk orbax's threads would print tracebacks, a hundred lines."""
    size = 2 * sum(np.asarray(x).nbytes for x in jax.tree.leaves(state)) + 2**20  # what is merged stands there twice
    with naming(directory), tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(size))
        file.flush()


def _restored(manager: Any, directory: pathlib.Path, state: Any, identity: Any) -> tuple[Any, dict[str, Any]]:
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


def adam(rate: float, steps: int) -> optax.GradientTransformation:
    """Adam, whose learning rate begins at `rate` and falls to a tenth of itself along a cosine."""
    return optax.adam(optax.cosine_decay_schedule(rate, steps, alpha=0.1))


def shuffled(batches: Sequence[Batch], seed: int) -> Callable[[int], Batch]:
    """Which batch a step learns from: all of them in an order drawn anew for every round."""

    def of(step: int) -> Batch:
        epoch, place = divmod(step, len(batches))
        return batches[np.random.default_rng([seed, epoch]).permutation(len(batches))[place]]

    return of
