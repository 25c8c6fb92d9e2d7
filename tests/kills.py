"""Runs and sweeps that are killed at any moment: resumed, they end with the results of those that nobody disturbed.

    python -m tests.kills DIRECTORY 30

kills the main job under both protocols, and a sweep, by turns.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

from tests.runs import ROOT, one_layer, samples, without_times

TASKS = "multi_turn", "evicted_perplexity"
KINDS = "in_prompt", "after_compression", "sweep"
ROW = {"context": "the code for ada is 7 3 .", "question": "what is the code for ada ?", "answers": ["7 3"]}


def options(kind, here):
    """The script and options of a job of a kind; three rows of data, the second of which is none.

    `here` is alone in its folder: a job takes equal lines over from directories beside.
    """
    here.parent.mkdir(parents=True)
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
    """A process that compiles everything itself, once there is a manifest."""
    command = [sys.executable, f"experiments/{script}.py", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not [*here.rglob("manifest.json")]:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{script} ended before it began")
        time.sleep(0.01)
    return process


def found(here):
    """All that jobs leave, but for times, pictures and tables of them, and ids, which are of the data's path too."""
    return [
        {
            "files": sorted(str(p.relative_to(directory)) for p in directory.rglob("*")),
            "samples": sorted(json.dumps(line | {"id": ""}) for line in without_times(samples(directory))),
            "bad": (directory / "bad_rows.jsonl").read_bytes(),
            "kept": [
                {name: array.tolist() for name, array in np.load(p, allow_pickle=False).items()}
                for p in sorted((directory / "kept").glob("*.npz"))
            ],
        }
        for directory in sorted(p.parent for p in here.rglob("manifest.json"))
    ]


def whole(kind, here):
    """What an undisturbed job leaves, and how many seconds it takes from its manifest on."""
    process, began = start(*options(kind, here), here), time.monotonic()
    if process.wait():
        raise RuntimeError(f"{kind} failed")
    return found(here), time.monotonic() - began


def killed_and_resumed(kind, here, after):
    """What a job leaves that is killed so many seconds after its manifest is there, and then runs again.

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
