from kvjax.experiments.evaluation import report
from kvjax.experiments.evaluation.summary import TIMED, summarise


def test_bad_rows_are_counted():
    bad = {"task": "mine", "index": 0, "line": 1, "reason": "no <b>JSON"}
    for count, said in (
        (1, "1 row could not be asked, and is not among"),
        (2, "2 rows could not be asked, and are not"),
    ):
        summary = summarise([], {}, [bad] * count)
        assert f"\n{said}" in report.markdown(summary, "x")
        assert r"- mine, line 1: no \<b>JSON" in report.markdown(summary, "x")


def test_prompts_that_were_kept_whole_are_named():
    """A budget that keeps everything is none, however it is called."""
    made = {
        "task": "mine",
        "score": 1.0,
        "prompt_tokens": 20,
        "most_live": 20,
        **dict.fromkeys(TIMED, 1.0),
        "answers": [],
    }
    runs = ("full", "1.0", (20, 20)), ("window", "0.5", (20, 10)), ("think", "c-0.5", (20, 20))
    lines = [
        {**made, "method": method, "budget": budget, "index": i, "live": live[i]}
        for method, budget, live in runs
        for i in range(2)
    ]
    cost = {"slots": 1, "kv_bytes": 1, "prefill_peak_bytes": None, "decode_peak_bytes": None}
    summary = summarise(lines, dict.fromkeys(("full@1.0", "window@0.5", "think@c-0.5"), cost))
    assert [r["kept_whole"] for r in summary["rows"]] == [2, 1, 2]
    (said,) = (line for line in report.markdown(summary, "x").splitlines() if "every token was kept" in line)
    assert "window at 0.5 (1 of 2). " in said
    assert "full" not in said.partition(": ")[2].partition(".")[0]


def test_names_are_no_markup():
    made = {"task": "mine", "index": 0, "score": 1.0, "prompt_tokens": 2, "most_live": 2, "live": 2, "answers": []}
    line = {**made, **dict.fromkeys(TIMED, 1.0), "method": r"<img src=x>|\\<b> [a](b) *c* d_e _f_", "budget": "0.5"}
    cost = {"slots": 1, "kv_bytes": 1, "prefill_peak_bytes": None, "decode_peak_bytes": None}
    text = report.markdown(summarise([line], {f"{line['method']}@0.5": cost}), "<i>")
    assert text.startswith("# \\<i\\>\n")
    assert r" x\`\<b\>(a=1)." in report.options_line([("x`<b>", "a=1")])[0]
    shown = r"\<img src=x\>\|\\\\\<b\> \[a\](b) \*c\* d_e \_f\_"
    assert text.count(f"| {shown} | 0.5 |") == 2
    assert f"{shown} at 0.5 (1 of 1)" in text
