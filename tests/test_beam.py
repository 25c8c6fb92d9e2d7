"""Beam search: against transformers with a full cache, against a plain search over single rows with evicted ones."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods, models
from kvjax.cache.pool import PooledKV
from kvjax.cache.state import PerHead
from tests.methods import one_method

BUDGET = 8
M, T, V = 8, 12, 41
STOPS = (False, True, "never")


@pytest.fixture(scope="module")
def small():
    """One layer, compiled quickly."""
    config = models.ModelConfig(
        vocab_size=V, embed_dim=32, mlp_dim=48, num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=8
    )
    model = models.LanguageModel(config)
    return model, jax.tree.map(lambda x: x * jnp.asarray(1.6, x.dtype), model.init(jax.random.key(11)))


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(5).integers(0, V, (3, T)), np.array([T, 9, 5])


def ends_of(result, at):
    """End tokens that the search meets: what some hypotheses hold at index `at`."""
    return tuple({int(t) for t in np.asarray(result.tokens)[:, :, at].ravel()})


def leaves(kv):
    """Keys, values, and what the policy carries."""
    return [kv.k, kv.v, *jax.tree.leaves(kv.memory, is_leaf=lambda leaf: isinstance(leaf, PerHead))]


def assert_same_cache(state, row, other, other_row):
    """Equal up to the order of slots and to rounding."""
    assert int(state.length[row]) == int(other.length[other_row])
    assert jax.random.key_data(state.keys[row]).tolist() == jax.random.key_data(other.keys[other_row]).tolist()
    for a, b in zip(state.layers, other.layers, strict=True):
        a, b = (kv.view() if isinstance(kv, PooledKV) else kv for kv in (a, b))
        order_a, order_b = np.argsort(a.pos[row], axis=-1), np.argsort(b.pos[other_row], axis=-1)
        in_order = lambda x, order: np.take_along_axis(
            np.asarray(x), order.reshape(order.shape + (1,) * (x.ndim - 2)), 1
        )
        np.testing.assert_array_equal(in_order(a.pos[row], order_a), in_order(b.pos[other_row], order_b))
        alive = in_order(a.pos[row], order_a) != kvjax.EMPTY
        for x, y in zip(leaves(a), leaves(b), strict=True):
            if isinstance(x, PerHead):
                np.testing.assert_allclose(x.value[row], y.value[other_row], atol=1e-4)
            else:
                x, y = in_order(x[row], order_a)[alive], in_order(y[other_row], order_b)[alive]
                np.testing.assert_allclose(x, y, atol=1e-4)


# Against transformers.

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(transformers model, kvjax model, params)."""
    torch = pytest.importorskip("torch", reason="parity needs torch, which the test extra installs on Python 3.11")
    path = tmp_path_factory.mktemp("beam")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in theirs.parameters():
            p.mul_(3.0)  # as initialised, all tokens are about equally likely
    theirs = theirs.eval()
    theirs.save_pretrained(path)
    return theirs, *models.load(path)


QUICK = [(1, 4, 2, True), (2, 3, 1, "never")]
SEARCHES = [(0, 3, 3, False), *((*sizes, s) for sizes in [(1, 3, 3), (1, 4, 2), (2, 3, 1)] for s in STOPS)]


