"""Writes the pages of the API reference: `pip install 'kvjax[docs]'`, then `python experiments/reference.py`."""

import inspect
import pathlib
import pkgutil
import re
from typing import Any

import tyro

import kvjax

_SHORT = {
    r"jaxtyping\.(\w+)\[[\w.]+(?: \| [\w.]+)*, '([^']*)'\]": r'\1["\2"]',
    r"jaxtyping\.PyTree\[[\w.]+\]": "PyTree",
    r"(?:jax\.)?jaxlib\._jax\.Array": "Array",
    r"typing\.Any": "Any",
}


def short(text: str) -> str:
    """A type as the source has it: `Float["B K S"]`, without the modules of arrays."""
    for long, name in _SHORT.items():
        text = re.sub(long, name, text)
    return text


def write(output: pathlib.Path = pathlib.Path("results/reference")) -> None:
    """Writes a page for every module of kvjax, its models and its kernels.

    Args:
      output: a folder for the pages; `index.html` is where to begin.
    """
    try:
        import pdoc
    except ImportError:
        raise SystemExit("the reference is written by pdoc; pip install 'kvjax[docs]'") from None
    plain = inspect.formatannotation

    def shown(annotation: Any, *args: Any, **how: Any) -> str:
        return short(plain(annotation, *args, **how))

    pdoc.doc.formatannotation = inspect.formatannotation = shown
    pdoc.render.configure(docformat="google", show_source=False)
    inside = {f"kvjax.{found.name}" for found in pkgutil.iter_modules(kvjax.__path__)}
    commands = {"kvjax.configs", "kvjax.experiments"}
    known = {f"kvjax.{name}" for name in kvjax.__all__}  # of which the first page has pages already
    pdoc.pdoc("kvjax", *sorted(inside - commands - known), output_directory=output)
    print(f"open {output / 'index.html'}")


if __name__ == "__main__":
    tyro.cli(write)
