"""Files of trained heads."""

import os

import jax
import numpy as np
import pytest

from kvjax.contract import FrozenArrays
from kvjax.models import scorer


def test_a_trained_head_replaces_its_file_in_one_step(tmp_path, monkeypatch):
    module = scorer.ScoreHead(2, 3, 4)
    make = lambda seed: scorer.TrainedHead(
        2, 3, 4, FrozenArrays(jax.tree.map(np.asarray, scorer.init(module, jax.random.key(seed), 10)))
    )
    head = make(0)
    for name in ("head.npz", "head"):
        head.save(tmp_path / name)
        assert scorer.TrainedHead.load(tmp_path / name) == head

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        make(1).save(tmp_path / "head.npz")
    assert scorer.TrainedHead.load(tmp_path / "head.npz") == head
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "head.npz"]


def test_a_head_takes_layers_that_are_traced():
    """Its weights are numpy's."""
    weights = FrozenArrays(jax.tree.map(np.asarray, scorer.init(scorer.ScoreHead(2, 3, 4), jax.random.key(0), 10)))
    head, features = scorer.TrainedHead(2, 3, 4, weights), np.ones((1, 3, 5, 10), np.float32)
    for layer in range(2):
        np.testing.assert_allclose(jax.jit(head)(features, layer), head(features, layer), rtol=1e-5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "EOFError: .*; copy or train it again"),
        (lambda data: data[: len(data) // 2], "BadZipFile: "),
        (lambda data: data[:200] + bytes([data[200] ^ 4]) + data[201:], "BadZipFile|error"),
        ({"sizes": None}, "KeyError: 'sizes is not a file"),
        ({"sizes": "{"}, "JSONDecodeError: "),
        ({"sizes": "[2, 3, 4]"}, r"its sizes are \[2, 3, 4\], not num_layers, num_kv_heads, hidden"),
        (
            {"sizes": '{"num_layers": 5, "num_kv_heads": 3, "hidden": 4}'},
            r"hidden is .*\[2, 3, 10, 4\] there, .*\[5, 3,",
        ),
        ({"mean": None}, r"hidden is .* there, .* wanted|mean is absent there, .* wanted"),
        ({"more": np.ones(3, np.float32)}, r"more is float32\[3\] there, not wanted"),
        ({"out": np.ones((3, 2, 4), np.float32)}, r"out is float32\[3, 2, 4\] there, float32\[2, 3, 4\] wanted"),
        ({"out": np.ones((2, 3, 4), int)}, r"out is int64\[2, 3, 4\] there, float32\[2, 3, 4\] wanted"),
        ({"out": np.full((2, 3, 4), np.nan, np.float32)}, "out has values that are not finite"),
    ],
)
def test_a_damaged_head_is_refused(tmp_path, damage, message):
    file = tmp_path / "head.npz"
    params = scorer.init(scorer.ScoreHead(2, 3, 4), jax.random.key(0), 10)
    scorer.TrainedHead(2, 3, 4, FrozenArrays(jax.tree.map(np.asarray, params))).save(file)
    if callable(damage):
        file.write_bytes(damage(file.read_bytes()))
    else:
        with np.load(file) as data:
            arrays = {**data, **damage}
        np.savez(file, **{n: x for n, x in arrays.items() if x is not None})
    with pytest.raises(ValueError, match=f"{file} holds no trained head.*({message})"):
        scorer.TrainedHead.load(file)
