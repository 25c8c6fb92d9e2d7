"""Published gates and shares of heads: what is kept with them is what their numbers say."""

import json
import types

import numpy as np
import pytest

import kvjax
from kvjax import configs, methods
from kvjax.configs.experiment import Setup
from kvjax.learning.relax import with_table
from kvjax.methods.published import published
from tests import tensors

L, K, T = 3, 2, 40
CONFIG = types.SimpleNamespace(num_layers=L, num_kv_heads=K, window=lambda i: 8 if i == 1 else None)
GATES = "0.9\t-0.001\n0.3\t1.0\n0.0004\t0.5\n"
SHARES = {"L0H0": 0.125, "L0H1": 0.375, "L2H0": 0.25, "L2H1": 0.25}


def live(policy):
    """Whether tokens stay, "L K T"."""
    qkv = tensors.qkv(5, B=1, T=T)
    return np.stack([kvjax.evict_layer(policy, *qkv, layer=i, num_layers=L).live[0] for i in range(L)])


def test_heads_of_the_smallest_published_gates_stream(tmp_path):
    (tmp_path / "Model-0.5B.tsv").write_text(GATES)
    gates = published(tmp_path / "Model-0.5B", CONFIG)
    np.testing.assert_array_equal(gates, [[0.9, 0.0], [0.3, 1.0], [0.0004, 0.5]])
    kept = live(methods.duo_attention(gates, streaming=0.5, sinks=2, recent=5))
    few = (np.arange(T) < 2) | (np.arange(T) >= T - 5)
    streams = np.array([[False, True], [True, False], [True, False]])
    np.testing.assert_array_equal(kept, np.where(streams[..., None], few, True))


def test_heads_get_their_published_shares_beside_the_window_and_sliding_layers_the_average(tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(SHARES))
    shares = published(tmp_path / "model", CONFIG)
    policy = methods.headkv(4 + 8, shares, beta=1.0, window=4)
    assert policy == with_table(methods.ada_snapkv(4 + 8, window=4), shares)
    np.testing.assert_array_equal(live(policy).sum(-1), [[4 + 4, 4 + 12], [4 + 8] * 2, [4 + 8] * 2])


def test_every_file_that_was_published_is_of_its_models_shape(shared_data):
    heads = {"Llama-2-7B-32K-Instruct": (32, 32), "Qwen3-4B": (36, 8), "Qwen3-4B-Instruct-2507": (36, 8)}
    heads |= {"gemma-3-4b-it": (34, 4), "gemma-3-12b-it": (48, 8)}
    for file in [*shared_data.glob("duo_gates/*.tsv"), *shared_data.glob("head_budgets/*.json")]:
        layers, kv_heads = heads.get(file.stem, (32, 8))
        window = (lambda i: None if i % 6 == 5 else 1024) if file.stem.startswith("gemma") else lambda i: None
        config = types.SimpleNamespace(num_layers=layers, num_kv_heads=kv_heads, window=window)
        found = published(str(file).removesuffix(file.suffix), config)
        assert found.shape == (layers, kv_heads)
        assert found.max() <= 1 if file.suffix == ".tsv" else abs(found.mean() - 1) < 1e-9


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", GATES, "a.tsv has 3 layers of 2 kv heads, but the model 4 of 4 to give them to; take what was pub"),
        ("a.json", json.dumps(SHARES), "a.json has 2 layers of 2 kv heads, but the model 4 of 4 to give them to"),
        ("a.tsv", "0.5\tx\n", "a.tsv has no gates or shares of heads: could not convert string 'x'"),
        ("a.json", '{"layer0": 1}', "a.json has no gates or shares of heads: "),
        ("b.tsv", GATES, "nothing is published as .*a; its folder has b$"),
    ],
)
def test_what_is_not_of_the_model_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        published(tmp_path / "a", types.SimpleNamespace(num_layers=4, num_kv_heads=4))


@pytest.mark.parametrize(("config", "option"), [("duo_attention", "gates"), ("headkv", "importance")])
def test_a_command_names_what_was_published(tmp_path, config, option):
    table = np.random.default_rng(0).uniform(0, 1, (4, 4))
    np.savetxt(tmp_path / "model.tsv", table, delimiter="\t")
    np.save(tmp_path / "model.npy", table)
    of = lambda name: configs.find(config)[1](**{option: str(tmp_path / name)}, setup=Setup()).policies
    assert of("model.tsv") == of("model.npy")
