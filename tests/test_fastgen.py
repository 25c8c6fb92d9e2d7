"""FastGen: what heads keep while decoding, beside one head in plain Python; whose tokens are of which kind."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

import kvjax
from kvjax import methods, models
from kvjax.budgets import STEP
from kvjax.contract import LayerInfo
from kvjax.methods.profile import FastGen
from kvjax.models.embedded import EMBEDDED
from tests import tensors
from tests.by_hand import moment

PROMPT, NEW, HEADS, GROUP = 30, 14, 5, 2
DECLARED, MARKS = [0, 12, 33], np.flatnonzero(np.random.default_rng(0).random(PROMPT + NEW) < 0.3)
MARKS = sorted(set(MARKS.tolist()) - set(DECLARED))  # ids are columns


def structured_heads(seed=0):
    """Five heads that look at: special tokens, and punctuation, and frequent words, and the vicinity, and anything."""
    rng = np.random.default_rng(seed)
    T, H = PROMPT + NEW, 8
    special, mark, words = (np.isin(np.arange(T), x) for x in (DECLARED, MARKS, [4, 9, 17, 31, 36]))
    q, k = rng.standard_normal((HEADS, GROUP, T, H)) * 0.3, rng.standard_normal((HEADS, T, H)) * 0.3
    wanted = [special, special | mark, np.where(mark, 0.2, special | words)]
    for head, liked in enumerate(wanted):
        q[head, :, :, 0] = 7 * H**0.5
        k[head, :, 0] = liked
    place = np.arange(T) / T
    q[3, :, :, 0], q[3, :, :, 1] = 1200 * place, -600  # -(i - j)^2, up to a term that does not depend on j
    k[3, :, 0], k[3, :, 1] = place, place**2
    f = lambda x: jnp.asarray(x, jnp.float32)
    return f(q.reshape(1, HEADS * GROUP, T, H)), f(k[None])


def simulate(q, k, policy, cap):
    """(strategy, positions kept after the prompt and after every step) of one kv head. q is "G T H", k "T H"."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    num_local = int(policy.local * PROMPT + 1e-9)

    def row(i, live):
        x = q[:, i] @ k[live].T * k.shape[1] ** -0.5
        e = np.exp(x - x.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)).mean(0)

    received, matrix = dict.fromkeys(range(PROMPT), 0.0), []
    for i in range(PROMPT):
        matrix.append(row(i, list(range(i + 1))))
        for j, x in enumerate(matrix[-1]):
            received[j] += x

    def tiers(length):
        ranked = sorted(received, key=lambda j: (received[j], j), reverse=True)
        frequent = set(ranked[: int(policy.frequent * length + 1e-9)])
        return [
            set(policy.special),
            set(policy.punctuation),
            frequent,
            set(range(length - num_local, length)),
            {*received},
        ]

    strategy = 4
    for s in (3, 2, 1, 0):
        fixed, near = set().union(*tiers(PROMPT)[: min(s, 2) + 1]), num_local if s == 3 else 0
        mass = [sum(x for j, x in enumerate(p) if j in fixed or i - j < near) for i, p in enumerate(matrix)]
        if np.mean(mass) >= policy.recovery:
            strategy = s

    def keep(length):
        kept = []
        for tier, members in enumerate(tiers(length)[: strategy + 1]):
            fresh = [j for j in received if j in members and j not in kept]
            kept += sorted(fresh, key=lambda j: (j if tier == 3 else received[j], j), reverse=True)
        for j in set(received) - set(kept[:cap]):
            del received[j]
        return sorted(received)

    history = [keep(PROMPT)]
    for i in range(PROMPT, PROMPT + NEW):
        received[i] = 0.0
        live = sorted(received)
        for j, x in zip(live, row(i, live), strict=True):
            received[j] += x
        history.append(keep(i + 1))
    return strategy, history


