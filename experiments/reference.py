"""Writes the pages of the API reference: `pip install 'kvjax[docs]'`, then `python experiments/reference.py`."""

import importlib
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
    r"(?:jax\.)?jaxlib\._jax\.(\w+)": r"\1",
    r"typing\.Any": "Any",
}


MODULES = "kvjax.methods.released", "kvjax.models.embedded"  # are imported by their own names
FIRST = "methods", "models", "generate", "Session", "prefill", "decode_step", "from_fn", "chain"  # what newcomers call


def short(text: str) -> str:
    """A type as the source has it: `Float["B K S"]`, without the modules of arrays."""
    for long, name in _SHORT.items():
        text = re.sub(long, name, text)
    return text


def exported(name: str) -> list[str]:
    """The names that a package takes from its modules for its users; none of a module or of an empty package."""
    module = importlib.import_module(name)
    inside = lambda value: getattr(value, "__module__", name).startswith(name)  # a constant has no module
    return [
        key
        for key in dir(module)
        if hasattr(module, "__path__") and not key.startswith("_")
        if not inspect.ismodule(value := getattr(module, key)) and inside(value)
    ]


def write(output: pathlib.Path = pathlib.Path("results/reference")) -> None:
    """Writes a page for every package that users import from.

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
    pdoc.render.configure(docformat="google", show_source=False, math=True)
    inside = {f"kvjax.{found.name}" for found in pkgutil.iter_modules(kvjax.__path__)}
    inside -= {"kvjax.configs", "kvjax.experiments"}  # commands
    inside -= {"kvjax.run", "kvjax.generation", "kvjax.text", "kvjax.__main__"}  # the names of the first are kvjax's
    for name in inside:
        if names := exported(name):  # stand on the package's page, as users import them
            importlib.import_module(name).__dict__["__all__"] = names
    kvjax.__all__ = sorted(kvjax.__all__, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    known = {f"kvjax.{name}" for name in kvjax.__all__}  # of which the first page has pages already
    pdoc.pdoc("kvjax", *sorted(inside - known), *MODULES, output_directory=output)
    print(f"open {output / 'index.html'}")


if __name__ == "__main__":
    tyro.cli(write)