@pytest.mark.parametrize(
    ("length_penalty", "seed"),
    [
        pytest.param(*x, marks=() if x == (1.0, 0) else pytest.mark.slow)
        for x in itertools.product((1.0, 0.6, 2.0, -1.0), range(3))
    ],
)
@pytest.mark.parametrize(
    ("num_ends", "W", "R", "early_stopping"),
    [pytest.param(*s, marks=() if s in QUICK else pytest.mark.slow) for s in SEARCHES],
)
def test_equals_transformers(pair, num_ends, W, R, length_penalty, seed, early_stopping):
    import torch

    theirs, model, params = pair
    lengths = np.array([T, 7, 1])
    ids = np.random.default_rng(seed).integers(1, V, (3, T))
    free = kvjax.generate_beams(
        model, params, ids, lengths=lengths, num_beams=3, max_new_tokens=M, num_return_sequences=3, eos_ids=()
    )
    # The two tokens that the free search meets most often: hypotheses of many lengths end.
    eos = tuple(int(i) for i in np.bincount(np.ravel(free.tokens), minlength=V).argsort()[::-1][:num_ends])
    ours = kvjax.generate_beams(
        model, params, ids, lengths=lengths, num_beams=W, max_new_tokens=M, num_return_sequences=R, eos_ids=eos,
        length_penalty=length_penalty, early_stopping=early_stopping,
    )  # fmt: skip
    mask = (np.arange(T) >= T - lengths[:, None]).astype(np.int64)
    with torch.no_grad():
        out = theirs.generate(
            torch.tensor(ids * mask), attention_mask=torch.tensor(mask), num_beams=W, num_return_sequences=R,
            max_new_tokens=M, do_sample=False, eos_token_id=list(eos) or None, pad_token_id=0,
            length_penalty=length_penalty, early_stopping=early_stopping, return_dict_in_generate=True,
            output_scores=True,
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


# Against a plain search.


@functools.partial(jax.jit, static_argnames="model")
def one_step(model, params, token, state):
    logits, state = kvjax.decode_step(model, params, token, state)
    return jax.nn.log_softmax(logits[0]), state


def plain_search(model, params, prompt, policy, width, *, num_beams, eos_ids=(), length_penalty=1.0, key):
    """Lists of (tokens, score, state), each beam with a state of its own; early_stopping=False."""
    padded = np.concatenate([np.zeros(width - len(prompt), np.int32), prompt])[None]
    plan = kvjax.make_plan(model.config, policy, prompt_len=width, max_new_tokens=M)
    logits, state = jax.jit(kvjax.prefill, static_argnums=(0, 3))(
        model, params, jnp.asarray(padded, jnp.int32), plan, lengths=jnp.asarray([len(prompt)]), key=key[None]
    )
    beams, finished = [((), 0.0, jax.nn.log_softmax(logits[0]), state)], []
    for n in range(1, M + 1):
        options = [
            ((*tokens, t), score + float(logp[t]), state)
            for tokens, score, logp, state in beams
            for t in range(len(logp))
        ]
        options.sort(key=lambda o: -o[1])
        ended = lambda o, n=n: o[0][-1] in eos_ids or n == M
        finished += [(o[0], o[1] / n**length_penalty, o[2]) for o in options[:num_beams] if ended(o)]
        finished = sorted(finished, key=lambda f: -f[1])[:num_beams]
        going = [o for o in options if o[0][-1] not in eos_ids][:num_beams]
        if len(finished) == num_beams and going[0][1] / n**length_penalty <= finished[-1][1]:
            break
        if n < M:
            read = [one_step(model, params, jnp.asarray(o[0][-1:], jnp.int32), o[2]) for o in going]
            beams = [(o[0], o[1], np.asarray(logp), state) for o, (logp, state) in zip(going, read, strict=True)]
    return finished


def _skip_tables(case):
    if case.name in ("layer_table", "head_table"):
        pytest.skip("its table has three layers, the model here two")


@one_method
def test_evicted_caches_equal_a_search_row_by_row(small, prompts, case):
    """Tokens, scores and the returned hypotheses' caches, without end tokens and with."""
    _skip_tables(case)
    model, params = small
    tokens, lengths = prompts
    policy, W, R = case.make(BUDGET), 3, 2
    keys = jax.random.split(jax.random.key(9), 3)
    search = functools.partial(
        kvjax.generate_beams, model, params, tokens, lengths=lengths, policy=policy, num_beams=W, max_new_tokens=M,
        num_return_sequences=R, key=keys, buckets=False,
    )  # fmt: skip
    free = search()
    # The first layer of that pyramid holds all.
    live = free.state.num_live[:, 1:] if case.name == "pyramid_factory" else free.state.num_live
    assert int(live.max()) < T + M - 1 or case.name in ("full", "think")  # channels are no slots
    for at in (3, 4, 2, 1):
        eos = ends_of(free, at)[:2]
        ended = search(eos_ids=eos)
        if some_end := len({int(n) for n in ended.lengths.ravel()}) > 1:
            break
    assert some_end
    for result, ends in ((free, ()), (ended, eos)):
        for b, n in enumerate(lengths):
            prompt = tokens[b, T - n :]
            expected = plain_search(model, params, prompt, policy, T, num_beams=W, eos_ids=ends, key=keys[b])
            for r in range(R):
                n = int(result.lengths[b, r])
                assert tuple(result.tokens[b, r, :n].tolist()) == expected[r][0]
                np.testing.assert_allclose(result.scores[b, r], expected[r][1], rtol=1e-4)
                assert_same_cache(result.state, b * R + r, expected[r][2], 0)


# Laws.


@pytest.fixture(scope="module")
def ends(small, prompts):
    """End tokens that greedy generation meets at various steps, whatever is evicted."""
    tokens, lengths = prompts
    full = kvjax.generate(*small, tokens, lengths=lengths, max_new_tokens=M)
    return tuple({int(t) for t in np.ravel(full.tokens[:, 3:6])})


@one_method
def test_one_beam_is_greedy(small, prompts, ends, case):
    _skip_tables(case)
    model, params = small
    tokens, lengths = prompts
    options = {"lengths": lengths, "policy": case.make(BUDGET), "max_new_tokens": M, "key": jax.random.key(3)}
    greedy = kvjax.generate(model, params, tokens, eos_ids=ends, pad_id=40, **options)
    one = kvjax.generate_beams(model, params, tokens, eos_ids=ends, pad_id=40, num_beams=1, **options)
    assert int(greedy.lengths.min()) < M
    np.testing.assert_array_equal(one.tokens[:, 0], greedy.tokens)
    np.testing.assert_array_equal(one.lengths[:, 0], greedy.lengths)
    assert int(one.state.step) == int(greedy.state.step)
    # A row that has ended before the others is still evicted from by `generate`, where its schedule says so.
    for row in np.nonzero(greedy.lengths == greedy.lengths.max())[0]:
        assert_same_cache(one.state, row, greedy.state, row)


def test_one_beam_without_ends_is_greedy(small, prompts):
    model, params = small
    tokens, lengths = prompts
    options = {"lengths": lengths, "policy": methods.h2o(BUDGET), "max_new_tokens": M}
    greedy = kvjax.generate(model, params, tokens, **options)
    one = kvjax.generate_beams(model, params, tokens, num_beams=1, **options)
    np.testing.assert_array_equal(one.tokens[:, 0], greedy.tokens)


def test_one_beam_breaks_near_ties_as_greedy_does():
    """Logits that differ by less than the rounding of a sum of log probabilities."""
    logits = jnp.asarray([[0.0, 1.0, 1.0 + 2**-22]], jnp.float32)
    found = kvjax.drivers.beam._candidates(logits, jnp.full((1, 1), -500.0), 1, 0)
    assert int(found.tokens[0, 0]) == int(logits.argmax()) == 2


def test_a_row_gets_what_it_gets_alone(small, prompts):
    """Though rows close at different steps, and draw at random."""
    model, params = small
    tokens, lengths = prompts
    keys = jax.random.split(jax.random.key(1), 3)
    search = functools.partial(
        kvjax.generate_beams, model, params, policy=methods.random(BUDGET), num_beams=3, num_return_sequences=2,
        max_new_tokens=M,
    )  # fmt: skip
    eos = ends_of(search(tokens, lengths=lengths, key=keys), 2)
    together = search(tokens, lengths=lengths, key=keys, eos_ids=eos, early_stopping=True)
    steps = set()
    for b in range(3):
        row = slice(b, b + 1)
        alone = search(tokens[row], lengths=lengths[row], key=keys[row], eos_ids=eos, early_stopping=True)
        steps.add(int(alone.state.step))
        np.testing.assert_array_equal(together.tokens[b], alone.tokens[0])
        np.testing.assert_allclose(together.scores[b], alone.scores[0], rtol=1e-5)
        for r in range(2):
            assert int(alone.state.length[r]) == lengths[b] + int(alone.lengths[0, r]) - 1
            assert_same_cache(together.state, 2 * b + r, alone.state, r)
    assert len(steps) > 1
    assert int(together.state.step) == max(steps)


def test_the_loop_ends_with_the_last_open_sequence(small, prompts):
    model, params = small
    tokens, lengths = prompts
    search = functools.partial(kvjax.generate_beams, model, params, tokens, lengths=lengths, policy=methods.tova(8))
    every = tuple(range(V - 2))  # two tokens that do not end
    steps = {}
    for early_stopping in (True, False):
        result = search(num_beams=2, max_new_tokens=300, eos_ids=every, early_stopping=early_stopping)
        steps[early_stopping] = int(result.state.step)
        assert int(result.lengths.max()) <= steps[early_stopping] + 1
    assert steps[True] <= steps[False] < 20


def test_the_state_goes_on(small, prompts):
    """Every returned hypothesis can be read on: the next logits are those of its text alone."""
    model, params = small
    tokens, lengths = prompts
    R, policy = 2, methods.snapkv(BUDGET, window_size=4, kernel_size=3)
    result = kvjax.generate_beams(
        model, params, tokens, lengths=lengths, policy=policy, num_beams=3, num_return_sequences=R, max_new_tokens=M
    )
    last = result.tokens[:, :, -1].reshape(-1)
    logits, _ = jax.jit(kvjax.decode_step, static_argnums=0)(model, params, last, result.state)
    plan = kvjax.make_plan(model.config, policy, prompt_len=T, max_new_tokens=M)

    @jax.jit
    def read(tokens, lengths, more):
        first, state = kvjax.prefill(model, params, tokens, plan, lengths=lengths)
        return first, kvjax.feed(model, params, more, state)[0]

    for r in range(R):
        first, rest = read(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths), result.tokens[:, r])
        np.testing.assert_allclose(logits[r::R], rest[:, -1], atol=2e-4)
        logp = jax.nn.log_softmax(jnp.concatenate([first[:, None], rest[:, :-1]], axis=1))
        chosen = jnp.take_along_axis(logp, result.tokens[:, r, :, None], axis=-1)[..., 0]
        np.testing.assert_allclose(result.scores[:, r], chosen.mean(-1), rtol=1e-4)


