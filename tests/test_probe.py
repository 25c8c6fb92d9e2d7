"""What some methods must know of a model, as the command finds it."""

import numpy as np
import pytest

from kvjax.experiments import probe
from kvjax.models.embedded import EMBEDDED

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("as_users_run_it")]


def test_the_importance_beside_the_embedded_model_is_what_the_command_finds(tmp_path):
    probe.heads(probe.Probe(tmp_path / "heads.npy"))
    np.testing.assert_allclose(np.load(tmp_path / "heads.npy"), np.load(EMBEDDED / "heads.npy"), rtol=1e-5)


def test_a_function_with_a_hidden_layer_is_fitted(tmp_path, capsys):
    of = probe.Probe(tmp_path / "kvzap.npz", examples=3, length=256)
    probe.kvzap(of, units=4, steps=10)
    assert "tokens' logarithms, the function says" in capsys.readouterr().out
    with np.load(of.output) as arrays:
        shapes = {name: x.shape for name, x in arrays.items()}
    assert shapes == {"in": (4, 128, 4), "in_bias": (4, 4), "out": (4, 4, 4), "out_bias": (4, 4)}


def test_a_text_of_other_words_than_the_vocabulary_has_is_refused(tmp_path):
    (tmp_path / "text").write_text("the parrot squawks . " * 40)
    of = probe.Probe(tmp_path / "centres.npz", text=str(tmp_path / "text"), length=64)
    with pytest.raises(ValueError, match="the text has words that this model's vocabulary lacks; give another"):
        probe.centres(of)
