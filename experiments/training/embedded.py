"""Trains the embedded model: a small Llama that retrieves facts from long filler, and fails once they are evicted.

What made it learn, in the order of importance:

* A structured start. Two heads of layer 0 begin as previous-token heads and two of layer 1 as induction heads
  (`previous_token_start`, `induction_start`). Retrieval then only has to be refined; from a random start this size
  stays near 40 % for as long as this run lasts. The model is made for retrieval, and its heads are cleaner than a real
  model's: it shows that the machinery works and is no independent evidence for any paper.
* A curriculum on length that advances as soon as first digits of answers are right.
* Muon on the matrices, Adam on embeddings and norms; loss on answers, and a third as much on the language.
* Position jumps, so that short documents show long distances.
"""

import dataclasses
import functools
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, PyTree

from kvjax.experiments import corpus
from kvjax.experiments.training import loop
from kvjax.experiments.training.loop import ANSWER, FIRST, LANGUAGE
from kvjax.models import LanguageModel, ModelConfig, Rope, save
from kvjax.models.embedded import EMBEDDED
from kvjax.models.tokenizer import write_tokenizer
from kvjax.run.layers import without_cache

CONFIG = ModelConfig(
    vocab_size=len(corpus.VOCABULARY),
    embed_dim=128,
    mlp_dim=256,
    num_layers=4,
    num_query_heads=8,
    num_kv_heads=4,
    head_dim=32,
    rope=Rope(theta=10000.0),
    tie_embeddings=True,
    max_position=2048,
    bos_id=corpus.WORD_ID[corpus.BOS],
    eos_ids=(corpus.WORD_ID[corpus.EOS],),
)


@dataclasses.dataclass(frozen=True)
class Stage(loop.DocumentStage):
    """A stretch of the curriculum.

    Attributes:
      phrasings: indices into (PAIR, *PHRASINGS).
      digits: lengths of values.
      filler: range of the share of filler among statements.
      multi: probability that a question asks for several names.
    """

    phrasings: tuple[int, ...] = (0, 1, 2, 3)
    digits: tuple[int, ...] = (2, 3, 4)
    filler: tuple[float, float] = (0.0, 0.0)
    multi: float = 0.3


CURRICULUM = (
    Stage(300, 48, 48, phrasings=(0,), digits=(1,), multi=0.0, until=0.97),
    Stage(600, 96, 24, digits=(1, 2, 4), multi=0.0, until=0.96),
    Stage(400, 128, 20, filler=(0.0, 0.6), until=0.975),
    Stage(350, 256, 12, filler=(0.0, 0.9), until=0.98),
    Stage(300, 512, 8, filler=(0.2, 0.95), rate=(1.0, 0.6)),
    Stage(500, 1024, 4, filler=(0.3, 0.97), rate=(0.6, 0.02)),
)


# --- documents ---


def document(rng: np.random.Generator, stage: Stage) -> tuple[np.ndarray, np.ndarray]:
    """Facts, filler and questions in random order; every question asks for facts that were stated.

    Half of the documents keep all questions for the end. Returns token ids and the class of every token.
    """
    phrasings = [(corpus.PAIR, *corpus.PHRASINGS)[i] for i in stage.phrasings]
    share = rng.uniform(*stage.filler)
    at_end, mixed = rng.random() < 0.5, rng.random() < 0.5
    stated_as, asked_as = (phrasings[rng.integers(len(phrasings))] for _ in range(2))
    num_digits = int(rng.choice(stage.digits))
    names = [corpus.NAMES[i] for i in rng.permutation(len(corpus.NAMES))]
    questions_from = stage.length * rng.uniform(0.5, 0.95)
    tokens, classes = [corpus.WORD_ID[corpus.BOS]], [LANGUAGE]
    known: list[tuple[str, list[str]]] = []
    unasked: list[tuple[str, list[str]]] = []
    while len(tokens) < stage.length + 1:
        if mixed:
            stated_as, asked_as = (phrasings[rng.integers(len(phrasings))] for _ in range(2))
        if known and (len(tokens) >= questions_from if at_end else rng.random() < 0.5):
            several = asked_as is not corpus.PAIR and rng.random() < stage.multi
            count = min(len(known), int(rng.integers(2, 5))) if several else 1
            if len(unasked) < count:
                unasked = [known[i] for i in rng.permutation(len(known))]
            asked, unasked = unasked[:count], unasked[count:]
            text, kind = _question(asked_as, asked)
        elif rng.random() < share or not names:
            text = list(corpus.filler(rng, "train"))
            kind = [LANGUAGE] * len(text)
        else:
            name, value = names.pop(), corpus.draw_value(rng, num_digits)
            known.append((name, value))
            text = corpus.fact(stated_as, name, value)
            unpredictable = {name, *value}
            kind = [0 if w in unpredictable else LANGUAGE for w in text]
        tokens += [corpus.WORD_ID[w] for w in text]
        classes += kind
    return np.array(tokens[: stage.length + 1]), np.array(classes[: stage.length + 1])


