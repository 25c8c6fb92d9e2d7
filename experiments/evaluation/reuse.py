"""What an earlier run leaves for later ones: the full cache's results."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any, Final

from kvjax.experiments.core.provenance import environment
from kvjax.experiments.evaluation import report
from kvjax.experiments.evaluation.policies import FULL
from kvjax.experiments.evaluation.results import Results, planned_keys, read_bad, read_config, read_costs, read_samples

_LABEL: Final = "full@1.0"
_OTHERS: Final = (
    "baselines",
    "baseline_budget",
    "task_budget",
    "compress",
)  # what of a setup the full cache does not depend on


def reuse_full(results: Results, kept: set[str]) -> Iterator[str]:
    """Takes the full cache's results over from a directory beside, if there is one of an equal run.

    That is a run of the same setup, tasks, checkpoint, code, versions and device. What is taken over is printed, and
    noted in the manifest. Times are those of the other run.

    Args:
      results: the run; where it has lines of the full cache, nothing is taken.
      kept: the runs whose positions of one prompt are kept.

    Yields:
      The label of the full cache, if it was taken over.
    """
    wanted = [key for key in planned_keys(results.config, results.bad) if key[:2] == FULL]
    if any(key in results.samples for key in wanted) or _LABEL in kept | {*results.costs}:
        return
    here = results.directory.resolve()
    for manifest in sorted(here.parent.glob("*/manifest.json")):
        there = manifest.parent
        if there == here or ".old-" in there.name:
            continue
        found = _full_of(there, results.config)
        if found is None:
            continue
        samples, cost, positions, bad = found
        results.set_bad(bad)
        results.take_over(_LABEL, str(there), samples)
        results.set_cost(*FULL, cost)
        report.save_kept(results.directory, results.config, _LABEL, positions)
        print(
            f"the full cache's {len(samples)} examples are taken over from {there}, an equal run; --restart runs them"
        )
        yield _LABEL
        return


def _full_of(directory: pathlib.Path, config: dict[str, Any]) -> tuple[list[Any], Any, list[Any], list[Any]] | None:
    """Lines, cost, kept positions and bad rows of the full cache in an equal run that has all of them."""
    try:
        theirs = read_config(directory)
        if _identity(theirs) != _identity(config):
            return None
        manifest = json.loads((directory / "manifest.json").read_bytes())
        now = environment([])
        if manifest.get("resumed") or any(
            manifest.get(k) != now[k] for k in ("code", "versions", "switches", "device")
        ):
            return None
        samples, _ = read_samples(directory, theirs)
        bad = read_bad(directory, theirs)
        keys = [key for key in planned_keys(theirs, bad) if key[:2] == FULL]
        cost, positions = read_costs(directory, theirs)[_LABEL], report.load_kept(directory, theirs)[_LABEL]
        return [samples[key] for key in keys], cost, positions, bad
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no run of this script, or a broken one
        return None


def _identity(config: dict[str, Any]) -> Any:
    """What the full cache's results depend on."""
    setup = {name: value for name, value in config["setup"].items() if name not in _OTHERS}
    full = [p | {"tasks": None} for p in config["policies"] if (p["method"], p["budget"]) == FULL]
    return setup, full, *(config[name] for name in ("tasks", "text", "checkpoint", "seed", "shard"))
