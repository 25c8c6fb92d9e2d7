"""NaCl's tables and figures (Chen et al., ACL 2024)."""

import functools
from typing import Any, Final

from kvjax import Policy, Share, methods
from kvjax.experiments.papers.tables.base import Budget, Claim, Column, Entry, Method, grid, read
from kvjax.methods.variants import nacl_by_layer, nacl_drawn

METHODS: Final = {
    "full": Method("Full cache", lambda _: methods.full()),
    "streaming_llm": Method("Attention Sink", lambda b: methods.streaming_llm(b, sinks=4)),
    "h2o": Method("H2O", lambda b: methods.h2o(b), note="half heavy hitters, half recent: not given"),
    "tova": Method("MSRNN", lambda b: methods.tova(b)),
    "scissorhands": Method("Scissorhands", lambda b: methods.scissorhands(b), note="history and drop are not given"),
    "nacl": Method("NaCl", lambda b: methods.nacl(b), note="shares of Table 4"),
}

_ABLATION: Final = {
    "nacl": METHODS["nacl"],
    "without_proxies": Method(
        "- Eviction w. Proxy Tokens",
        lambda b: methods.nacl(b, recent=0, random=Share(1.0)),
        note="all of the budget is drawn at random",
    ),
    "without_random": Method("- Random Eviction", lambda b: methods.nacl(b, random=0)),
    "uniform_sampling": Method("- Probability Sampling", lambda b: nacl_drawn(b, by="uniform")),
    "without_global": Method(
        "- Global Eviction", lambda b: methods.nacl(b), block=1, note="evicts after every token that is read"
    ),
    "without_headwise": Method(
        "- Head-wise Eviction", lambda b: nacl_by_layer(b), note="one decision for a layer's heads"
    ),
}


def _nacl(budget: Budget, **options: Any) -> Policy:
    """NaCl with other shares, and no proxy that stays, so that any share can be drawn at random."""
    return methods.nacl(budget, recent=0, **options)


_SWEPT: Final = {
    **{
        f"proxies-{share}": Method(f"NaCl, {share} % proxies", functools.partial(_nacl, proxies=share / 100))
        for share in (1, 10, 30, 60, 100)
    },
    **{
        f"random-{share}": Method(f"NaCl, {share} % random", functools.partial(_nacl, random=Share(share / 100)))
        for share in (0, 10, 30, 50, 70, 90, 100)
    },
}

_SHORT: Final = {
    "PiQA": "piqa",
    "COPA": "copa",
    "Open.": "openbookqa",
    "Wino.": "winogrande",
    "SciQ": "sciq",
    "ARC-E": "arc_easy",
    "ARC-C": "arc_challenge",
}
_LONG: Final = {
    "PR-Zh": "passage_retrieval_zh",
    "PR-En": "passage_retrieval_en",
    "Repo-P": "repobench-p",
    "HotpotQA": "hotpotqa",
    "NarQA": "narrativeqa",
    "TriviaQA": "triviaqa",
    "QMSum": "qmsum",
}


def _shots(shots: int) -> tuple[Column, ...]:
    """The seven short tasks with so many examples before the question, their mean, and perplexity."""
    named = {f"{title} {shots}-shot": data for title, data in _SHORT.items()}
    return (
        *(Column(title, (data,), "accuracy", shots) for title, data in named.items()),
        Column(f"Average {shots}-shot", of=tuple(named)),
        Column(f"log PPL {shots}-shot", ("openbookqa_text",), "log_perplexity", shots),
    )


_TABLE1: Final = """
model: llama-2-7b
budget: 0.2
full          78.8 83.0 44.8 73.7 80.9 78.8 50.8 64.6 3.8 59.3 87.0 47.2 75.5 11.1 67.6 31.2 53.8 3.2
streaming_llm 54.0 55.0 30.2 49.1 22.3 25.4 23.0 35.9 6.4 50.4 47.0 29.0 46.6 11.1 25.6 22.5 33.2 7.9
h2o           77.6 81.0 41.0 67.0 75.8 70.4 44.0 60.3 4.0 59.2 86.0 44.6 73.8 10.5 66.0 30.0 52.8 3.3
tova          77.6 78.0 43.0 67.8 76.5 71.6 45.3 60.6 4.0 58.9 86.0 44.8 73.9 10.7 65.9 30.6 52.9 3.3
nacl          77.9 79.0 43.8 71.5 80.0 74.9 48.8 63.8 4.0 58.9 87.0 45.6 73.6 11.1 66.1 31.4 53.2 3.2
"""

_TABLE2: Final = """
model: llama-2-7b-chat
full          8.0 10.1 52.3 27.7 18.6 83.3 20.6 31.5
budget: 0.3
scissorhands  4.0  2.6 51.8 17.2 12.5 79.2 19.6 26.7
h2o           3.7  5.0 50.9 27.1 15.5 81.6 20.2 29.1
tova          5.5  4.5 50.3 26.1 16.4 82.9 20.9 29.5
nacl          6.8  9.0 52.5 27.9 16.4 83.1 21.5 31.0
budget: 0.2
scissorhands  0.5 43.0 44.9 11.4  6.7 68.9 16.3 21.9
h2o           4.2  4.5 49.4 24.5 15.2 82.8 19.8 28.6
tova          4.5  4.5 49.0 23.9 14.7 82.5 20.4 28.5
nacl          7.0  9.4 51.6 27.2 17.1 82.5 20.8 30.8
budget: 0.1
scissorhands  0.0  3.7 27.6  4.4  2.8 52.8 12.9 14.9
h2o           4.9  3.5 48.1 22.8 13.6 79.4 19.6 27.4
tova          4.0  3.0 47.9 23.4 13.4 80.8 19.6 27.5
nacl          6.8  7.0 49.2 25.5 15.0 81.7 20.4 29.4
"""