def _question(phrasing: corpus.Phrasing, asked: list[tuple[str, list[str]]]) -> tuple[list[str], list[int]]:
    names, values = [n for n, _ in asked], [v for _, v in asked]
    ask, reply = corpus.question(phrasing, names), corpus.answer(phrasing, names, values)
    asks = [0 if w in names else LANGUAGE for w in ask]
    if phrasing is not corpus.PAIR:
        asks[len(asks) - 1 - len(phrasing.answer[1].split())] = ANSWER  # the answer repeats the first name
    replies = [ANSWER if w in corpus.DIGITS or w in names else LANGUAGE for w in reply]
    for i, w in enumerate(reply):
        if w in corpus.DIGITS and (i == 0 or reply[i - 1] not in corpus.DIGITS):
            replies[i] = FIRST
    return ask + reply, asks + replies


def batch(seed: int, step: int, stage: Stage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, classes, positions) of one step: a function of seed and step alone, whoever asks.

    In long documents positions often jump, up to the model's longest.
    """
    jumps = 0.7 if stage.length >= 256 else 0.0
    return loop.drawn(np.random.default_rng([seed, step]), stage, document, jumps=jumps, most=CONFIG.max_position)


# --- parameters ---

_CONSTANT = 0.3  # of embedding channel 0, which every token shares
_EMBEDDING_STD = 0.1


def initial_params(key: Array) -> PyTree[Any]:
    """Random parameters with the structured start."""
    params = loop.initialised(LanguageModel(CONFIG).shapes, key, embedding_std=_EMBEDDING_STD)
    params = jax.tree.map(np.array, params)
    previous_token_start(params)
    induction_start(params)
    return jax.tree.map(jnp.asarray, params)


def previous_token_start(
    params: PyTree[Any], num_heads: int = 4, strength: float = 16.0, pairs: int = 5, c: ModelConfig = CONFIG
) -> None:
    """Query heads of layer 0 that look one token back, written into `params` of a model.

    Embedding channel 0 is a constant. Queries and keys read it into their fastest rotary pairs, queries turned back by
    one position, so that their product is largest at distance 1.
    """
    freq = c.rope.frequencies(c.head_dim)[:pairs]
    normed = _CONSTANT / (_EMBEDDING_STD**2 + _CONSTANT**2 / c.embed_dim) ** 0.5  # the constant after RMSNorm
    size = strength**0.5 / normed
    params["embed_tokens"][:, 0] = _CONSTANT
    qkv = params["layers_0"]["self_attn"]["qkv_proj"]["weight"]  # "K G+2 H D"
    qkv[:, :-1, :, 0] = 0.0
    half, group = c.head_dim // 2, c.num_query_heads // c.num_kv_heads
    for head in range(num_heads):
        q, k = qkv[head // group, head % group], qkv[head // group, -2]
        q[:pairs, 0] = size * np.cos(-freq)
        q[half : half + pairs, 0] = size * np.sin(-freq)
        k[:pairs, 0] = size


def induction_start(
    params: PyTree[Any], num_kv_heads: int = 2, match: float = 1.7, copy: float = 0.5, c: ModelConfig = CONFIG
) -> None:
    """KV heads of layer 1 that find earlier occurrences of the current token and copy what followed.

    Keys read what layer 0's previous-token heads wrote, queries read the current token through the same projection, and
    outputs are values transposed.
    """
    h, group = c.head_dim, c.num_query_heads // c.num_kv_heads
    first, second = (params[f"layers_{i}"]["self_attn"] for i in range(2))
    for j in range(num_kv_heads):
        before, here = first["qkv_proj"]["weight"][j], second["qkv_proj"]["weight"][j]
        written = first["o_proj"]["weight"][:, j * group * h :][:, :h].T
        here[-2] = match * written / np.linalg.norm(written, axis=1, keepdims=True)
        here[:group] = match * before[-1]
        for g in range(j * group, (j + 1) * group):
            second["o_proj"]["weight"][:, g * h : (g + 1) * h] = copy * here[-1].T


HOW = loop.Options(pathlib.Path("results/train_embedded"), EMBEDDED)


def train(how: Annotated[loop.Options, tyro.conf.arg(name="")] = HOW) -> None:
    """Trains the embedded model, or goes on where an interrupted run stopped."""
    model = LanguageModel(CONFIG)

    def write(params: PyTree[Any]) -> None:
        save(how.output, model, params, dtype="float16")
        write_tokenizer(how.output, corpus.VOCABULARY, special=loop.SPECIAL)

    of_step = functools.partial(batch, how.seed)
    loop.train(initial_params, model, without_cache, 4e-3, of_step, CURRICULUM, how, write)
