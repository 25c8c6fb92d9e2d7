"""Breaks the code in one place after another and runs the tests of that place: each must fail.

    python -m tests.tools.mutants                      # all of them, half an hour on 2 cores; writes its README.md
    python -m tests.tools.mutants --only kvjax/pool    # those whose file or words contain a text; prints alone

A line of `mutants.jsonl` says what is broken, in which file, what stands there and what instead, and which tests are
asked. They run on copies of the project, one a core, so the working tree stays as it is.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
NO_TESTS = 5  # how pytest exits where none is selected
SAID = {True: "noticed", False: "ESCAPED", None: "skipped"}
LIMIT = 1800  # seconds for the tests of one mutant; one that hangs is noticed as well


def run(tree: pathlib.Path, tests: list[str]) -> tuple[bool | None, str]:
    """Whether tests fail, None where this jax lets none of them run; and the first that does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *(f"tests/{test}" for test in tests)]
    command += ["-m", "not exhaustive"]
    ask = lambda: subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=LIMIT)
    try:
        done = ask()
        if done.returncode == NO_TESTS:
            command[-1] = "exhaustive"
            done = ask()
    except subprocess.TimeoutExpired:
        return True, f"no end within {LIMIT} s"
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{' '.join(command)} exits {done.returncode}:\n{done.stdout}\n{done.stderr}")
    if done.returncode == 0 and not re.search(r"\d+ passed", done.stdout):
        return None, ""
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    return done.returncode != 0, found[1] if found else ""


def main() -> int:
    """Prints a line a mutant; exits 1 if one was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="a text in the file or the words of a mutant")
    args = parser.parse_args()
    every = [json.loads(line) for line in (HERE / "mutants.jsonl").read_text().splitlines()]
    chosen = [m for m in every if args.only in m["file"] or args.only in m["broken"]]
    trees: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()

    def ask(mutant: dict[str, Any]) -> tuple[bool | None, str]:
        tree, start = trees.get(), time.monotonic()
        path = tree / mutant["file"]
        text = path.read_text()
        try:
            if text.count(mutant["right"]) != 1:
                times = text.count(mutant["right"])
                raise ValueError(f"{mutant['right']!r} stands {times} times in {mutant['file']}, not once")
            path.write_text(text.replace(mutant["right"], mutant["wrong"]))
            noticed, by = run(tree, mutant["tests"])
        finally:
            path.write_text(text)
            trees.put(tree)
        seconds = time.monotonic() - start
        print(f"{SAID[noticed]} {seconds:5.0f} s  {mutant['broken']}  {by}", flush=True)
        return noticed, by

    with tempfile.TemporaryDirectory() as folder:
        jobs = os.cpu_count() or 1
        for job in range(jobs):
            tree = pathlib.Path(folder, str(job), "kvjax")
            unread = shutil.ignore_patterns(".git", ".venv*", "results", "__pycache__")
            shutil.copytree(ROOT, tree, symlinks=True, ignore=unread)  # folders that are linked into the package
            trees.put(tree)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            found = list(pool.map(ask, chosen))
    lines, escaped = (
        ["| what is broken | where | noticed by |", "|---|---|---|"],
        sum(noticed is False for noticed, _ in found),
    )
    for mutant, (noticed, by) in zip(chosen, found, strict=True):
        by = f"`{by}`" if noticed else "**nothing**" if noticed is False else "not asked: needs another jax"
        lines.append(f"| {mutant['broken']} | `{mutant['file']}` | {by} |")
    asked = sum(noticed is not None for noticed, _ in found)
    print(f"{asked - escaped} of {asked} noticed")
    if len(chosen) == len(every):
        text = f"# Mutants\n\n{__doc__}\n{asked - escaped} of {asked} are noticed.\n\n"
        (HERE / "README.md").write_text(text + "\n".join(lines) + "\n")
    return int(escaped > 0)


if __name__ == "__main__":
    sys.exit(main())