_TABLE3: Final = """
model: llama-2-7b
budget: 0.2
nacl             63.8 x
without_proxies  35.7 x
without_random   62.6 x
uniform_sampling 63.0 x
without_global   62.5 x
without_headwise 61.7 x
model: llama-2-7b-chat
nacl             x 30.8
without_proxies  x 24.8
without_random   x 21.7
uniform_sampling x 29.7
without_global   x 29.3
without_headwise x 28.1
"""

_PRINTED: Final = "the printed mean is lower than that of the printed columns; the paper does not say why"
_EVICTING: Final = ("h2o", "tova", "nacl")
_CHAT: Final = ("llama-2-7b-chat",)
_TASKS: Final = (
    Column("Short-Text ACC.", tuple(_SHORT.values()), "accuracy", 5),
    Column("Long-Text ACC.", tuple(_LONG.values()), "longbench"),
)

ENTRIES: Final = (
    Entry(
        "nacl", "table1", "seven short tasks with 5 and 25 shots, and perplexity, LLaMA2-7B", "section 6.1", "scores",
        METHODS, (*_shots(5), *_shots(25)), read(_TABLE1),
        (("budget", "20 % of the prompt"), ("tasks", "lm-eval-harness"), ("perplexity", "log, on OpenBookQA")),
        off=(
            *(("llama-2-7b", m, 0.2, _PRINTED) for m in ("streaming_llm", "h2o", "tova", "nacl")),
            ("llama-2-7b", "full", 1.0, _PRINTED),
        ),
        notes="The columns' own means are 70.1 for the full cache and 68.0 for NaCl with 5 shots, where 64.6 and 63.8 "
        "are printed. PIQA and SciQ fall from 5 to 25 shots with every method, as contexts outgrow the model's.",
    ),
    Entry(
        "nacl", "table2", "seven LongBench sets at 4k tokens, LLaMA2-7B-Chat", "section 6.1", "scores",
        METHODS, (*(Column(t, (d,), "longbench") for t, d in _LONG.items()), Column("Average", of=tuple(_LONG))),
        read(_TABLE2), (("budget", "30, 20 and 10 % of the prompt"), ("prompts", "4k tokens")),
        off=(("llama-2-7b-chat", "scissorhands", 0.2, "PR-En is printed as 43.0; 4.3 gives the printed mean"),),
    ),
    Entry(
        "nacl", "table3", "ablation of NaCl at 20 %, short and long tasks", "section 6.3", "scores",
        _ABLATION, _TASKS, read(_TABLE3), (("budget", "20 % of the prompt"),),
        notes="The means are those of Table 1 (5 shots) and Table 2: of LLaMA2-7B and of LLaMA2-7B-Chat. Long text "
        "without random eviction is printed as 9.2 less than 30.8, which is 9.1.",
    ),
    Entry(
        "nacl", "table4", "NaCl's shares of the budget at 10, 20 and 30 %", "appendix A.6", "settings",
        notes="they are the defaults of kvjax.methods.nacl",
    ),
    Entry("nacl", "figure1", "greedy eviction against one eviction (an illustration)", "section 1", "drawing"),
    Entry(
        "nacl", "figure2", "retained positions of H2O, MSRNN and NaCl; attention by position", "section 4", "drawn",
        figures=("retained_positions", "eviction_scores"), notes="figure only",
    ),
    Entry("nacl", "figure3", "overview of NaCl", "section 5", "drawing"),
    Entry(
        "nacl", "figure4", "memory of the cache against length, batch of 4, LLaMA2-7B", "section 6.4", "speed",
        METHODS, (Column("4096 + 512", ("speed_4k",), "kv_gb"),), grid(("llama-2-7b",), ("h2o", "nacl"), (0.2, 0.1), 1),
        claims=(Claim("budget at which NaCl is as accurate as H2O at 0.2", 0.1, "section 6.4"),), notes="figure only",
    ),
    Entry(
        "nacl", "figure5", "average accuracy against budget, proxies and random share", "section 6.3", "scores",
        {**METHODS, **_SWEPT}, (Column("Average", tuple(_LONG.values()), "longbench"),),
        grid(_CHAT, _EVICTING, (0.1, 0.2, 0.3), 1) + grid(_CHAT, tuple(_SWEPT), (0.2,), 1)[1:],
        claims=(
            Claim("share of proxies that is best, of the prompt", 0.1, "section 6.3"),
            Claim("share of the budget drawn at random that is best", 0.7, "section 6.3"),
            Claim("points gained with 10 % of the budget drawn at random", 2.25, "section 6.3"),
            Claim("points gained with 70 % of the budget drawn at random", 8.17, "section 6.3"),
        ),
        notes="figure only; which tasks the average is over is not said: here Table 2's",
    ),
    Entry(
        "nacl", "figure6", "sparsity of attention by threshold and length", "appendix A.1", "drawn",
        figures=("attention_sparsity",), claims=(Claim("sparsity at length 1,200", 0.78, "appendix A.1"),),
        notes="figure only, but for one number",
    ),
    *(
        Entry(
            "nacl", f"figure{n}", f"eviction scores of {who} while generating", "appendix A.2", "drawn",
            figures=("eviction_scores",), notes="figure only",
        )
        for n, who in ((7, "H2O"), (8, "MSRNN"), (9, "NaCl"))
    ),
    Entry("nacl", "figure10", "why to evict at random (an illustration)", "appendix A.4", "drawing"),
)  # fmt: skip
