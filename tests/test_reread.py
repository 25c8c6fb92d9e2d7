"""Prompts that are read again, chunk by chunk (KVzip)."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import contract, methods, models
from kvjax.contract import kv_layers
from kvjax.models import gpt2
from kvjax.observe import Reread
from kvjax.run.layers import without_cache
from kvjax.run.prefill_each import Stored, read_whole
from kvjax.run.state import Prompts
from tests import tensors
from tests.kept import digest
from tests.tensors import live_positions
from tests.test_laws_models import made
from tests.test_storage import ALIBI

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden" / "kvzip.json").read_text())
T, LENGTHS = 24, np.array([24, 17], np.int32)
IDS = np.asarray(tensors.token_ids(2, T))
ASKED = {"repeat": (1, 2), "repeat_next": (3,), "suffix": (4,), "chunk": 9, "overlap": 2, "sinks": 2}


def kvzip(budget, **change):
    """KVzip by small instructions."""
    return methods.kvzip(budget, Reread(**{**ASKED, **change}))


def test_chunks_are_those_of_a_rows_own_tokens():
    """By hand: an instruction, the end of the chunk before, the suffix, the chunk."""
    how = Reread((91, 92), (93,), (94,), prefix=1, chunk=3, overlap=2)
    rows = lambda ids: [how.rows(np.array(ids), first, 8).tolist() for first in how.firsts(8)]
    later = [[93, 12, 13, 94, 14, 15, 16], [93, 15, 16, 94, 17]]
    assert rows(range(10, 18)) == [[91, 92, 94, 11, 12, 13], *later]
    assert rows(range(20, 24)) == [[91, 92, 94, 21, 22, 23], [], []]
    assert (how.most(8), how.most(4), len(how.firsts(1)), Reread((1,)).most(8)) == (7, 6, 0, 9)


@pytest.mark.parametrize("case", [c for c in GOLDEN["cases"] if c["layerwise"]], ids=["kvzip", "plus"])
def test_kept_tokens_are_those_of_kvpress(case, embedded):
    model, params, _ = embedded
    told = {name: tuple(GOLDEN[name]) for name in ("repeat", "repeat_next", "suffix")}
    policy = methods.kvzip(0.5, Reread(**told, chunk=GOLDEN["chunk"], plus=case["plus"]))
    how, ids = policy.score.how, np.array(GOLDEN["ids"], np.int32)
    assert [how.rows(ids, first, len(ids)).tolist() for first in how.firsts(len(ids))] == GOLDEN["read"]
    _, state = kvjax.prefill(model, params, ids[None], policy=policy, max_new_tokens=1)
    assert [live_positions(kv)[0] for kv in state.layers] == case["kept"]


BY_QUERY_HEAD = contract.Layout(by_query_head=True)
CASES = {  # options, fields, and a digest of what the library before this one kept
    "window, prefix": ({"prefix": 3}, {}, "c355"),
    "plus, by query head": ({"plus": True}, {"heads": None, "layout": BY_QUERY_HEAD}, "1c6c"),
    "ALiBi": ({"plus": True}, {}, "8631"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_keeps_what_was_recorded(case, shallow):
    options, fields, kept = CASES[case]
    model, params = shallow
    if case == "window, prefix":
        model = models.LanguageModel(dataclasses.replace(model.config, sliding_window=(5,)))
    if case == "ALiBi":
        model = models.LanguageModel(ALIBI)
        params = jax.tree.map(lambda x: x * 4, jax.jit(model.init)(jax.random.key(7)))
    policy = dataclasses.replace(kvzip(8, **options), **fields)
    _, state = kvjax.prefill(model, params, IDS, policy=policy, max_new_tokens=1, lengths=LENGTHS)
    assert digest(state.layers[0].head_pos) == kept


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"layout": contract.Layout()}, {"layout": contract.Layout("rank", pool=True)}])
def test_stored_otherwise_it_keeps_the_same(change, shallow):
    read = lambda policy: kvjax.prefill(*shallow, IDS, policy=policy, max_new_tokens=1, lengths=LENGTHS)[1].layers[0]
    assert live_positions(read(dataclasses.replace(kvzip(8), **change))) == live_positions(read(kvzip(8)))


def test_sets_of_query_heads_say_apart_what_their_group_says_together(shallow):
    """The largest over a group is that of its heads, so a group's best token is the best of one of them."""
    read = lambda policy: kvjax.prefill(*shallow, IDS, policy=policy, max_new_tokens=1)[1].layers[0]
    plain = lambda n, **how: dataclasses.replace(kvzip(n, sinks=0), heads=None, layout=contract.Layout(**how))
    apart, together = live_positions(read(plain(1, by_query_head=True))), live_positions(read(plain(1)))
    for heads, groups in zip(apart, together, strict=True):
        assert all(one in heads[2 * g : 2 * g + 2] for g, one in enumerate(groups))


