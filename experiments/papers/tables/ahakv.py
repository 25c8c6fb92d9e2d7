"""AhaKV's tables and figures (Gu et al.)."""

from typing import Final

from kvjax import methods
from kvjax.experiments.papers.tables.base import Claim, Column, Entry, Method, grid, read
from kvjax.experiments.papers.tables.longbench import GROUPS
from kvjax.methods.variants import ahakv_without

METHODS: Final = {
    "full": Method("Full Cache", lambda _: methods.full()),
    "streaming_llm": Method("Sink", lambda b: methods.streaming_llm(b, sinks=4)),
    "h2o": Method("H2O", lambda b: methods.h2o(b, recent=32)),
    "snapkv": Method("SnapKV", lambda b: methods.snapkv(b, window=32), note="pooling is not given: max, kernel 7"),
    "nacl": Method("NACL", lambda b: methods.nacl(b), note="shares are not given: those of NaCl's Table 4"),
    "tova": Method("TOVA", lambda b: methods.tova(b)),
    "ahakv": Method("AhaKV", lambda b: methods.ahakv(b, recent=32), note="the pooling kernel is not given: 7"),
}

_ABLATION: Final = {
    "without_ra": Method("w/o RA", lambda b: ahakv_without("recent", b, recent=32)),
    "without_sgs": Method("w/o SGS", lambda b: ahakv_without("gain", b, recent=32)),
    "without_vpe": Method("w/o VPE", lambda b: ahakv_without("prior", b, recent=32)),
    "ahakv": METHODS["ahakv"],
}

_SETTINGS: Final = (
    ("budget", "1000 a head; 720 for LLaMA2-7B, whose context is short"),
    ("recent", "32, the same for all methods"),
    ("lambda", "as Eq. 12 has it"),
    ("seeds", "results are means over several seeds; how many is not said"),
)

_TABLE1: Final = """
model: llama-3-8b-instruct
budget: 1000
full          54.47 57.75 41.55 32.33 20.14 54.83 41.94
streaming_llm 56.59 53.03 30.31 26.88 17.75 26.50 33.55
h2o           58.88 54.57 38.61 30.76 19.75 41.70 38.93
snapkv        56.52 56.36 40.56 31.06 18.22 54.33 40.99
nacl          56.62 54.78 40.32 31.39 18.49 54.33 40.77
tova          53.45 57.29  38.6 30.74 17.63 53.30 40.18
ahakv         57.14 57.13 41.25 31.85 18.66 54.83 41.63
model: qwen2-7b-instruct
budget: 1000
full          59.35 61.60 45.20 34.35 22.65 39.33 42.47
streaming_llm 56.09 55.41 29.56 26.45 19.43 15.33 32.46
h2o           52.72 56.14 37.82 31.77 21.15 22.67 36.24
snapkv        59.08 60.37 43.99 33.33 20.71 38.50 41.30
nacl          58.67 53.67 41.80 32.02 20.83 38.00 39.27
tova          56.91 56.65 37.97 30.69 19.00 35.61 37.99
ahakv         59.30 61.04 44.18 33.98 22.02 38.33 41.84
model: llama-2-7b-chat
budget: 720
full          55.72 51.99 22.28 18.56 18.55  5.34 27.28
streaming_llm 53.35 49.26 14.11 15.01 15.66  1.94 23.27
h2o           42.66 49.32 20.46 16.29 18.27  4.01 24.51
snapkv        55.32 50.95 21.50 17.65 16.82  5.57 26.39
nacl          54.50 49.84 19.92 17.82 16.97  6.54 26.04
tova          53.68 51.16 16.10 16.41 15.68  4.34 24.66
ahakv         55.06 51.49 22.20 18.16 17.12  5.57 26.78
model: gemma-7b-it
budget: 1000
full          46.91 52.75 33.82 23.81 20.47 27.02 33.25
streaming_llm 48.84 49.78 20.34 18.63 18.05 15.33 27.18
h2o           50.01 49.99 29.88 21.29 20.13 22.55 31.09
snapkv        47.66 52.45 32.89 22.35 18.84 26.29 32.39
nacl          47.09 50.35 31.81 21.93 19.12 26.69 31.77
tova          45.69 49.20 30.61 21.20 18.78 25.38 30.80
ahakv         49.37 53.26 32.88 22.93 19.38 27.36 33.08
"""

