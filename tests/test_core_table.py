"""Lines as tables: names, examples, numbers, and outputs beside the full cache's."""

import random

import pandas as pd
import pytest

from kvjax.experiments.core import stats, table


def answer(method, index, output, question=0, budget="0.5", **changes):
    made = {"setting": "s", "run": "r", "line": 1, "policy": method, "variant": "", "averaged": True}
    made |= {"task": "summarise", "method": method, "budget": budget, "index": index, "question": question}
    made |= {"context": index, "score": 0.0, "metric": "contains", "output": output, "references": ["six seven"]}
    return made | changes


FULL = [answer("full", 0, "one two three four", budget="1.0"), answer("full", 1, "", budget="1.0")]
FULL += [answer("full", 1, "five", question=1, budget="1.0")]
LIKELIHOOD = answer("full", 0, None, budget="1.0", task="text", score=None, nll=2.0, tokens=3)
COST = {"prompt_tokens": 20, "most_live": 20, "slots": 20, "kv_bytes": 40, "prefill_seconds": 1.0,
        "decode_tokens_per_second": 2.0}  # fmt: skip


def test_outputs_beside_the_full_caches():
    mine = [answer("h2o", 0, "one two four"), answer("h2o", 1, ""), answer("h2o", 1, "", question=1)]
    found = table.lines([*FULL, *mine, answer("h2o", 7, "no row of the full cache"), LIKELIHOOD])
    first, second = table.agreement(found, ["contains"]).to_dict("records")
    assert [first[k] for k in ("method", "budget", "task", "index")] == ["h2o", "0.5", "summarise", 0]
    assert first["same"] == first["contains"] == 0.0
    assert first["prefix"] == 2 / 4
    assert first["edit_similarity"] == pytest.approx(2 * 3 / (4 + 3))
    assert {second[k] for k in (*table.ALIKE, "contains")} == {0.5}  # of two blanks, and of one
    (row,) = table.means(pd.DataFrame([first, second])).to_dict("records")
    assert (row["examples"], row["same"]) == (2, 0.25)
    assert row["same_low"] <= 0.25 <= row["same_high"]
    by_name = table.numbers(found).set_index(["method", "task"])
    assert by_name.loc[("h2o", "summarise"), "same"] == 0.25
    equal = table.lines([*FULL[:1], answer("h2o", 0, "one two three four")])
    assert {v for v in table.agreement(equal, ["exact_match", "f1"]).iloc[0] if isinstance(v, float)} == {1.0}


def test_what_a_metric_cannot_judge_is_equal_or_not(monkeypatch):
    """As ROUGE, a reference without letters."""

    def letters(output, references):
        if not any(map(str.isalpha, references[0])):
            raise ValueError("no letters")
        return 0.5

    monkeypatch.setattr(table.metrics, "find", lambda name: letters)
    with pytest.raises(ValueError, match="no letters"):  # of what has digits it may be another fault
        table.agreement(table.lines([answer("full", 0, "1"), answer("h2o", 0, "1")]), ["rouge_l"])
    lines = [
        answer(m, i, text)
        for i in range(3)
        for m, text in (("full", ("= =", "= =", "a")[i]), ("h2o", ("= =", "=", "b")[i]))
    ]
    assert table.agreement(table.lines(lines), ["rouge_l"])["rouge_l"].tolist() == [1.0, 0.0, 0.5]


def test_answers_are_judged_by_those_of_the_full_cache():
    full = FULL[:2]
    found = table.beside_full(table.lines([*full, answer("h2o", 0, "one two four"), answer("h2o", 1, "")]))
    assert found["score"].tolist() == pytest.approx([1, 1, 2 * 3 / (4 + 3), 1])
    assert found["output"].tolist() == [*(line["output"] for line in full), "one two four", ""]
    with pytest.raises(ValueError, match="without one of the full cache beside it"):
        table.beside_full(table.lines([*full, answer("h2o", 7, "one")]))


def test_rows_of_one_context_count_as_one():
    rows = [answer(m, i, "one", context="x") for m in ("full", "h2o") for i in range(20)]
    (row,) = table.means(table.agreement(table.lines(rows))).to_dict("records")
    assert row["examples"] == 20
    assert (row["same"], row["same_low"], row["same_high"]) == pytest.approx(stats.interval([1.0]))


