"""Layers with a state of their own in place of keys and values: the delta rule, and what runs of a hybrid model do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, methods, models
from kvjax.contract import kv_layers
from kvjax.experiments.harness.scoring import score_whole
from kvjax.models.families import from_hugging_face
from kvjax.models.recurrent import CHUNK, behind, delta_rule
from kvjax.observe import Reread

B, T, NEW = 2, 19, 5
LENGTHS = np.array([T, 12])
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 8}
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]


@pytest.fixture(scope="module")
def hybrid():
    """Layers of gated DeltaNet and of attention in turn."""
    raw = {**SIZES, **DELTA, "model_type": "qwen3_5_text", "layer_types": KINDS}
    model = models.LanguageModel(from_hugging_face(raw))
    draw = np.random.default_rng(3)
    noise = lambda x: 0.5 * draw.standard_normal(x.shape).astype(x.dtype) if x.ndim == 1 else 0.0  # keys differ in norm
    return model, jax.tree.map(lambda x: 2 * x + noise(x), jax.jit(model.init)(jax.random.key(3)))


def tokens(width=T, seed=0):
    return np.random.default_rng(seed).integers(0, 61, (B, width)).astype(np.int32)


def close(a, b, within=2e-5):
    """Whether numbers of two trees differ by no more than a share of the largest of an array."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, atol=within * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize("width", [1, 7, CHUNK + 9])
def test_the_delta_rule_is_its_formula_and_padding_changes_nothing(width):
    H, K, V = 2, 3, 4
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal((B, *shape))
    q, k, v, state = draw(width, H, K), draw(width, H, K) / 2, draw(width, H, V), draw(H, K, V)
    decay, rate = -np.abs(draw(width, H)), rng.random((B, width, H))
    exist = np.arange(width)[None] >= np.array([[0], [min(3, width)]])
    out, after = delta_rule(
        *map(jnp.asarray, (q, k, v, decay, rate)), jnp.asarray(state, jnp.float32), jnp.asarray(exist)
    )
    for b, h in np.ndindex(B, H):
        S = state[b, h].copy()
        for t in np.flatnonzero(exist[b]):
            S = S * np.exp(decay[b, t, h])
            S = S + rate[b, t, h] * np.outer(k[b, t, h], v[b, t, h] - k[b, t, h] @ S)
            np.testing.assert_allclose(out[b, t, h], q[b, t, h] @ S, atol=2e-5)
        np.testing.assert_allclose(after[b, h], S, atol=2e-5)


def test_inputs_stand_behind_the_last_ones_whatever_padding_is_between():
    last, x = jnp.array([[[1.0], [2.0]]] * 3), jnp.array([[[7.0], [8.0], [9.0]]] * 3)
    pos = jnp.array([[4, 5, 6], [-1, 4, 5], [-1, -1, -1]])
    every = behind(last, x, pos)[..., 0].tolist()
    assert every == [[1, 2, 7, 8, 9], [0, 1, 2, 8, 9], [0, 0, 0, 1, 2]]


def test_policies_count_the_layers_that_hold_keys_and_values(hybrid):
    model, params = hybrid
    assert kv_layers(model.config) == (1, 3)
    policy = methods.pyramidkv(8, window=4, beta=4)
    _, state = kvjax.prefill(model, params, tokens(), policy=policy, lengths=LENGTHS, max_new_tokens=NEW)
    assert [info.layer for info in state.plan.infos] == [0, 1]
    assert state.plan.infos[0].num_layers == 2
    assert state.num_live[0].sum(-1).tolist()[0] > state.num_live[0].sum(-1).tolist()[1]
    own = jax.tree.leaves(state.others)
    assert [x.shape for x in own] == 2 * [(B, 3, 24), (B, 2, 4, 8)]
    planned = kvjax.plan_memory(model.config, policy, batch=B, prompt_len=T, max_new_tokens=NEW)
    assert planned.layers == state.nbytes
    assert state.nbytes == sum(kv.nbytes for kv in state.layers) + sum(x.nbytes for x in own)


def test_a_prompt_read_whole_is_one_read_in_blocks_and_token_by_token(hybrid):
    model, params = hybrid
    ids = tokens(T + NEW)
    how = {"lengths": LENGTHS + NEW, "max_new_tokens": 0}
    whole, state = kvjax.prefill(model, params, ids, **how)
    in_blocks, of_blocks = kvjax.prefill(model, params, ids, block=5, **how)
    close((in_blocks, of_blocks.others), (whole, state.others))
    _, start = kvjax.prefill(model, params, ids[:, :T], lengths=LENGTHS, max_new_tokens=NEW)
    each, after = kvjax.feed(model, params, ids[:, T:], start)
    close((each[:, -1], after.others), (whole, state.others))


