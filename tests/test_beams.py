"""Beam search: against transformers with a full cache, against a plain search over single rows with evicted ones."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import budgets, compose, contract, generate, generate_beams, generate_beams_from, methods, models
from kvjax.generation import beams
from kvjax.generation import generate as generating
from kvjax.run import steps
from tests.marks import exhaustive_but

M, T, V = 8, 12, 41
LENGTHS = np.array([T, 9, 5])
TOKENS = np.random.default_rng(5).integers(0, V, (3, T))
DECODING = dataclasses.replace(methods.ada_snapkv(8, window=2, kernel=3), score=methods.h2o(8).score, when=budgets.STEP)
POLICIES = {
    "sums": methods.h2o(8),
    "draws": methods.random(8),
    "pool": dataclasses.replace(DECODING, layout=contract.Layout(pool=True)),
    "turned": methods.streaming_llm(8, sinks=2),
    "interval": compose.when(budgets.Schedule(every=3), methods.tova(8)),
}
by_policy = pytest.mark.parametrize("name", exhaustive_but(POLICIES, "draws", "pool"))


@pytest.fixture(scope="module")
def small():
    """One layer, compiled quickly."""
    config = models.ModelConfig(
        vocab_size=V, embed_dim=32, mlp_dim=48, num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=8
    )
    model = models.LanguageModel(config)
    return model, jax.tree.map(lambda x: x * jnp.asarray(1.6, x.dtype), model.init(jax.random.key(11)))


@pytest.fixture(scope="module")
def search(small):
    """A search behind the prompts."""
    return lambda tokens=TOKENS, lengths=LENGTHS, **how: generate_beams(
        *small, tokens, lengths=lengths, **{"num_beams": 3, "max_new_tokens": M} | how
    )


def stored(state, row):
    """What a sequence's layers hold: of every head the live positions in order, keys, values and memory."""
    found = []
    for kv in state.layers:
        view = kv.view()
        pos = np.asarray(view.pos[row])
        slots = [x for x in jax.tree.leaves(view.memory) if x.shape[:3] == view.pos.shape]
        for head in range(len(pos)):
            order = np.argsort(pos[head])
            order = order[pos[head][order] >= 0]
            found += [np.asarray(x[row, head])[order] for x in (view.pos, view.k, view.v, *slots)]
    return found


