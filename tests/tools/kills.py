"""Jobs that are killed at any moment: run again, they end with the results of those that nobody disturbed.

    python -m tests.tools.kills DIRECTORY 30

kills by turns the main job under both protocols, a sweep, a board, a paper's table and its claims, findings, the
learning of budgets, and the training of a model.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.runs import ROOT, one_layer, samples, without_times

TASKS = "multi_turn", "evicted_perplexity"
KINDS = "in_prompt", "after_compression", "sweep", "board", "reproduce", "replication", "findings", "learn", "train"
ROW = {"context": "the code for ada is 7 3 .", "question": "what is the code for ada ?", "answers": ["7 3"]}


def options(kind, here):
    """The script and options of a job of a kind; runs have three rows of data, the second of which is none.

    `here` is alone in its folder: a job takes equal lines over from directories beside.
    """
    here.parent.mkdir(parents=True)
    if kind == "train":
        sizes = ["--max-steps", "4", "--save-every", "2", "--output", str(here / "model")]
        return "train", [
            "embedded",
            "--checkpoints",
            str(here / "checkpoints"),
            "--output",
            str(here / "model"),
            *sizes,
        ]
    if kind == "board":
        sizes = "--methods window h2o --bytes 0.5 --examples 2 --length 320 --batch-size 2".split()
        return "board", [*sizes, "--parts", "perplexity", "continuation", "--output", str(here)]
    if kind == "reproduce":
        sizes = "keyformer/table3 --data project --examples 3 --length 200 --new-tokens 8 --batch-size 1".split()
        return "reproduce", [*sizes, "--methods", "h2o", "--output", str(here)]
    if kind == "replication":
        sizes = "--models embedded --parts perplexity --examples 1 --length 320 --batch-size 1".split()
        return "replication", [*sizes, "--output", str(here)]
    if kind == "findings":
        sizes = "to_hindsight --prompts 2 --length 96 --follow 4 --budget 0.5 --batch-size 1".split()
        return "findings", [*sizes, "--output", str(here)]
    if kind == "learn":
        sizes = "--window-size 8 --budget 0.25 --length 128 --calibration 2 --held-out 2 --tasks single_needle".split()
        sizes += ["--batch-size", "2", "--future", "4", "--steps", "30", "--model", one_layer()]
        return "learn", ["budget", "--config", "learned_budget.py", *sizes, "--output", str(here)]
    data = here.parent / "mine.jsonl"
    data.write_text(f"{json.dumps(ROW)}\n{{nope\n{json.dumps({**ROW, 'context': ROW['context'] * 3})}\n")
    sizes = "--window 4 --length 384 --examples 4 --batch-size 2 --max-new-tokens 4 --baselines none --seed 0 1".split()
    sizes += ["--model", one_layer(), "--tasks", *TASKS, "--data", str(data)]
    if kind == "sweep":
        return "sweep", ["--config", "snapkv.py", "--budget", "0.5", "0.25", "--output", str(here), "--", *sizes]
    return "run", ["--config", "snapkv.py", "--budget", "0.5", "--protocol", kind, "--output", str(here), *sizes]


FAST = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"  # to compile; as slow to run is no matter
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": FAST, "JAX_ENABLE_COMPILATION_CACHE": "0"}


def start(script, words, here):
    """A process that compiles everything itself, once it has written something."""
    command = [sys.executable, f"experiments/{script}.py", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not [*here.rglob("*")]:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{script} ended before it began")
        time.sleep(0.01)
    return process


def content(path):
    """What is in a file; None where it has times, or is a picture or table of what other files have."""
    if path.name == "samples.jsonl":
        return sorted(json.dumps(line | {"id": ""}) for line in without_times(samples(path.parent)))  # the data's path
    if path.suffix == ".npz":
        return {name: array.tolist() for name, array in np.load(path, allow_pickle=False).items()}
    if (
        path.suffix == ".safetensors"
        or path.name in ("bad_rows.jsonl", "scores.csv.gz")
        or path.parent.name == "tables"
    ):
        return path.read_bytes()
    return None


def found(here):
    """All that a job leaves, by file; of checkpoints, the arrays of the last."""
    files = sorted(p for p in here.rglob("*") if p.is_file() and "checkpoints" not in p.parts)
    name = lambda path: re.sub(r"-[0-9a-f]{16}\b", "", str(path.relative_to(here)))  # a digest of the data's path
    left = {name(path): content(path) for path in files}
    if steps := [int(p.name) for p in here.glob("checkpoints/*") if p.name.isdigit()]:
        stored, folder = ocp.PyTreeCheckpointer(), here / "checkpoints" / str(max(steps)) / "state"
        as_numpy = lambda _: ocp.RestoreArgs(restore_type=np.ndarray)
        arrays = stored.restore(folder, restore_args=jax.tree.map(as_numpy, stored.metadata(folder).item_metadata.tree))
        left["checkpoint"] = max(steps), [x.tolist() for x in jax.tree.leaves(arrays)]
    return left


def whole(kind, here):
    """What an undisturbed job leaves, and how many seconds it takes from its first file on."""
    process, began = start(*options(kind, here), here), time.monotonic()
    if process.wait():
        raise RuntimeError(f"{kind} failed")
    return found(here), time.monotonic() - began


def killed_and_resumed(kind, here, after):
    """What a job leaves that is killed so many seconds after its first file is there, and then runs again.

    Raises:
      RuntimeError: a line of the killed job is not there any more, or the job fails.
    """
    script, words = options(kind, here)
    process = start(script, words, here)
    time.sleep(after)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    for number in (process.pid, *map(int, children.stdout.split())):
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    done = {p: p.read_bytes().rpartition(b"\n")[0] for p in here.rglob("samples.jsonl")}
    lines = sum(len(text.splitlines()) for text in done.values())
    print(f"{kind}, killed after {after:.1f} s: {lines} lines there", flush=True)
    command = [sys.executable, f"experiments/{script}.py", *words]
    while subprocess.run(["pgrep", "-f", str(here)], capture_output=True, check=False).stdout:
        time.sleep(0.05)  # until the system has ended a killed child
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    if lost := [path for path, text in done.items() if not path.read_bytes().startswith(text)]:
        raise RuntimeError(f"{lost[0]} lost lines, or has them again")
    return found(here)


def main(directory, count):
    """Kills so many jobs. Exits with how many of them end otherwise."""
    directory.mkdir(parents=True)
    undisturbed = {}
    for kind in KINDS:
        undisturbed[kind] = whole(kind, directory / kind / "whole" / "x")
        print(f"{kind}: {undisturbed[kind][1]:.0f} s", flush=True)
    rng, wrong = np.random.default_rng(0), 0
    for i in range(count):
        kind, turn = KINDS[i % len(KINDS)], i // len(KINDS)
        expected, seconds = undisturbed[kind]
        moment = (turn + rng.random()) / -(-count // len(KINDS)) * seconds
        if killed_and_resumed(kind, directory / kind / str(i) / "x", moment) != expected:
            wrong += 1
            print(f"{kind} {i} ended otherwise", flush=True)
    print(f"{count} kills, {wrong} ended otherwise")
    return wrong


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), int(sys.argv[2])))
