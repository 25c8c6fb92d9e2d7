"""Values of options: what has no meaning is refused where it is given, and what is equal is held in one type."""

import dataclasses
import inspect
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, methods
from kvjax.algebra import Chain
from kvjax.cache.context import row_keys
from kvjax.learning import families, relax
from kvjax.methods import profiling as fastgen
from kvjax.pallas_kernels import Columns, Softmax, attention, hash_uniform, pooled_attention, recovered_attention
from kvjax.pallas_kernels.values import Value, complete_repr
from kvjax.scoring import key_scores, measurements, scores, select
from kvjax.scoring.learned import FrozenArrays
from kvjax.scoring.predicted import HiddenHeads
from kvjax.sizes import allocation
from kvjax.sizes.budget import Above, AtMost, Ratio, Share, Sum, Tokens
from tests import helpers
from tests.methods import CASES, OF_ONE_LAYER

NAN = float("nan")


pytestmark = pytest.mark.usefixtures("unchecked")
evict_layer = jax.jit(kvjax.evict_layer, static_argnums=0, static_argnames="num_layers")
H2O = methods.h2o(8)
IDS = {"special_ids": (1,), "punctuation_ids": (2,)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.every(NAN), "m=nan: must be a whole number of at least 1"),
        (lambda: kvjax.every(2.0), "m=2.0: must be a whole number of at least 1"),
        (lambda: kvjax.every(None), "m=None: must be a whole number"),
        (lambda: kvjax.when_over(NAN), "m=nan: must be a whole number of at least 1"),
        (lambda: kvjax.when_over(2, drop=NAN), r"Schedule\(drop=nan\): Ratio\(share=nan\): a share of the prompt"),
        (lambda: kvjax.Schedule(prefill="no"), r"Schedule\(prefill='no'\): must be True or False"),
        (lambda: Tokens(NAN), r"Tokens\(n=nan\): a number of tokens is whole"),
        (lambda: Tokens(20.7), r"Tokens\(n=20.7\): a number of tokens is whole"),
        (lambda: Tokens(True), r"Tokens\(n=True\): a number of tokens is whole"),
        (lambda: Ratio(0.33, "banana"), r"Ratio.rounding='banana' is not one of \('floor', 'int', 'ceil'\)"),
        (lambda: Share(NAN), r"Share\(share=nan\): a share of the budget"),
        (lambda: Sum(()), r"Sum\(counts=\(\)\): must have at least 1 elements, not 0"),
        (lambda: AtMost((1, "2")), "not a number of tokens"),
        (lambda: Above(1, 2.5), r"Above\(min_prompt=2.5\): must be a whole number of at least 0"),
        (lambda: kvjax.Protect(recent=[1]), r"Protect\(recent=\[1\]\): not a number of tokens"),
        (
            lambda: kvjax.scoring.protect.TopStd(4, ignore_prefix=-1),
            r"TopStd\(ignore_prefix=-1\): must be a whole number",
        ),
        (lambda: methods.criticalkv(64, eps=NAN), r"eps=nan\): what is added to scores is finite"),
        (lambda: methods.expected_attention(64, eps=NAN), r"eps=nan\): what is added to weights is finite"),
        (lambda: methods.expected_attention(64, horizon=10**9), "no more than 1,048,576 are averaged"),
        (lambda: methods.think(query_rows=0), r"query_rows=0\): at least one row must be observed"),
        (lambda: methods.ada_snapkv(64, skip_layers=1.5), r"skip_layers=1.5\): a number of layers is whole"),
        (lambda: methods.snapkv(64, window_size=8.5), "window_size=8.5: at least one row must be observed"),
        (lambda: methods.snapkv(64, kernel_size=3.0), r"kernel=3.0\): must be a whole number"),
        (lambda: methods.scissorhands(64, theta=NAN), r"threshold=nan\): not a finite number or one of"),
        (lambda: methods.scissorhands(64, history=0), r"rows=0\): at least one row must be observed"),
        (lambda: methods.easykv("mas", 20, mode="encoding", recent_ratio=NAN), "recent_ratio=nan: must be a number"),
        (lambda: methods.h2o(64, group=None), r"of=Observe\(.*one number a slot of every kv head, .* group= one of"),
        (lambda: methods.mas(64, group=None), r"Mean.group=None is not one of \('mean', 'max', 'sum'\)"),
        (lambda: methods.snapkv(64, group=None), r"Window.group=None is not one of"),
        (lambda: methods.nacl(64, group=None), "one number a slot of every kv head"),
        (lambda: methods.nacl(64, proxy_causal="yes"), "proxy_causal='yes': must be True or False"),
        (lambda: methods.nacl_llama3(64), r"budget=64: a share of the prompt lies in \(0, 1\]"),
        (lambda: methods.fastgen("banana"), "'banana' is no tokenizer"),
        (
            lambda: methods.fastgen(special_ids=[-1], punctuation_ids=[2]),
            r"special_ids=\[-1\]: give a tuple of token ids",
        ),
        (lambda: methods.chunkkv(64, base="snapkv"), "base='snapkv': must be of type Evict, not str"),
        (lambda: kvjax.Evict("h2o", 64), r"Evict\(score='h2o'\): must be of type Score, not str"),
        (lambda: dataclasses.replace(H2O, when=4), r"Evict\(when=4\): must be of type Schedule, not int"),
        (lambda: kvjax.from_fn("norm", budget=4), r"FromFunction\(fn='norm'\): give a function"),
        (lambda: kvjax.when(H2O, kvjax.every(4)), r"is not a schedule; write when\(schedule, policy\)"),
        (lambda: kvjax.when(kvjax.every(4), methods.h2o), "is not a policy; call a method with its budget"),
        (lambda: kvjax.shared_layers("h2o"), "'h2o' is not a policy"),
        (lambda: kvjax.partition([H2O], "a"), "give a mapping from labels to policies"),
        (lambda: kvjax.partition({"a": "h2o"}, "a"), "'h2o' is not a policy"),
        (lambda: kvjax.partition({"a": H2O}, ""), "give one label a layer"),
        (lambda: kvjax.partition({"a": H2O}, 3), "labels=3: must be a sequence"),
        (lambda: kvjax.Sample(temperature=NAN), r"temperature=nan\): must be positive and finite"),
        (lambda: kvjax.Sample(temperature=1e-46), r"temperature=1e-46\): must be positive"),
        (lambda: kvjax.Sample(top_k=1.5), r"top_k=1.5\): at least one token must remain"),
        (lambda: kvjax.soften(H2O, math.inf), "temperature=inf must be positive and finite"),
        (lambda: kvjax.soften(H2O, "cold"), "temperature=cold must be positive"),
        (lambda: relax.annealed(1.0, 0.0, 0.5), r"end=0.0: must be a number in \(0, inf\)"),
        (lambda: relax.annealed(1.0, 0.5, np.array([0.5, -1.0])), r"fraction=.*: must be a number in \[0, 1\]"),
        (lambda: families.NaclShares((1.0, 2.0)), "must have 3 elements, not 2"),
        (lambda: families.PyramidBeta(math.inf), r"beta is larger than 1"),
        (lambda: families.with_table(H2O, "banana"), "are no numbers; give a row a layer"),
        (lambda: allocation.HeadTable(3), r"HeadTable\(weights=3\): must be a sequence"),
        (lambda: allocation.HeadTable(np.array(3)), r"HeadTable\(weights=array\(3\)\): must be a sequence"),
        (lambda: allocation.LayerTable(("1",)), "LayerTable: .* weights are finite"),
        (lambda: analysis.interval(np.ones(3), NAN), r"confidence=nan: must be a number in \(0, 1\)"),
        (lambda: row_keys(0, 2), "key=0 is not a PRNG key"),
        (lambda: Columns(rows=1.5), r"rows=1.5\): a column statistic needs at least one query row"),
    ],
)
def test_what_has_no_meaning_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


