"""What it takes to compile: against depth, and how many programs a sweep of budgets needs."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.drivers import attend, loop

DEPTHS = 4, 32
_PROMPT, _NEW = 4096, 32
_POLICIES = {"full": methods.full(), "snapkv": methods.snapkv(64), "h2o": methods.h2o(64)}


def _model(num_layers: int) -> models.LanguageModel:
    sizes = {"vocab_size": 512, "embed_dim": 128, "mlp_dim": 256, "num_query_heads": 8, "num_kv_heads": 4}
    return models.LanguageModel(models.ModelConfig(**sizes, num_layers=num_layers, head_dim=16))


def compile_times() -> dict[str, dict[str, dict[str, float]]]:
    """Processor seconds of tracing, lowering and compiling, by policy, phase and depth.

    The persistent cache is off meanwhile. A first compilation, which starts the compiler, is not counted.
    """
    config: Any = jax.config
    cached = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    try:
        _compiled(_model(1), methods.window(32))
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name, policy in _POLICIES.items():
            by_depth = {depth: _compiled(_model(depth), policy) for depth in DEPTHS}
            phases = by_depth[DEPTHS[0]]
            found[name] = {phase: {str(d): seconds[phase] for d, seconds in by_depth.items()} for phase in phases}
        return found
    finally:
        config.update("jax_enable_compilation_cache", cached)


def _compiled(model: models.LanguageModel, policy: kvjax.Policy) -> dict[str, float]:
    params, ints = model.shapes, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    how = {"policy": policy, "lengths": np.array([_PROMPT]), "max_new_tokens": _NEW}
    read = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, **how))
    step = jax.jit(lambda params, token, state: kvjax.decode_step(model, params, token, state))

    def seconds(function: Any, *arguments: Any) -> tuple[float, Any]:
        start = time.process_time()
        lowered = function.lower(*arguments)
        lowered.compile()
        return time.process_time() - start, lowered.out_info

    prefill, (_, state) = seconds(read, params, ints(1, _PROMPT))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return {"prefill": prefill, "decode": seconds(step, params, ints(1), state)[0]}


def sweep_programs(budgets: tuple[int, ...] = (16, 32, 48, 64), seeds: int = 10) -> dict[str, int]:
    """Programs of layers and loops that a sweep compiles: with a plan for each budget, and within the largest."""
    model = _model(2)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 512, (1, 256)).astype(np.int32)
    found: dict[str, int] = {}
    programs: list[Any] = [attend.layer_step, loop._in_place]
    largest = kvjax.make_plan(model.config, methods.h2o(max(budgets)), np.array([256]), 256, 2)
    for name, plan in (("a plan for each budget", None), ("all within the largest", largest)):
        jax.clear_caches()
        for budget in budgets:
            for seed in range(seeds):
                how: dict[str, Any] = {"plan": plan, "key": jax.random.key(seed), "max_new_tokens": 2, "buckets": False}
                kvjax.generate(model, params, tokens, policy=methods.h2o(budget), **how)
        found[name] = sum(program._cache_size() for program in programs)
    return found
