"""What is written in `kvjax/methods/peers.md` keeps what kvpress kept when `golden/peers.json` was recorded."""

import collections
import dataclasses
import functools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.bench import peer_tensors
from kvjax import methods
from models.rope import Rope
from tests import helpers

TABLE = pathlib.Path(kvjax.__file__).parent / "methods" / "peers.md"
RECORDED = json.loads((pathlib.Path(__file__).parent / "golden" / "peers.json").read_text())
CHECKS = ("tokens", "tokens, equal scores aside", "counts")
WIDTH = 130  # every prompt is padded to it, so that all share programs
ROPE = Rope(theta=peer_tensors.THETA)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table that is checked: a press, the policy, the blocks in which it reads, what is compared."""

    press: str
    policy: str
    block: int | None
    check: str

    def __repr__(self):
        return self.press


def table(first):
    """The three cells of every row of the table whose first column has this title."""
    (rows,) = re.findall(rf"^\| {first} \|.*\n\|---.*\n((?:\|.*\n)+)", TABLE.read_text(), re.M)
    return [line.strip("| ").split(" | ") for line in rows.splitlines()]


def checked_rows():
    for press, here, how in table("kvpress"):
        if how.partition(";")[0] in CHECKS:
            policy, *block = re.findall(r"`([^`]*)`", here)
            assert len(block) <= 1
            block = int(block[0].removeprefix("block=")) if block else None
            yield Row(press.strip("`"), policy, block, how.partition(";")[0])


ROWS = tuple(checked_rows())


def batches(cases):
    """Cases that one policy reads as one batch."""
    groups = collections.defaultdict(list)
    for case in cases:
        groups[tuple(case.get(name) for name in ("r", "head_dim", "layers", "seed", "more"))].append(case)
    return list(groups.values())


def make_policy(expression, case):
    """What the table says, for one compression ratio."""
    names = {"kvjax": kvjax, "methods": methods, "dataclasses": dataclasses, "math": math}
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


def replay(policy, cases, block):
    """The layer after prompts that are read in blocks, and after what follows them one by one."""
    (q, k, v), _ = padded(cases, 0)
    lengths = [case["tokens"] for case in cases]
    return helpers.replay(policy, q, k, v, WIDTH, lengths=lengths, block=block, rotate=ROPE)


def tokens_of(text):
    return [i for i, sign in enumerate(text) if sign == "1"]


def compare(ours, case, layer, head, check, score=None):
    """`ours`: positions of one head."""
    theirs = tokens_of(case["kept"][layer][head])
    assert len(ours) == len(theirs)
    if check == "tokens":
        assert ours == theirs
    elif check == "tokens, equal scores aside":
        assert len(set(score[sorted(set(ours) ^ set(theirs))].tolist())) <= 1


@pytest.mark.parametrize("row", ROWS, ids=repr)
def test_the_same_tokens(row):
    for cases in batches(RECORDED["presses"][row.press]):
        policy = make_policy(row.policy, cases[0])
        alone = not {"more", "keys", "values", "channels"} & set(cases[0]) and row.block is None
        if alone:
            for layer in range(cases[0]["layers"]):
                keep, score = read_prompts(policy, cases, layer)
                for i, case in enumerate(cases):
                    begin = WIDTH - case["tokens"]
                    for head, mask in enumerate(keep[i, :, begin:]):
                        compare(np.nonzero(mask)[0].tolist(), case, layer, head, row.check, score[i, head, begin:])
            continue
        seen = replay(policy, cases, row.block)
        for i, case in enumerate(cases):
            for head, ours in enumerate(seen.live[-1][i]):
                compare(ours, case, 0, head, row.check)
        stored_as_recorded(seen.kv, cases)


def stored_as_recorded(kv, cases):
    """Keys that were turned, and channels that were zeroed."""
    if "keys" in cases[0]:
        kv = kv.turned(ROPE)
        for i, case in enumerate(cases):
            for head, sums in enumerate(case["keys"][0]):
                order = [slot for slot in np.argsort(kv.pos[i, head]) if kv.pos[i, head, slot] >= 0]
                np.testing.assert_allclose(kv.k[i, head, np.array(order)].sum(-1), sums, atol=2e-3)
    if "channels" in cases[0]:
        stay = np.asarray((kv.k != 0).any(2))
        assert [[tokens_of(head) for head in case["channels"][0]] for case in cases] == [
            [np.nonzero(head)[0].tolist() for head in row] for row in stay
        ]


def test_every_press_has_a_row():
    written = {name for press, _, _ in table("kvpress") for name in re.findall(r"\b\w+Press\b", press)}
    assert written == set(RECORDED["about"]["classes"])


def test_what_is_recorded_is_in_the_table():
    rows = [press.strip("`") for press, _, _ in table("kvpress")]
    assert len(rows) == len(set(rows))
    lacking = [press for press, here, _ in table("kvpress") if here == "-"]
    for press in RECORDED["presses"]:
        assert press in rows or any(f"{name.strip('`')}(" in press for name in lacking), press
    assert {row.press for row in ROWS} <= set(RECORDED["presses"])


def test_the_rows_of_others_are_policies():
    given = {"c": 64, "L": 4, "floor": 0.2, "prefix": 8, "table": np.arange(1.0, 17.0).reshape(4, 4)}
    names = given | {"kvjax": kvjax, "methods": methods, "dataclasses": dataclasses, "math": math}
    for _, here, _ in table("theirs"):
        if here != "-":
            policy = eval(re.match(r"`([^`]*)`", here)[1], names)
            rules = policy.at(helpers.site(T=256, layer=2, num_layers=4)).spec
            assert rules.target[-1] > 0
