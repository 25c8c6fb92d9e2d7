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
from kvjax import methods
from kvjax.cache.context import Context, Site, row_keys
from kvjax.experiments.bench import peer_tensors
from kvjax.models import ModelConfig
from kvjax.models.rope import Rope
from kvjax.policy import context, empty_layer
from kvjax.scoring.stats import AttentionStats
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


def replay(policy, cases, block):
    """The layer after prompts that are read in blocks, and after what follows them one by one."""
    (q, k, v), _ = padded(cases, 0)
    lengths = [case["tokens"] for case in cases]
    return helpers.replay(policy, q, k, v, WIDTH, lengths=lengths, block=block, rotate=ROPE)


def generate(policy, cases, block=None):
    """Live positions, "B K" lists, after prompts that are read at once or in blocks and what follows them one by one.

    Every shape is one program, which costs less than `replay` where there are many steps, or loops in them.
    """
    (q, k, v), _ = padded(cases, 0)
    B, N, M, H = q.shape
    where = Site(0, 1, N, k.shape[1], H, WIDTH, M - WIDTH)
    here, keys = policy.at(where), row_keys(None, B)
    lengths = jnp.asarray([case["tokens"] for case in cases], jnp.int32)

    @jax.jit
    def read(kv, tensors, pos, ctx):
        one = ctx.phase == "decode"
        kv = here.make_room(kv, dataclasses.replace(ctx, length=ctx.length - 1)) if one else kv
        how = {"rotate": ROPE, "observe": here.spec.observe(ctx.phase), "policy": here if one else None}
        _, kv, stats = kvjax.attend(kv, *tensors, pos, ctx=ctx, **how)
        return here.step(kv, stats, ctx)

    def tokens(kv, first, last, phase):
        pos = jnp.maximum(jnp.arange(first, last, dtype=jnp.int32)[None] - (WIDTH - lengths)[:, None], -1)
        ctx = Context(pos[:, -1] + 1, lengths, keys, site=where, phase=phase)
        return read(kv, [x[:, :, first:last] for x in (q, k, v)], pos, ctx), ctx

    kv, block = empty_layer(here, B, jnp.float32), WIDTH if block is None else block
    for first in range(WIDTH % -block, WIDTH, block):
        kv, ctx = tokens(kv, max(first, 0), first + block, "prefill")
        kv = kvjax.compact(kv, int(here.spec.capacity.max()))
    kv = here.finish(kv, ctx)
    for at in range(WIDTH, M):
        kv, _ = tokens(kv, at, at + 1, "decode")
    return helpers.live_positions(kv)


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
