"""What decides, and how far from hindsight: variance by a plain decomposition, and the pages."""

import dataclasses
import itertools
import types

import numpy as np
import pytest

from kvjax.experiments import findings
from kvjax.experiments.core import stats
from kvjax.experiments.findings import DIVISIONS, PROTECTIONS, SCORES, Findings
from kvjax.experiments.papers import lost
from kvjax.experiments.tasks import Example, Question

WORDS = "magic| numbers| for| red|-ox| is|:| |5|0|.| One| magic| numbers| for| blue|-|fox| is|:| |40|71|.".split("|")
SIZES = len(SCORES), len(PROTECTIONS), len(DIVISIONS)


def test_what_factors_do_together_is_the_rest():
    """As least squares leave it; `tests.tools.referee` has what each explains alone."""
    values, cells = np.random.default_rng(0).normal(size=SIZES), [*itertools.product(*map(range, SIZES))]
    design = np.array([[1.0, *(cell[axis] == k for axis in range(3) for k in range(SIZES[axis]))] for cell in cells])
    left = values.ravel() - design @ np.linalg.lstsq(design, values.ravel(), rcond=None)[0]
    rest = (left**2).sum() / ((values - values.mean()) ** 2).sum()
    assert stats.variance_shares(values, findings.FACTORS)["interactions"] == pytest.approx(rest)
    equal_but_for_rounding = np.where(values > 0, 0.1 + 0.2, 0.3)
    assert not any(stats.variance_shares(equal_but_for_rounding, findings.FACTORS).values())


def test_the_best_method_beside_the_best_mask():
    """A method with twice the divergence of the mask on every prompt is said to have it."""
    options = Findings("to_hindsight", prompts=4, budget=(0.5, 0.25))
    first, rng = len(findings.published()), np.random.default_rng(1)
    mask = rng.uniform(0.1, 0.2, (2, 4))
    kl = np.concatenate([np.full((first + 2, 2, 4), 3.0), mask[None]])
    kl[1] = 2 * mask
    text, figure = findings.to_hindsight(options, kl)
    assert figure.get_suptitle() == "The best method's divergence is 2.0 times hindsight's"
    name = [*findings.published()][1][0]
    assert [line for line in text.splitlines() if line.startswith("| 25 %")] == [
        f"| 25 % | {name} | hindsight (model) | 2.00 [2.00, 2.00] |"
    ]


def test_tokens_of_a_fact_are_found():
    """The wanted needle's key and value, of two, in tokens with and without spaces."""
    asked, tokenizer = Question(references=("4071",)), types.SimpleNamespace(decode=lambda ids: WORDS[ids[0]])
    found = lost.fact_in(tokenizer, Example("niah", 0, (*range(len(WORDS)),), (asked,)))
    pieces = [
        "".join(w for w, part in zip(WORDS, found, strict=True) if part == kind) for kind in (lost.KEY, lost.VALUE)
    ]
    assert pieces == [" blue-fox", "4071"]


def test_policies_are_crossed_and_published_ones_stay_within_a_budget():
    every = findings.crossed()
    assert len({make(0.25) for make in every.values()}) == len(every) == np.prod(SIZES)
    votes = every["votes", "both", "pyramid"](0.25)
    assert (votes.sinks, votes.recent, votes.layers) == (4, 16, DIVISIONS["pyramid"]["layers"])
    for make in findings.published().values():
        assert make(0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["what_decides", "to_hindsight", "lost"])
def test_a_finding_is_written_once(tmp_path, capsys, monkeypatch, name):
    few = lambda of: lambda: dict(itertools.islice(of().items(), 4))
    monkeypatch.setattr(findings, "published", few(findings.published))
    monkeypatch.setattr(findings, "SCORES", {k: SCORES[k] for k in ("mean", "random")})
    monkeypatch.setattr(findings, "PROTECTIONS", {k: PROTECTIONS[k] for k in ("none", "first 4")})
    command = [name, "--prompts", "2", "--batch-size", "1", "--length", "96", "--follow", "4"]
    command += ["--methods", "random", "mas", "--length", "256"] if name == "lost" else []
    command += ["--budget", "0.5", "--output", str(tmp_path)]
    findings.main(command)
    stored = tmp_path / f"{name}-embedded.npz"
    with np.load(stored) as data:
        before = dict(data)
    assert (tmp_path / f"{name}-embedded.md").read_text().startswith("# ")
    assert (tmp_path / f"{name}-embedded.png").stat().st_size > 10_000
    findings.main(command)
    assert "is complete" in capsys.readouterr().out
    part = {key: x[..., :1] if x.ndim else x for key, x in before.items()}  # as of an interrupted one
    np.savez_compressed(stored, **part)
    findings.main(command)
    assert "is complete" not in capsys.readouterr().out
    with np.load(stored) as data:
        for key, x in before.items():
            np.testing.assert_array_equal(data[key], x)
    monkeypatch.setattr(findings, "PROTECTIONS", {"both": (4, 16)})
    if name == "what_decides":
        with pytest.raises(SystemExit, match=r"keeps more than a budget of 10 tokens, as so few cannot hold"):
            findings.main([*command[:-4], "--budget", "0.1", "--output", str(tmp_path / "x")])


def test_too_few_prompts_are_refused():
    with pytest.raises(ValueError, match="prompts=1 must be at least 2"):
        dataclasses.replace(Findings("what_decides"), prompts=1)
    with pytest.raises(ValueError, match=r"budget \(0.5, 1.0\) must be shares of the prompt above 0 and below 1"):
        Findings("what_decides", budget=(0.5, 1.0))
    with pytest.raises(ValueError, match="those of Lost"):
        Findings("lost")


def test_what_was_measured_with_other_options_or_of_another_text_is_not_overwritten(tmp_path):
    file, text = tmp_path / "what_decides-embedded.npz", tmp_path / "text.txt"
    text.write_text("one text")
    options, asked = Findings("what_decides", output=tmp_path, text=text), "{}"
    for content in ("one text", "another"):
        np.savez(file, kl=np.ones((96, 4, 24)), options=asked)
        text.write_text(content)
        with pytest.raises(ValueError, match=r"was measured with .*, not .*; give another --output") as error:
            findings.run(options)
        asked = str(error.value).split(", not ", 1)[1].removesuffix("; give another --output")
        with np.load(file) as data:
            assert data["kl"].shape == (96, 4, 24)
