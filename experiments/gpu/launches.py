"""What a decode step launches in each layer, read from its program, which is compiled for a GPU that need not be there.

`aot_check.py --steps` prints it, for a model shaped like Llama 3 8B in bfloat16, 4,096 tokens and budgets of 1,024.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

import jax

import kvjax
from kvjax import models
from kvjax.contract import Policy
from kvjax.experiments.bench.policies import make_policy
from kvjax.pallas_kernels import api

PROMPT, BUDGET, LAYERS = 4096, 1024, (4, 6)  # fewer compute the angles of a rotation again in each
POLICIES = {name: make_policy(name, BUDGET) for name in ("full", "snapkv", "h2o", "streaming_llm", "roco")}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_CALLS = r"(?:calls|to_apply|body|condition|(?:true|false)_computation|branch_computations)=\{?((?:%[\w.\-]+,? ?)+)"


def program(policy: Policy, layers: int, implementation: api.Implementation, where: jax.sharding.NamedSharding) -> str:
    """The optimised program of a step of so many layers, whose cache is overwritten.

    Args:
      policy: what evicts.
      layers: of the model.
      implementation: of attention, as in `pallas_kernels.use`.
      where: the device that it is compiled for.
    """
    config = models.ModelConfig(128256, 4096, 14336, layers, 32, 8, 128, dtype="bfloat16", max_position=8192)
    model = models.LanguageModel(config)
    there = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

    def step(params, token, layers, state):
        logits, after = kvjax.decode_step(model, params, token, dataclasses.replace(state, layers=layers))
        return logits.argmax(-1), after.layers, after.length

    with api.use(implementation):
        prompt = jax.ShapeDtypeStruct((1, PROMPT), "int32")
        prefill = lambda params, tokens: kvjax.prefill(model, params, tokens, policy=policy, max_new_tokens=32)
        state = there(jax.eval_shape(prefill, model.shapes, prompt)[1])
        token = jax.ShapeDtypeStruct((1,), "int32", sharding=where)
        bare = dataclasses.replace(state, layers=())
        with jax.sharding.use_abstract_mesh(where.mesh.abstract_mesh):
            lowered = jax.jit(step, donate_argnums=2).lower(there(model.shapes), token, state.layers, bare)
    return lowered.compile().as_text() or ""


def launched(text: str) -> collections.Counter[str]:
    """How many kernels, copies and control structures of each kind a program launches, by its optimised HLO.

    Loops and branches count once, and so does each thing inside them.
    """
    computations: dict[str, list[str]] = {}
    for head, body in re.findall(r"^((?:ENTRY )?%[\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        computations["ENTRY" if head.startswith("ENTRY") else head] = body.splitlines()

    def kinds(name: str) -> Iterator[str]:
        for line in computations[name]:
            operation = re.search(r" = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(", line)
            if operation is None or operation[1] in _FREE or operation[1].endswith("-done"):
                continue
            called = [x for found in re.findall(_CALLS, line) for x in re.findall(r"%[\w.\-]+", found)]
            if operation[1] == "fusion":
                yield _fusion("\n".join(computations[called[0]]))
            elif operation[1] == "custom-call":
                target = re.search(r'custom_call_target="([^"]*)"', line)
                yield "product" if target is not None and "cublas" in target[1] else "kernel"
            else:
                if operation[1] not in ("call", "async-start"):
                    yield operation[1]
                for inner in called if operation[1] in ("call", "async-start", "while", "conditional") else ():
                    yield from kinds(inner)

    return collections.Counter(kinds("ENTRY"))


def _fusion(body: str) -> str:
    """What a fused computation is: its heaviest operation."""
    if " dot(" in body:
        return "product"
    if re.search(r' multiply\(.*op_name="[^"]*dot_general', body):
        return "product by multiplying and adding"
    return next((x for x in ("scatter", "sort", "reduce") if f" {x}(" in body), "elementwise")


def a_layer(policy: Policy, implementation: api.Implementation, where: jax.sharding.NamedSharding) -> dict[str, float]:
    """What one more layer launches, the sum first: from programs of fewer and of more layers, which have the rest."""
    few, more = (launched(program(policy, n, implementation, where)) for n in LAYERS)
    each = {kind: (more[kind] - few[kind]) / (LAYERS[1] - LAYERS[0]) for kind in sorted(few | more)}
    return {"all": sum(each.values()), **{kind: n for kind, n in each.items() if n}}