NONSENSE = (
    NAN,
    math.inf,
    -1,
    0,
    1.5,
    "banana",
    None,
    [1],
    True,
    10**12,
    10**400,
    np.int64(2),
    np.float32(0.5),
    np.array(2),
    {},
)
HEADS = HiddenHeads(FrozenArrays({"out": np.zeros((3, 8, 2), np.float32), "out_bias": np.zeros((3, 2), np.float32)}))
FILTERS = {"budget": 64, "filters": np.ones((2, 2, 8), np.float32)}
NEEDED = {
    "q_filters": FILTERS,
    "simlayerkv": {"threshold": 0.9},
    "headkv": {"budget": 64, "importance": [[1.0]]},
    "fastgen": IDS,
    "easykv": {"importance": "roco", "budget": 20, "mode": "encoding"},
    "full": {},
    "think": {},
    "duo_attention": {"gates": [[0.5, 0.6]]},
    "kvzap": {"budget": 64, "function": HEADS},
}
METHODS = [n for n, f in sorted(vars(methods).items()) if inspect.isfunction(f)]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_a_value_or_says_why_not(name):
    """No other error, and no policy that cannot be a static argument."""
    method = getattr(methods, name)
    needed = NEEDED.get(name, {"budget": 0.2 if name == "nacl_llama3" else 64})
    for option in inspect.signature(inspect.unwrap(method)).parameters:
        for value in () if option == "options" else NONSENSE:
            try:
                policy = method(**{**needed, option: value})
            except ValueError:
                continue
            hash(policy)
            assert not (isinstance(value, float) and math.isnan(value) and option != "tokenizer"), (option, value)


