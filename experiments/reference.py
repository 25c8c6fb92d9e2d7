"""Writes the site: pages of the API reference, and the READMEs as its guide.

pip install 'kvjax[docs]'
python experiments/reference.py
"""

import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import shutil
from typing import Any

import tyro

import kvjax

_SHORT = {
    r"jaxtyping\.(\w+)\[[\w.]+(?: \| [\w.]+)*, '([^']*)'\]": r'\1["\2"]',
    r"jaxtyping\.PyTree(?:\[[\w.]+\])?": "PyTree",
    r"typing\.Annotated\[(\w+), ([^\[\]]*)\]": r"\1 \2",
    r"(?:jax\.)?jaxlib\._jax\.(\w+)": r"\1",
    r"typing\.Any": "Any",
}


MODULES = "kvjax.methods.released", "kvjax.models.embedded"  # are imported by their own names
FIRST = "methods", "models", "generate", "Session", "prefill", "decode_step", "from_fn", "chain"  # what newcomers call


ROOT = pathlib.Path(__file__).resolve().parents[1]
GUIDE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>body {{max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 sans-serif}}
pre, table {{overflow-x: auto; display: block}} td, th {{padding: .2rem .6rem; text-align: left; vertical-align: top}}
img {{max-width: 100%}} pre, code {{background: #f2f2f2}} pre {{padding: .8rem}} td {{border-top: 1px solid #ddd}}
{colours}</style><nav><a href="{home}">Reference</a> · <a href="{first}">Guide</a></nav>
{body}</html>
"""
_LIST = "index.md"  # stands for the list of a folder's files
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")


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


def write_guide(output: pathlib.Path) -> None:
    """Writes `README.md` and all pages that it leads to, with the pictures, notebooks and records that they name.

    Args:
      output: the site's folder; the guide goes into `guide`, in the folders of the checkout.
    """
    from pdoc import render_helpers

    left, seen = [ROOT / "README.md"], set()
    while left:
        source = left.pop()
        listed = source.name == _LIST and sorted(x.name for x in source.parent.iterdir() if x.is_file())
        if source in seen or not (listed or source.is_file()):
            continue
        seen.add(source)
        place = output / "guide" / source.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copyfile(source, place)
            continue

        def linked(link: re.Match, here: pathlib.Path = source.parent) -> str:
            target = (here / link[1]).resolve()
            if target.is_dir():
                target /= "README.md" if (target / "README.md").is_file() else _LIST
            left.append(target)
            page = target.with_suffix(".html") if target.suffix == ".md" else target
            return f"]({os.path.relpath(page, here)}"

        files = f"# {source.parent.name}\n\n" + "\n".join(f"- [{name}]({name})" for name in listed or ())
        text = _LINK.sub(linked, files if listed else source.read_text())
        to = lambda path, here=place.parent: os.path.relpath(path, here)
        body = render_helpers.to_html(re.sub(r"<!-- .*? -->\n?", "", text))
        page = GUIDE.format(
            title=text.partition("\n")[0].lstrip("# "),
            colours=render_helpers.formatter.get_style_defs(),
            home=to(output / "kvjax.html"),
            first=to(output / "guide" / "README.html"),
            body=body,
        )
        place.with_suffix(".html").write_text(page)


def write(output: pathlib.Path = pathlib.Path("results/reference")) -> None:
    """Writes a page for every package that users import from, and the guide.

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
    kvjax.__doc__ = f"{kvjax.__doc__}\nThe [guide](guide/README.html) shows how they are used.\n"
    pdoc.pdoc("kvjax", *sorted(inside - known), *MODULES, output_directory=output)
    write_guide(output)
    print(f"open {output / 'index.html'}")


if __name__ == "__main__":
    tyro.cli(write)