def test_rows_that_do_not_read_keep_their_state(hybrid):
    model, params = hybrid
    _, state = kvjax.prefill(model, params, tokens(), lengths=LENGTHS, max_new_tokens=NEW)
    _, after = kvjax.decode_step(model, params, np.array([5, 6]), state, active=np.array([True, False]))
    row = lambda state, i: jax.tree.map(lambda x: np.asarray(x[i]), state.others)
    close(row(after, 1), row(state, 1), 0)
    assert not all(map(np.array_equal, *map(jax.tree.leaves, (row(after, 0), row(state, 0)))))


def test_rows_are_taken_and_a_stored_state_goes_on(hybrid, tmp_path):
    model, params = hybrid
    policy = methods.snapkv(8, window=4)
    _, state = kvjax.prefill(model, params, tokens(), policy=policy, lengths=LENGTHS, max_new_tokens=NEW)
    kvjax.save_state(tmp_path / "s.safetensors", model, params, state, policy=policy)
    again = kvjax.load_state(tmp_path / "s.safetensors", model, params, policy=policy)
    close(again, state, 0)
    ids = np.array([5, 6])
    logits, _ = kvjax.decode_step(model, params, ids, again)
    turned, _ = kvjax.decode_step(model, params, ids[[1, 0, 1]], state[np.array([1, 0, 1])])
    close(turned, logits[np.array([1, 0, 1])], 1e-6)


def test_generation_streams_and_beams_are_those_of_steps(hybrid):
    model, params = hybrid
    how = {"policy": methods.h2o(8, recent=4), "lengths": LENGTHS, "max_new_tokens": NEW, "eos_ids": ()}
    written = kvjax.generate(model, params, tokens(), **how).tokens
    logits, state = kvjax.prefill(model, params, tokens(), **{k: x for k, x in how.items() if k != "eos_ids"})
    for i in range(NEW):
        assert written[:, i].tolist() == logits.argmax(-1).tolist()
        logits, state = kvjax.decode_step(model, params, logits.argmax(-1), state)
    streamed = [*kvjax.stream(model, params, tokens(), **how)]
    np.testing.assert_array_equal(np.stack(streamed, 1), written)
    beams = kvjax.generate_beams(model, params, tokens(), num_beams=1, **how)
    np.testing.assert_array_equal(beams.tokens[:, 0], written)


def test_one_reading_serves_policies_and_those_that_read_again(hybrid):
    model, params = hybrid
    policies = {"snapkv": methods.snapkv(8, window=4), "kvzip": methods.kvzip(8, Reread(chunk=8))}
    each = kvjax.prefill_each(model, params, tokens(), policies, lengths=LENGTHS, max_new_tokens=NEW)
    for name, logits, state in each:
        alone, own = kvjax.prefill(model, params, tokens(), policy=policies[name], lengths=LENGTHS, max_new_tokens=NEW)
        close((logits, state.others), (alone, own.others), 0)
        for kv, other in zip(state.layers, own.layers, strict=True):
            np.testing.assert_array_equal(kv.pos, other.pos)


def test_inside_of_jit_layers_of_two_kinds_are_one_scan(hybrid):
    model, params = hybrid
    run = lambda ids: kvjax.prefill(model, params, ids, policy=methods.snapkv(8, window=4), max_new_tokens=NEW)
    plain, state = run(tokens())
    logits, after = jax.jit(run)(tokens())
    close((logits, after.others), (plain, state.others))
    assert "scan" in str(jax.make_jaxpr(run)(tokens()))


def test_the_cost_of_an_eviction_is_measured(hybrid):
    model, params = hybrid
    policy = methods.tova(8)
    reading = analysis.read(model, params, tokens(), tokens(NEW, seed=1), policies=[policy], lengths=LENGTHS)
    full = [jnp.ones((B, 2, T), bool)] * 2
    close(reading.logits_after(model, params, full), reading.logits, 1e-5)


def test_a_text_is_scored_whole_as_by_steps(hybrid):
    model, params = hybrid
    following = np.roll(tokens(), -1, axis=1)
    logp, _ = score_whole(model, params, tokens(), LENGTHS, following)
    _, state = kvjax.prefill(model, params, tokens()[:, :-1], lengths=LENGTHS - 1, max_new_tokens=1)
    logits, _ = kvjax.decode_step(model, params, tokens()[:, -1], state)
    close(logp[:, -1], jax.nn.log_softmax(logits)[np.arange(B), following[:, -1]])