def test_lines_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match=r"no line of full to compare with; the methods are h2o"):
        table.agreement(table.lines([answer("h2o", 0, "one")]))
    twice = table.lines([*FULL, answer("full", 0, "other", budget="0.9")])
    with pytest.raises(ValueError, match=r"two outputs of summarise 0 that differ"):
        table.agreement(twice)
    assert table.agreement(table.lines([LIKELIHOOD])).empty


def test_outputs_are_scored_again():
    outputs = [answer("h2o", 0, "Six seven!"), answer("h2o", 0, "six", question=1), LIKELIHOOD]
    (found,) = table.rescored(table.lines(outputs), ["exact_match", "f1"]).to_dict("records")
    assert found["exact_match"] == 0.5
    assert found["f1"] == pytest.approx((1 + 2 / 3) / 2)


def test_an_example_is_the_mean_over_its_questions_and_of_likelihoods_over_their_tokens():
    rows = [answer("full", 0, None, q, task="text", score=None, nll=nll, tokens=n) | COST | {"live": 10 * (1 + q)}
            for q, (nll, n) in enumerate([(1.0, 3), (2.0, 1)])]  # fmt: skip
    rows += [answer("full", 0, "x", q, score=float(q)) for q in range(2)]
    rows += [answer("full", 1, None, task="text", score=None, nll=float("inf"), tokens=1)]  # no row
    found = table.examples(table.lines(rows)).set_index("task")
    assert found["value"].to_dict() == {"text": 1.25, "summarise": 0.5}
    assert (found.loc["text", "live"], found.loc["text", "kind"]) == (15, "nll")


def test_policies_and_tasks_of_one_name_that_differ_are_told_apart_and_lines_are_there_once():
    rows = [answer("h2o", 0, "a", run="one"), answer("h2o", 0, "a", run="two"), answer("h2o", 1, "b", run="two")]
    assert table.lines(rows)[["method", "index", "run"]].values.tolist() == [["h2o", 0, "one"], ["h2o", 1, "two"]]
    rows[2] |= {"policy": "another"}
    assert table.lines(rows)["method"].tolist() == ["h2o (one)", "h2o (two)"]
    rows[2] |= {"policy": "h2o", "variant": "longer"}
    assert table.lines(rows)["task"].tolist() == ["summarise (one)", "summarise (two)"]


def test_numbers_do_not_depend_on_the_order_of_lines():
    thirds = lambda m, task, i: (i * (7 if task == "a" else 5) + len(m)) % 4 / 3
    rows = [
        answer(
            m, i, f"{m} {i % 3}", task=task, budget=b, score=thirds(m, task, i), context=i // 2, live=9.0 + i, **COST
        )
        for m, b in (("full", "1.0"), ("h2o", "0.5"), ("tova", "T=0.9"))
        for task in "ab"
        for i in range(24 if task == "a" else 12)
    ]
    first = table.numbers(table.lines(rows)).set_index(["method", "task"]).sort_index()
    random.Random(0).shuffle(rows)
    again = table.numbers(table.lines(rows)).set_index(["method", "task"]).sort_index()
    apart = ["parts", "runs"]
    pd.testing.assert_frame_equal(first.drop(columns=apart), again.drop(columns=apart), rtol=1e-14)
    average = first.loc[("h2o", "average")]
    assert average["value"] == pytest.approx(first.loc[[("h2o", "a"), ("h2o", "b")], "value"].mean())
    assert (average["n"], average["parts"], average["compared"]) == (36, "a, b", 2)


def test_costs():
    """A budget that keeps everything is none, however it is called; times are medians over batches."""
    live = {("full", "1.0"): (20, 20), ("window", "0.5"): (20, 10), ("think", "c-0.5"): (20, 20), ("h2o", "5"): (5, 5)}
    rows = [
        answer(m, i, "x", budget=b, live=live[m, b][i]) | COST | {"prefill_seconds": 1.0 + i // 2}
        for m, b in live
        for i in range(2)
    ]
    found = table.numbers(table.lines(rows)).set_index("method")
    assert found["kept_whole"].to_dict() == {"full": 2, "window": 1, "think": 2, "h2o": 0}
    assert found["place"].to_dict() == {"full": 1.0, "window": 0.5, "think": 1.0, "h2o": 0.25}
    assert found.loc["window", ["live", "kv_of_full", "timed_batches", "prefill_seconds"]].tolist() == [0.75, 1, 1, 1.0]
    assert [table.has_budget(x) for x in ("1.0", "128", "0.0625", "T=0.95", "T=1")] == [True] * 3 + [False] * 2