_TABLE2: Final = """
model: llama-2-7b-chat
budget: 720
without_ra    30.26 84.47 36.44 55.77 39.7  49.33
without_sgs   30.5  82.85 37.89 58.0  39.6  49.76
without_vpe   29.54 82.94 33.96 58.16 41.06 49.13
ahakv         30.91 84.34 39.21 58.4  40.1  50.59
"""

_TABLE3: Final = """
model: qwen2-1.5b-instruct
budget: 1000
full          39.93 54.77 36.53  28.3 22.36  8.33 32.03
streaming_llm 39.26  49.5 22.64 20.52 17.45  5.33 25.47
h2o            38.9 49.09 23.52 21.34 18.07  5.17 25.78
snapkv        40.31 54.59 33.81 26.15 18.73  8.16 30.39
nacl          39.59 51.91 31.48 25.46 18.87  8.33 29.29
tova          37.61 49.91 29.14 23.83 17.18  6.00 27.31
ahakv         39.99 54.68 34.60 29.10 19.81  8.83 31.39
model: qwen1.5-4b-chat
budget: 1000
full          34.29 57.13 40.98 31.66 22.80 11.83 34.02
streaming_llm 34.24 52.73 26.29 21.76 18.51  7.66 27.08
h2o           36.61 51.48 37.81 29.06 21.52 10.33 31.61
snapkv        35.10 55.69 40.09 30.48 20.13 10.83 32.77
nacl          35.39 53.18 39.05 29.14 19.93 11.17 31.89
tova           33.1 51.56  37.4 28.54 19.65 10.00 30.70
ahakv         35.30 55.37 40.25 31.10 20.78 11.50 33.09
model: qwen1.5-14b-chat
budget: 1000
full          56.64 60.24 42.65 37.85 22.24 53.66 44.11
streaming_llm 55.10 54.39 26.80 26.94 19.03 16.00 31.75
h2o           56.07 57.37 39.84 36.04 22.83 51.91 42.48
snapkv        56.97 59.22 41.50 36.54 21.04 53.33 43.20
nacl          56.67 57.15 40.67 36.15 21.36  53.5 42.66
tova          52.63 57.15 39.02 35.06  20.8 52.33 41.24
ahakv         61.79 59.45 41.22 36.88 21.59 53.67 43.87
"""

_FIVE: Final = {
    "2Wiki": "2wikimqa",
    "TriQA": "triviaqa",
    "Multi-EN": "multifieldqa_en",
    "lcc": "lcc",
    "Samsum": "samsum",
}
_SHORT: Final = {"OpenBook": "openbookqa", "ARC-E": "arc_easy", "WiC": "wic", "WinoGrande": "winogrande"}
_EVICTING: Final = tuple(name for name in METHODS if name != "full")
_LIKELY: Final = "its parts as printed do not give it; a misprint in one of them"

