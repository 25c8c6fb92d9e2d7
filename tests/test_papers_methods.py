"""The papers' methods as tables run them: their rules in numpy."""

import numpy as np
import pytest

import kvjax
from kvjax.experiments.papers.attention import capture
from kvjax.experiments.papers.base import Prompts
from kvjax.experiments.papers.methods import METHODS, largest_rows
from tests.tensors import live_positions, token_ids
from tests.test_figures import grouped, logits, matrix


def rocos(x, budget, scope):
    """What RoCo keeps of the logits "G T T" of a kv head, evicting after every token, by the paper's text alone."""
    total, square, count, live = *np.zeros((3, x.shape[-1])), []
    for t in range(x.shape[-1]):
        live = [*live, t]
        e = np.exp(x[:, t, live])
        p = (e / e.sum(-1, keepdims=True)).mean(0)
        total[live] += p
        square[live] += p * p
        count[live] += 1
        if len(live) > budget:
            mean = {j: total[j] / count[j] for j in live}
            by_deviation = sorted(live, key=lambda j: (square[j] / count[j] - mean[j] ** 2, j))
            live.remove(min(by_deviation[: len(live) - scope], key=mean.get))
    return live


@pytest.mark.parametrize(("method", "budget", "scope"), [("roco", 0.5, 6), ("roco-scopes", 0.5, 3)])
def test_rocos_tables_protect_no_token_by_its_position(tiny, method, budget, scope):
    """The rule of the text in the first layer, which nothing below evicts; kvjax's default keeps other tokens."""
    model, params = tiny
    tokens, name = np.asarray(token_ids(2, 24, seed=3)), "roco" if method == "roco" else "deviation-0.3"
    (first, *_) = capture(Prompts(model, params, tokens))
    x = logits(first).reshape(2, 2, 2, 24, 24)
    expected = [[rocos(x[b, k], 12, scope) for k in range(2)] for b in range(2)]
    how = {"max_new_tokens": 0, "block": 1}
    read = lambda name: kvjax.prefill(model, params, tokens, policy=METHODS[method][name].make(budget), **how)[1]
    live = lambda name: live_positions(read(name).layers[0])
    assert [[sorted(head) for head in row] for row in live(name)] == expected
    if method == "roco":
        assert live("roco_recent") != live("roco")
        assert all({*range(21, 24)} <= {*head} for row in live("roco_recent") for head in row)


def test_ahakvs_limitation_sums_the_largest_rows_of_every_token(tiny):
    """SG-softmax, the 6 largest probabilities of each column times pooled value norms, and the last 6 tokens."""
    model, params = tiny
    tokens, seen = np.asarray(token_ids(2, 24, seed=3)), np.arange(1, 25)
    _, state = kvjax.prefill(model, params, tokens, policy=largest_rows(12, recent=6), max_new_tokens=0)
    gain = np.where(seen > 12, np.sqrt(2 * np.log(np.maximum(seen / 12, 1))), 1)
    for layer, held in zip(capture(Prompts(model, params, tokens)), state.layers, strict=True):
        largest = np.sort(grouped(matrix(layer, gain)), axis=2)[:, :, -6:].sum(2)
        norms = np.pad((np.asarray(layer.v, np.float64) ** 2).sum(-1), [(0, 0), (0, 0), (3, 3)])
        score = largest * sum(norms[..., j : j + 24] for j in range(7))
        chosen = np.argsort(score[..., :18], axis=-1)[..., -6:]
        expected = [[sorted([*head.tolist(), *range(18, 24)]) for head in row] for row in chosen]
        assert [[sorted(head) for head in row] for row in live_positions(held)] == expected
