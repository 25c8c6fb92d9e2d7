"""What the commands of this folder share: how they begin and end, and how they write files."""

import contextlib
import functools
import gzip
import importlib
import io
import json
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import tyro

from kvjax.experiments import stopping
from kvjax.experiments.core.compiled import HELP, read_cache_option
from kvjax.models.written import naming, write_bytes


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Ends a script with one line, and an exit code, where an option, the machine or a signal stops it."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as e:
        raise SystemExit(f"error: {str(e) or type(e).__name__}") from e
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise SystemExit(f"error: the device has too little memory; lower the batch size or the length ({e})") from e
    except KeyboardInterrupt as e:
        print(f"\n{str(e) or 'interrupted; no result was being written'}", file=sys.stderr)
        raise SystemExit(stopping.exit_code()) from e


def as_command(main: Callable[[Sequence[str]], object]) -> Callable[..., Any]:
    """A command's `main(argv)`; without arguments it reads the process's command line, and takes its signals over.

    What stops it ends the process with one line and an exit code (`plain_errors`).
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> Any:
        if argv is None:
            stopping.begin()
        given = sys.argv[1:] if argv is None else argv
        with plain_errors():
            return main(given)

    return run


def typed(name: str) -> str:
    """How a command of this folder was called: by `kvjax` or by its file. Help and errors name it so."""
    program = pathlib.PurePath(sys.argv[0])
    by_kvjax = program.stem == "kvjax" or program.parts[-2:] == ("kvjax", "__main__.py")
    script, *rest = name.split()
    return " ".join(("kvjax", name) if by_kvjax else (f"experiments/{script}.py", *rest))


def check_limit(argv: Sequence[str]) -> None:
    """Names `--examples` to whoever asks for `--limit`, as lm-eval calls it.

    Raises:
      ValueError: it is asked for.
    """
    if "--limit" in argv:
        raise ValueError("there is no --limit; --examples says how many examples a task has")


def parsed(options: Any, argv: Sequence[str], name: str, about: str | None = None) -> Any:
    """What the command line says, by tyro; programs are kept unless it says not to (`read_cache_option`).

    Args:
      options: a class or a function whose arguments are options; or several by name, of which one is named first.
      argv: the command line.
      name: the command's.
      about: what its help says.
    """
    if "examples" in getattr(options, "__dataclass_fields__", {}):
        check_limit(argv)
    cli: Any = tyro.extras.subcommand_cli_from_dict if isinstance(options, dict) else tyro.cli
    return cli(options, args=read_cache_option(argv), prog=typed(name), description=f"{about or ''}\n\n{HELP}")


def script(function: Any) -> Any:
    """What a function, or one of several by name, returns that is called as the process's command line says."""
    cli: Any = tyro.extras.subcommand_cli_from_dict if isinstance(function, dict) else tyro.cli
    return as_command(lambda argv: cli(function, args=argv))()


def imported(module: str, extra: str) -> types.ModuleType:
    """A module of a package that kvjax itself does without.

    Args:
      module: its name.
      extra: of kvjax, that installs it.

    Raises:
      ValueError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0].replace("_", "-")
        raise ValueError(f"{package} cannot be imported ({e}); pip install 'kvjax[{extra}]'") from e


def write_json(path: pathlib.Path, content: Any) -> None:
    """JSON, as `write_bytes` writes it."""
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def write_figure(path: pathlib.Path, figure: Any, **options: Any) -> None:
    """A PNG of a matplotlib figure, as `write_bytes` writes it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", **options)
    write_bytes(path, buffer.getvalue())


def write_page(
    directory: pathlib.Path, name: str, text: str, figures: Mapping[str, Any], rows: Sequence[Any] = ()
) -> None:
    """Writes a page, its figures and what it was made from, and says where.

    Args:
      directory: where.
      name: the page's, without a suffix.
      text: Markdown.
      figures: matplotlib's, by their names.
      rows: pandas' tables, one below the other in `scores.csv.gz`.
    """
    for title, figure in figures.items():
        write_figure(directory / f"{title}.png", figure)
    if rows:
        import pandas as pd  # which takes longer than --help should

        content = pd.concat(rows).to_csv(index=False, float_format="%.9g").encode()
        write_bytes(directory / "scores.csv.gz", gzip.compress(content, mtime=0))
    write_bytes(directory / f"{name}.md", text.encode())
    print(f"written to {directory}")


def check_output(path: pathlib.Path | None) -> None:
    """Tries, before hours of work, whether a file can be written where it is wanted; its directory is made.

    Raises:
      ValueError: the path is a directory.
      OSError: a file that cannot be written there.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--output {path} is a directory; name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path.parent), tempfile.TemporaryFile(dir=path.parent):
        pass
