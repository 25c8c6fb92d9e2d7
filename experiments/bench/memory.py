"""Bytes of a run, as `plan_memory` predicts them, as XLA plans them, and as a process holds them at its peak.

    python -m kvjax.experiments.bench.memory
    python -m kvjax.experiments.bench.memory --only h2o "ada_snapkv, dense" --lengths 4096

Every row is a process of its own: a Llama of random numbers (4 layers of 256, 8 query heads and 2 kv heads of 32)
reads a prompt under a method with a budget of 512 tokens, and decodes. Numbers are beyond parameters and prompt. The
measured peak is that of the resident set since before the second prefill, the first of which warmed up; freed buffers
go back to the system at once (`MALLOC_MMAP_THRESHOLD_`). Rows are stored as they are found; the same command goes on
where it was interrupted. Needs Linux.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import methods, models
from kvjax.configs.experiment import check_whole
from kvjax.contract import Layout
from kvjax.experiments.bench.policies import make_policy
from kvjax.experiments.bench.process import apart, forget_peak, held, stored_rows
from kvjax.experiments.bench.speed import RANDOM
from kvjax.experiments.core.command import script, write_json
from kvjax.experiments.core.locks import Locked
from kvjax.experiments.core.page import Table
from kvjax.experiments.core.provenance import device_info
from kvjax.methods.released import papers
from kvjax.models.written import write_bytes
from kvjax.run.memory import shown

_NEW, _BUDGET, _BLOCK = 64, 512, 512
_BLOCKS = ", in blocks"  # behind the name of a method


_PLAIN = (
    *("full", "window", "dilated_window", "random", "streaming_llm", "h2o", "key_attention", "mas", "aqas"),
    *("scissorhands", "roco", "keyformer", "ahakv", "tova", "snapkv", "pyramidkv", "nacl", "knorm", "keydiff"),
    *("lagkv", "expected_attention", "criticalkv", "chunkkv"),
)
_H2O, _STREAMING = methods.h2o(_BUDGET), methods.streaming_llm(_BUDGET)
_FASTGEN = dataclasses.replace(methods.fastgen(range(3), range(3, 9)), budget=_BUDGET)
_LAYERS: dict[Hashable, kvjax.Policy] = {"first": methods.full(), "rest": _STREAMING}
_HEADS: dict[Hashable, kvjax.Policy] = {"retrieval": methods.full(), "streaming": _STREAMING}
_BY_LAYER = kvjax.partition(_LAYERS, ["first"] + ["rest"] * (RANDOM.num_layers - 1))
_BY_HEAD = kvjax.partition_heads(_HEADS, [["retrieval", "streaming"]] * RANDOM.num_layers)
METHODS: dict[str, tuple[str, kvjax.Policy]] = {
    **{name: ("dense", make_policy(name, _BUDGET)) for name in _PLAIN},
    "fastgen": ("dense", _FASTGEN),
    "think": ("thin keys", methods.think()),
    "snapkv, think": ("thin keys", kvjax.chain(methods.snapkv(_BUDGET), methods.think())),
    "ada_snapkv": ("pool", methods.ada_snapkv(_BUDGET)),
    "ada_snapkv, dense": ("dense", make_policy("ada_snapkv dense", _BUDGET)),
    "ada_pyramid": ("pool", methods.ada_pyramid(_BUDGET)),
    "h2o, adaptive heads": ("pool", dataclasses.replace(_H2O, heads=kvjax.Adaptive(), layout=Layout(pool=True))),
    "fastgen, pool": ("pool", dataclasses.replace(_FASTGEN, pool=True)),
    "h2o, query heads": ("query heads", papers.by_query_head(_H2O)),
    "h2o, rank": ("dense", dataclasses.replace(_H2O, layout=Layout("rank"))),
    f"roco{_BLOCKS}": ("dense", methods.roco(_BUDGET)),
    "full first layer, streaming_llm": ("by layer", _BY_LAYER),
    "full and streaming_llm heads": ("by head", _BY_HEAD),
}


def measure(name: str, length: int) -> dict[str, Any]:
    """One row, in this process.

    Returns:
      Bytes: of the state as predicted and in its arrays; at the peak of prefill as predicted, compiled and measured; of
      a decode step's temporaries, compiled and measured, beyond the state that it overwrites. What is read in blocks
      is no one program: nothing is compiled of it.
    """
    storage, policy = METHODS[name]
    model = models.LanguageModel(RANDOM)
    params = jax.block_until_ready(jax.jit(model.init)(jax.random.key(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, RANDOM.vocab_size, (1, length)), jnp.int32)
    how: dict[str, Any] = {"policy": policy, "max_new_tokens": _NEW}
    how["block"] = _BLOCK if name.endswith(_BLOCKS) else None
    predicted = kvjax.plan_memory(RANDOM, prompt_len=length, **how)
    prefill = lambda params, tokens: kvjax.prefill(model, params, tokens, lengths=np.array([length]), **how)
    read: Any = prefill if how["block"] else jax.jit(prefill).lower(params, tokens).compile()
    step = jax.jit(lambda params, token, state: kvjax.decode_step(model, params, token, state), donate_argnums=2)
    _, state = jax.block_until_ready(read(params, tokens))
    arrays = sum(x.nbytes for x in jax.tree.leaves(state))
    token = jnp.zeros((1,), jnp.int32)
    step = step.lower(params, token, state).compile()
    logits, state = step(params, token, state)  # warmed up too
    jax.block_until_ready(logits)
    del state

    before = held("VmRSS")
    forget_peak()
    logits, state = jax.block_until_ready(read(params, tokens))
    peak = held("VmHWM") - before
    holding = held("VmRSS")
    forget_peak()
    for _ in range(8):
        logits, state = step(params, token, state)
        jax.block_until_ready(logits)
    planned: Any = None if how["block"] else read.memory_analysis()
    of_step: Any = step.memory_analysis()
    return {
        "storage": storage,
        "state": {"predicted": predicted.state, "arrays": arrays, "full": predicted.full},
        "prefill": {
            "predicted": predicted.peak,
            "compiled": planned and planned.output_size_in_bytes + planned.temp_size_in_bytes,
            "outputs": planned and planned.output_size_in_bytes,
            "measured": peak,
        },
        "step": {"compiled": of_step.temp_size_in_bytes, "measured": max(0, held("VmHWM") - holding)},
    }


def _parts(key: str) -> tuple[str, int]:
    """The method and the tokens of a row."""
    name, _, length = key.rpartition("@")
    return name, int(length)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """All rows as Markdown."""
    head = ["method", "storage", "tokens", "state: predicted", "in arrays", "of full", "peak of prefill: predicted"]
    head += ["compiled", "measured", "predicted / compiled", "decode step: compiled", "measured"]
    lines = []
    for key, row in rows.items():
        name, length = _parts(key)
        state, prefill, step = row["state"], row["prefill"], row["step"]
        share = state["arrays"] / state["full"]
        cells = [name, row["storage"], f"{length:,}", shown(state["predicted"]), shown(state["arrays"])]
        compiled = prefill["compiled"]
        ratio = f"{prefill['predicted'] / compiled:.2f}" if compiled else ""
        cells += [f"{share:.1%}", shown(prefill["predicted"]), shown(compiled) if compiled else ""]
        cells += [shown(prefill["measured"]), ratio, shown(step["compiled"]), shown(step["measured"])]
        lines.append(cells)
    return "\n".join(Table(head, lines).markdown()) + "\n"


def bench(
    lengths: tuple[int, ...] = (4096, 16384),
    only: tuple[str, ...] = (),
    output: pathlib.Path = pathlib.Path("results/bench_memory"),
) -> None:
    """Measures what is not there yet, and prints a table of all rows.

    Args:
      lengths: tokens of the prompt.
      only: names of methods; all if there are none.
      output: a directory for `memory.json` and `memory.md`.
    """
    check_whole(1, lengths=lengths)
    if unknown := [name for name in only if name not in METHODS]:
        raise ValueError(f"--only {unknown[0]!r} is not one of {', '.join(METHODS)}")
    config = {f.name: getattr(RANDOM, f.name) for f in dataclasses.fields(RANDOM) if f.name not in ("rope", "eos_ids")}
    setup = {
        "model": json.loads(json.dumps(config)),
        "budget": _BUDGET,
        "max_new_tokens": _NEW,
        "device": device_info(),
    }
    with Locked(output):
        rows = stored_rows(output / "memory.json", {"setup": setup})
        wanted = [f"{name}@{n}" for name in only or METHODS for n in lengths]
        places = {name: i for i, name in enumerate(METHODS)}
        for key in wanted:
            if key in rows:
                continue
            name, length = _parts(key)
            print(f"{name}, {length:,} tokens", file=sys.stderr)
            how = {"MALLOC_MMAP_THRESHOLD_": "131072"}
            rows[key] = apart("kvjax.experiments.bench.memory", "measure", name, length, **how)
            rows = dict(sorted(rows.items(), key=lambda row: (places[_parts(row[0])[0]], _parts(row[0])[1])))
            write_json(output / "memory.json", {"setup": setup, "rows": rows})
            write_bytes(output / "memory.md", table(rows).encode())
    print(table({key: rows[key] for key in wanted}))


if __name__ == "__main__":
    script(bench)
