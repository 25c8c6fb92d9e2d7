"""The pages of the API reference: types as the source has them."""

import pytest

from kvjax.experiments import reference


def test_types_are_short():
    long = "jaxtyping.Float[jaxlib._jax.Array, 'B K S'] | jax.jaxlib._jax.Array | jaxtyping.PyTree[typing.Any]"
    assert reference.short(long) == 'Float["B K S"] | Array | PyTree'
    assert reference.short("jaxtyping.Int[numpy.ndarray | jaxlib._jax.Array, 'B']") == 'Int["B"]'


@pytest.mark.slow
def test_what_users_import_has_a_page(tmp_path):
    pytest.importorskip("pdoc")
    reference.write(tmp_path)
    first = (tmp_path / "kvjax.html").read_text()
    assert first.index('id="generate"') < first.index('id="from_fn"') < first.index('id="Adaptive"')
    page = (tmp_path / "kvjax" / "evict.html").read_text()
    assert "B K S" in page
    assert "jaxtyping" not in (tmp_path / "kvjax" / "methods.html").read_text()
    assert 'id="snapkv"' in (tmp_path / "kvjax" / "methods.html").read_text()  # where a user imports it from
    assert not (tmp_path / "kvjax" / "methods" / "votes.html").exists()
