"""Trains the second model that comes with the project: a small Llama that retrieves in many ways.

It was trained on a text of a megabyte, Shakespeare's plays (1,115,394 characters).

No head is written into its parameters: all of them start at random. What made it learn in this time:

* Documents begin as short echoes of words. Each token of a repetition asks for the same circuit, where a document of
  facts has one question.
* Layer 0 sees three tokens at first, then eight, then all. With it 80 % of the echoes were right after 147 steps,
  and without it 43 % after 480.
* Biases on queries and keys that start at random, so that heads differ in where they look.
* Then facts, copies and lists in running text, longer from stage to stage, with position jumps.
* Slots are hidden from heads while it learns: the token just before, so that a key does not hang on it alone, and
  tokens far back, so that an answer can be read from more than one place.
"""

import dataclasses
import functools
import hashlib
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import tyro
from jaxtyping import Array, Bool, Int, PyTree

from kvjax.contract import turned_queries
from kvjax.experiments import corpus
from kvjax.experiments.core.setup import read_text
from kvjax.experiments.training import embedded, loop
from kvjax.experiments.training.documents import Documents, Sizes
from kvjax.models import LanguageModel, save
from kvjax.models.embedded import VARIED
from kvjax.models.tokenizer import save_tokenizer
from kvjax.pallas_kernels import Logits

BOS, EOS = (list(loop.SPECIAL.values()).index(token) for token in (corpus.BOS, corpus.EOS))
KINDS = ("running", "copies", "facts", "lists", "echoes")
HELD_OUT = 0.1  # of the text, at its end, is never trained on
LOCAL = 24  # tokens back that no slot is hidden from
LONGEST = 2560  # positions are below this

CONFIG = dataclasses.replace(
    embedded.CONFIG,
    vocab_size=2048,
    embed_dim=256,
    mlp_dim=512,
    max_position=4096,
    qkv_bias=True,
    bos_id=BOS,
    eos_ids=(EOS,),
)


@dataclasses.dataclass(frozen=True)
class Stage(loop.DocumentStage):
    """A stretch of the curriculum.

    Attributes:
      kinds: how often each of `KINDS` is drawn.
      sizes: of what documents hold.
      near: probability that a head does not see the token before.
      far: largest share of the tokens far back that a head does not see.
      jumps: probability that positions jump.
      first: tokens that layer 0 sees.
    """

    kinds: tuple[float, ...]
    sizes: Sizes = Sizes()
    near: float = 0.0
    far: float = 0.0
    jumps: float = 0.0
    first: int = 4096


CURRICULUM = (
    Stage(1500, 40, 96, (0.05, 0, 0.1, 0, 0.85), Sizes((1, 2, 3), 0.6), first=3, until=0.8, rate=(2.0, 2.0)),
    Stage(500, 64, 60, (0.1, 0.2, 0.4, 0, 0.3), Sizes((1, 2, 3), 0.6, echo=24), first=8, until=0.85, rate=(1.5, 1.5)),
    Stage(600, 96, 40, (0.1, 0.25, 0.5, 0.1, 0.05), Sizes((1, 2, 3, 4), echo=24), until=0.88, rate=(1.5, 1.2)),
    Stage(500, 192, 20, (0.1, 0.2, 0.55, 0.15, 0), Sizes(filler=(0.0, 0.5)), near=0.05, jumps=0.2, until=0.93),
    Stage(450, 384, 11, (0.15, 0.15, 0.55, 0.15, 0), Sizes(filler=(0.0, 0.9)), near=0.1, far=0.1, jumps=0.4),
    Stage(400, 768, 6, (0.2, 0.1, 0.6, 0.1, 0), Sizes(filler=(0.2, 0.95)), near=0.1, far=0.25, jumps=0.6,
          rate=(1.0, 0.6)),
    Stage(300, 1536, 3, (0.2, 0.1, 0.6, 0.1, 0), Sizes(filler=(0.3, 0.97)), near=0.1, far=0.25, jumps=0.5,
          rate=(0.6, 0.02)),
)  # fmt: skip