SAME = [
    (lambda x: kvjax.Protect(sinks=x), 2, np.int64(2)),
    (lambda x: kvjax.Protect(sinks=x), 0.5, np.float32(0.5)),
    (lambda x: kvjax.Protect(sinks=x), 2, Tokens(2)),
    (lambda x: kvjax.LastRows(x), 2, np.uint8(2)),
    (lambda x: kvjax.every(x), 2, np.int32(2)),
    (lambda x: kvjax.Adaptive(x), 0.0, -0.0),
    (lambda x: kvjax.Adaptive(x), 1.0, 1),
    (lambda x: kvjax.Adaptive(normalize=x), True, np.True_),
    (lambda x: methods.h2o(x), 64, np.int64(64)),
    (lambda x: methods.expected_attention(x), 3, np.int64(3)),
    (lambda x: methods.nacl(64, first_proxies=x), 0, np.int64(0)),
    (lambda x: methods.easykv("roco", x, mode="auto", prompt_length=10), 20, np.int64(20)),
    (lambda x: sys.modules["kvjax.methods.easykv"].block_sizes(60, x, 4, "encoding"), 20, np.int64(20)),
    (lambda x: methods.snapkv(64, window_size=x), 8, np.int64(8)),
    (lambda x: methods.keyformer(64, tau=x), (1.0, 2.0), [1, np.float64(2)]),
    (lambda x: methods.scissorhands(64, theta=x), 0.0, -0.0),
    (lambda x: kvjax.Observe(element="above", threshold=x), 1.0, 1),
    (lambda x: methods.fastgen(special_ids=x, punctuation_ids=()), (1, 2), np.array([2, 1])),
    (lambda x: fastgen.FastGen(**IDS, budget=x), 4, np.int64(4)),
    (lambda x: kvjax.LayerTable(x), (1.0, 2.0), jnp.asarray([1, 2])),
]


@pytest.mark.parametrize(("make", "one", "other"), SAME)
def test_equal_settings_are_one(make, one, other):
    """As values, as keys of caches, and as they print."""
    assert make(one) == make(other)
    assert repr(make(one)) == repr(make(other))


APART = {
    "Schedule.drop": lambda x: kvjax.when_over(4, drop=x),
    "Protect.sinks": lambda x: kvjax.Protect(sinks=x),
    "Protect.recent": lambda x: kvjax.Protect(recent=x),
    "PromptSinks.size": kvjax.scoring.protect.PromptSinks,
    "TopStd.size": kvjax.scoring.protect.TopStd,
    "TopStd.decode_size": lambda x: kvjax.scoring.protect.TopStd(2, decode_size=x),
    "LastRows.n": kvjax.LastRows,
    "FirstAndLastRows.first": lambda x: kvjax.scoring.stats.FirstAndLastRows(x, 2),
    "FirstAndLastRows.last": lambda x: kvjax.scoring.stats.FirstAndLastRows(2, x),
    "EntropyScaled.k": kvjax.scoring.stats.EntropyScaled,
    "TopKThenRandom.random": select.TopKThenRandom,
    "Evict.budget": lambda x: kvjax.Evict(scores.Recency(), x),
    "FastGen.budget": lambda x: fastgen.FastGen(**IDS, budget=x),
    "StepwiseMask.heavy": lambda x: kvjax.methods.simulations.StepwiseMask(x, 1),
    "NextStepMask.recent": lambda x: kvjax.methods.simulations.NextStepMask(1, x),
    "nacl": lambda x: methods.nacl(64, protect=x, proxies=x, random=x),
}


@pytest.mark.parametrize("name", APART)
def test_one_token_is_not_the_whole_prompt(name):
    """1 == 1.0, and both hash alike."""
    make = APART[name]
    assert make(1) != make(1.0)
    assert repr(make(1)) != repr(make(1.0)), "they print as they were written"
    replaced = dataclasses.replace(make(1))
    assert replaced == make(1)


def test_the_order_of_calls_changes_nothing():
    site = helpers.site()
    protects = lambda recent: dataclasses.replace(H2O, protect=kvjax.Protect(recent=recent)).tables(site)[2]
    assert (protects(1) == 1).all()
    assert protects(1.0).tolist() == list(range(25))


def test_a_hash_of_numbers_does_not_depend_on_their_types():
    expected = hash_uniform(jnp.uint32(2**32 - 3), jnp.arange(5))
    for seed in (2**32 - 3, jnp.int32(-3), np.int32(-3)):
        for index in (jnp.arange(5), np.arange(5), np.arange(5, dtype=np.uint8)):
            np.testing.assert_array_equal(hash_uniform(seed, index), expected)


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_keys_of_every_generator_draw_row_by_row(generator):
    """Draws of these generators under `vmap` are those of the first row's key."""
    keys = row_keys(jax.random.split(jax.random.key(1, impl=generator), 3), 3)
    ctx = helpers.context(helpers.site(), length=[24] * 3)
    draw = lambda keys: dataclasses.replace(ctx, keys=keys).uniform(jnp.zeros((len(keys), 1, 1), jnp.int32)).ravel()
    assert len(set(draw(keys).tolist())) == 3
    np.testing.assert_array_equal(draw(keys[::-1]), draw(keys)[::-1])
    if generator == "rbg":
        same = row_keys(jax.random.split(jax.random.key(1), 3), 3)
        np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(same))


