"""Mistakes of users that a type checker must find, one a line; no other line has one."""

import jax.numpy as jnp

import kvjax
from kvjax import methods, models

model, params = models.load("directory")
x, tokens = jnp.zeros((1, 2, 8, 4)), jnp.zeros((1, 8), jnp.int32)

methods.snapkv()  # wrong: no budget
methods.snapkv("64")  # wrong: text for a number
methods.snapkv(64, window_size=16)  # wrong: the option is window
methods.snapkv(64, window="16")  # wrong: text for a number
methods.snapkv(64, pooling="mean")  # wrong: no such way
methods.snap_kv(64)  # wrong: no such method
print(kvjax.EMPTIES)  # wrong: no such name
models.num_parameters(params)  # wrong: no such function
kvjax.chain(methods.snapkv(64), 64)  # wrong: a number for a policy
kvjax.when(16, methods.h2o(64))  # wrong: a number for a schedule
kvjax.Adaptive(alpha="0.5")  # wrong: text for a number
kvjax.partition({"first": 64}, ["first"])  # wrong: a number for a policy
kvjax.evict_layer(methods.snapkv(64), x, x)  # wrong: no values
print(kvjax.evict_layer(methods.snapkv(64), x, x, x).kept)  # wrong: what is kept is live
kvjax.generate(model, params, tokens, max_new_tokens=4, policy=64)  # wrong: a number for a policy
kvjax.generate(model, params, tokens, max_tokens=4)  # wrong: the option is max_new_tokens
print(kvjax.generate(model, params, tokens, max_new_tokens=4).token)  # wrong: the field is tokens
kvjax.make_plan(model.config, methods.h2o(64), [512], "512", 4)  # wrong: text for a number
models.load(5)  # wrong: a number for a directory
kvjax.prefill(model.config, params, tokens, max_new_tokens=4)  # wrong: a configuration for a model
