"""Breaks the code in one place after another and runs the tests of that place: each must fail.

    python -m tests.mutants                      # all of them, an hour on 2 cores; writes tests/mutants/README.md
    python -m tests.mutants --only kvjax/pool    # those whose file or words contain a text; prints alone

A line of `mutants.jsonl` says what is broken, in which file, what stands there and what instead, and which tests are
asked. Each runs on a copy of the project, so the working tree stays as it is.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
NO_TESTS = 5  # how pytest exits where none is selected
LIMIT = 1800  # seconds for the tests of one mutant; one that hangs is noticed as well


def run(tree: pathlib.Path, tests: list[str]) -> tuple[bool, str]:
    """Whether tests fail, and the first that does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", *(f"tests/{test}" for test in tests)]
    ask = lambda: subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=LIMIT)
    try:
        done = ask()
        if done.returncode == NO_TESTS:  # all of them are slow
            command += ["-m", "slow"]
            done = ask()
    except subprocess.TimeoutExpired:
        return True, f"no end within {LIMIT} s"
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{' '.join(command)} exits {done.returncode}:\n{done.stdout}\n{done.stderr}")
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    return done.returncode != 0, found[1] if found else ""


def main() -> int:
    """Prints a line a mutant; exits 1 if one was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="a text in the file or the words of a mutant")
    args = parser.parse_args()
    every = [json.loads(line) for line in (HERE / "mutants.jsonl").read_text().splitlines()]
    chosen = [m for m in every if args.only in m["file"] or args.only in m["broken"]]
    lines, escaped = ["| what is broken | where | noticed by |", "|---|---|---|"], 0
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "kvjax")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "results", "__pycache__"))
        for mutant in chosen:
            path, start = tree / mutant["file"], time.monotonic()
            text = path.read_text()
            if text.count(mutant["right"]) != 1:
                raise ValueError(f"{mutant['right']!r} stands {text.count(mutant['right'])} times in {mutant['file']}")
            path.write_text(text.replace(mutant["right"], mutant["wrong"]))
            noticed, by = run(tree, mutant["tests"])
            path.write_text(text)
            escaped += not noticed
            lines.append(f"| {mutant['broken']} | `{mutant['file']}` | {f'`{by}`' if noticed else '**nothing**'} |")
            seconds = time.monotonic() - start
            print(f"{'noticed' if noticed else 'ESCAPED'} {seconds:5.0f} s  {mutant['broken']}  {by}", flush=True)
    print(f"{len(chosen) - escaped} of {len(chosen)} noticed")
    if len(chosen) == len(every):
        text = f"# Mutants\n\n{__doc__}\n{len(chosen) - escaped} of {len(chosen)} are noticed.\n\n"
        (HERE / "README.md").write_text(text + "\n".join(lines) + "\n")
    return int(escaped > 0)


if __name__ == "__main__":
    sys.exit(main())