@pytest.mark.slow
def test_layers_may_be_read_again_in_ways_of_their_own(tiny):
    """In a chain all see the same reading; by layer, each has the instructions of its own policy."""
    other = kvzip(8, repeat=(9,), chunk=30)
    chained = kvjax.chain(kvzip(12), methods.tova(8))
    mixed = kvjax.partition({"c": chained, "o": other, "all": kvjax.Policy()}, ["o", "all", "c"])
    read = lambda policy: kvjax.prefill(*tiny, IDS, policy=policy, max_new_tokens=1, lengths=LENGTHS)[1].layers
    held, alone = [live_positions(kv) for kv in read(mixed)], [live_positions(kv) for kv in read(other)]
    assert held[0] == alone[0]
    assert held[1][0] == [list(range(T))] * 2
    assert [len(head) for row in held[2] for head in row] == [8] * 4


@pytest.mark.slow
def test_where_last_layers_read_others_keys_it_is_what_rows_pay_in_those_that_hold_some():
    """By hand, of the prompt and a repetition of each chunk as one text that is read without a cache."""
    (model, params), how = made("sharing"), Reread(**ASKED)
    params = jax.tree.map(lambda x: x / 2, params)  # sharper attention magnifies rounding
    ids, held, most = np.asarray(tensors.token_ids(1, T)), kv_layers(model.config), 0.0
    for first in how.firsts(T):
        text = np.concatenate([ids[0], how.rows(ids[0], first, T)])
        pos = np.arange(len(text))
        plain, told = without_cache(jnp.asarray(pos[None])), []

        def attend(cache, q, k, v, *, rotate, logits, plain=plain, told=told, pos=pos, **more):
            if k is not None:
                turned = rotate(jnp.repeat(k, q.shape[1] // k.shape[1], axis=1), pos[None, None])
                told.append((jnp.einsum("nrh,nsh->nrs", rotate(q, pos[None, None])[0], turned[0]), logits.window))
            return plain(cache, q, k, v, rotate=rotate, logits=logits, **more)

        model(params, text[None], attend=attend)
        chunk = (pos >= first) & (pos < min(first + how.chunk, T))
        seen = (pos[:, None] >= pos) & (chunk | (pos < min(how.sinks, first)) | (pos >= T))
        seen = [seen & (pos[:, None] - pos < (window or len(pos))) for _, window in told]
        rows = [jax.nn.softmax(jnp.where(m, x, -jnp.inf), -1)[:, T:, :T] for (x, _), m in zip(told, seen, strict=True)]
        most = np.maximum(most, [np.where(chunk[:T], p.reshape(2, -1, T).max(1), 0.0) for p in rows])
    stored = Stored((contract.Layout(),) * len(held), (how,))
    prompts = {"max_new_tokens": 0, "policies": (), "stored": stored}
    _, _, stats = read_whole(model, params, Prompts(ids, np.array([T], np.int32)), **prompts)
    np.testing.assert_allclose([stats.of(i)[how][0] for i in range(len(held))], most, atol=1e-5)
    _, state = kvjax.prefill(model, params, ids, policy=kvzip(8), max_new_tokens=1)
    assert state.num_live.sum(-1).tolist() == [[16, 16]]


def test_it_is_refused_where_it_cannot_be(shallow):
    model, params = shallow
    read = functools.partial(kvjax.prefill, model, params, IDS, max_new_tokens=1)
    with pytest.raises(ValueError, match="token id 61 is outside the vocabulary, 0 to 60"):
        read(policy=kvzip(8, suffix=(61,)))
    with pytest.raises(ValueError, match="outside of jit"):
        jax.eval_shape(lambda ids: read(policy=kvzip(8), lengths=ids[:, 0]), jnp.asarray(IDS))
    each = {"tova": methods.tova(8), "kvzip": kvzip(8, suffix=(61,))}
    with pytest.raises(ValueError, match="kvzip: token id 61 is outside the vocabulary"):
        kvjax.prefill_each(model, params, IDS, each, max_new_tokens=1)
    state = kvjax.start(model, policy=kvzip(8), lengths=LENGTHS, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"forward\(evict=True\) reads them once; use kvjax.prefill"):
        kvjax.forward(model, params, IDS, state, valid=LENGTHS, evict=True)
    with pytest.raises(ValueError, match="reads the prompt again, which needs a model"):
        kvjax.evict_layer(kvzip(8), *tensors.qkv())
    sizes = {"vocab_size": 61, "embed_dim": 16, "mlp_dim": 24, "num_layers": 1, "head_dim": 8}
    learned = models.LanguageModel(gpt2.GPT2Config(**sizes, num_query_heads=2, num_kv_heads=2, max_position=32))
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape), learned.shapes)
    with pytest.raises(ValueError, match=r"24 tokens and 13 that repeat a chunk of it are 37, but .* 32 positions"):
        kvjax.prefill(learned, nothing, IDS, policy=kvzip(8), max_new_tokens=1)
