"""Perplexity while evicting, against the policies' own decode steps."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.experiments.core.engine import Engine, prompts_of, shapes
from kvjax.experiments.papers.methods import METHODS
from kvjax.experiments.tasks.base import Question, example
from kvjax.methods.released.easykv import block_sizes
from tests.tensors import token_ids


@pytest.mark.parametrize("method", ["full", "roco", "h2o"])
def test_every_token_is_predicted_from_what_is_kept_before_it(tiny, method):
    """Of two texts in one batch, each with its own budget, half of its tokens: as decoding token by token gives it."""
    model, params = tiny
    texts = [tuple(np.asarray(token_ids(1, n, seed=n))[0].tolist()) for n in (14, 10)]
    prompts = [prompts_of(example("a", i, ids, Question()), "in_prompt")[0] for i, ids in enumerate(texts)]
    (shape,) = shapes(prompts)
    how = {"batch_size": 2, "tokenizer": None, "texts": True}
    engine = Engine(model, params, METHODS["roco"][method].make(0.5), shape, **how)
    engine.compile()
    lines, _ = engine.run(prompts)
    step = jax.jit(lambda token, state: kvjax.decode_step(model, params, token, state))
    for ids, ((line,)) in zip(texts, lines, strict=True):
        policy = METHODS["roco-generating"][method].make(len(ids) // 2)
        logits, state = kvjax.prefill(model, params, np.array([ids[:1]]), policy=policy, max_new_tokens=len(ids))
        found = []
        for token in ids[1:]:
            found.append(jax.nn.log_softmax(logits)[0, token])
            logits, state = step(jnp.array([token]), state)
        assert line["nll"] == pytest.approx(-float(np.mean(found)), rel=1e-5)
        assert line["tokens"] == len(ids) - 1
        assert method == "full" or int(state.num_live.max()) == len(ids) // 2


@pytest.mark.parametrize("method", ["roco-block-2", "roco-block-8"])
def test_a_text_in_blocks_is_predicted_as_easykvs_loop_does(tiny, method):
    """Its loop step by step: a dense prefix, then blocks that see what is kept and themselves, and evict as many."""
    made, n, nominal = METHODS["easykv-ppl"][method], 45, 18
    ids = tuple(np.asarray(token_ids(1, n))[0].tolist())
    prompts = prompts_of(example("a", 0, ids, Question()), "in_prompt")
    (shape,) = shapes(prompts)
    engine = Engine(*tiny, made.make(nominal), shape, batch_size=1, tokenizer=None, block=made.block, texts=True)
    engine.compile()
    (((line,),), _), found = engine.run(prompts), []
    sizes = block_sizes(n, nominal, made.block, "ppl")
    policy = dataclasses.replace(made.make(nominal), budget=sizes.final)  # also of what does not end with the text
    for start in range(sizes.dense_prefix, n, made.block):
        _, state = kvjax.prefill(*tiny, np.array([ids[:start]]), policy=policy, max_new_tokens=8, block=made.block)
        for token, after in itertools.pairwise(ids[start : start + made.block + 1]):
            logits, state = kvjax.decode_step(*tiny, jnp.array([token]), state)
            found.append(jax.nn.log_softmax(logits)[0, after])
    assert line["nll"] == pytest.approx(-float(np.mean(found)), rel=1e-5)
    assert line["tokens"] == len(found) == n - sizes.dense_prefix - 1