def fitted(text: str) -> tokenizers.Tokenizer:
    """Byte pairs for a text and the project's own words. Digits stand alone, most names are one token, some several."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    words = " " + " ".join(w for w in corpus.VOCABULARY if not w.startswith("<"))
    bank = " " + " ".join(" ".join(s) for s in corpus.sentence_bank("train")[:2000])
    extra = " behind beside often list who has which number please keep repeat near question answer note they she it"
    digits = " " + " ".join(corpus.DIGITS)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=list(loop.SPECIAL.values()),
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([text, *[words] * 60, bank, *[extra] * 40, *[digits] * 1000], trainer)
    return tokenizer


def batch(documents: Documents, seed: int, step: int, stage: Stage) -> tuple[Any, ...]:
    """Tokens, classes, and what `Hiding` takes: a function of seed and step alone, whoever asks."""
    rng, shares = np.random.default_rng([seed, step]), np.array(stage.kinds) / sum(stage.kinds)

    def document(rng: np.random.Generator, stage: Stage) -> tuple[np.ndarray, np.ndarray]:
        kind = KINDS[rng.choice(len(KINDS), p=shares)]
        return documents.draw(rng, stage.length + 1, kind, stage.sizes)

    tokens, classes, pos = loop.drawn(rng, stage, document, jumps=stage.jumps, most=LONGEST - 1)
    far = (rng.uniform(0, stage.far, stage.batch) * (rng.random(stage.batch) < 0.6)).astype(np.float32)
    in_all_heads = rng.random(stage.batch) < 0.4
    hidden = np.float32(stage.near), far, in_all_heads, np.int32(stage.first)
    return tokens, classes, pos, jax.random.key(step), hidden


class Hiding:
    """Causal attention without a cache, in which slots are hidden from heads."""

    def __init__(self, pos: Int[Array, "B T"], key: Array, hidden: tuple[Array, ...]):
        """Draws nothing yet.

        Args:
          pos: positions.
          key: draws what is hidden.
          hidden: see `batch`: the probability that the token before is hidden, the share of far ones "B", whether all
            heads miss the same ones "B", and how many tokens layer 0 sees.
        """
        self._pos, self._key = pos, key
        self._near, self._far, self._in_all_heads, self._first = hidden

    def seen(self, layer: int, num_kv_heads: int) -> Bool[Array, "B K T T"]:
        """Whether a token (row) sees another (column)."""
        (B, T), K = self._pos.shape, num_kv_heads
        back = jnp.arange(T)[:, None] - jnp.arange(T)[None]
        causal = (back >= 0) & ((back < self._first) | (layer > 0))
        near_key, far_key, _ = jax.random.split(jax.random.fold_in(self._key, layer), 3)
        same = jnp.minimum(1.0, 3.0 * jax.random.uniform(self._key, (B, 1, T)))  # in all layers: a third as many
        drawn = jnp.where(self._in_all_heads[:, None, None], same, jax.random.uniform(far_key, (B, K, T)))
        far = drawn < self._far[:, None, None]
        near = jax.random.uniform(near_key, (B, K, T)) < self._near
        back, causal = back[None, None], causal[None, None]
        return causal & ~(far[:, :, None] & (back > LOCAL)) & ~(near[..., None] & (back == 1))

    def __call__(self, cache, q, k, v, *, layer, rotate, logits=Logits(), **_):
        """See `kvjax.run.layers.without_cache`."""
        (B, N, T, H), K = q.shape, k.shape[1]
        q, k = turned_queries(rotate, q, self._pos[:, None]), rotate(k, self._pos[:, None])
        bias = jnp.where(self.seen(layer, K), 0.0, -1e30)[:, :, None]
        q = q.reshape(B, K, N // K, T, H) * logits.factor(H)
        x = jnp.einsum("bkgth,bksh->bkgts", q, k) + bias
        out = jnp.einsum("bkgts,bksh->bkgth", jax.nn.softmax(x, axis=-1), v)
        return out.reshape(B, N, T, H), cache, ()


def as_llama(params: PyTree[Any]) -> tuple[LanguageModel, PyTree[Any]]:
    """The same model with biases of zero on attention's output, which a Llama with biases has.

    Without them it would be a Qwen2, and transformers would cut text as Qwen's tokenizer does, whatever the file says.
    """
    layers = {name: layer for name, layer in params.items() if name.startswith("layers_")}
    zero = jnp.zeros(CONFIG.embed_dim)
    for name, layer in layers.items():
        attention = layer["self_attn"]
        biased = {**attention, "o_proj": {**attention["o_proj"], "bias": zero}}
        layers[name] = {**layer, "self_attn": biased}
    return LanguageModel(dataclasses.replace(CONFIG, out_bias=True)), {**params, **layers}


HOW = loop.Options(pathlib.Path("results/train_varied"), VARIED)


def train(text: pathlib.Path, how: Annotated[loop.Options, tyro.conf.arg(name="")] = HOW) -> None:
    """Trains the varied model, or goes on where an interrupted run stopped.

    Args:
      text: a file of running text in UTF-8, its paragraphs with an empty line between them; a megabyte will do.
      how: checkpoints and steps.
    """
    whole = read_text(str(text))
    given = whole[: int((1 - HELD_OUT) * len(whole))]
    tokenizer, model = fitted(given), LanguageModel(CONFIG)
    documents = Documents(lambda s: tokenizer.encode(s).ids, BOS, given)

    def write(params: PyTree[Any]) -> None:
        save(how.output, *as_llama(params), dtype="float16")
        save_tokenizer(how.output, tokenizer, special=loop.SPECIAL)

    initial = functools.partial(loop.initialised, model.shapes, embedding_std=0.1, bias_std=1.0)
    of_step, read = functools.partial(batch, documents, how.seed), hashlib.sha256(given.encode()).hexdigest()
    loop.train(initial, model, Hiding, 3e-3, of_step, CURRICULUM, how, write, text=read)
