"""Where papers and released code disagree: every number of the table in `kvjax/methods/README.md`.

A method is the one, a variant the other. A line of `golden/disagreements.json` has what a call keeps, and another call
that keeps something else. They were recorded when they were what plain formulations in float64 keep, one row after the
other, which are in the history: `git show 86e9e57:tests/test_disagreements.py`. What is only counted stands here.
"""

import dataclasses
import inspect
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import methods
from kvjax.budgets import Pyramid, Share
from kvjax.contract import LayerInfo, resolve
from kvjax.methods.profile import FastGen
from kvjax.methods.released import easykv, factory, kvpress, papers, parts
from kvjax.methods.released.counts import FloorPyramid, InclusivePyramid, Truncated
from kvjax.observe import Reread
from kvjax.scores.attention import Faded
from tests import recorded, tensors
from tests.by_hand import moment
from tests.marks import marks

HERE, ROOT = pathlib.Path(__file__).parent, pathlib.Path(kvjax.__file__).parent
RECORDED = json.loads((HERE / "golden" / "disagreements.json").read_text())
NAMES = recorded.NAMES | {
    "FastGen": FastGen,
    "bare": lambda policy: dataclasses.replace(policy, score=Faded(policy.score.of)),  # without its prior
}
QUICK = ("D-03", "D-06", "D-07", "D-08", "D-09", "D-18", "D-21", "D-22", "D-23", "D-24", "D-26")
SLOW = ("D-01", "D-02", "D-10", "D-12", "D-13", "D-15", "D-16", "D-19", "D-20", "D-39", "D-46", "D-49")
K, PROMPT, TOKENS = 2, 16, 22
LAYER = dict(zip("qkv", tensors.qkv(34, B=1, N=4, K=K, T=TOKENS, H=8, sharpness=2.0), strict=True))
IN_PROMPT = {name: x[:, :, :PROMPT] for name, x in LAYER.items()}


def found(policy, row):
    """What a call keeps, by head, and the scores behind it where a line has them.

    "prompt": of the prompt, and the scores of its tokens. "live": after the prompt and after every later token, and the
    scores of what lives at the end. "read": what every later token reads.
    """
    key = jax.random.split(jax.random.key(row["key"]), 1) if "key" in row else None
    if row["what"] == "prompt":
        layers, scores = tensors.evicted(policy, [IN_PROMPT], key=key)
        return tensors.live_positions(layers[0])[0], scores[0][0] if "scores" in row else None
    how = {"block": row.get("block"), "key": key, "reads": row["what"] == "read"}
    seen = tensors.replay(policy, [LAYER], PROMPT, **how)
    kept, scores = [step[0] for step in getattr(seen, row["what"])], None
    if "scores" in row:
        in_order = np.argsort(seen.kv.pos[0], axis=-1)[:, -len(kept[-1][0]) :]
        scores = np.take_along_axis(np.asarray(seen.kv.memory.score[0]), in_order, axis=-1)
    return kept, scores


@pytest.mark.parametrize(
    "row",
    [pytest.param(x, marks=marks(x["number"], QUICK + SLOW, QUICK), id=f"{x['number']} {x['call']}") for x in RECORDED],
)
def test_it_keeps_what_the_plain_formulation_keeps(row):
    kept, scores = found(eval(row["call"], NAMES), row)
    assert kept == row["kept"]
    if scores is not None:
        np.testing.assert_allclose(scores, row["scores"], atol=1e-5)
    if "default" in row:
        others, plain = found(eval(row["default"], NAMES), row)
        assert others != kept or np.abs(plain - scores).max() > 0.01


def test_every_number_is_documented_and_tested():
    register = {f"D-{n:02}" for n in range(1, 51)}
    numbers = lambda text: set(re.findall(r"D-\d\d", text))
    assert numbers((ROOT / "methods" / "README.md").read_text()) == register
    assert numbers("".join(path.read_text() for path in ROOT.rglob("*.py"))) <= register
    functions = re.findall(r"def test_(d\d\d\w*)", pathlib.Path(__file__).read_text())
    tested = {f"D-{n}" for name in functions for n in re.findall(r"(?:^|_)d(\d\d)", name)}
    laws = numbers("".join((HERE / f"test_{name}.py").read_text() for name in ("laws", "compose")))
    assert {row["number"] for row in RECORDED} | tested | laws == register


