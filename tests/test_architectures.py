"""What takes longer of every architecture: bfloat16, and the main job with several policies."""

import json
import shutil

import numpy as np
import pytest

from kvjax import models
from kvjax.experiments import run
from kvjax.models.embedded import EMBEDDED
from kvjax.models.families import FAMILIES
from tests.runs import samples
from tests.test_drawn_models import DRAWN
from tests.test_parity import CASES, SIZES, all_logits, saved, torch

KINDS = ["full_attention", "sliding_attention"]
OPTIONS = {"MinistralForCausalLM": {"head_dim": 8, "sliding_window": 7, "layer_types": KINDS}}
for name, options in CASES.values():  # the first of each
    OPTIONS.setdefault(name, options)
every_architecture = pytest.mark.parametrize("architecture", OPTIONS)


@pytest.mark.parametrize("table", [OPTIONS, DRAWN], ids=["cases", "drawn"])
def test_every_architecture_is_here(table):
    """MPT's other name is that of its own code, and no class of transformers."""
    assert set(table) == {name for family in FAMILIES for name in family.architectures} - {"MPTForCausalLM"}


@pytest.mark.exhaustive
@every_architecture
def test_bfloat16_drifts_as_in_transformers(architecture, tmp_path):
    """The largest distance of logits from those in float32, of the largest logit there; `-s` prints both."""
    theirs = saved(architecture, {**SIZES, **OPTIONS[architecture]}, tmp_path, scale=2.0)[0]
    ids = np.random.default_rng(1).integers(1, 99, (16, 40))
    with torch.no_grad():
        exact = theirs(torch.tensor(ids)).logits.numpy()
        coarse = type(theirs).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        drift = lambda logits: float(np.abs(logits - exact).max() / np.abs(exact).max())
        mine = drift(all_logits(*models.load(tmp_path, dtype="bfloat16"), ids))
        other = drift(coarse(torch.tensor(ids)).logits.float().numpy())
    print(f"| {architecture} | {mine:.1%} | {other:.1%} | {mine / other:.2f} |")
    assert mine <= 2 * other


SMALL = ["--length", "196", "--examples", "1", "--batch-size", "1", "--tasks", "key_value", "--budget", "32"]
SMALL += ["--baseline-budget", "32"]


def checkpoint(architecture, path):
    """The options of a run of a random model with the embedded model's tokenizer, and its config."""
    vocabulary = json.loads((EMBEDDED / "config.json").read_text())["vocab_size"]
    sizes = {**SIZES, "max_position_embeddings": 260, **OPTIONS[architecture], "vocab_size": vocabulary}
    _, model, _ = saved(architecture, sizes, path / "model")
    for file in EMBEDDED.glob("tokenizer*"):
        shutil.copy(file, path / "model")
    return [*SMALL, "--model", str(path / "model"), "--output", str(path / "out")], model.config


@pytest.mark.exhaustive
@every_architecture
def test_the_main_job_runs_five_policies(architecture, tmp_path):
    options, config = checkpoint(architecture, tmp_path)
    turned_once = [] if config.additive_rotation else ["--positions", "rank"]
    options += ["--positions", "original"] if config.learned_positions else turned_once
    others = ["h2o", "snapkv", "ada_snapkv", "keyformer"]
    run.main(["--config", "streaming_llm.py", "--baselines", *others, *options])
    found = {s["method"]: s for s in samples(tmp_path / "out")}
    assert set(found) == {"full", "streaming_llm", *others}
    assert all(s["live"] == 32 for name, s in found.items() if name != "full")
