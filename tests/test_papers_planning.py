"""What a paper's run takes on one card: its hours and memory against formulas written anew."""

import dataclasses
import re

import jax
import pytest

from kvjax import methods, models
from kvjax.experiments import reproduce
from kvjax.experiments.papers import planning
from kvjax.experiments.papers.methods import Method
from kvjax.experiments.papers.planning import Work
from kvjax.experiments.papers.runs import Options
from kvjax.experiments.papers.tables import ENTRIES, MODELS, Model

SMALL = Model("small", layers=2, width=256, kv_heads=1, billions=0.003, positions=512)
FULL = Method("full", lambda _: methods.full())


@pytest.mark.parametrize(
    ("name", "mlp", "vocab"), [("llama-2-7b", 11008, 32000), ("mistral-7b-instruct-v0.2", 14336, 32000)]
)
def test_a_model_of_the_catalogues_shape_has_its_parameters(name, mlp, vocab):
    model = models.LanguageModel(dataclasses.replace(MODELS[name].config, mlp_dim=mlp, vocab_size=vocab))
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    assert sum(x.size for x in shapes) / 1e9 == pytest.approx(MODELS[name].billions, abs=0.005)


def test_hours_are_operations_over_a_rate_or_bytes_over_a_bandwidth():
    """Slots are whole tiles: 96 + 16 tokens are 112; keys and values of 128 channels of 2 bytes."""
    found = planning.seconds(FULL, 1.0, Work("xsum", 10, 96, 16, 4), SMALL, 3)
    moved = 6e6 + 4 * 3 * 2 * 112 * 2 * 128 * 2
    operations = 10 * (6e6 * 96 + 2 * 2 * 2 * 128 * 96**2)  # of 2 layers with 2 heads, two products of half the pairs
    assert found == pytest.approx(max(operations / 4e14, 3 * moved / 2e12) + 3 * 16 * moved / 2e12)
    blocks = planning.seconds(dataclasses.replace(FULL, block=10), 1.0, Work("xsum", 10, 96, 16, 4), SMALL, 3)
    assert blocks == pytest.approx(3 * (10 + 16) * moved / 2e12)
    assert planning.seconds(FULL, 1.0, Work("openwebtext", 4, 96, 0, 4), SMALL, 1) == pytest.approx(
        96 * (6e6 + 4 * 2 * 96 * 2 * 128 * 2) / 2e12
    )


def test_a_plan_counts_every_model_set_and_policy_and_options_make_it_smaller(capsys):
    reproduce.main(["roco/table2", "--plan"])
    said = capsys.readouterr().out
    assert "LLaMA2-7B-Chat, 6.74 billion parameters, 8 methods" in said
    assert "WizardLM-7B, 6.74 billion" in said
    assert "xsum: 1,000 prompts of 603 tokens, 4 at once, 128 to generate" in said
    assert "assumed: 400 TFLOP/s, 2.0 TB/s" in said
    total = lambda text: float(re.findall(r"in all (\S+) hours", text)[0])
    options = Options("roco/table2", stands_for="llama-2-7b-chat", examples=10, seed=(0, 1))
    assert total(planning.planned(ENTRIES["roco/table2"], options)) == pytest.approx(total(said) * 0.02, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "works"), [("keyformer/table1", 4), ("nacl/table1", 16), ("ada-kv/figure4", 1), ("roco/figure6", 1)]
)
def test_speeds_tasks_of_lm_eval_and_what_no_text_states_have_plans(name, works):
    said = planning.planned(ENTRIES[name], Options(name, budget=(0.5,)))
    assert len(re.findall(r" prompts of [1-9][\d,]* tokens", said)) == works


def test_what_is_planned_itself_runs_no_model():
    said = planning.planned(ENTRIES["nacl/figure4"], Options("nacl/figure4"))
    assert "no model runs: memory is computed" in said
    assert "hours" not in said


def test_what_is_drawn_has_a_plan_for_each_figure():
    for name, entry in ENTRIES.items():
        if entry.drawn:
            times = re.findall(r"all rows of attention, (\S+) seconds", planning.planned(entry, Options(name)))
            assert len(times) == len(entry.figures)


def test_a_figures_plan_counts_prompts_of_all_seeds():
    """Llama-2-7B reads 1,000 prompts of 1,024 tokens, and multiplies every row of attention with all keys again."""
    how = {"stands_for": "llama-2-7b", "length": 1024, "examples": 500, "seed": (0, 1)}
    said = planning.planned(ENTRIES["nacl/figure7"], Options("nacl/figure7", **how))
    spent, size = (float(x) for x in re.findall(r"attention, (\S+) seconds and (\S+) of", said)[0])
    reading, rows = 2 * 6.74e9 * 1024 + 2 * 32 * 4096 * 1024**2, 4 * 32 * 4096 * 1024**2
    assert spent == pytest.approx(1000 * (reading + rows) / 4e14, rel=0.05)
    attended, block = 2 * 32 * 3 * 4096, 2 * 4 * 32 * 32  # queries, keys, values; two blocks of 32 rows, in float32
    assert size == pytest.approx(2 * 6.74 + 1000 * 1024 * (attended + block) / 1e9, rel=5e-3)


def test_a_plan_says_what_the_smallest_and_the_largest_cache_take():
    """128k tokens of LLaMA2-7B have 69 GB of keys and values, which one card does not hold beside the weights."""
    said = planning.planned(ENTRIES["nacl/appendix-a7"], Options("nacl/appendix-a7"))
    most, least = map(float, re.findall(r"(\S+) of caches .* full at 1.0, (\S+) under nacl at 0.2", said)[0])
    assert least + 2 * 6.74 < 80 < (131072 + 512) * 2 * 32 * 4096 * 2 / 1e9 + 2 * 6.74 < most + 2 * 6.74
    assert "which does not fit:" in said  # one prompt at a time: no smaller batch helps
