"""Outputs beside the full cache's, and scored again."""

import pytest

from kvjax.experiments.core.stats import interval
from kvjax.experiments.evaluation.agreement import agreement, means, rescored


def line(method, index, *outputs, budget="0.5", references=("six seven",)):
    answers = [{"output": o, "references": list(references), "score": 0.0} for o in outputs]
    return {"method": method, "budget": budget, "task": "summarise", "index": index, "answers": answers}


FULL = line("full", 0, "one two three four", budget="1.0"), line("full", 1, "", "five", budget="1.0")
LIKELIHOOD = {"method": "full", "budget": "1.0", "task": "text", "index": 0, "nll": 2.0, "answers": [{"nll": 2.0}]}


def test_outputs_beside_the_full_caches():
    mine = line("h2o", 0, "one two four"), line("h2o", 1, "", ""), line("h2o", 7, "no row of the full cache")
    first, second = agreement([*FULL, *mine, LIKELIHOOD], ["contains"])
    assert (first["method"], first["budget"], first["task"], first["index"]) == ("h2o", "0.5", "summarise", 0)
    assert first["same"] == first["contains"] == 0.0
    assert first["prefix"] == 2 / 4
    assert first["edit_similarity"] == pytest.approx(2 * 3 / (4 + 3))
    assert {second[k] for k in ("same", "prefix", "edit_similarity", "contains")} == {0.5}  # of two blanks, and of one
    (row,) = means([first, second])
    assert row["examples"] == 2
    assert row["same"][0] == 0.25
    assert row["same"][1] <= 0.25 <= row["same"][2]


def test_rows_of_one_context_count_as_one():
    rows = [{**line(m, i, "one"), "same_context": "x"} for m in ("full", "h2o") for i in range(20)]
    (row,) = means(agreement(rows))
    assert row["examples"] == 20
    assert row["same"] == pytest.approx(interval([1.0]))


def test_equal_outputs_agree_by_every_measure():
    copies = [{**one, "method": "h2o"} for one in FULL[:1]]
    (found,) = agreement([*FULL, *copies], ["exact_match", "f1"])
    assert {v for v in found.values() if isinstance(v, float)} == {1.0}


def test_lines_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match=r"no line of full to compare with; the methods are h2o"):
        agreement([line("h2o", 0, "one")])
    with pytest.raises(ValueError, match=r"two outputs of summarise 0 that differ"):
        agreement([*FULL, line("full", 0, "other", budget="1.0")])
    assert agreement([LIKELIHOOD]) == []


def test_outputs_are_scored_again():
    outputs = line("h2o", 0, "Six seven!", "six"), LIKELIHOOD
    (found,) = rescored(outputs, ["exact_match", "f1"])
    assert found["exact_match"] == 0.5
    assert found["f1"] == pytest.approx((1 + 2 / 3) / 2)