q, k, v = (np.zeros((2, heads, 6, 4), np.float32) for heads in (4, 2, 2))
wide = np.zeros((2, 2, 6, 5), np.float32)
row, slots = np.zeros((2, 6), np.int32), np.zeros((2, 2, 6), np.int32)
seeded = lambda seed: Softmax(seed=seed, noise="gumbel")
pool, owner = np.zeros((2, 6, 4), np.float32), np.zeros((2, 6), np.int32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvjax.evict_layer(H2O, q.tolist(), k, v), "q must be an array of floats .* not list"),
        (lambda: kvjax.evict_layer(H2O, q[0], k, v), r"q must be .* axes \(batch, query heads, tokens, head_dim\)"),
        (lambda: kvjax.evict_layer(H2O, q.astype(int), k, v), "q must be an array of floats .* got int64"),
        (lambda: kvjax.evict_layer(H2O, q[:0], k[:0], v[:0]), r"none of them 0; got float32 of shape \(0, 4, 6, 4\)"),
        (lambda: kvjax.evict_layer(H2O, q, k, wide), "must agree in batch, length and"),
        (lambda: kvjax.evict_layer(H2O, q, k, v.astype(np.float16)), "and all in dtype"),
        (lambda: kvjax.evict_layer(H2O, q[:, :3], k, v), "3 query heads are not a multiple of 2 kv heads"),
        (lambda: kvjax.evict_layer(H2O, q, k, v, tokens=[[1, 2], [3, 4]]), r"tokens have the shape \(2, 2\)"),
        (lambda: kvjax.evict_layer(H2O, q, k, v, out_proj=np.zeros((2, 4, 5), np.float32)), "there are 4 query heads"),
        (lambda: kvjax.evict_layer(H2O, q, k, v, layer=1.0), "layer=1.0: is not one of 1 layers"),
        (lambda: kvjax.evict_layer(H2O, q, k, v, num_layers=0), "num_layers=0: must be a whole number of at least 1"),
        (lambda: kvjax.evict_layer(H2O, q, k, v, scale=NAN), "scale=nan: must be a number"),
        (lambda: kvjax.evict_layer(H2O, q, k, v, rotate=3), "rotate=3: give a function"),
        (
            lambda: attention(q, k, wide, row, slots),
            r"v has the shape \(2, 2, 6, 5\), but",
        ),
        (lambda: attention(q, k[:1], v, row, slots), r"k has the shape \(1, 2, 6, 4\), but \(2, 2, 6, 4\) fits"),
        (lambda: attention(q, k, v, row.astype(float), slots), "q_pos must be an array of integers"),
        (lambda: attention(q, k, v, row, slots[:, :1]), r"kv_pos has the shape \(2, 1, 6\)"),
        (lambda: attention(q, k, v, row, slots, columns=Columns()), "columns=.*: must be a sequence"),
        (
            lambda: attention(q, k, v, row, slots, columns=(Columns(weight=[1.0]),)),
            "a column's weight must be an array of floats .* not list",
        ),
        (
            lambda: attention(q, k, v, row, slots, columns=(Columns(softmax=seeded([1])),)),
            "softmax's seed must be an ar",
        ),
        (lambda: attention(q, k, v, row, slots, columns=(Columns(softmax=seeded(row[:1, 0])),)), r"seed has the shape"),
        (
            lambda: attention(q, k, v, row, slots, columns=(Columns(softmax=Softmax(before=np.zeros(2))),)),
            "softmax's before must be an array of integers",
        ),
        (lambda: attention(q, k, v, row, slots, softcap=0), "softcap=0: must be positive; use None for none"),
        (lambda: attention(q, k, v, row, slots, window=2.5), "window=2.5: must be a whole number of at least 1"),
        (lambda: attention(q, k, v, row, slots, bias=3), "bias must be an array of floats .* not int"),
        (lambda: attention(q, k, v, row, slots, implementation=["xla"]), "is not one of"),
        (lambda: pooled_attention(q[:, :, :1], pool, pool[:, :5], owner, row[:, :1], row, num_kv_heads=2), "v has the"),
        (
            lambda: pooled_attention(q[:, :, :1], pool, pool, owner, row[:, :1], row, num_kv_heads=2.0),
            "num_kv_heads=2.0",
        ),
        (lambda: recovered_attention(q, k, row, slots, np.zeros((1, 2, 2, 6))), "masks must be an array of booleans"),
        (
            lambda: recovered_attention(q, k, row, slots, np.ones((1, 2, 2, 6), bool), within=[row[:1, 0]]),
            r"within has the shape \(1,\), but \(2,\) fits",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


ones = lambda *shape, dtype=np.float32: np.ones(shape, dtype)
masses, masks = ones(2, 1, 2, 6), ones(2, 1, 2, 6, dtype=bool)
shares, heads, ones_of_heads = ones(2, 4, 6) / 6, ones(4, 4, 5), ones(2, 2, 6, dtype=bool)
single = lambda **options: (Columns(**options),)
ARRAYS = {
    "evict_layer q": lambda t, s: kvjax.evict_layer(H2O, t(q), k, v),
    "evict_layer v": lambda t, s: kvjax.evict_layer(H2O, q, k, t(v)),
    "evict_layer out_proj": lambda t, s: kvjax.evict_layer(H2O, q, k, v, out_proj=t(heads)),
    "evict_layer hidden": lambda t, s: kvjax.evict_layer(H2O, q, k, v, hidden=t(ones(2, 6, 5))),
    "evict_layer slopes": lambda t, s: kvjax.evict_layer(H2O, q, k, v, slopes=t(ones(4))),
    "generate tokens": lambda t, s: kvjax.generate(*s[:2], t(row, bfloat16=True), max_new_tokens=2),
    "generate lengths": lambda t, s: kvjax.generate(*s[:2], row, max_new_tokens=2, lengths=t(row[:, 0], bfloat16=True)),
    "generate eos_ids": lambda t, s: kvjax.generate(*s[:2], row, max_new_tokens=2, eos_ids=t(row[0])),
    "generate params": lambda t, s: kvjax.generate(s[0], t(s[1]), row, max_new_tokens=2),
    "generate_beams params": lambda t, s: kvjax.generate_beams(s[0], t(s[1]), row, max_new_tokens=2),
    "stream params": lambda t, s: kvjax.stream(s[0], t(s[1]), row, max_new_tokens=2),
    "read params": lambda t, s: kvjax.read(s[0], t(s[1]), [1, 2, 3], policy=H2O),
    "prefill params": lambda t, s: kvjax.prefill(s[0], t(s[1]), row, s[2].plan),
    "decode_step params": lambda t, s: kvjax.decode_step(s[0], t(s[1]), [1, 2], s[2]),
    "feed tokens": lambda t, s: kvjax.feed(*s[:2], t(row, bfloat16=True), s[2]),
    "generate_from logits": lambda t, s: kvjax.generate_from(*s[:2], t(s[3]), s[2], max_new_tokens=2),
    "evict keep": lambda t, s: kvjax.evict(s[2].layers[0], t(np.ones(s[2].layers[0].pos.shape, bool))),
    "take_rows rows": lambda t, s: kvjax.take_rows(s[2], t(row[0], bfloat16=True)),
    "shard_params params": lambda t, s: kvjax.shard_params(s[0], t(s[1]), kvjax.make_mesh()),
    "make_plan lengths": lambda t, s: kvjax.make_plan(
        s[0].config, H2O, prompt_len=6, max_new_tokens=1, lengths=t(row[0])
    ),
    "partition labels": lambda t, s: kvjax.partition({1: H2O}, t(row[0])),
    "LayerTable weights": lambda t, s: kvjax.LayerTable(t(ones(2))),
    "HeadTable weights": lambda t, s: kvjax.HeadTable(t(ones(2, 2))),
    "q_filters filters": lambda t, s: methods.q_filters(8, t(ones(2, 2, 8))),
    "attention q": lambda t, s: attention(t(q), k, v, row, slots),
    "attention kv_pos": lambda t, s: attention(q, k, v, row, t(slots)),
    "attention bias": lambda t, s: attention(q, k, v, row, slots, bias=t(ones(2, 4, 6))),
    "attention weight": lambda t, s: attention(q, k, v, row, slots, columns=single(weight=t(ones(2, 6)))),
    "attention multiplier": lambda t, s: attention(
        q, k, v, row, slots, columns=single(softmax=Softmax(multiplier=t(ones(2, 2, 6))))
    ),
    "pooled_attention k": lambda t, s: pooled_attention(
        q[:, :, :1], t(pool), pool, owner, row[:, :1], row, num_kv_heads=2
    ),
    "recovered_attention masks": lambda t, s: recovered_attention(q, k, row, slots, t(ones_of_heads[None])),
    "layer_loss q": lambda t, s: analysis.layer_loss(t(q), k, v, ones_of_heads),
    "layer_loss keep": lambda t, s: analysis.layer_loss(q, k, v, t(ones_of_heads)),
    "distances": lambda t, s: analysis.distances(q, t(q)),
    "largest_value": lambda t, s: analysis.largest_value(v, t(heads)),
    "loss_bound": lambda t, s: analysis.loss_bound(q[..., 0], t(ones(2))),
    "lost_share": lambda t, s: analysis.lost_share(t(q[..., 0]), q[..., 0]),
    "output_kl": lambda t, s: analysis.output_kl(q, t(q)),
    "eviction_loss": lambda t, s: analysis.eviction_loss(t(shares), v, heads, ones_of_heads),
    "eviction_bound": lambda t, s: analysis.eviction_bound(shares, t(v), heads, ones_of_heads),
    "least_bound": lambda t, s: analysis.least_bound(shares, v, heads, t(row[:, :2])),
    "future_attention": lambda t, s: analysis.future_attention(q, t(k), row, slots),
    "of_kv_heads": lambda t, s: analysis.of_kv_heads(t(shares), 2),
    "lost_mass": lambda t, s: analysis.lost_mass(t(masses), masks),
    "hindsight_rank": lambda t, s: analysis.hindsight_rank(masses, t(masks)),
    "best_in_hindsight": lambda t, s: analysis.best_in_hindsight(t(masses), masks, masks),
    "regret": lambda t, s: analysis.regret(masses, masks, t(masks)),
    "soft_top_k": lambda t, s: relax.soft_top_k(t(ones(4)), 2.0, temperature=1.0),
    "task_loss": lambda t, s: relax.task_loss(t(ones(2, 4)), [1, 2]),
}


@pytest.fixture(scope="module")
def begun(shallow):
    """A model, its parameters, a state that was planned for 4 tokens more, and the logits of the next token."""
    plan = kvjax.make_plan(shallow[0].config, H2O, prompt_len=6, max_new_tokens=4)
    logits, state = kvjax.prefill(*shallow, row, plan)
    return *shallow, state, logits


def test_a_tensor_of_torch_is_told_to_be_numpy(begun):
    """At every door that takes an array, wherever it cannot be read as one."""
    torch = pytest.importorskip("torch")

    def tensors(tree, *, bfloat16=False):
        one = lambda x: torch.tensor(np.asarray(x), dtype=torch.bfloat16 if bfloat16 else None)
        return jax.tree.map(one, tree)

    for door, call in ARRAYS.items():
        with pytest.raises(ValueError, match=r"(?s)Tensor, not an array of numpy or JAX; give x.numpy\(\)"):
            print(door, call(tensors, begun))


KEY, KEYS = jax.random.key(0), jax.random.split(jax.random.key(0), 2)
HEADS_APART = kvjax.partition_heads({"a": H2O, "b": methods.full()}, [["a", "b"]])
planned = lambda config, policy: kvjax.make_plan(config, policy, prompt_len=80, max_new_tokens=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, p, s, x: kvjax.take_rows([0], s), "state is a list, not a KVState"),
        (lambda m, p, s, x: kvjax.take_rows(s, KEYS), "rows is a PRNG key, not numbers"),
        (lambda m, p, s, x: kvjax.shard_params(m, 3, kvjax.make_mesh()), "params are one array or number"),
        (lambda m, p, s, x: kvjax.shard_params(p, m, kvjax.make_mesh()), "model is a dict, not a model"),
        (lambda m, p, s, x: kvjax.shard_params(m, None, kvjax.make_mesh()), "params=None hold no array"),
        (lambda m, p, s, x: kvjax.generate(m, p, row, max_new_tokens=1, lengths=KEYS), "lengths is a PRNG key, not"),
        (lambda m, p, s, x: kvjax.generate(m, {"a": np.array([None])}, row, max_new_tokens=1), "holds object, not num"),
        (lambda m, p, s, x: kvjax.generate(m, p, row, max_new_tokens=1, key=np.array([None])), "is not a PRNG key"),
        (lambda m, p, s, x: planned(m.config, H2O).check_lengths(KEYS), "lengths is a PRNG key, not numbers"),
        (lambda m, p, s, x: kvjax.partition({"a": H2O}, KEYS), "(?s)labels=.*it is a PRNG key, not numbers"),
        (lambda m, p, s, x: kvjax.LayerTable(KEYS), "LayerTable: it is a PRNG key, not numbers"),
        (lambda m, p, s, x: kvjax.LayerTable(b"ab"), "LayerTable: must be a sequence"),
        (lambda m, p, s, x: kvjax.soften(H2O, KEY), "temperature is a PRNG key, not numbers"),
        (lambda m, p, s, x: kvjax.Sample(temperature=KEY), "(?s)key<fry>.* must be a number in"),
        (lambda m, p, s, x: relax.annealed(1.0, 0.5, KEY), "fraction is a PRNG key, not numbers"),
        (lambda m, p, s, x: relax.with_temperature(3, 0.5), "state is a int, not a KVState"),
        (lambda m, p, s, x: relax.with_budgets(s, "banana"), "budgets must be numbers; got <U6"),
        (lambda m, p, s, x: kvjax.generate_from(m, p, x, s, max_new_tokens=10**30), "and at most 1,073,741,823"),
        (lambda m, p, s, x: kvjax.generate_from(m, p, x, s, max_new_tokens=1, tokens="banana"), "tokens must be integ"),
        (lambda m, p, s, x: kvjax.generate_beams(m, p, row, max_new_tokens=2**31), "and at most 1,073,741,823"),
        (lambda m, p, s, x: kvjax.read(m, p, [1, 2], policy=H2O, chunk=2**31), "chunk=2147483648: .* at most 1,048,57"),
        (lambda m, p, s, x: kvjax.stream(m, p, row, max_new_tokens=2, chunk=2**31), "chunk=2147483648: .* at most 1,0"),
        (lambda m, p, s, x: kvjax.stream(m, p, row, max_new_tokens=2, stop=KEY), "(?s)stop=.*must be strings"),
        (lambda m, p, s, x: kvjax.init_state(s.plan, [6, 6], sizes="banana"), "sizes are not those of 2 sequences"),
        (lambda m, p, s, x: kvjax.init_state(s.plan, [6, 6], dtype=None), "dtype=None: must be a dtype of floats"),
        (lambda m, p, s, x: kvjax.forward(m, p, row, s, evict="no"), "evict='no': must be True or False"),
        (lambda m, p, s, x: kvjax.evict_layer(H2O, q, k, v, tokens="banana"), "tokens have the shape"),
        (lambda m, p, s, x: kvjax.evict_layer(H2O, q, k, v, num_layers=10**30), "num_layers=10{30}: .* at most 65,536"),
        (lambda m, p, s, x: methods.scissorhands(8, decay=KEY), "(?s)decay=.*must be a number"),
        (
            lambda m, p, s, x: kvjax.evict_layer(H2O, q, k, v, tokens=row.astype(np.int64) + 2**40),
            "ids are numbers of 32 bits",
        ),
        (lambda m, p, s, x: analysis.read(m, p, row, row, seeds=10**9), "seeds=1000000000: .* at most 65,536"),
        (lambda m, p, s, x: analysis.interval("banana"), "values must be numbers; got <U6"),
        (lambda m, p, s, x: analysis.interval([]), r"values have the shape \(0,\)"),
        (lambda m, p, s, x: jax.jit(lambda p: next(kvjax.read(m, p, [1, 2], policy=H2O)))(p), "reads chunk by chunk"),
        (lambda m, p, s, x: analysis.value_bounds(3), "reading is a int, not a Reading"),
        (
            lambda m, p, s, x: analysis.distances(q, q[:, :1]),
            "after has the shape .*: 1 on the axis N, where before has",
        ),
        (
            lambda m, p, s, x: planned(m.config, kvjax.chain(methods.cake(64), methods.mas(9))),
            "use AcrossLayers.* alone",
        ),
        (lambda m, p, s, x: kvjax.when(kvjax.every(2), methods.cake(64)), "layers compete once for the budget of"),
        (lambda m, p, s, x: kvjax.soften(methods.cake(64), 0.5), "it has no other schedule and no temperature"),
        (
            lambda m, p, s, x: planned(m.config, kvjax.partition_heads({"a": HEADS_APART, "b": H2O}, [["a", "b"]])),
            "a member that gives kv heads policies of their own already",
        ),
    ],
)
def test_wrong_kinds_are_told_apart(begun, make, message):
    """Before anything is allocated, compiled or ignored."""
    with pytest.raises(ValueError, match=message):
        make(*begun)


