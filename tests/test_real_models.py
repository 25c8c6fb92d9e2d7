"""Two published models, loaded by name from the package index: beside transformers, and what methods keep in one."""

import re

import jax
import numpy as np
import pytest

from kvjax import methods, models
from kvjax.models import packaged
from tests import kept
from tests.marks import exhaustive_but
from tests.test_parity import all_logits, assert_close, check_hidden_are_evicted, torch, transformers

TEXT = (kept.ROOT / "LICENSE").read_text()
README = (kept.ROOT / "README.md").read_text()
RECORDED = kept.expected("smollm2")
NAMES = dict.fromkeys(key.partition(" ")[0] for key in RECORDED)
QUICK = "snapkv"


@pytest.fixture(scope="module", params=packaged.PACKAGED)
def both(request):
    """(transformers' reading of the same file, model, params, ids of a text)."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    file, (model, params) = kept.fetched_or_skip(request.param), models.load(request.param)
    tokenizer = models.load_tokenizer(request.param)
    read = transformers.AutoModelForCausalLM.from_pretrained
    theirs = read(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    return theirs, model, params, np.array(tokenizer(TEXT).input_ids[:700])


@pytest.mark.slow
def test_logits_of_a_text(both):
    """Longer than the windows of the one that has such."""
    theirs, model, params, ids = both
    with torch.no_grad():
        assert_close(all_logits(model, params, ids[None]), theirs(torch.tensor(ids[None])).logits, 1e-4)


@pytest.mark.slow
def test_evicted_tokens_are_hidden_ones(both):
    theirs, model, params, ids = both
    check_hidden_are_evicted(theirs, model, params, methods.h2o(24), ids[None, :54], 1e-4)


@pytest.mark.slow
def test_the_first_page_answers_what_it_says(capsys):
    kept.fetched_or_skip(kept.SMOLLM2)
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "smollm2" in b)
    exec(compile(block, "README.md", "exec"), {})
    answers = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert answers == re.findall(r'"([^"\n]+)"', README.partition("it answers ")[2].partition("\n")[0])


@pytest.fixture(scope="module")
def smollm2():
    kept.fetched_or_skip(kept.SMOLLM2)
    return kept.smollm2()


@pytest.mark.slow
@pytest.mark.parametrize("case", exhaustive_but(NAMES, QUICK))
def test_what_is_kept_is_what_was_recorded(smollm2, case):
    """By layer, after the prompt and after steps, under both budgets."""
    jax.clear_caches()  # programs of 30 layers map more memory than a process may
    *read, counts, policies = smollm2
    for budget in counts:
        assert kept.of_model(*read, policies[case](budget)) == RECORDED[f"{case} {budget}"]
