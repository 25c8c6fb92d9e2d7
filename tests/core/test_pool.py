"""A pool of slots that the heads of a layer share, with keys rotated by rank; and other storages by rank."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import kvjax
from kvjax import core, models
from kvjax import methods as old
from kvjax.core import methods as new
from kvjax.core.contract import Layout
from kvjax.models import mpt
from tests.core import tensors
from tests.kept import digest

LENGTHS = np.array([24, 17], np.int32)
IDS = np.asarray(tensors.token_ids(2, 24))
ALIBI = mpt.MPTConfig(
    vocab_size=61, embed_dim=32, mlp_dim=48, num_layers=1, num_query_heads=4, num_kv_heads=4, head_dim=8
)
CASES = {
    "H2O by rank": (
        replace(old.h2o(10, recent=4), heads=kvjax.Adaptive(0.5, 4.0), storage="pool", positions="rerotate"),
        replace(new.h2o(10, recent=4), heads=core.Adaptive(0.5, 4.0), layout=Layout("rank", pool=True)),
    ),
    "StreamingLLM": (
        replace(old.streaming_llm(8, sinks=2), storage="pool"),
        replace(new.streaming_llm(8, sinks=2), layout=Layout("shifted", 2, pool=True)),
    ),
    "StreamingLLM by head": (
        kvjax.partition_heads({"s": old.streaming_llm(8, sinks=2), "all": old.full()}, [["s", "all"]]),
        core.partition_heads({"s": new.streaming_llm(8, sinks=2), "all": core.Policy()}, [["s", "all"]]),
    ),
    "StreamingLLM, ALiBi": (old.streaming_llm(8, sinks=2), new.streaming_llm(8, sinks=2)),
    "H2O by rank, ALiBi": (
        replace(old.h2o(10, recent=4), positions="rerotate"),
        replace(new.h2o(10, recent=4), layout=Layout("rank")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_reads_by_rank_what_the_old_library_reads(case, shallow):
    model, params = shallow
    if "ALiBi" in case:
        model = models.LanguageModel(ALIBI)
        params = jax.tree.map(lambda x: x * 4, jax.jit(model.init)(jax.random.key(7)))
    how = {"lengths": LENGTHS, "max_new_tokens": 8, "eos_ids": ()}
    was, now = (
        f(model, params, IDS, policy=p, **how)
        for f, p in zip((kvjax.generate, core.generate), CASES[case], strict=True)
    )
    np.testing.assert_array_equal(now.tokens, was.tokens)
    assert digest(now.state.layers[0].head_pos) == digest(was.state.layers[0].head_pos)


def test_it_stores_all_channels(shallow):
    chained = core.chain(new.ada_snapkv(8, window=4), new.think(0.5, rows=4))
    with pytest.raises(ValueError, match="a pool stores all 8 key channels, but this layer keeps 4; use pool=False"):
        core.generate(*shallow, IDS, policy=chained, max_new_tokens=1)
