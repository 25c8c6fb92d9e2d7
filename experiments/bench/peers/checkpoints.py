"""The models of the table: published ones, and random ones that are written once."""

import dataclasses
import pathlib
from typing import Literal

import jax

from kvjax import models
from kvjax.experiments.bench.speed import RANDOM
from kvjax.models.gguf import converted
from kvjax.models.packaged import PACKAGED, fetched
from kvjax.models.rope import Rope
from kvjax.models.sources import locate

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the table, and how much of it is measured.

    Attributes:
      name: what its rows begin with.
      title: what the table calls it.
      source: what `kvjax.models.load` knows, or the config of a random one.
      dtype: of the checkpoint, parameters, activations and caches on both sides.
      lengths: prompts that are read; after the first two, tokens are decoded.
      steps, batch: tokens decoded in one timed run; sequences of a batch, beside a single one.
      budget: the share of the second prompt that methods keep.
      methods, more: these methods, and others once the main rows of all models are there.
      first: the method, the prompt and the new tokens of a user's first run.
      inside: whether statistics and eviction at every step are put beside kvjax without them.
    """

    name: str
    title: str
    source: str | models.ModelConfig
    dtype: Dtype = "float32"
    lengths: tuple[int, ...] = (1024, 4096)
    steps: int = 32
    batch: int = 4
    budget: float = 0.25
    methods: tuple[str, ...] = ("snapkv", "h2o", "ada_snapkv")
    more: tuple[str, ...] = ()
    first: tuple[str, int, int] = ("full", 1024, 64)
    inside: bool = False


_LLAMA = models.ModelConfig(
    vocab_size=128256,
    embed_dim=2048,
    mlp_dim=8192,
    num_layers=16,
    num_query_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rope=Rope(kind="llama3", theta=500000.0, factor=32.0, original_max=8192),
    tie_embeddings=True,
    max_position=1 << 17,
)
_PRESSES = ("pyramidkv", "knorm", "keydiff", "expected_attention", "lagkv", "chunkkv", "criticalkv", "tova")
_PRESSES += ("streaming_llm", "random")
_SMOLLM, _GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
_TINY = dataclasses.replace(RANDOM, max_position=1 << 17)
_TWO_GIGABYTES = dataclasses.replace(_LLAMA, vocab_size=32000, mlp_dim=5632, num_layers=9, num_kv_heads=32)
# In this order.
MODELS = (
    Model("llama1b-bf16", "Llama-3.2-1B's shape, bfloat16", _LLAMA, "bfloat16", steps=16, methods=("snapkv",)),
    Model("smollm2-f32", "SmolLM2-135M, float32", _SMOLLM, lengths=(1024, 4096, 8192), more=_PRESSES),
    Model("smollm2-bf16", "SmolLM2-135M, bfloat16", _SMOLLM, "bfloat16"),
    Model("llama1b-f32", "Llama-3.2-1B's shape, float32", _LLAMA, steps=16, methods=("snapkv",)),
    Model("gemma3-bf16", "Gemma-3 270M, bfloat16", _GEMMA, "bfloat16", methods=("snapkv",), first=("full", 4096, 64)),
    Model(
        "tiny",
        "a random Llama of 4 layers, float32",
        _TINY,
        lengths=(2048, 4096, 8192, 16384),
        steps=64,
        more=(*_PRESSES, "nacl", "keyformer", "roco"),
        first=("snapkv", 4096, 128),
        inside=True,
    ),
    Model("llama2gb-f32", "a random Llama of 2 GB, float32", _TWO_GIGABYTES, lengths=(), methods=()),
)


def as_toy(model: Model) -> Model:
    """The same with a few tokens, to see that everything runs."""
    lengths = tuple(128 * (i + 1) for i, _ in enumerate(model.lengths))
    return dataclasses.replace(model, lengths=lengths, steps=2, batch=2, first=(model.first[0], 128, 2))


def checkpoint(model: Model, folder: pathlib.Path) -> pathlib.Path:
    """The directory that both sides load, in the model's dtype where it is ours to write; a random one is written once.

    Args:
      model: which.
      folder: where random ones lie, by their names.
    """
    if not isinstance(model.source, str):
        place = folder / model.name
        if not (place / "config.json").exists():
            print(f"writing {model.title} to {place}", flush=True)
            made = models.LanguageModel(dataclasses.replace(model.source, dtype=model.dtype))
            models.save(place, made, jax.jit(made.init)(jax.random.key(0)), dtype=model.dtype)
        return place
    return published(model.source, model.dtype)


def published(source: str, dtype: str) -> pathlib.Path:
    """The directory of a model that `kvjax.models.load` knows, in a dtype where it is ours to write."""
    return converted(fetched(source), dtype=dtype) if source in PACKAGED else locate(source)
