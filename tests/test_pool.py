"""A pool of slots that the heads of a layer share, with keys rotated by rank; and other storages by rank."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.contract import Layout
from kvjax.models import mpt
from tests import tensors
from tests.kept import digest

LENGTHS = np.array([24, 17], np.int32)
IDS = np.asarray(tensors.token_ids(2, 24))
ALIBI = mpt.MPTConfig(
    vocab_size=61, embed_dim=32, mlp_dim=48, num_layers=1, num_query_heads=4, num_kv_heads=4, head_dim=8
)
CASES = {  # a policy; tokens that the library before this one generated, and a digest of what it kept
    "H2O by rank": (
        replace(methods.h2o(10, recent=4), heads=kvjax.Adaptive(0.5, 4.0), layout=Layout("rank", pool=True)),
        [[14, 4, 7, 43, 17, 15, 0, 35], [35, 7, 17, 25, 7, 36, 40, 60]],
        "c114",
    ),
    "StreamingLLM": (
        replace(methods.streaming_llm(8, sinks=2), layout=Layout("shifted", 2, pool=True)),
        [[14, 7, 35, 56, 7, 60, 60, 14], [35, 7, 14, 35, 4, 7, 7, 7]],
        "a1c7",
    ),
    "StreamingLLM by head": (
        kvjax.partition_heads({"s": methods.streaming_llm(8, sinks=2), "all": kvjax.Policy()}, [["s", "all"]]),
        [[14, 7, 1, 56, 9, 36, 35, 7], [35, 7, 14, 3, 22, 16, 4, 7]],
        "d083",
    ),
    "StreamingLLM, ALiBi": (
        methods.streaming_llm(8, sinks=2),
        [[43, 14, 13, 8, 49, 13, 8, 14], [21, 21, 7, 13, 21, 21, 21, 21]],
        "848d",
    ),
    "H2O by rank, ALiBi": (
        replace(methods.h2o(10, recent=4), layout=Layout("rank")),
        [[43, 43, 43, 43, 43, 43, 43, 43], [21, 15, 10, 14, 3, 21, 21, 21]],
        "2639",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_reads_by_rank_what_was_recorded(case, shallow):
    model, params = shallow
    if "ALiBi" in case:
        model = models.LanguageModel(ALIBI)
        params = jax.tree.map(lambda x: x * 4, jax.jit(model.init)(jax.random.key(7)))
    policy, tokens, kept = CASES[case]
    found = kvjax.generate(model, params, IDS, policy=policy, lengths=LENGTHS, max_new_tokens=8, eos_ids=())
    np.testing.assert_array_equal(found.tokens, tokens)
    assert digest(found.state.layers[0].head_pos) == kept


def test_it_stores_all_channels(shallow):
    chained = kvjax.chain(methods.ada_snapkv(8, window=4), methods.think(0.5, rows=4))
    with pytest.raises(ValueError, match="a pool stores all 8 key channels, but this layer keeps 4; use pool=False"):
        kvjax.generate(*shallow, IDS, policy=chained, max_new_tokens=1)
