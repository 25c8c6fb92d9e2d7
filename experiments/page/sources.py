"""What directories of results hold."""

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from kvjax.experiments.evaluation import boards
from kvjax.experiments.evaluation.results import planned_keys, read_bad, read_config, read_costs, read_samples
from kvjax.experiments.evaluation.summary import metrics_of
from kvjax.experiments.page.lines import Found, Line, Place, Run, Setting, in_blocks, model_name
from kvjax.experiments.page.lm_eval import read_lm_eval, result_files, without_repeats

_ASIDE = "model", "protocol", "tasks", "text"  # which have places of their own


def read(directories: Sequence[pathlib.Path], passed_over: Callable[[pathlib.Path], bool] = lambda _: False) -> Found:
    """Everything that finished runs in directories hold, and in the directories within those that are no runs.

    Args:
      directories: of runs of `experiments/run.py`, of lm-eval or of `experiments/reproduce.py`.
      passed_over: directories that need not be named where they hold none.

    Raises:
      ValueError: a directory that does not exist, or none that holds a finished run.
    """
    if absent := [str(d) for d in directories if not d.exists()]:
        raise ValueError(f"there is no {', '.join(absent)}")
    found, seen = Found(), set[pathlib.Path]()
    for directory in (d for d in directories if d.is_dir()):
        if not _read_one(directory, found, seen):
            within = sorted(d for d in directory.iterdir() if d.is_dir() and not d.name.startswith("."))
            if not sum(_read_one(d, found, seen) for d in within) and not passed_over(directory):
                board = (directory / boards.FILE).is_file()
                why = "no finished run of run.py, of reproduce.py or of lm-eval"
                found.skipped.append((directory, "a leaderboard without rows; give it by --with" if board else why))
    found.lines = without_repeats(found.lines)
    if not found.runs:
        reasons = "".join(f"\n  {path}: {why}" for path, why in found.skipped)
        raise ValueError(f"no finished run among the directories given; run experiments/run.py first{reasons}")
    return found


def _read_one(directory: pathlib.Path, found: Found, seen: set[pathlib.Path]) -> bool:
    """Adds what a directory holds that was not `seen`. Returns whether it holds anything, broken or not."""
    readers: list[tuple[pathlib.Path, Callable[[pathlib.Path, Found], None]]]
    if (directory / "manifest.json").is_file():
        reproduced = (directory / "report.json").is_file()
        readers = [(directory, _read_reproduction if reproduced else _read_run)]
    else:
        readers = [(file, read_lm_eval) for file in result_files(directory)]
    for path, reader in readers:
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        part = Found()
        try:
            reader(path, part)
        except (ValueError, OSError) as e:
            found.skipped.append((path, str(e)))
        except (KeyError, TypeError, AttributeError) as e:  # other fields than those that are written
            found.skipped.append((path, f"broken ({type(e).__name__}: {e})"))
        else:
            found.add(part)
    return bool(readers)


def _read_run(directory: pathlib.Path, found: Found) -> None:
    """Adds a run of `experiments/run.py`.

    Raises:
      ValueError: files that are broken, no run of that script, or one that is not finished.
    """
    config = read_config(directory)
    setup, policies, tasks = (config.get(name) for name in ("setup", "policies", "tasks"))
    named = lambda p: isinstance(p, dict) and {"method", "budget", "policy"} <= set(p)
    whole = isinstance(setup, dict) and isinstance(tasks, dict) and isinstance(policies, list)
    if not whole or not all(map(named, policies)):
        raise ValueError("not a run of experiments/run.py, and not finished if it is one of experiments/reproduce.py")
    samples, _ = read_samples(directory, config)
    bad = read_bad(directory, config)
    keys = planned_keys(config, bad)
    if lost := sum(key not in samples for key in keys):
        raise ValueError(f"not finished: {lost} of {len(keys)} lines of samples.jsonl are missing; run it again")
    costs = read_costs(directory, config)
    of = {(p["method"], p["budget"]): str(p["policy"]) for p in policies}
    sizes = {run: costs[label]["kv_bytes"] for run in of if (label := "@".join(run)) in costs}
    manifest = json.loads((directory / "manifest.json").read_bytes())
    run = Run(
        directory.name,
        directory / "manifest.json",
        directory / "samples.jsonl",
        (*made(manifest), *_refused(bad)),
        sizes,
        boards.setup_of(config),
        {p["method"]: str(p["options"]) for p in policies if "options" in p},
    )
    details = {k: v for k, v in boards.shared(run.setup).items() if k not in _ASIDE}
    setting = Setting(
        model_name(str(setup.get("model"))), str(setup.get("protocol")), tuple((k, str(v)) for k, v in details.items())
    )
    variants = {
        name: json.dumps([{k: v for k, v in task.items() if k != "examples"}, config.get("text")], sort_keys=True)
        for name, task in tasks.items()
    }
    found.runs.append(run)
    for number, (key, sample) in enumerate(samples.items(), 1):
        method, budget, task, index = key
        policy = in_blocks(of[method, budget], None if method == "full" else setup.get("block"))
        kind: Literal["score", "nll"] = "score" if "score" in sample else "nll"
        place = Place(setting, task, variants[task], method, budget, policy)
        context = sample.get("same_context", index)
        value, metrics = float(sample[kind]), tuple(metrics_of([sample]))
        found.lines.append(Line(place, run, number, index, context, kind, value, sample, metrics))


def _refused(bad: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """How many rows of data could not be asked, and why the first of them."""
    if not bad:
        return []
    reasons = "; ".join(f"line {row['line']}: {row['reason']}" for row in bad[:3])
    return [("rows that could not be asked", f"{len(bad)} ({reasons}{'; ...' if len(bad) > 3 else ''})")]


def _read_reproduction(directory: pathlib.Path, found: Found) -> None:
    """Adds what `experiments/reproduce.py` wrote.

    Raises:
      ValueError: a report that is broken.
    """
    path = directory / "report.json"
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or not {"entry", "status", "numbers"} <= set(content):
        raise ValueError(f"{path} is not what experiments/reproduce.py writes")
    lines = directory / "samples.jsonl"
    found.runs.append(
        Run(directory.name, directory / "manifest.json", lines if lines.is_file() else None, made(content))
    )
    found.reproductions.append((directory, content))


def made(manifest: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """What a manifest says of how results were made, as far as it says so."""

    def pairs() -> Iterator[tuple[str, Any]]:
        command = manifest.get("command")
        yield "command", " ".join(map(str, command[1:])) if isinstance(command, list) else command
        changed = " with local changes" if manifest.get("git_dirty") else ""
        commit = manifest.get("git_commit")
        yield "commit", f"{str(commit)[:12]}{changed}" if commit else None
        device = manifest.get("device")
        if isinstance(device, dict):
            yield "device", f"{device.get('count')} x {device.get('kind')}, {device.get('cpus')} CPUs"
        versions = manifest.get("versions")
        if isinstance(versions, dict):
            yield "versions", ", ".join(f"{k} {versions[k]}" for k in ("jax", "kvjax") if k in versions)
        yield "made", manifest.get("created")
        shard = (manifest.get("config") or {}).get("shard")
        yield "shard", f"{shard[0]} of {shard[1]}" if isinstance(shard, list) and len(shard) == 2 else None

    return tuple((name, str(value)) for name, value in pairs() if value)
