"""The site: types as the source has them, and a guide whose links lead somewhere."""

import re

import pytest

from kvjax.experiments import reference


def test_types_are_short():
    long = "jaxtyping.Float[jaxlib._jax.Array, 'B K S'] | jax.jaxlib._jax.Array | jaxtyping.PyTree[typing.Any]"
    assert reference.short(long) == 'Float["B K S"] | Array | PyTree'
    assert reference.short("typing.Annotated[int, from 1 to 9] | None") == "int from 1 to 9 | None"
    assert reference.short("jaxtyping.Int[numpy.ndarray | jaxlib._jax.Array, 'B']") == 'Int["B"]'


@pytest.mark.slow
def test_what_users_import_has_a_page(tmp_path):
    pytest.importorskip("pdoc")
    reference.write(tmp_path)
    first = (tmp_path / "kvjax.html").read_text()
    assert first.index('id="generate"') < first.index('id="from_fn"') < first.index('id="Adaptive"')
    page = (tmp_path / "kvjax" / "compose.html").read_text()
    assert "B K S" in page
    assert "jaxtyping" not in (tmp_path / "kvjax" / "methods.html").read_text()
    assert 'id="snapkv"' in (tmp_path / "kvjax" / "methods.html").read_text()  # where a user imports it from
    assert not (tmp_path / "kvjax" / "methods" / "votes.html").exists()


@pytest.mark.slow
def test_links_of_the_guide_lead_to_its_pages_and_files(tmp_path):
    pytest.importorskip("pdoc")
    (tmp_path / "kvjax.html").touch()
    reference.write_guide(tmp_path)
    pages = {page: page.read_text() for page in (tmp_path / "guide").rglob("*.html")}
    assert {"README.html", "CONTRIBUTING.html", "experiments", "kvjax"} <= {
        x.name for x in (tmp_path / "guide").iterdir()
    }
    each = (
        (page, *link) for page, text in pages.items() for link in re.findall(r'(?:href|src)="([^":#]*)(#[^"]*)?"', text)
    )
    dead = [f"{page.name}: {to}{anchor}" for page, to, anchor in each if not _leads(pages, page, to, anchor[1:])]
    assert not dead


def _leads(pages, page, to, anchor):
    target = (page.parent / to).resolve() if to else page
    return target.is_file() and (not anchor or f'id="{anchor}"' in pages[target])
