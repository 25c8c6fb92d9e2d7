"""Every table and every figure of the five papers: what it shows, with which settings, and the numbers in the text."""

import difflib
from typing import Final

from kvjax.experiments.papers.tables import adakv, ahakv, keyformer, nacl, roco
from kvjax.experiments.papers.tables.base import Cell as Cell
from kvjax.experiments.papers.tables.base import Column as Column
from kvjax.experiments.papers.tables.base import Entry as Entry
from kvjax.experiments.papers.tables.base import Method as Method
from kvjax.experiments.papers.tables.base import Row as Row

ENTRIES: Final[dict[str, Entry]] = {
    entry.name: entry for paper in (adakv, ahakv, keyformer, nacl, roco) for entry in paper.ENTRIES
}


def find(name: str) -> Entry:
    """The entry of a name such as "ada-kv/table2".

    Raises:
      ValueError: an unknown name, with those of its paper, or with the papers there are.
    """
    if name in ENTRIES:
        return ENTRIES[name]
    paper, _, label = name.partition("/")
    labels = [e.label for e in ENTRIES.values() if e.paper == paper]
    if labels:
        raise ValueError(f"{paper} has no entry {label!r}; there are {', '.join(labels)}")
    papers = sorted({e.paper for e in ENTRIES.values()})
    near = difflib.get_close_matches(name, ENTRIES, n=1, cutoff=0.6)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no entry {name!r}; the papers are {', '.join(papers)}, as in ada-kv/table2{meant}")
