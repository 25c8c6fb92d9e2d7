"""Rows of `kvjax/methods/peers.md`, evaluated on the tensors of recorded cases."""

import collections
import dataclasses
import functools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench import peer_tensors
from kvjax import methods
from kvjax.policy import context
from kvjax.scoring.stats import AttentionStats
from models import ModelConfig
from models.rope import Rope
from tests import helpers

TABLE = pathlib.Path(kvjax.__file__).parent / "methods" / "peers.md"
CHECKS = r"tokens(, within \d+)?(, equal scores aside)?|counts"
WIDTH = 130  # every prompt is padded to it, so that all share programs
ROPE = Rope(theta=peer_tensors.THETA)


def table(first):
    """The three cells of every row of the table whose first column has this title."""
    (rows,) = re.findall(rf"^\| {first} \|.*\n\|---.*\n((?:\|.*\n)+)", TABLE.read_text(), re.M)
    return [line.strip("| ").split(" | ") for line in rows.splitlines()]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table that is checked.

    Attributes:
      name: of what keeps tokens elsewhere.
      policy: the policy here.
      block: the blocks in which it reads, None where it reads the prompt at once.
      check: what is compared.
    """

    name: str
    policy: str
    block: int | None
    check: str

    def __repr__(self):
        return self.name


def rows(first):
    """Those rows of the table whose first column has this title that are checked."""
    found = []
    for there, here, how in table(first):
        check = how.partition(";")[0]
        if re.fullmatch(CHECKS, check):
            policy, *block = re.findall(r"`([^`]*)`", here)
            assert len(block) <= 1
            block = int(block[0].removeprefix("block=")) if block else None
            found.append(Row(there.replace("`", ""), policy, block, check))
    return tuple(found)


def batches(cases):
    """Cases that one policy reads as one batch."""
    groups = collections.defaultdict(list)
    for case in cases:
        groups[tuple(case.get(name) for name in ("r", "c", "head_dim", "layers", "seed", "more"))].append(case)
    return list(groups.values())


def make_policy(expression, case):
    """What the table says, for one compression ratio or capacity."""
    names = {"kvjax": kvjax, "methods": methods, "dataclasses": dataclasses, "math": math}
    names |= {"L": case["layers"], "c": case.get("c")}
    for draw in ("drawn", "uniform", "spread"):
        names[draw] = functools.partial(getattr(peer_tensors, draw), case)
    if "r" in case:
        names |= {"r": case["r"], "b": kvjax.Ratio(1 - case["r"], "int")}
    return eval(expression, names)


def padded(cases, layer):
    """(q, k, v) of a layer, prompts padded on the left; the projection and the hidden states."""
    of_cases = [peer_tensors.layer_tensors(case, layer) for case in cases]
    left = lambda x, case: np.pad(x, ((0, 0), (WIDTH - case["tokens"], 0), (0, 0)))
    q, k, v = (jnp.asarray([left(x[n], c) for x, c in zip(of_cases, cases, strict=True)]) for n in "qkv")
    hidden = [left(peer_tensors.hidden_states(x)[None], c)[0] for x, c in zip(of_cases, cases, strict=True)]
    return (q, k, v), {"out_proj": jnp.asarray(of_cases[0]["out_proj"]), "hidden": jnp.asarray(hidden)}


def read_prompts(policy, cases, layer):
    """(kept "B K T", scores) of padded prompts in one layer."""
    (q, k, v), how = padded(cases, layer)
    lengths = np.array([case["tokens"] for case in cases])
    where = {"layer": layer, "num_layers": cases[0]["layers"]}
    how |= {"rotate": ROPE, "lengths": lengths, "key": jax.random.key(0)}
    selection = kvjax.evict_layer(policy, q, k, v, **how, **where)
    return np.asarray(selection.keep), np.asarray(selection.score)


def read_layers(policy, cases):
    """(kept "L B K T", scores) of padded prompts where layers share a budget, once all of them have been read."""
    lengths, L, H = [case["tokens"] for case in cases], cases[0]["layers"], cases[0]["head_dim"]
    D = peer_tensors.embed_dim(H)
    heads = {"num_query_heads": peer_tensors.QUERY_HEADS, "num_kv_heads": peer_tensors.KV_HEADS, "head_dim": H}
    config = ModelConfig(vocab_size=8, embed_dim=D, mlp_dim=8, num_layers=L, **heads)
    plan = kvjax.make_plan(config, policy, prompt_len=WIDTH, max_new_tokens=0, lengths=lengths)
    state = kvjax.init_state(plan, lengths)
    state = dataclasses.replace(state, length=state.prompt_length)
    pos = jnp.maximum(jnp.arange(WIDTH)[None] - (WIDTH - state.length)[:, None], -1).astype(jnp.int32)
    layers, stats, scores = [], [], []
    for i, kv in enumerate(state.layers):
        ctx, here, ((q, k, v), how) = context(state, i, "prefill"), policy.at(plan.sites[i]), padded(cases, i)
        _, kv, seen = kvjax.attend(kv, q, k, v, pos, ctx=ctx, rotate=ROPE, observe=here.spec.observe("prefill"), **how)
        layers.append(kv)
        stats.append(seen)
        scores.append(np.asarray(here.decide(kv, seen, ctx)[1].score))
    after = policy(dataclasses.replace(state, layers=tuple(layers)), AttentionStats(tuple(stats), phase="prefill"))
    live = np.zeros((L, len(cases), peer_tensors.KV_HEADS, WIDTH), bool)
    for i, kv in enumerate(after.layers):
        for b, row in enumerate(helpers.live_positions(kv)):
            for k, positions in enumerate(row):
                live[i, b, k, np.array(positions) + WIDTH - lengths[b]] = True
    return live, scores


def tokens_of(text):
    return [i for i, sign in enumerate(text) if sign == "1"]


def check_prompts(policy, cases, check):
    """Compares what every head of every layer keeps of prompts; heads of one group may be one head elsewhere, or here.

    Args:
      policy: the policy.
      cases: what one policy reads as one batch.
      check: what the table says.
    """
    L = cases[0]["layers"]
    if policy.shared:
        keep, score = read_layers(policy, cases)
    else:
        keep, score = zip(*(read_prompts(policy, cases, i) for i in range(L)), strict=True)
    for layer in range(L):
        for i, case in enumerate(cases):
            theirs, begin = case["kept"][layer], WIDTH - case["tokens"]
            heads = max(len(theirs), len(keep[layer][i]))
            for head in range(heads):
                here = head * len(keep[layer][i]) // heads
                ours = np.nonzero(keep[layer][i, here, begin:])[0].tolist()
                compare(ours, theirs[head * len(theirs) // heads], check, score[layer][i, here, begin:])


def compare(ours, theirs, check, score=None):
    """Raises AssertionError where tokens that one head keeps differ by more than a check lets them.

    Args:
      ours: their positions.
      theirs: the string of the file.
      check: what the table says.
      score: ours of every token, larger is kept; to tell which are equal.
    """
    ours, theirs = set(ours), set(tokens_of(theirs))
    within = re.search(r"within (\d+)", check)
    fewer, more = sorted((ours, theirs), key=len)
    assert len(more) - len(fewer) <= (int(within[1]) if within else 0)
    if not fewer <= more and check != "counts":
        assert "equal scores aside" in check
        assert len(set(score[sorted(ours ^ theirs)].tolist())) == 1
