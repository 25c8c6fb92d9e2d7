"""The end of the main job: a dozen lines, whatever there is."""

import math
import pathlib

from kvjax.experiments.core.screen import screen


def number(method, budget, task, value, kind="score", share=0.5):
    return {"method": method, "budget": budget, "task": task, "kind": kind, "value": value, "low": value / 2,
            "high": value, "kv_of_full": share}  # fmt: skip


def test_several_tasks():
    runs = [("full", "1.0", 1.0, 2.0, 1.0), ("snapkv", "0.5", 0.75, 2.5, 0.5), ("random", "0.5", 0.25, 4.0, math.nan)]
    found = [number(m, b, task, x, share=share) for m, b, x, _, share in runs for task in ("a", "b", "average")]
    found += [number(m, b, "text_perplexity", x, "nll", share) for m, b, _, x, share in runs]
    assert screen(found, "average", {"page": pathlib.Path("x/report.html"), "records": pathlib.Path("x")}) == (
        "method  budget  mean of 2 tasks, %   text perplexity    KV bytes\n"
        "full    1.0     100.0 [50.0, 100.0]  2.00 [1.00, 2.00]  100.0 %\n"
        "snapkv  0.5     75.0 [37.5, 75.0]    2.50 [1.25, 2.50]  50.0 %\n"
        "random  0.5     25.0 [12.5, 25.0]    4.00 [2.00, 4.00]\n"
        "\n"
        "Best by mean of 2 tasks: snapkv at 0.5 (75.0); worst: random at 0.5 (25.0); the full cache has 100.0.\n"
        "\n"
        "page:    x/report.html\n"
        "records: x"
    )


def test_what_does_not_fit_is_counted_and_perplexity_is_better_below():
    found = [number("m", str(i), "text", 1.0 + i, "nll") for i in range(14)]
    lines = screen(found, "average", {}).splitlines()
    assert len(lines) == 1 + 12 + 1 + 3 - 1
    assert lines[13] == "... 2 more rows in the page"
    assert lines[15] == "Best by text: m at 0 (1.00); worst: m at 13 (14.00)."
    kept = screen([number("m", "0.5", "text", 0.5)], "average", {}, kept={("m", "0.5"): "2 of 2"})
    assert kept.splitlines()[1].endswith("50.0 % (2 of 2 prompts kept whole)")
    alone = screen([number("full", "1.0", "key_value", 0.5)], "average", {}, "Kept whole: none.")
    assert alone == (
        "method  budget  key value, %       KV bytes\nfull    1.0     50.0 [25.0, 50.0]  50.0 %\n\nKept whole: none.\n"
    )
