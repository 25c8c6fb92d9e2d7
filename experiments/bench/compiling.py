"""Prints what it takes to compile, by depth, how many programs a sweep of budgets needs, and what programs hold.

The command: `python -m kvjax.experiments.bench.compiling`.
"""

import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_distinct, check_whole
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.bench.process import apart, held
from kvjax.experiments.core.command import check_output, script
from kvjax.experiments.core.page import Table
from kvjax.experiments.core.provenance import device_info, write_found
from kvjax.generation import loop
from kvjax.models.embedded import EMBEDDED
from kvjax.run import layers

_NEW = 32
_POLICIES = {"full": "full", "SnapKV": "snapkv", "PyramidKV": "pyramidkv", "H2O": "h2o"}


def _model(num_layers: int) -> models.LanguageModel:
    sizes = {"vocab_size": 512, "embed_dim": 128, "mlp_dim": 256, "num_query_heads": 8, "num_kv_heads": 4}
    return models.LanguageModel(models.ModelConfig(**sizes, num_layers=num_layers, head_dim=16))


def compile_times(depths: tuple[int, ...], called: int, traced: int) -> dict[str, dict[str, dict[str, float]]]:
    """Processor seconds of tracing, lowering and compiling, by policy, program and depth.

    A first compilation, which starts the compiler, is not counted. The persistent cache must be off.

    Args:
      depths: numbers of layers.
      called: tokens of the prompt that `prefill` reads when it is called, its run included.
      traced: tokens of the prompt for `jax.jit` around `prefill` and around `decode_step`.
    """
    _compiled(_model(1), methods.window(32), called, called)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, method in _POLICIES.items():
        policy = make_policy(method, 64)
        by_depth = {depth: _compiled(_model(depth), policy, called, traced) for depth in depths}
        programs = by_depth[depths[0]]
        found[name] = {what: {str(d): seconds[what] for d, seconds in by_depth.items()} for what in programs}
    return found


def _compiled(model: models.LanguageModel, policy: kvjax.Policy, called: int, traced: int) -> dict[str, float]:
    params = jax.jit(model.init)(jax.random.key(0))
    how = {"policy": policy, "max_new_tokens": _NEW}
    jax.clear_caches()
    start = time.process_time()
    jax.block_until_ready(kvjax.prefill(model, params, np.zeros((1, called), np.int32), **how))
    first = time.process_time() - start
    read = jax.jit(lambda params, tokens: kvjax.prefill(model, params, tokens, **how, lengths=np.array([traced])))
    step = jax.jit(lambda params, token, state: kvjax.decode_step(model, params, token, state))

    def seconds(function: Any, *arguments: Any) -> tuple[float, Any]:
        start = time.process_time()
        lowered = function.lower(*arguments)
        lowered.compile()
        return time.process_time() - start, lowered.out_info

    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    prefill, (_, state) = seconds(read, params, ints(1, traced))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    decode = seconds(step, params, ints(1), state)[0]
    return {"prefill, called": first, "prefill in your jit": prefill, "decode_step in your jit": decode}


def sweep_programs(budgets: tuple[int, ...] = (16, 32, 48, 64), seeds: int = 10) -> dict[str, int]:
    """Programs of layers and loops that a sweep compiles: with a plan for each budget, and within the largest."""
    model = _model(2)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 512, (1, 256)).astype(np.int32)
    found: dict[str, int] = {}
    programs: list[Any] = [layers.layer_step, loop._decoded]
    largest = kvjax.make_plan(model.config, methods.h2o(max(budgets)), np.array([256]), 256, 2)
    for name, plan in (("a plan for each budget", None), ("all within the largest", largest)):
        jax.clear_caches()
        for budget in budgets:
            for seed in range(seeds):
                how: dict[str, Any] = {"plan": plan, "key": jax.random.key(seed), "max_new_tokens": 2, "buckets": False}
                kvjax.generate(model, params, tokens, policy=methods.h2o(budget), **how)
        found[name] = sum(program._cache_size() for program in programs)
    return found


def held_by_lengths(policy: str, share: float, lengths: int = 24) -> dict[str, float]:
    """MiB that this process holds more after prompts of so many lengths, 64 to 1,024 tokens, and layers compiled.

    Args:
      policy: a method's name.
      share: its budget, a share of the prompt.
      lengths: how many.
    """
    model, params = models.load(EMBEDDED)
    ids = np.random.default_rng(0).integers(4, model.config.vocab_size, (1, 1024)).astype(np.int32)
    read = lambda n: kvjax.generate(
        model, params, ids[:, -n:], policy=make_policy(policy, share), max_new_tokens=8, eos_ids=()
    )
    read(33)
    programs: Any = layers.layer_step
    before, of_first = held("VmRSS"), programs._cache_size()
    for n in np.linspace(64, 1024, lengths).astype(int):
        jax.block_until_ready(read(int(n)))
    return {"MiB": (held("VmRSS") - before) / 2**20, "layers": programs._cache_size() - of_first}


def bench(
    depths: tuple[int, ...] = (4, 16, 32), called: int = 256, traced: int = 4096, output: pathlib.Path | None = None
) -> None:
    """Prints a table, and what sweeps and lengths need.

    Args:
      depths: numbers of layers.
      called: tokens of the prompt that `prefill` reads when it is called.
      traced: tokens of the prompt for `jax.jit` around `prefill` and around `decode_step`.
      output: a JSON file for the figures.
    """
    check_whole(1, depths=depths, called=called, traced=traced)
    check_distinct("depths", depths)
    check_output(output)
    device = device_info()
    uncached = functools.partial(apart, "kvjax.experiments.bench.compiling", JAX_ENABLE_COMPILATION_CACHE="0")
    compiled = uncached("compile_times", depths, called, traced)
    print(f"{device['machine']}, {device['cpus']} CPUs, jax {jax.__version__}\n\nProcessor time to compile:\n")
    lines = [
        [f"{policy}, {what}", *(f"{x:.1f}" for x in seconds.values())]
        for policy, programs in compiled.items()
        for what, seconds in programs.items()
    ]
    print("\n".join(Table(["", *(f"{n} layers, s" for n in depths)], lines).markdown()))
    programs = sweep_programs()
    shown = ", ".join(f"{n} with {what}" for what, n in programs.items())
    print(f"\nprograms of a sweep of 4 budgets and 10 seeds: {shown}")
    lengths: dict[str, dict[str, float]] = {}
    for name, share in (("full", 1.0), ("snapkv", 0.25)):
        found = lengths[name] = uncached("held_by_lengths", name, share)
        print(f"24 lengths, {name}: {found['MiB']:.0f} MiB more, {found['layers']:.0f} programs of layers")
    tokens = {"called": called, "traced": traced}
    write_found(output, compiling=compiled, tokens=tokens, programs=programs, lengths=lengths)


if __name__ == "__main__":
    script(bench)
