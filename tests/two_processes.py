"""One of two processes of two devices each, which share a batch and heads: `python -m tests.two_processes I PORT`.

It fails where tokens, or what its devices hold of the cache, are not what one device generates.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import kvjax
from kvjax import methods, models

index, port = map(int, sys.argv[1:])
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
assert (jax.device_count(), jax.local_device_count()) == (4, 2)

config = models.ModelConfig(
    vocab_size=61, embed_dim=32, mlp_dim=48, num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=8
)
model = models.LanguageModel(config)
params = jax.tree.map(lambda x: np.asarray(x * jnp.asarray(2.0, x.dtype)), model.init(jax.random.key(7)))
tokens = np.random.default_rng(0).integers(61, size=(4, 24))
options = {"policy": methods.h2o(8), "max_new_tokens": 4, "lengths": [24, 20, 24, 11], "buckets": False}
alone = kvjax.generate(model, params, tokens, **options)

devices = np.array(jax.devices()).reshape(2, 2).T
mesh = jax.sharding.Mesh(devices, ("data", "heads"))  # heads are shared across processes
found = kvjax.generate(model, kvjax.shard_params(model, params, mesh), tokens, mesh=mesh, **options)
for name in ("tokens", "lengths"):
    here, there = getattr(found, name), getattr(alone, name)
    np.testing.assert_array_equal(multihost_utils.process_allgather(here, tiled=True), there)
for shard in found.state.layers[0].pos.addressable_shards:
    assert shard.data.shape == (2, 1, found.state.layers[0].pos.shape[2])
    assert shard.index[1] == slice(index, index + 1)
    np.testing.assert_array_equal(shard.data, alone.state.layers[0].pos[shard.index])
print("equal")