def test_a_search_behind_fed_tokens(small, prompts):
    """`generate_beams_from` on what other drivers returned equals the search behind the whole prompt."""
    model, params = small
    tokens = jnp.asarray(prompts[0], jnp.int32)
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, "eos_ids": (5, 6), "length_penalty": 0.5}
    plan = kvjax.make_plan(model.config, methods.full(), prompt_len=T - 4, max_new_tokens=8)

    @jax.jit
    def pipeline(params, tokens):
        _, state = kvjax.prefill(model, params, tokens[:, : T - 4], plan)
        logits, state = kvjax.feed(model, params, tokens[:, T - 4 :], state)
        return kvjax.generate_beams_from(model, params, logits[:, -1], state, **options)

    result, expected = pipeline(params, tokens), kvjax.generate_beams(model, params, tokens, **options)
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    np.testing.assert_allclose(result.scores, expected.scores, rtol=1e-4)


def test_an_equal_search_compiles_nothing(small, prompts):
    model, params = small
    tokens, lengths = prompts
    run = lambda penalty, early_stopping: kvjax.generate_beams(
        model, params, tokens, lengths=lengths, policy=methods.h2o(BUDGET), num_beams=2, max_new_tokens=4,
        eos_ids=[1], length_penalty=penalty, early_stopping=early_stopping,
    )  # fmt: skip
    run(1.0, False)
    before = kvjax.drivers.beam._generate_beams._cache_size()
    run(0.3, True)
    run(2.0, "never")
    assert kvjax.drivers.beam._generate_beams._cache_size() == before


