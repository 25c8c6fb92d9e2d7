"""Opens kvjax as new users do, and prints what opened.

    python -m tests.tools.doors            # Python 3.11 and 3.12, each with the lowest and the highest dependencies
    python -m tests.tools.doors --short    # Python 3.11 with the lowest, without the slow tests: what CI runs
    python -m tests.tools.doors --short --dist dist    # the same, before a release of what it leaves in dist

An archive of the source and, from it, a wheel are built and checked. The wheel is installed into fresh environments.
In a folder that has a `models.py`, `configs.py` and `experiments.py` of a user's own, each imports kvjax beside them,
runs the blocks of the README, a first look at the main job, and mypy and pyright over the blocks and over
`mistakes.py`, whose marked lines are what they must find. Then the checkout takes the wheel's place as an editable
install, is imported in the same folder, and runs the tests of tokenizers, weights and parity.
"""

import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[3]
HERE = pathlib.Path(__file__).parent
READMES = ["README.md", *(f"{p}/README.md" for p in ("kvjax", "kvjax", "models", "experiments", "pallas_kernels"))]
TOOLS = ["mypy", "pyright"]
TESTS = [
    "tests/test_encode.py",
    "tests/test_weights.py",
    "tests/test_model_config.py",
    "tests/test_loading.py",
    "tests/test_parity.py",
]
OWN = """
import configs, experiments, models
import kvjax, kvjax.models, kvjax.configs, kvjax.experiments.run
assert {m.mine for m in (configs, experiments, models)} == {"mine"}, "the user's own files were not imported"
assert kvjax.models.ModelConfig and kvjax.__version__ and set(kvjax.__all__) <= set(dir(kvjax)) | {"models", "plot"}
"""
LACKING = {
    "import kvjax.plot": "plot",
    "import kvjax.configs": "experiments",
    "import kvjax.experiments": "experiments",
}
VERSIONS = """
import importlib.metadata as m, platform
print(platform.python_version(), *(f"{p} {m.version(p)}" for p in ("jax", "flax", "transformers", "numpy")), sep=", ")
"""


def requirements(lowest: bool, extra: str | None = None) -> list[str]:
    """What pyproject.toml asks for; each at the lowest version that it allows, or as it stands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return [re.sub(r">=([\w.]+)(,<[\w.]+)?", r"==\1", r) if lowest else r for r in asked]


def marked(source: pathlib.Path) -> set[int]:
    """The lines of a file that say that they are wrong."""
    return {i for i, line in enumerate(source.read_text().splitlines(), start=1) if "# wrong: " in line}


def wrong(reported: str, name: str) -> set[int]:
    """The lines of a file in which a type checker has found an error."""
    return {int(i) for i in re.findall(rf"{re.escape(name)}:(\d+)(?::\d+)?(?: -|:) error", reported)}


class Door:
    """One environment, and the folder of its user.

    Args:
      python: an interpreter to make it with.
      lowest: whether dependencies are the lowest allowed ones.
      short: only the first README, and no slow tests.
      wheel: what they install.
      folder: for both.
    """

    def __init__(self, python: str, lowest: bool, short: bool, wheel: pathlib.Path, folder: pathlib.Path):
        self.lowest, self.short, self.home = lowest, short, folder / "home"
        self._python, self._wheel, self._venv = python, wheel, folder / "venv"
        self.home.mkdir(parents=True)
        for name in ("models", "configs", "experiments"):
            (self.home / f"{name}.py").write_text('mine = "mine"\n')
        shutil.copy(HERE / "mistakes.py", self.home)
        for readme in READMES[:1] if short else READMES:
            text = (ROOT / readme).read_text()
            for i, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
                (self.home / f"{readme[:-3].replace('/', '_')}_{i}.py").write_text(block)

    def call(self, *command: str, cwd: pathlib.Path | None = None, check: bool = True) -> str:
        """What a command of the environment prints.

        Raises:
          RuntimeError: it failed.
        """
        own = {
            "VIRTUAL_ENV": str(self._venv),
            "PATH": f"{self._venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "MPLBACKEND": "agg",
        }
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own
        command = (str(self._venv / "bin" / command[0]), *command[1:])
        done = subprocess.run(
            command, cwd=cwd or self.home, env=environment, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done.stdout + done.stderr

    def install(self) -> str:
        """The environment, with the wheel alone, which names what it lacks."""
        subprocess.run([self._python, "-m", "venv", str(self._venv)], check=True)
        lowest = requirements(True) if self.lowest else []
        self.call("pip", "install", "-q", str(self._wheel), *TOOLS, *lowest)
        for code, extra in LACKING.items():
            if f"pip install 'kvjax[{extra}]'" not in (said := self.call("python", "-c", code, check=False)):
                raise RuntimeError(f"{code} does not name the extra {extra}: {said}")
        if "pip install 'kvjax[experiments]'" not in (said := self.call("kvjax", "run", "--help", check=False)):
            raise RuntimeError(f"kvjax run does not name its extra: {said}")
        return f"{self._wheel.stat().st_size / 1e6:.2f} MB, " + self.call("python", "-c", VERSIONS).strip()

    def extras(self) -> str:
        """What READMEs and the commands need beside it."""
        extras = "experiments", "plot"
        lowest = [asked for extra in extras for asked in requirements(True, extra)] if self.lowest else []
        self.call("pip", "install", "-q", f"{self._wheel}[{','.join(extras)}]", *lowest)
        return ", ".join(extras)

    def imports(self) -> str:
        """kvjax beside the user's own files."""
        self.call("python", "-c", OWN)
        return "beside models.py, configs.py, experiments.py"

    def blocks(self) -> str:
        """What the READMEs show."""
        files = sorted(self.home.glob("*README_*.py"))
        run = "import sys; [exec(compile(open(f).read(), f, 'exec'), {}) for f in sys.argv[1:]]"
        self.call("python", "-c", run, *(f.name for f in files))
        return f"{len(files)} blocks"

    def main_job(self) -> str:
        """A first look: one short example of every task, and their page."""
        first_look = "--config snapkv.py --examples 1 --length 256 --output out".split()
        self.call("kvjax", "run", *first_look)
        found = (self.home / "out" / "report.html").stat().st_size
        return f"page of {found:,} bytes"

    def types(self) -> str:
        """Every mistake is found by both type checkers, and nothing else is."""
        files, wanted = sorted(f.name for f in self.home.glob("*.py")), marked(self.home / "mistakes.py")
        for tool in TOOLS:
            reported = self.call(tool, *files, check=False)
            found = wrong(reported, "mistakes.py")
            others = {f for f in files if f != "mistakes.py" and wrong(reported, f)}
            if found != wanted or others:
                raise RuntimeError(
                    f"{tool}: lines {sorted(found ^ wanted)} of mistakes.py, {sorted(others)}\n{reported}"
                )
        return f"{len(wanted)} of {len(wanted)} mistakes by {' and '.join(TOOLS)}"

    def editable(self) -> str:
        """The checkout in the wheel's place."""
        self.call("pip", "install", "-q", "--no-deps", "-e", str(ROOT))
        self.call("python", "-c", OWN)
        return "imported beside the same files"

    def tests(self) -> str:
        """Tokenizers, weights and parity with transformers; without torch, where its build for CPUs is missing."""
        self.call("pip", "install", "-q", *requirements(False, "test"), *(requirements(True) if self.lowest else []))
        only = "not slow" if self.short else "slow or not slow"
        said = self.call("pytest", "-q", "-m", only, *TESTS, cwd=ROOT)
        return re.findall(r"\d+ passed.*? in", said)[-1].removesuffix(" in")


