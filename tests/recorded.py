"""Lines of `golden/peers.csv`, evaluated on the tensors of recorded cases."""

import collections
import csv
import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import budgets, methods
from kvjax.compose import across
from kvjax.contract import Layout
from kvjax.methods.released import counts, easykv, factory, kvpress, papers, parts
from kvjax.models.rope import Rope
from kvjax.scores import attention, softmax
from kvjax.scores.softmax import Noisy
from tests import tensors
from tests.tools.record import peer_tensors

PAGE = pathlib.Path(kvjax.__file__).parent / "methods" / "peers.md"
TABLE = pathlib.Path(__file__).parent / "golden" / "peers.csv"
CHECKS = r"tokens(, within \d+)?(, equal scores aside)?|counts"
WIDTH = 130  # every prompt is padded to it, so that all share programs
ROPE = Rope(theta=peer_tensors.THETA)
NAMES = {
    **{"kvjax": kvjax, "methods": methods, "papers": papers, "factory": factory, "kvpress": kvpress, "easykv": easykv},
    **{
        "across": across,
        "attention": attention,
        "parts": parts,
        "softmax": softmax,
        "budgets": budgets,
        "counts": counts,
        "Layout": Layout,
        "Noisy": Noisy,
        "dataclasses": dataclasses,
    },
}


def table(source):
    """The lines of one source: "kvpress", "authors", or "theirs" for code that was not run."""
    with TABLE.open(newline="") as lines:
        return [line for line in csv.DictReader(lines) if line["source"] == source]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line that is checked.

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


def rows(source):
    """The lines of a source that are checked."""
    found = []
    for line in table(source):
        if line["checked"]:
            assert re.fullmatch(CHECKS, line["checked"])
            block = int(line["block"]) if line["block"] else None
            found.append(Row(line["theirs"], line["here"], block, line["checked"]))
    return tuple(found)


def batches(cases):
    """Cases that one policy reads as one batch."""
    groups = collections.defaultdict(list)
    for case in cases:
        groups[tuple(case.get(name) for name in ("r", "c", "head_dim", "layers", "seed", "more"))].append(case)
    return list(groups.values())


def make_policy(expression, case):
    """What the table says, for one compression ratio or capacity."""
    names = NAMES | {"L": case["layers"], "c": case.get("c")}
    for draw in ("drawn", "uniform", "spread", "centres"):
        names[draw] = functools.partial(getattr(peer_tensors, draw), case)
    names["linear"] = lambda weights: lambda x, layer: x @ jnp.asarray(weights)[layer].swapaxes(-1, -2)
    if "r" in case:
        names |= {"r": case["r"], "b": kvpress.kept(case["r"])}
    return eval(expression, names)


def padded(cases):
    """The layers of cases as parameters of `Tensors`, prompts padded on the left."""
    left = lambda x, case: np.pad(x, ((0, 0), (WIDTH - case["tokens"], 0), (0, 0)))
    layers = []
    for layer in range(cases[0]["layers"]):
        each = [peer_tensors.layer_tensors(case, layer) for case in cases]
        x = {n: jnp.asarray([left(y[n], c) for y, c in zip(each, cases, strict=True)]) for n in "qkv"}
        hidden = [left(peer_tensors.hidden_states(y)[None], c)[0] for y, c in zip(each, cases, strict=True)]
        layers.append(x | {"out_proj": jnp.asarray(each[0]["out_proj"]), "hidden": jnp.asarray(hidden)})
    return layers


def tokens_of(text):
    return [i for i, sign in enumerate(text) if sign == "1"]


def replay(policy, cases, block):
    """What remains of prompts that are read in blocks or at once, and of what follows them one by one."""
    lengths = [case["tokens"] for case in cases]
    return tensors.replay(policy, padded(cases), WIDTH, lengths=lengths, block=block, rotate=ROPE)


def check_prompts(policy, cases, check):
    """Compares what every head of every layer keeps of prompts; heads of one group may be one head elsewhere, or here.

    Args:
      policy: the policy.
      cases: what one policy reads as one batch.
      check: what the table says.
    """
    lengths = [case["tokens"] + case.get("more", 0) for case in cases]  # the last of which ask
    layers, scores = tensors.evicted(policy, padded(cases), lengths=lengths, key=jax.random.key(0), rotate=ROPE)
    for layer, (kv, score) in enumerate(zip(layers, scores, strict=True)):
        live = tensors.live_positions(kv)
        for i, case in enumerate(cases):
            theirs, begin = case["kept"][layer], WIDTH - case["tokens"]
            heads = max(len(theirs), len(live[i]))
            for head in range(heads):
                here = head * len(live[i]) // heads
                own = None if score is None else score[i, here, begin:]
                compare(
                    [x for x in live[i][here] if x < case["tokens"]], theirs[head * len(theirs) // heads], check, own
                )


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