def test_the_list_of_disagreements_names_what_there_is():
    """Every number once; every call is a policy, and differs from the method's default where it is the other one."""
    lines = (ROOT / "methods" / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| D-")]
    assert [row[0] for row in rows] == [f"D-{i:02}" for i in range(1, 51)]
    for number, _, ships, other in rows:
        calls = re.findall(r"`([a-z]+\.[^`]+)`", other)
        assert calls or other.startswith("-"), number
        for call in calls:
            policy = eval(call, recorded.NAMES)
            assert isinstance(policy, kvjax.Policy), call
            plain = re.search(r"methods\.(\w+)\(64", call)
            assert plain is None or policy != getattr(methods, plain[1])(64), call
        for call in re.findall(r"`(methods\.[^`]+)`", ships):
            assert isinstance(eval(call, recorded.NAMES), kvjax.Policy)


def test_what_changes_rows_softmax_or_draw_says_which_policies_have_them():
    refused = {
        lambda: papers.with_rows(methods.snapkv(8), last=3): "Pooled sums no rows; give a policy such as",
        lambda: papers.summed_by(methods.knorm(8), Faded): "KeyNorm sums no rows",
        lambda: papers.with_softmax(methods.h2o(8), k=3): "ranks by the model's softmax; give methods.ahakv",
        lambda: papers.nacl_drawn(methods.h2o(8), among="all"): "TopK draws nothing; give a policy such as",
        lambda: papers.nacl_by_layer(methods.h2o(8)): "TopK draws nothing",
    }
    for call, words in refused.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


# ------------------------------------------------------------------------------------------------ draws and sums


@pytest.mark.exhaustive
def test_d05_one_run_for_all_or_a_draw_for_all():
    """One contiguous run, the same in all heads and layers, and another at every eviction."""

    def gone(policy):
        kept = tensors.evicted(policy, [IN_PROMPT] * 2)[0]
        return [sorted(set(range(PROMPT)) - set(head)) for kv in kept for head in tensors.live_positions(kv)[0]]

    (first, *others) = gone(dataclasses.replace(methods.random(7), select=parts.RandomRun(), sinks=2))
    assert first == list(range(first[0], first[0] + PROMPT - 7))
    assert others == [first] * 3
    assert len({tuple(x) for x in gone(dataclasses.replace(methods.random(7), sinks=2))}) == 4
    shared = gone(papers.with_score(methods.random(7), shared=True))
    assert shared[0] == shared[1]
    draw = lambda length, prompt: moment(None, length, prompt=prompt).uniform(jnp.zeros((1, 1, 1), jnp.int32)).item()
    assert draw(8, 8) == draw(16, 16)
    assert draw(8, 24) != draw(16, 24), "two blocks of one prompt"


def test_d36_one_score_for_the_batch():
    """Each sequence's own without noise, added up."""
    x = dict(zip("qkv", tensors.qkv(8, B=2, N=4, K=K, T=PROMPT, H=8, sharpness=2.0), strict=True))
    plain = papers.with_softmax(methods.keyformer(7, recent=3, tau=(1.0, 1.0)), noise="none")
    both = papers.summed_by(plain, parts.OverBatch)
    of = lambda policy: tensors.evicted(policy, [x])[1][0]
    np.testing.assert_allclose(of(both), np.broadcast_to(of(plain).sum(0), (2, K, PROMPT)), rtol=1e-5)


# ------------------------------------------------------------------------------------------------ counts


def test_d11_the_scopes_of_the_released_code():
    """Live tokens less evictable ones, at 100 tokens: half of them, or what `int` makes of 0.3 and 0.1."""
    n, budget = np.array([400]), np.array([100])
    size = lambda policy: int(resolve(policy.score.size, n, budget)[0])
    assert size(methods.roco(100)) == 50
    assert size(easykv.easykv_decoding("roco", 100)) - n[0] == int(0.3 * 100) + 1
    first, then = easykv.easykv_encoding_decoding("roco", 100, stride=8).members
    assert 101 - size(then) == 108 - int(0.3 * 108)
    assert 108 - size(first) == max(108 - int(0.1 * 108) - 4, 8)


def budget_of(policy, *lengths):
    """Tokens of a head in prompts of these lengths."""
    return policy.sizes(LayerInfo(0, 1, 4, K, 8, max(lengths), 0), np.array(lengths)).hparams.budget.tolist()


def test_d14_the_block_loop_overspends():
    target = lambda n, budget, **how: budget_of(easykv.easykv_encoding("mas", budget, **how), n)[0]
    assert target(5144, 0.5, stride=24) == 2572
    assert target(5144, 0.5, stride=24, exact=False) == 2576, "as its README prints"
    for n in range(40, 70):
        size = target(n, 20, stride=6, exact=False)
        assert 20 <= size <= 26
        assert (n - size) % 6 == 0
        assert target(n, 20, stride=6) == 20


def test_d17_the_shares_of_the_released_code():
    n = np.array([131_072, 40_000, 2_049])
    policy, table = papers.nacl_llama3(), methods.nacl(0.2)
    tokens = lambda count, budget=None: resolve(count, n, budget).tolist()
    budget = resolve(policy.budget, n)
    assert tokens(policy.sinks) == [256] * 3
    assert tokens(policy.recent, budget) == [max(int(0.01 * x) - 256, 0) for x in n]
    assert tokens(policy.score.of.last) == [int(0.01 * x) for x in n]
    assert tokens(policy.select.random, budget) == [int(0.07 * x + 1e-9) for x in n]
    assert resolve(table.recent, np.array([1000]), np.array([200])).tolist() == [20]


def test_d25_every_prompt_has_its_own_pyramid():
    policy = methods.ada_pyramid(0.5, beta=4, window=2)
    infos = [LayerInfo(i, 3, 4, 2, 8, 40, 0) for i in range(3)]
    own = np.array([policy.sizes(info, np.array([40, 20])).hparams.budget for info in infos])
    outside = np.array([2])
    assert own[:, 0].tolist() == [2 + x for x in Pyramid(4)(np.array([18]), np.array([38]), 3, outside)[0]]
    assert own[:, 1].tolist() == [2 + x for x in Pyramid(4)(np.array([8]), np.array([18]), 3, outside)[0]]


def test_d41_d42_integer_pyramids():
    at = lambda divide, b, n, layers, w=8: divide(np.array([b]), np.array([n - w]), layers, np.array([w]))[0]
    assert at(Pyramid(20), 120, 4096, 32).sum() == 32 * 120 == 3840
    assert at(FloorPyramid(20), 120, 4096, 32).sum() == 4016
    assert factory.pyramidkv_factory(128).layers == FloorPyramid(20.0)
    assert methods.pyramidkv(128).layers == Pyramid(20.0)
    # Shorter than twice the budget: uniform, a flatter integer pyramid, or what the first layers cannot use moves down.
    short = 200
    assert set(at(FloorPyramid(20), 120, short, 32).tolist()) == {120}
    flat = at(FloorPyramid(20, uniform=False), 120, short, 32)
    assert (flat[0], flat[-1]) == (192, 192 - 31 * ((192 - 48) // 31))
    one = at(Pyramid(20), 120, short, 32)
    assert one.sum() == 32 * 120
    assert one.max() == 192
    assert (one >= np.minimum(at(Pyramid(20), 120, 4096, 32), 192)).all()


def test_d43_a_window_inside_the_pyramid():
    sizes = np.array([40]), np.array([992]), 3, np.array([8])
    inside = InclusivePyramid(4.0)(*sizes)[0] + 8
    assert inside.tolist() == [round(x) for x in (2 * 48 - 12, 48, 12)]
    on_top = Pyramid(4.0)(*sizes)[0] + 8
    assert on_top.tolist() == [2 * 40 - 10 + 8, 48, 18]
    assert kvpress.pyramidkv_kvpress(48, beta=4.0).layers == InclusivePyramid(4.0)


def test_d44_a_fraction_or_a_capacity():
    assert budget_of(methods.snapkv(0.5, window=2), 16, 8) == [8, 4]
    assert budget_of(methods.snapkv(8, window=2), 16, 8) == [8, 8]


def test_d45_truncated_ratios():
    tokens = lambda share, n: int(resolve(share, np.array([n]))[0])
    assert int(10 * (1 - 0.9)) == tokens(Truncated(1 - 0.9), 10) == 0
    assert tokens(1 - 0.9, 10) == 1
    assert budget_of(methods.h2o(Truncated(1 - 0.7)), 10) == [int(10 * (1 - 0.7))] == [3]
    assert budget_of(methods.h2o(Truncated(1 - 0.9)), 10) == [1], "attention needs one token"


def test_defaults():
    """What ships where papers and code name numbers."""
    default = lambda method: {
        name: p.default
        for name, p in inspect.signature(getattr(methods, method)).parameters.items()
        if p.default is not p.empty
    }
    wanted = {
        "streaming_llm": {"sinks": 4},
        "h2o": {"recent": Share(0.5)},
        "aqas": {"recent": Share(0.5)},
        "scissorhands": {"history": 400, "recent": 10, "drop": Share(0.5)},
        "roco": {"scope": Share(0.5)},
        "dilated_window": {"dilation": 1},
        "nacl": {"recent": None, "proxies": None, "random": None},
        "snapkv": {"window": 32, "kernel": 7, "pooling": "max"},
        "pyramidkv": {"beta": 20.0, "window": 8, "kernel": 7},
        "ada_snapkv": {"alpha": 0.5, "window": 32, "kernel": 7},
        "ada_pyramid": {"alpha": 0.5, "beta": 20.0, "window": 8, "kernel": 7},
        "ahakv": {"recent": 32, "kernel": 7},
        "keyformer": {"recent": Share(0.3), "tau": (1.0, 2.0)},
        "fastgen": {"frequent": 0.3, "local": 0.3, "recovery": 0.95},
        "lagkv": {"lag": 128, "sinks": 4},
        "expected_attention": {"horizon": 512, "sinks": 4, "eps": 0.0},
        "criticalkv": {"first": 0.5, "eps": 1e-4},
        "chunkkv": {"size": 20},
        "think": {"channels": 0.5, "rows": 32},
    }
    assert {method: default(method) for method in wanted} == wanted
    assert default("kvzip")["how"] == Reread(chunk=2048, overlap=8, sinks=4)
    recent = methods.roco(64).recent
    found = resolve(recent, np.array([100, 100]), np.array([64, 8])).tolist()
    assert found == [10, 2], "the last 10, a quarter of small budgets"