def divide(needed, strategies, total):
    """The slots of a pool for every head, token by token."""
    given = [0] * HEADS
    for wanted in (needed, [NEW if s == 4 else 0 for s in strategies]):
        left = total - sum(given)
        level = max(n for n in range(PROMPT + NEW + 1) if sum(min(w, n) for w in wanted) <= left)
        given = [g + min(w, level) for g, w in zip(given, wanted, strict=True)]
    return [g + (total - sum(given)) // HEADS for g in given]


@pytest.mark.parametrize(
    ("budget", "pool"),
    [(None, False), (11, False), (PROMPT + NEW, True), (23, True), (9, True)],
    ids=["no cap", "cap", "pool for all", "pool for sets", "pool too small"],
)
def test_decoding_against_a_simulation(budget, pool):
    q, k = structured_heads()
    policy = FastGen(tuple(DECLARED), tuple(MARKS), 0.2, 0.2, 0.9, budget=budget, pool=pool)
    seen = tensors.replay(policy, [{"q": q, "k": k, "v": k}], PROMPT)
    history, (_, _, strategies, *caps) = [now[0] for now in seen.live], seen.kv.memory
    alone = lambda head, cap: simulate(q[0, head * GROUP : (head + 1) * GROUP], k[0, head], policy, cap)
    wanted, strategies = [budget] * HEADS, strategies[0].tolist()
    if pool:
        wanted = divide([len(alone(head, None)[1][0]) for head in range(HEADS)], strategies, budget * HEADS)
        assert caps[0][0].tolist() == wanted
    for head, strategy in enumerate(strategies):
        expected = alone(head, wanted[head])
        assert strategy == expected[0]
        assert [now[head] for now in history] == expected[1]
    assert len(set(strategies)) > 2
    if budget == 11:
        assert max(len(head) for now in history for head in now) == budget
    if budget == 9:
        assert max(sum(len(head) for head in now) for now in history) <= budget * HEADS


def test_a_group_is_profiled_by_its_mean():
    """One query head looks at the special token, the other at itself: 0.5625 of their mean is on the special one."""
    first, itself = np.zeros((8, 8)), np.eye(8)
    first[:, 0] = 1
    q, k, v, scale = tensors.from_probabilities(np.stack([first, itself]))
    chosen = lambda recovery: (
        tensors.evicted(FastGen((0,), (7,), 0.0, 0.0, recovery), [{"q": q, "k": k, "v": v}], scale=scale)[0][0]
        .memory[2]
        .tolist()
    )
    assert (chosen(0.56), chosen(0.99)) == ([[0]], [[4]])


def test_a_row_that_stands_still_keeps_its_cache(shallow):
    model, params = shallow
    policy = methods.fastgen(range(3), range(3, 30), recovery=0.7)
    _, before = kvjax.prefill(model, params, tensors.token_ids(2, 12), policy=policy, max_new_tokens=4)
    _, after = kvjax.decode_step(model, params, [40, 1], before, active=[True, False])  # a special token stands still
    (old,), (new,) = before.layers, after.layers
    np.testing.assert_array_equal(old.pos[1], new.pos[1])
    for x, y in zip(old.memory, new.memory, strict=True):
        np.testing.assert_array_equal(x[1], y[1])


def test_sizes():
    info, n = LayerInfo(0, 1, 4, 2, 8, 20, 8), np.array([20, 8])
    policy = methods.fastgen((), ())
    assert policy.sizes(info, n).per_head.tolist() == [28, 28]
    of = lambda budget: dataclasses.replace(policy, budget=budget).sizes(info, n)
    assert of(0.25).per_head.tolist() == [6, 3]
    assert of(100).per_head.tolist() == [28, 28]
    assert moment(dataclasses.replace(policy, budget=5), 20, prompt=20).hparams[2].tolist() == [5]


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"local=1.5 is no share; give a number from 0 to 1"):
        methods.fastgen((0,), (1,), local=1.5)
    with pytest.raises(ValueError, match="what heads need is known only later; give a budget"):
        FastGen((), (), pool=True)
    with pytest.raises(ValueError, match="has no schedule"):
        kvjax.when(STEP, methods.fastgen((0,), (1,)))
    with pytest.raises(ValueError, match="tokens"):
        kvjax.evict_layer(methods.fastgen((0,), (1,)), *tensors.qkv())


def byte_level_tokenizer():
    """Pieces as byte-level BPE writes them: G with a dot is a leading space, and other bytes are letters too."""
    pieces = ["<s>", "</s>", "<|turn|>", ",", "Ġ.", "Ġ...", "âĢĶ", "âĢ", "Ġ", "a", "Ġa,", "+", "Ċ"]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, []))
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens([tokenizers.AddedToken("<|turn|>", special=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def test_token_classes():
    assert methods.token_classes(byte_level_tokenizer()) == ((0, 1, 2), (3, 4, 5, 6, 11))
    tokenizer = models.load_tokenizer(EMBEDDED)
    special, punctuation = methods.token_classes(tokenizer)
    assert set(special) == set(tokenizer.all_special_ids)
    words = tokenizer.convert_ids_to_tokens(list(punctuation))
    assert "." in words
    assert not any(c.isalnum() for word in words for c in word)
