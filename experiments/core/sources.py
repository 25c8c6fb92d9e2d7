"""What directories of results hold, as lines and numbers of one form: runs, lm-eval's output, papers."""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvjax.configs.experiment import Setup
from kvjax.experiments.core import table
from kvjax.experiments.core.records import Key, read_bad, read_lines, read_manifest
from kvjax.pallas_kernels.kinds import kind_of

# What a setup holds that no number depends on, or that tasks and policies are told apart by.
_ASIDE = (
    "chat",
    "examples",
    "data",
    "metrics",
    "baselines",
    "baseline_budget",
    "task_budget",
    "block",
    "reads",
    "batch_size",
)


_NUMBER, _TEXT = float | None, str | None
_LINE = dict.fromkeys(table.NUMERIC, _NUMBER) | dict.fromkeys(("context", "metric", "output"), _TEXT)
_PAPER = dict.fromkeys(("ours", "low", "high", "theirs"), _NUMBER) | dict.fromkeys(("method", "column"), str)
_PAPER |= {"budget": float | _TEXT}


@dataclasses.dataclass
class Run:
    """A finished run.

    Attributes:
      name: of its directory; for lm-eval, of the task and the call, too.
      manifest: the file that says how it was made.
      lines: the file of its lines; None where there is none.
      made: (name, value) of command, commit, device and versions.
      setup: what it has in common with runs that it can be compared with; empty for what other scripts made.
      setting: where its numbers stand.
      options: by method, those that are not the defaults of `kvjax.methods`.
      text: the file that facts were hidden in, and its digest; empty where there was none.
    """

    name: str
    manifest: pathlib.Path
    lines: pathlib.Path | None
    made: list[tuple[str, str]]
    setup: dict[str, Any] = dataclasses.field(default_factory=dict)
    setting: str = ""
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    text: str = ""


@dataclasses.dataclass
class Found:
    """What directories hold, or one of them, or one call of lm-eval.

    Attributes:
      runs: all finished ones.
      lines: of all runs, as `table.lines` makes them, once all are read.
      numbers: what comes without lines, in the columns of `table.numbers`.
      papers: (directory, content) of what `experiments/reproduce.py` wrote.
      skipped: (path, why) of what holds none.
    """

    runs: list[Run] = dataclasses.field(default_factory=list)
    lines: Any = dataclasses.field(default_factory=list)
    numbers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    papers: list[tuple[pathlib.Path, dict[str, Any]]] = dataclasses.field(default_factory=list)
    skipped: list[tuple[pathlib.Path, str]] = dataclasses.field(default_factory=list)


def read(directories: Sequence[pathlib.Path], output: pathlib.Path | None = None) -> Found:
    """Everything that finished runs in directories hold, and in the directories within those that are no runs.

    Args:
      directories: of runs of `experiments/run.py`, of lm-eval or of `experiments/reproduce.py`.
      output: a directory that need not be named where it holds none.

    Raises:
      ValueError: a directory that does not exist, or none that holds a finished run.
    """
    if absent := [str(d) for d in directories if not d.exists()]:
        raise ValueError(f"there is no {', '.join(absent)}")
    found, seen = Found(), set[pathlib.Path]()

    def take(directory: pathlib.Path) -> bool:
        """Whether a directory holds anything, broken or not."""
        readers = [*_readers(directory)]
        for path, reader in readers:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                part = reader(path)
            except (ValueError, OSError) as e:
                found.skipped.append((path, str(e)))
            except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:  # no run writes such
                found.skipped.append((path, f"broken ({type(e).__name__}: {e})"))
            else:
                for name in ("runs", "lines", "numbers", "papers"):
                    getattr(found, name).extend(getattr(part, name))
        return bool(readers)

    for directory in (d for d in directories if d.is_dir()):
        if not take(directory):
            within = sorted(d for d in directory.iterdir() if d.is_dir() and not d.name.startswith("."))
            if not sum(map(take, within)) and not (output and output.resolve() == directory.resolve()):
                found.skipped.append((directory, "no finished run of run.py, of reproduce.py or of lm-eval"))
    if not found.runs:
        reasons = "".join(f"\n  {path}: {why}" for path, why in found.skipped)
        raise ValueError(f"no finished run among the directories given; run experiments/run.py first{reasons}")
    _name_apart(found.runs)
    numbers = dict[tuple[Any, ...], dict[str, Any]]()
    for number in found.numbers:
        numbers.setdefault(tuple(number[k] for k in table.NUMBER), number | {"runs": (number["run"].name,)})
    found.numbers = [*numbers.values()]
    found.lines = table.lines([line | {"run": line["run"].name} for line in _without_repeats(found.lines)])
    return found