def test_a_token_may_be_traced_where_the_state_is_known(begun):
    model, params, state, _ = begun
    step = lambda token: kvjax.decode_step(model, params, token, state)[0]
    np.testing.assert_allclose(jax.jit(step)(jnp.array([1, 2])), step([1, 2]), rtol=1e-5)


MIXES = {
    *("h2o", "mas", "roco", "ahakv", "keyformer", "expected_attention", "chunkkv", "fastgen_pooled", "ada_snapkv"),
    *("scissorhands", "nacl_decoding", "criticalkv"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c.name in MIXES else pytest.mark.slow) for c in OF_ONE_LAYER], ids=repr
)
def test_strict_promotion_of_64_bits(case):
    """Tests run under strict promotion; float64 meets the 32 bits of memories, noise and counts."""
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.random.default_rng(0).standard_normal((1, h, 12, 8))) for h in (4, 2, 2))
        found = evict_layer(
            case.make(8), q, k, v, out_proj=jnp.ones((4, 8, 5)), tokens=jnp.arange(12)[None] % 11, num_layers=3
        )
        assert q.dtype == jnp.float64
        assert found.keep.any(-1).all()


def test_wide_kernels_pool_as_narrow_ones_do():
    """Put together from powers of two beyond `_ONE_BY_ONE` slots, and no wider than the text."""
    rng = np.random.default_rng(0)
    score = jnp.asarray(rng.random((1, 1, 90)), jnp.float32)
    pos = jnp.arange(90, dtype=jnp.int32)[None, None]
    padded = np.pad(np.asarray(score, np.float64)[0, 0], 95)
    pool = jax.jit(scores.pool_in_order, static_argnums=(3, 4, 5))
    for kernel in (65, 91, 179, 181, 10**6 + 1):
        half = min(kernel // 2, 95)
        windows = [padded[95 + i - half : 95 + i + half + 1] for i in range(90)]
        for kind, expected in (("max", [w.max() for w in windows]), ("avg", [w.sum() / kernel for w in windows])):
            pooled = pool(score, pos, pos >= 0, kind, kernel, "zero")
            np.testing.assert_allclose(pooled[0, 0], expected, rtol=1e-5)


def test_sizes_beyond_the_text_mean_the_text():
    """No array and no program grows with a history, a partition, a chunk or a distance."""
    q, k, v = helpers.qkv(3, B=1, T=12)
    lagged = lambda **sizes: kvjax.Evict(key_scores.LagRelative(**sizes), 6)
    chunked = lambda size: kvjax.Evict(scores.Recency(), 6, select=select.Chunks(size))
    dilated = lambda dilation: methods.dilated_window(6, dilation=dilation, mode="anchored")
    for huge, whole in (
        (methods.scissorhands(8, history=10**9, recent=2), methods.scissorhands(8, history=12, recent=2)),
        (lagged(lag=2**40), lagged(lag=13)),
        (lagged(lag=2, sinks=2**40), lagged(lag=2, sinks=12)),
        (chunked(2**40), chunked(12)),
        (dilated(2**40), dilated(12)),
    ):
        np.testing.assert_array_equal(evict_layer(huge, q, k, v).keep, evict_layer(whole, q, k, v).keep)
    assert measurements.FutureQueries(2**20).horizon == 2**20


@pytest.mark.parametrize("budget", [2**31, sys.maxsize, Sum((Ratio(1.0), Tokens(2**31), Tokens(2**31)))])
@pytest.mark.parametrize(
    "make",
    [
        methods.h2o,
        lambda b: methods.ada_snapkv(b, window_size=4),
        lambda b: methods.pyramidkv(b, window_size=4),
        lambda b: methods.nacl(b, protect=2**31, proxies=2**31, random=2**31),
        lambda b: dataclasses.replace(methods.h2o(b), heads=kvjax.HeadTable(np.ones((3, 2)) + np.eye(3, 2))),
        lambda b: methods.fastgen(special_ids=(), punctuation_ids=(), recovery_ratio=1.0, budget=b, storage="pool"),
        lambda b: methods.easykv("roco", b, mode="encoding_decoding", stride=2**31),
        lambda b: methods.scissorhands(b, drop=2**30),
        lambda b: kvjax.Evict(scores.Recency(), b, protect=kvjax.Protect(2**29, 2**29), when=kvjax.before_append()),
    ],
    ids=["h2o", "ada", "pyramid", "nacl", "table", "fastgen", "easykv", "scissorhands", "protect"],
)
def test_a_budget_beyond_every_plan_holds_everything(make, budget):
    q, k, v = helpers.qkv(3, B=1, T=12)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    found = evict_layer(make(budget), q, k, v, tokens=tokens, num_layers=3)
    assert found.keep.all()
    assert (found.budgets == 12).all()


def _values(kind):
    """All classes of a kind that policies are made of."""
    for below in kind.__subclasses__():
        if not below.__module__.startswith("kvjax.drivers"):  # samplers have filters of the same names
            yield below.__name__, below
            yield from _values(below)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_policy_prints_as_what_makes_it(case):
    """Short, without what it has by default, and evaluates back, arrays and functions aside; the complete repr names
    every field.
    """
    policy = case.make(8)
    if case.name != "from_fn" and "FrozenArrays" not in repr(policy):
        assert eval(repr(policy), {"inf": np.inf, **dict(_values(Value))}) == policy
    for part in policy.policies if isinstance(policy, Chain) else (policy,):
        for field in dataclasses.fields(part):
            assert f"{field.name}=" in complete_repr(part)
    assert len(repr(policy)) < 350


def test_what_differs_from_a_default_is_printed():
    policy = dataclasses.replace(methods.h2o(64), granularity="query_head", when=kvjax.every(4))
    assert repr(policy) == (
        "Evict(score=Accumulated(), budget=64, protect=Protect(recent=Share(share=0.5)), when=Schedule(every=4), "
        "granularity='query_head')"
    )
    assert repr((kvjax.Protect(), kvjax.Sample(0.5))) == "(Protect(), Sample(temperature=0.5))"
    assert "Schedule(prefill=True, every=4, over=None, drop=0, before_append=False)" in complete_repr([policy])
    assert "over=None" not in repr([policy])