def test_a_beam_for_every_first_token_finds_the_best_pairs():
    """As wide as the vocabulary, the search over two tokens is exhaustive."""
    config = models.ModelConfig(
        vocab_size=4, embed_dim=8, mlp_dim=8, num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=8
    )
    model = models.LanguageModel(config)
    params = jax.tree.map(lambda x: x * jnp.asarray(2.0, x.dtype), model.init(jax.random.key(0)))
    prompt = np.array([[1, 2]])
    result = kvjax.generate_beams(model, params, prompt, num_beams=4, max_new_tokens=2, num_return_sequences=4)
    pairs = list(np.ndindex(4, 4))
    plan = kvjax.make_plan(config, methods.full(), prompt_len=2, max_new_tokens=2)

    @jax.jit
    def score(tokens, pairs):
        first, state = kvjax.prefill(model, params, tokens, plan)
        second, _ = kvjax.decode_step(model, params, pairs[:, 0], state)
        logp = jax.nn.log_softmax(jnp.stack([first, second], axis=1))
        return jnp.take_along_axis(logp, pairs[..., None], axis=-1)[..., 0].mean(-1)

    scores = score(jnp.asarray(np.repeat(prompt, 16, axis=0), jnp.int32), jnp.asarray(pairs, jnp.int32))
    best = np.argsort(-np.asarray(scores))[:4]
    assert [tuple(t) for t in result.tokens[0].tolist()] == [pairs[i] for i in best]
    np.testing.assert_allclose(result.scores[0], scores[best], rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_beams": 0}, "num_beams=0: search with at least 1 beam"),
        ({"num_beams": 42}, r"num_beams=42 .* the vocabulary has 41 .*use fewer beams"),
        ({"num_beams": 40, "eos_ids": (1, 1, 2)}, r"has 39 that do not end a sequence \(41 less 2 of eos_ids\)"),
        ({"num_return_sequences": 5}, "num_return_sequences=5 must lie between 1 and num_beams=4"),
        ({"num_return_sequences": 0}, "num_return_sequences=0 must lie"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: generate at least 1 token"),
        ({"early_stopping": "always"}, "early_stopping='always' is not one of"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"length_penalty": 90.0}, r"length_penalty=90.0: 8 tokens \*\* 90.0"),
        ({"tokens": np.zeros((1, 0), np.int32)}, "prompts are empty"),
        ({"tokens": np.full((1, 4), 41)}, "token id 41 is outside the vocabulary"),
        ({"lengths": [0, 3, 3]}, "prompt lengths must lie between 1"),
        ({"policy": methods.h2o(0.25, recent=0.5)}, "protect keeps 6"),
    ],
)
def test_bad_input_is_refused_before_tracing(small, prompts, change, message):
    model, _ = small
    arguments = {"tokens": prompts[0], "max_new_tokens": M, **change}
    with pytest.raises(ValueError, match=message):
        kvjax.generate_beams(model, None, **arguments)