def _readers(directory: pathlib.Path) -> Iterator[tuple[pathlib.Path, Callable[[pathlib.Path], Found]]]:
    """What is read in a directory; of lm-eval's calls the newest first."""
    if (directory / "manifest.json").is_file():
        yield directory, _reproduced if (directory / "report.json").is_file() else _run
    else:
        for file in sorted(directory.glob("results_*.json"), reverse=True):
            yield file, _lm_eval


def _name_apart(runs: Sequence[Run]) -> None:
    """Runs of one name are called by their paths."""
    count = collections.Counter(run.name for run in runs)
    for run in (run for run in runs if count[run.name] > 1):
        run.name = f"{run.manifest.parent}{run.name.removeprefix(run.manifest.parent.name)}"


# --- runs ---


def _run(directory: pathlib.Path) -> Found:
    """A run of `experiments/run.py`.

    Raises:
      ValueError: files that are broken or of an older kvjax, no run of that script, or one that is not finished.
    """
    manifest = read_manifest(directory)
    config = manifest["config"]
    setup, policies, tasks = (config.get(name) for name in ("setup", "policies", "tasks"))
    named = lambda p: isinstance(p, dict) and {"method", "budget", "policy"} <= set(p)
    whole = isinstance(setup, dict) and isinstance(tasks, dict) and isinstance(policies, list)
    if not whole or not all(map(named, policies)):
        raise ValueError("not a run of experiments/run.py, and not finished if it is one of experiments/reproduce.py")
    found, bad = read_lines(directory / "samples.jsonl")[0], read_bad(directory)
    for number, line in enumerate(found.values(), 1):
        _check(f"line {number} of {directory / 'samples.jsonl'}", line, _LINE)
    lost, planned = _missing(config, bad, found)
    if lost:
        raise ValueError(f"not finished: {lost} of {planned} examples are missing; run it again")
    run = Run(directory.name, directory / "manifest.json", directory / "samples.jsonl", _made(manifest, bad))
    run.setup = (
        {"template": "chat" if setup.get("chat") else "raw"}
        | setup
        | {name: config.get(name) for name in ("checkpoint", "tasks", "text")}
    )
    run.setting = setting_of(run.setup)
    if setup.get("text"):
        run.text = f"{pathlib.PurePath(setup['text']).name}, whose SHA-256 begins with {config.get('text')}"
    run.options = {p["method"]: str(p["options"]) for p in policies if "options" in p}
    block = "" if setup.get("block") is None else f", prompts in blocks of {setup['block']}"
    policy = {(p["method"], p["budget"]): p["policy"] + block * (p["method"] != "full") for p in policies}
    variant = {
        name: json.dumps([{k: v for k, v in task.items() if k != "examples"}, config.get("text")], sort_keys=True)
        for name, task in tasks.items()
    }
    order = [{name: i for i, name in enumerate(names)} for names in ([*policy], [*tasks])]
    rank = lambda key: (order[0][key[:2]], order[1][key[2]], *key[3:])
    place = {"run": run, "setting": run.setting, "averaged": True}
    lines = []
    for number, (key, line) in sorted(enumerate(found.items(), 1), key=lambda item: rank(item[1][0])):
        which = {"variant": variant[key[2]], "policy": policy[key[:2]], "called": key[0]}
        lines.append(line | place | which | {"line": number})
    return Found([run], lines)


