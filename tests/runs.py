"""Runs of the main job to test with: real small ones, and ones whose results are made up."""

import atexit
import dataclasses
import functools
import pathlib
import shutil
import tempfile

import numpy as np

from kvjax import models
from kvjax.experiments.core import job, pictures
from kvjax.experiments.core.records import read_lines
from kvjax.models.embedded import EMBEDDED

ROOT = pathlib.Path(__file__).parents[1]


@functools.cache
def one_layer() -> str:
    """The directory of a model that is the first layer of the embedded one, and compiles in a third of its time."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="one-layer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    model, params = models.load(EMBEDDED)
    config = dataclasses.replace(model.config, num_layers=1)
    first = {n: p for n, p in params.items() if n == "layers_0" or not n.startswith("layers_")}
    models.save(directory, models.LanguageModel(config), first)
    for file in EMBEDDED.glob("tokenizer*"):
        shutil.copy(file, directory)
    return str(directory)


def small(**changes):
    """The options of a small run, with others in place of some."""
    options = {"length": ["256"], "examples": ["4"], "batch_size": ["2"], "budget": ["0.5", "0.25"]}
    options |= {"model": [one_layer()]} | changes
    return [word for name, values in options.items() for word in ("--" + name.replace("_", "-"), *values)]


def samples(directory):
    return [*read_lines(directory / "samples.jsonl")[0].values()]


def without_times(lines, more=()):
    measured = ("prefill_seconds", "read_seconds", "decode_tokens_per_second", *more)
    return [{k: v for k, v in s.items() if k not in measured} for s in lines]


class Made:
    """An engine that makes its results up from examples and policies, at once."""

    def __init__(self, model, params, policy, shape, **options):
        self.size, self.shape, self.stored, self.at_once = len(repr(policy)), shape, None, options["batch_size"]

    def compile(self, full=None):
        pass

    def forget(self):
        pass

    def run(self, prompts, shown=(), full=None):
        positions = [[np.full((2, 3), self.size, np.int32)] * 2 for p in prompts if p.example in shown]
        return [[self.line(prompt, i) for i, _ in prompt.asked] for prompt in prompts], positions

    def line(self, prompt, i):
        found = {"question": i, "most_live": 9, "score": (self.size + prompt.example.index) % 2, "metric": "contains"}
        found |= {"output": "7 3", "references": ["7 3"], "tokens": 2, "prompt_tokens": len(prompt.tokens), "live": 7.0}
        found |= {"slots": self.size, "kv_bytes": 8 * self.size, "prefill_peak_bytes": None, "decode_peak_bytes": None}
        return {**found, "prefill_seconds": 0.5, "decode_tokens_per_second": 20.0}


SHORT = ["--config", "window.py", "--length", "256", "--examples", "4", "--batch-size", "2", "--budget", "0.5"]

SHORT += ["--tasks", "key_value", "--baselines"]


def make_up(patch, embedded):
    """Runs cost nothing: their results are made up, and no picture is drawn."""
    patch.setattr(job, "Engine", Made)
    patch.setattr(models, "load", lambda *_, **__: embedded[:2])
    patch.setattr(models, "load_tokenizer", lambda *_: embedded[2])
    patch.setattr(pictures, "drawn", lambda *_: {"curves": [], "maps": [], "kept": []})