def assert_same_cache(state, row, other, other_row):
    """Equal up to the order of slots and to rounding."""
    assert int(state.length[row]) == int(other.length[other_row])
    assert (state.keys[row] == other.keys[other_row]).all()
    for x, y in zip(stored(state, row), stored(other, other_row), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


STOPS = (False, True, "never")
MARKS = {(1, 4, 2, True): (), (2, 3, 1, "never"): pytest.mark.slow}  # the others are exhaustive
SEARCHES = [(0, 3, 3, False), *((*sizes, s) for sizes in [(1, 3, 3), (1, 4, 2), (2, 3, 1)] for s in STOPS)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(transformers model, kvjax model, params)."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch", reason="parity needs torch, which the test extra installs on Python 3.11")
    path = tmp_path_factory.mktemp("beam")
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # as initialised, all tokens are about equally likely
    model = model.eval()
    model.save_pretrained(path)
    return model, *models.load(path)


@pytest.mark.parametrize(
    ("length_penalty", "seed"),
    [
        pytest.param(*x, marks=() if x == (1.0, 0) else pytest.mark.exhaustive)
        for x in itertools.product((1.0, 0.6, 2.0, -1.0), range(3))
    ],
)
@pytest.mark.parametrize(
    ("num_ends", "W", "R", "early_stopping"),
    [pytest.param(*search, marks=MARKS.get(search, pytest.mark.exhaustive)) for search in SEARCHES],
)
def test_equals_transformers(theirs, num_ends, W, R, length_penalty, seed, early_stopping):
    import torch

    reference, model, params = theirs
    lengths = np.array([T, 7, 1])
    ids = np.random.default_rng(seed).integers(1, V, (3, T))
    search = functools.partial(generate_beams, model, params, ids, lengths=lengths, max_new_tokens=M)
    free = search(num_beams=3, num_return_sequences=3, eos_ids=())
    # The tokens that the free search meets most often: hypotheses of many lengths end.
    eos = tuple(int(i) for i in np.bincount(np.ravel(free.tokens), minlength=V).argsort()[::-1][:num_ends])
    rules = {"length_penalty": length_penalty, "early_stopping": early_stopping, "num_return_sequences": R}
    ours = search(num_beams=W, eos_ids=eos, **rules)
    mask = (np.arange(T) >= T - lengths[:, None]).astype(np.int64)
    with torch.no_grad():
        out = reference.generate(
            torch.tensor(ids * mask), attention_mask=torch.tensor(mask), num_beams=W, max_new_tokens=M, do_sample=False,
            eos_token_id=list(eos) or None, pad_token_id=0, return_dict_in_generate=True, output_scores=True, **rules,
        )  # fmt: skip
    sequences = out.sequences[:, T:].numpy().reshape(3, R, -1)
    np.testing.assert_allclose(ours.scores, out.sequences_scores.numpy().reshape(3, R), rtol=1e-4, atol=1e-4)
    assert sequences.shape[-1] == int(ours.lengths.max())
    for b, r in np.ndindex(3, R):
        n = int(ours.lengths[b, r])
        np.testing.assert_array_equal(ours.tokens[b, r, :n], sequences[b, r, :n])
        assert n == M or int(ours.tokens[b, r, n - 1]) in eos
        assert not set(eos) & set(np.asarray(ours.tokens[b, r, : n - 1]).tolist())
        assert (np.asarray(ours.tokens[b, r, n:]) == 0).all()


@functools.partial(jax.jit, static_argnames="model")
def one_step(model, params, token, state):
    logits, state = steps.decode_step(model, params, token, state)
    return jax.nn.log_softmax(logits), state


def plain_search(model, params, prompt, policy, *, num_beams, eos_ids, key):
    """Lists of (tokens, score, state), each beam with a row of its own; early_stopping=False, length_penalty=1."""
    ids = np.pad(prompt, (T - len(prompt), 0))[None]
    logits, state = steps.prefill(model, params, ids, policy=policy, max_new_tokens=M, lengths=[len(prompt)], key=key)
    beams, finished = [((), 0.0, np.asarray(jax.nn.log_softmax(logits[0])), state)], []
    for n in range(1, M + 1):
        options = [
            ((*tokens, t), score + float(logp[t]), state)
            for tokens, score, logp, state in beams
            for t in range(len(logp))
        ]
        options.sort(key=lambda o: -o[1])
        ended = lambda o, n=n: o[0][-1] in eos_ids or n == M
        finished += [(o[0], o[1] / n, o[2]) for o in options[:num_beams] if ended(o)]
        finished = sorted(finished, key=lambda f: -f[1])[:num_beams]
        going = [o for o in options if o[0][-1] not in eos_ids][:num_beams]
        if len(finished) == num_beams and going[0][1] / n <= finished[-1][1]:
            break
        if n < M:
            read = [one_step(model, params, jnp.asarray(o[0][-1:], jnp.int32), o[2]) for o in going]
            beams = [(o[0], o[1], np.asarray(logp[0]), after) for o, (logp, after) in zip(going, read, strict=True)]
    return finished


def ends_of(result):
    """End tokens that some hypotheses meet at one step, and others never or earlier."""
    return tuple({int(t) for t in np.asarray(result.tokens)[:, :, 3].ravel()})[:2]


@pytest.mark.slow
@by_policy
def test_evicted_caches_equal_a_search_row_by_row(small, search, name):
    """Tokens, scores and the returned hypotheses' caches, without end tokens and with."""
    policy, W, R, keys = POLICIES[name], 3, 2, jax.random.split(jax.random.key(9), 3)
    how = {"policy": policy, "num_return_sequences": R, "key": keys, "buckets": False}
    free = search(eos_ids=(), **how)
    assert max(int(kv.num_live.max()) for kv in free.state.layers) < T + M - 1
    eos = ends_of(free)
    ended = search(eos_ids=eos, **how)
    assert len({int(n) for n in ended.lengths.ravel()}) > 1
    for result, ends in ((free, ()), (ended, eos)):
        for b, n in enumerate(LENGTHS):
            prompt = TOKENS[b, T - n :]
            expected = plain_search(*small, prompt, policy, num_beams=W, eos_ids=ends, key=keys[b : b + 1])
            for r in range(R):
                n = int(result.lengths[b, r])
                assert tuple(result.tokens[b, r, :n].tolist()) == expected[r][0]
                np.testing.assert_allclose(result.scores[b, r], expected[r][1], rtol=1e-4)
                assert_same_cache(result.state, b * R + r, expected[r][2], 0)


@pytest.mark.slow
@by_policy
def test_one_beam_is_greedy(small, search, name):
    how = {"policy": POLICIES[name], "key": jax.random.key(3), "pad_id": 40}
    run = functools.partial(generate, *small, TOKENS, lengths=LENGTHS, max_new_tokens=M, **how)
    free = run(eos_ids=()).tokens
    np.testing.assert_array_equal(search(num_beams=1, eos_ids=(), **how).tokens[:, 0], free)
    ends = tuple({int(t) for t in np.ravel(free[:, 3:5])})
    greedy, one = run(eos_ids=ends), search(num_beams=1, eos_ids=ends, **how)
    assert int(greedy.lengths.min()) < M
    np.testing.assert_array_equal(one.tokens[:, 0], greedy.tokens)
    np.testing.assert_array_equal(one.lengths[:, 0], greedy.lengths)
    for row in range(3):
        assert_same_cache(one.state, row, greedy.state, row)


def test_one_beam_breaks_near_ties_as_greedy_does():
    """Logits that differ by less than the rounding of a sum of log probabilities."""
    logits = jnp.asarray([[0.0, 1.0, 1.0 + 2**-22]], jnp.float32)
    found = beams._candidates(logits, jnp.full((1, 1), -500.0), 1, 0)
    assert int(found.tokens[0, 0]) == int(logits.argmax()) == 2


@pytest.mark.slow
def test_a_row_gets_what_it_gets_alone(search):
    """Though rows close at different steps, and draw at random."""
    keys = jax.random.split(jax.random.key(1), 3)
    how = {"policy": POLICIES["draws"], "num_return_sequences": 2}
    how["eos_ids"] = ends_of(search(key=keys, **how))
    together = search(key=keys, early_stopping=True, **how)
    for b in range(3):
        row = slice(b, b + 1)
        alone = search(TOKENS[row], LENGTHS[row], key=keys[row], early_stopping=True, **how)
        np.testing.assert_array_equal(together.tokens[b], alone.tokens[0])
        np.testing.assert_allclose(together.scores[b], alone.scores[0], rtol=1e-5)
        for r in range(2):
            assert int(alone.state.length[r]) == LENGTHS[b] + int(alone.lengths[0, r]) - 1
            assert_same_cache(together.state, 2 * b + r, alone.state, r)


@pytest.mark.slow
def test_the_loop_ends_with_the_last_open_sequence(search):
    """Of the 300 tokens that it may have, it reads a few; fewer if it ends with the first full pool."""
    every = tuple(range(V - 2))  # two tokens that do not end
    longest = {}
    for early_stopping in (True, False):
        result = search(num_beams=2, max_new_tokens=300, eos_ids=every, early_stopping=early_stopping)
        longest[early_stopping] = int(result.lengths.max())
    assert longest[True] <= longest[False] < 20


@pytest.mark.slow
def test_a_search_behind_fed_tokens(small, search):
    """`generate_beams_from` on what other drivers returned equals the search behind the whole prompt."""
    how = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, "eos_ids": (5, 6), "length_penalty": 0.5}
    expected = search(lengths=None, **how)

    @jax.jit
    def run(params, tokens):
        _, state = steps.prefill(small[0], params, tokens[:, : T - 4], max_new_tokens=8)
        logits, state = generating.feed(small[0], params, tokens[:, T - 4 :], state)
        return generate_beams_from(small[0], params, logits[:, -1], state, **how)

    found = run(small[1], jnp.asarray(TOKENS, jnp.int32))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)


@pytest.mark.slow
def test_an_equal_search_compiles_nothing(search):
    """Penalties and rules of stopping are data, and so are budgets that need as many slots."""
    run = lambda penalty, stop: search(
        policy=methods.h2o(8), num_beams=2, eos_ids=[1], length_penalty=penalty, early_stopping=stop
    )
    run(1.0, False)
    before = beams.searched._cache_size()
    run(0.3, True)
    run(2.0, "never")
    assert beams.searched._cache_size() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_beams": 42}, "num_beams=42 must be a whole number from 1 to 41"),
        ({"num_beams": 40, "eos_ids": (1, 1, 2)}, r"has 39 that do not end a sequence \(41 less 2 of eos_ids\)"),
        ({"num_return_sequences": 5}, "num_return_sequences=5 must be a whole number from 1 to 3; there are num_beams"),
        ({"early_stopping": "always"}, "early_stopping='always' is not one of"),
        ({"length_penalty": 90.0}, r"length_penalty=90.0: 8 tokens to that power are no number of float32"),
    ],
)
def test_bad_input_is_refused_before_tracing(search, change, message):
    with pytest.raises(ValueError, match=message):
        search(**change)