def _check(where: str, found: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Refuses fields that are not what their annotations say."""
    for name, hint in hints.items():
        kind = kind_of(hint)
        if name in found and kind is not None and not kind.holds(found[name]):
            raise ValueError(f"{where} has {name}={found[name]!r:.60}, which no run writes; it must be {kind.words}")


def _missing(config: Mapping[str, Any], bad: Sequence[Mapping[str, Any]], found: Iterable[Key]) -> tuple[int, int]:
    """How many examples of a run, or of its shard, have no line, and of how many; bad ones have none."""
    shard, shards = config.get("shard") or (1, 1)
    rows = {task: range(shard - 1, of["examples"], shards) for task, of in config["tasks"].items()}
    asked = {(p["method"], p["budget"]) for p in config["policies"]}
    without = {(row["task"], row["index"]) for row in bad if row["index"] in rows.get(row["task"], ())}
    there = {k[:4] for k in found if k[:2] in asked and k[3] in rows.get(k[2], ()) and k[2:4] not in without}
    planned = len(asked) * (sum(map(len, rows.values())) - len(without))
    return planned - len(there), planned


def setting(model: str, protocol: str, details: Mapping[str, Any]) -> str:
    """What numbers share that may stand beside each other, as JSON of text.

    Args:
      model: a name, or a path, which its last part stands for.
      protocol: when questions are read.
      details: everything else, such as the length.
    """
    path = model.startswith((".", "/", "~")) or model.count("/") > 1
    named = {"model": pathlib.PurePath(model).name if path else model, "protocol": protocol}
    return json.dumps(named | {k: str(v) for k, v in details.items()})


def _made(manifest: Mapping[str, Any], bad: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What a manifest says of how results were made, the last time, and of rows that could not be asked."""
    made = manifest["made"][-1]
    device, versions = made.get("device") or {}, made.get("versions") or {}
    shard = manifest["config"].get("shard")
    reasons = "; ".join(f"line {row['line']}: {row['reason']}" for row in bad[:3])
    pairs = {
        "command": " ".join(map(str, made.get("command", ())[1:])),
        "code": code_of(manifest["made"]),
        "device": f"{device.get('count')} x {device.get('kind')}, {device.get('cpus')} CPUs" if device else None,
        "versions": ", ".join(f"{k} {versions[k]}" for k in ("jax", "kvjax") if k in versions),
        "made": made.get("created"),
        "shard": f"{shard[0]} of {shard[1]}" if shard else None,
        "rows that could not be asked": f"{len(bad)} ({reasons}{'; ...' if len(bad) > 3 else ''})" if bad else None,
    }
    return [(name, str(value)) for name, value in pairs.items() if value]


def code_of(made: Sequence[Mapping[str, Any]]) -> str:
    """Which code made a run's lines, those that were added later included: commits, or digests where there are none."""

    def one(each: Mapping[str, Any]) -> str:
        changed = " with local changes" if each.get("git_dirty") else ""
        commit = each.get("git_commit")
        return f"commit {str(commit)[:12]}{changed}" if commit else f"digest {each.get('code')}"

    return ", ".join(dict.fromkeys(map(one, made)))


def _reproduced(directory: pathlib.Path) -> Found:
    """What `experiments/reproduce.py` wrote.

    Raises:
      ValueError: a report or a manifest that is broken, or of an older kvjax.
    """
    path, lines = directory / "report.json", directory / "samples.jsonl"
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or not {"entry", "status", "numbers"} <= set(content):
        raise ValueError(f"{path} is not what experiments/reproduce.py writes")
    _check(str(path), content, {"entry": str, "status": str, "reduced": list, "numbers": Sequence[dict]})
    for number in content["numbers"]:
        _check(str(path), number, _PAPER)
    made = _made(read_manifest(directory), ())
    run = Run(directory.name, directory / "manifest.json", lines if lines.is_file() else None, made)
    return Found([run], papers=[(directory, content)])


# --- lm-eval's output ---


def _lm_eval(file: pathlib.Path) -> Found:
    """The lines of one call of lm-eval, and its numbers that come without any.

    Lines of two calls are the same where prompt and number are. Only metrics whose values are all in [0, 1] have lines.
    The first metric of a task stands for it in averages.

    Raises:
      ValueError: a file that is broken or not lm-eval's.
    """
    content = _objects(file, file.read_bytes())[0]
    results, config = content.get("results"), content.get("config")
    if not isinstance(results, dict) or not isinstance(config, dict):
        raise ValueError(f"{file} is not what lm-eval writes: it has no results or no config")
    part = Found()
    made = {"harness": f"lm-eval {content.get('lm_eval_version', '?')}", "code": content.get("git_hash")}
    said = [(name, str(value)) for name, value in made.items() if value]
    groups = {name for name, tasks in (content.get("group_subtasks") or {}).items() if tasks}
    for task, values in results.items():
        if task in groups or not isinstance(values, dict):
            continue
        call = f"{task}{file.name.removeprefix('results').removesuffix('.json')}"
        path = file.with_name(f"samples_{call}.jsonl")
        run = Run(f"{file.parent.name} {call}", file, path if path.is_file() else None, said)
        of = [content.get(name) or {} for name in ("versions", "n-shot", "task_hashes")]
        place = _described(content, config) | {"run": run, "variant": json.dumps([x.get(task) for x in of])}
        part.runs.append(run)
        samples = [] if run.lines is None else _objects(run.lines, *run.lines.read_bytes().splitlines())
        for sample in samples:
            _check(str(run.lines), sample, {"doc_id": float | str | None})
        found = [*_scored(task, samples)]
        part.lines += [place | line for line in found]
        for name, value in () if found else values.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if number and "," in name and "_stderr," not in name:
                error = values.get(name.replace(",", "_stderr,", 1))
                half = 1.959964 * error if isinstance(error, int | float) else math.nan  # a normal distribution's
                ends = {"value": float(value), "low": value - half, "high": value + half}
                named = {"task": f"{task} {name.partition(',')[0]}", "kind": "given", "n": 0, "run": run}
                part.numbers.append({k: place[k] for k in ("setting", "method", "budget")} | named | ends)
    return part


def _objects(file: pathlib.Path, *texts: bytes) -> list[dict[str, Any]]:
    found = []
    for number, text in enumerate(texts, 1):
        try:
            found.append({**json.loads(text)})
        except (ValueError, TypeError, RecursionError) as e:
            raise ValueError(f"line {number} of {file} is broken ({type(e).__name__}: {e})") from e
    return found


def _described(content: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """The setting, method, budget and policy of a call."""
    given = config.get("model_args") or {}
    if isinstance(given, str):
        given = dict(pair.split("=", 1) for pair in given.split(",") if "=" in pair)
    said = config.get("kvjax")
    ours = said if isinstance(said, dict) else {}
    details = {k: v for k, v in sorted(ours.items()) if k not in ("policy", "block")}
    for key in ("chat_template_sha", "system_instruction_sha", "fewshot_as_multiturn"):
        details |= {key: content[key]} if content.get(key) else {}
    model = str(given.get("pretrained", content.get("model_name", "?")))
    where = setting(model, "in_prompt", {"harness": "lm-eval", **details})
    if config.get("model") != "kvjax":
        method, budget, policy = str(config.get("model")), "1.0", json.dumps(given, sort_keys=True, default=str)
    else:
        method = str(given.get("policy", "full"))
        budget = "1.0" if method == "full" else str(given.get("budget", "-"))
        policy = str(ours.get("policy", given))
        if method != "full" and ours.get("block") is not None:
            policy += f", prompts in blocks of {ours['block']}"
    return {"setting": where, "method": method, "budget": budget, "policy": policy}


def _scored(task: str, samples: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A line a sample for every metric whose values are all in [0, 1]; the first one's task has the task's name."""
    found = []
    for filtered in dict.fromkeys(str(s.get("filter", "none")) for s in samples):
        of = [(n, s) for n, s in enumerate(samples, 1) if str(s.get("filter", "none")) == filtered]
        for metric in dict.fromkeys(m for _, s in of for m in s.get("metrics", ())):
            if all(isinstance(v := s.get(metric), int | float) and 0 <= v <= 1 for _, s in of):
                found.append((metric, filtered, of))
    several = len({f for _, f, _ in found}) > 1
    for i, (metric, filtered, of) in enumerate(found):
        label = f"{task} {metric}{f' {filtered}' if several else ''}" if i else task
        for number, s in of:
            row = json.dumps([s.get("doc_id"), s.get("prompt_hash")])
            said = s.get("filtered_resps")
            said = said[0] if isinstance(said, list) and len(said) == 1 else said
            line = {"task": label, "averaged": not i, "line": number, "index": row, "question": 0}
            line |= {
                "context": f"{label} {row}",
                "doc": s.get("doc_id"),
                "metric": metric,
                "score": float(s[metric]),
                "references": s.get("target"),
            }
            yield line | {"output": said if isinstance(said, str) else None}


def _without_repeats(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All lines but those of lm-eval's metrics that are a task's first one under another name, equal on every row."""
    values: dict[int, dict[str, list[float]]] = {}
    for line in (line for line in lines if "doc" in line):
        values.setdefault(id(line["run"]), {}).setdefault(line["task"], []).append(line["score"])
    differ = {task for first, *others in (of.items() for of in values.values()) for task, x in others if x != first[1]}
    return [line for line in lines if line["averaged"] or line["task"] in differ]


# --- what may stand in one table ---


def setting_of(setup: Mapping[str, Any]) -> str:
    """The `setting` of a run, by its setup as `Run` has it.

    Runs that were made before an option existed stand with those that left it as it is.
    """
    known: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Setup)} | dict(setup)
    seeds = known["seed"] if isinstance(known["seed"], list | tuple) else [known["seed"]]
    known["seed"] = seeds[0] if len(seeds) == 1 else list(seeds)
    aside = (*_ASIDE, "model", "protocol", "tasks", "text")
    details = {name: value for name, value in known.items() if name not in aside}
    return setting(str(setup.get("model")), str(setup.get("protocol")), details)