def opened(python: str, lowest: bool, wheel: pathlib.Path, short: bool) -> Iterator[tuple[str, str, float]]:
    """(what was tried, what it gave, seconds) in one environment, until something fails."""
    with tempfile.TemporaryDirectory() as folder:
        door = Door(python, lowest, short, wheel, pathlib.Path(folder))
        steps: dict[str, Callable[[], str]] = {
            "wheel": door.install,
            "extras": door.extras,
            "import": door.imports,
            "README": door.blocks,
            "main job": door.main_job,
            "types": door.types,
            "editable": door.editable,
            "tests": door.tests,
        }
        for name, step in steps.items():
            start = time.monotonic()
            try:
                found = step()
            except (RuntimeError, OSError, subprocess.SubprocessError) as e:
                yield name, f"FAILED: {e}", time.monotonic() - start
                return
            yield name, found, time.monotonic() - start


def main() -> None:
    """Prints a row for everything that was tried; ends with 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.doors")
    parser.add_argument(
        "--short", action="store_true", help="the lowest dependencies on one Python, without slow tests"
    )
    parser.add_argument("--dist", type=pathlib.Path, help="an empty folder, or a new one, for the archives")
    options = parser.parse_args()
    if options.dist and options.dist.exists() and any(options.dist.iterdir()):
        parser.error(f"{options.dist} has files already, which would be released; give another folder")
    short = options.short
    pythons = [sys.executable] if short else ["python3.11", "python3.12"]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        built = options.dist or pathlib.Path(folder)
        build = [sys.executable, "-m", "build", "-o", str(built), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        wheel, source = (next(built.glob(kind)) for kind in ("*.whl", "*.tar.gz"))
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(source)], check=True)
        print("| Python | dependencies | door | what | seconds |\n|---|---|---|---|---|")
        for python in pythons:
            for lowest in (True,) if short else (True, False):
                for name, found, seconds in opened(python, lowest, wheel, short):
                    first, _, rest = found.partition("\n")
                    how = "lowest" if lowest else "highest"
                    print(f"| {pathlib.Path(python).name} | {how} | {name} | {first} | {seconds:.0f} |", flush=True)
                    if found.startswith("FAILED"):
                        failed = True
                        print(rest, file=sys.stderr)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