ENTRIES: Final = (
    Entry(
        "ahakv", "table1", "LongBench's 21 sets in six groups, four models of 7 to 8B", "section 5.2.1", "scores",
        METHODS, GROUPS, read(_TABLE1), _SETTINGS,
        off=(
            ("llama-2-7b-chat", "snapkv", 720, _LIKELY),
            ("llama-2-7b-chat", "ahakv", 720, _LIKELY),
        ),
        notes="The average is over the 21 sets, not over the six groups.",
    ),
    Entry(
        "ahakv", "table2", "ablation of AhaKV's three parts on five LongBench sets, LLaMA2-7B", "section 5.3", "scores",
        _ABLATION, (*(Column(t, (d,), "longbench") for t, d in _FIVE.items()), Column("Avg", of=tuple(_FIVE))),
        read(_TABLE2), _SETTINGS,
        claims=(
            Claim("average lost without recent accumulation (RA)", 1.26, "section 5.3"),
            Claim("average lost without step gain softmax (SGS)", 0.83, "section 5.3"),
            Claim("average lost without value prior (VPE)", 1.46, "section 5.3"),
        ),
        notes="The budget is not repeated in section 5.3; it is taken from section 5.2.1.",
    ),
    Entry(
        "ahakv", "table3", "LongBench's 21 sets in six groups, models of 1.5B, 4B and 14B", "appendix B", "scores",
        METHODS, GROUPS, read(_TABLE3), _SETTINGS,
        off=(
            ("qwen1.5-14b-chat", "nacl", 1000, _LIKELY),
            ("qwen1.5-14b-chat", "tova", 1000, _LIKELY),
        ),
        notes="The average is over the 21 sets, not over the six groups.",
    ),
    Entry("ahakv", "figure1", "bias of accumulated attention (an illustration)", "section 1", "drawing"),
    Entry(
        "ahakv", "figure2", "eviction scores by position, retained tokens, what the value prior does", "section 3.1",
        "drawn", settings=(("prompt", "3,600 tokens, LLaMA2-7B-Chat"),),
        figures=("eviction_scores", "retained_positions"),
        claims=(Claim("position beyond which H2O evicts nearly everything, of 3,600", 1500, "section 3.1"),),
        notes="figure only, but for one position",
    ),
    Entry("ahakv", "figure3", "overview of AhaKV", "section 4.2", "drawing"),
    Entry(
        "ahakv", "figure4", "short-text accuracy against budget, LLaMA2-7B and Qwen2-1.5B", "section 5.2.2", "scores",
        METHODS, tuple(Column(t, (d,), "accuracy") for t, d in _SHORT.items()),
        grid(("llama-2-7b", "qwen2-1.5b-instruct"), _EVICTING, (0.6, 0.4, 0.2, 0.1, 0.04), 4),
        (("budget", "60 % to 4 %; the steps between are not in the text"), ("shots", "not in the text")),
        notes="figure only",
    ),
    Entry(
        "ahakv", "figure5", "retained positions, Qwen2-7B", "appendix A", "drawn", figures=("retained_positions",),
        notes="figure only",
    ),
    Entry(
        "ahakv", "figure6", "retained positions, LLaMA3-8B", "appendix C", "drawn", figures=("retained_positions",),
        notes="figure only",
    ),
    Entry(
        "ahakv", "figure7", "which paragraphs are named in passage_retrieval_zh, LLaMA3-8B", "appendix D", "scores",
        METHODS, (Column("PR-zh", ("passage_retrieval_zh",), "longbench"),),
        grid(("llama-3-8b-instruct",), ("h2o", "ahakv"), (1000,), 1), _SETTINGS,
        notes="figure only: how often each paragraph is named. A run gives the score and every output.",
    ),
    Entry(
        "ahakv", "figure8", "inference time and cache memory against budget, Qwen2-7B", "appendix E", "speed",
        METHODS, (Column("32K + 512", ("speed_32k",), "tokens_per_second"), Column("cache", ("speed_32k",), "kv_gb")),
        read(
            """
            model: qwen2-7b-instruct
            full - 5.98
            budget: 2048
            ahakv - 0.39
            """
        ),
        (("input", "32K tokens"), ("output", "512 tokens")),
        notes="Times are drawn only; two sizes of the cache, in G, stand in the text. By the model's shape (28 layers, "
        "4 kv heads of 128) a full cache of 33,280 tokens in 16 bits is 1.9 GB.",
    ),
)  # fmt: skip
