"""Ada-KV's tables and figures (Feng et al., arXiv 2407.11550, first version)."""

from typing import Any, Final

from kvjax import methods
from kvjax.experiments.papers.tables.base import Claim, Column, Entry, Method, Row, read
from kvjax.experiments.papers.tables.longbench import ENGLISH
from kvjax.methods.variants import by_query_head

# The paper ran a set for every query head: keys and values were copied to query heads before eviction.
_WINDOW: Final[dict[str, Any]] = {"window": 32, "kernel": 7}

METHODS: Final = {
    "full": Method("Full Cache", lambda _: methods.full()),
    "h2o": Method(
        "H2O", lambda b: methods.h2o(b), note="half heavy hitters, half recent, as H2O's paper has it; for kv heads"
    ),
    "streaming_llm": Method("StreamingLLM", lambda b: methods.streaming_llm(b, sinks=4)),
    "snapkv": Method("SnapKV", lambda b: by_query_head(methods.snapkv(b, **_WINDOW))),
    "pyramidkv": Method(
        "Pyramid", lambda b: by_query_head(methods.pyramidkv(b, **_WINDOW)), note="beta is not given: 20"
    ),
    "ada_snapkv": Method("Ada-SnapKV", lambda b: by_query_head(methods.ada_snapkv(b, alpha=0.5, **_WINDOW))),
    "ada_pyramid": Method(
        "Ada-Pyramid",
        lambda b: by_query_head(methods.ada_pyramid(b, alpha=0.5, **_WINDOW)),
        note="beta is not given: 20",
    ),
}

_SETTINGS: Final = (
    ("budget", "B = 128h to 1024h for a layer of h heads: 128 to 1024 a head"),
    ("window", "32 recent tokens, max pooling with kernel 7"),
    ("alpha", "0.5"),
    ("metrics", "those that LongBench recommends, up to 100"),
    ("prompts", "cut in the middle to the model's limit, without a chat template (released scripts)"),
)

_TABLE1: Final = """
model: mistral-7b-instruct-v0.2
full          26.63 32.99 49.34 42.77 27.35 18.77 32.87 24.24 27.10 71.00 86.23 42.96  2.75 86.98 55.33 52.87 42.51
budget: 128
h2o           21.19 21.66 38.60 30.63 20.65 12.19 20.65 22.42 21.81 39.00 82.52 40.68  2.98 79.56 49.13 46.76 34.40
streaming_llm 16.61 14.74 31.40 28.05 21.36 12.08 18.44 18.91 19.26 43.50 74.22 29.00  2.75 31.65 41.27 38.84 27.63
snapkv        19.17 21.40 42.93 36.76 22.44 15.86 19.16 21.84 21.55 47.50 84.15 40.24  2.30 68.26 50.69 47.13 35.09
pyramidkv     20.16 21.77 43.55 36.78 23.12 14.39 19.53 22.03 21.47 51.00 84.62 40.24  2.79 70.77 50.57 46.53 35.58
ada_snapkv    20.63 22.58 45.68 37.90 23.49 16.55 19.99 22.28 21.55 59.50 85.00 40.62  3.09 69.36 50.98 48.17 36.71
ada_pyramid   20.50 21.71 45.61 36.81 23.57 15.84 19.75 22.13 22.00 60.50 84.04 40.51  3.21 73.60 51.24 48.02 36.81
budget: 256
h2o           21.54 22.92 42.56 31.07 22.53 13.76 22.52 22.40 23.09 40.50 84.20 40.77  3.41 86.10 50.98 48.17 36.03
streaming_llm 17.93 16.01 33.36 30.71 21.30 10.08 20.66 19.47 22.89 53.50 73.59 29.22  3.00 27.77 42.30 39.87 28.85
snapkv        22.37 23.74 48.13 38.56 22.43 15.66 21.91 23.13 23.15 61.50 85.45 41.42  3.09 84.54 53.22 50.24 38.66
pyramidkv     20.09 24.00 47.33 38.24 22.48 16.02 21.40 22.45 22.63 63.00 84.93 40.98  3.40 82.48 52.78 49.36 38.22
ada_snapkv    22.55 25.78 48.33 40.30 24.24 16.64 21.63 23.03 23.19 67.00 85.78 41.53  3.47 87.07 53.86 51.13 39.72
ada_pyramid   22.64 24.64 47.40 40.25 23.62 16.83 21.82 23.34 22.70 66.50 84.99 41.34  2.78 86.90 53.17 49.52 39.28
budget: 512
h2o           21.72 26.03 44.81 32.33 23.16 14.86 23.65 22.84 24.70 42.00 85.22 41.57  3.40 86.45 53.04 49.68 37.22
streaming_llm 18.76 17.17 37.09 30.21 21.64  9.93 24.44 20.00 25.57 62.00 72.36 29.95  2.48 18.17 43.70 40.13 29.60
snapkv        24.60 27.81 48.98 39.46 25.25 16.98 23.70 22.96 24.37 67.00 85.88 41.26  2.78 86.56 54.81 51.71 40.26
pyramidkv     23.23 27.94 48.87 40.50 24.36 16.74 23.22 23.16 24.37 67.00 85.73 41.74  3.16 85.67 54.16 50.34 40.01
ada_snapkv    23.39 28.72 48.96 40.60 25.20 17.25 23.15 23.48 24.41 68.00 86.39 41.69  2.73 88.92 54.69 51.51 40.57
ada_pyramid   24.03 28.98 48.39 39.25 24.50 18.38 23.13 23.90 24.30 68.00 85.89 41.89  2.98 87.71 54.46 51.39 40.45
budget: 1024
h2o           23.90 28.62 46.46 37.03 24.74 15.04 25.30 23.11 25.92 46.00 85.93 41.80  3.24 86.57 54.46 51.01 38.70
streaming_llm 19.42 21.69 41.75 32.40 22.18 11.18 27.13 21.09 26.59 67.00 71.79 30.11  2.88 16.57 44.82 39.76 31.02
snapkv        25.47 29.57 49.33 40.90 25.53 19.01 25.94 23.89 26.21 69.50 86.48 42.10  2.98 88.56 55.57 51.92 41.44
pyramidkv     24.21 29.86 48.93 40.75 25.05 18.77 25.73 24.06 25.65 68.50 86.31 42.25  2.97 87.17 54.75 52.10 41.07
ada_snapkv    24.79 31.94 48.45 40.73 26.22 19.11 25.61 23.92 26.03 70.00 86.32 42.35  2.91 88.31 55.44 52.55 41.54
ada_pyramid   25.09 30.94 48.18 40.00 26.52 19.10 24.93 23.71 25.86 70.00 86.34 42.64  2.56 86.92 54.93 51.90 41.23
"""

_TABLE2: Final = """
model: lwm-text-chat-1m
full          18.00 25.80 43.10 23.40 16.70  9.70 27.20 25.00 24.70 70.50 61.60 39.60  3.00  6.50 42.20 41.60 29.91
budget: 128
h2o           17.90 17.73 36.10 21.52 17.51  9.26 16.13 22.99 19.64 43.50 60.64 36.36  3.00  5.50 34.93 36.74 24.97
streaming_llm 12.81 11.32 29.04 17.24 13.67  6.91 16.34 20.25 17.35 41.00 52.74 25.77  0.50  3.00 28.38 30.98 20.46
snapkv        17.51 17.57 38.89 22.15 17.28  9.13 15.01 21.96 17.94 46.00 61.05 35.97  0.00  4.00 36.92 37.83 24.95
pyramidkv     18.17 17.58 39.08 22.05 16.78  8.13 14.74 22.24 17.88 47.50 60.11 37.02  0.50  3.50 36.96 38.73 25.06
ada_snapkv    18.64 18.61 39.59 22.51 17.05  9.19 15.28 22.88 18.98 52.50 61.69 36.76  0.00  3.00 36.82 39.63 25.82
ada_pyramid   18.35 18.93 39.49 22.57 16.83  8.61 15.05 23.22 18.85 55.50 60.93 37.39  0.50  3.50 36.55 39.79 26.00
budget: 256
h2o           18.99 19.18 38.78 21.88 17.33  9.16 16.88 23.29 20.51 48.00 60.36 38.07  3.00  5.50 37.18 37.94 26.00
streaming_llm 13.59 11.81 29.73 18.59 14.37  6.72 21.06 20.78 21.29 51.50 51.92 26.51  0.50  3.00 28.97 31.09 21.96
snapkv        19.27 20.61 40.78 22.81 16.83  9.89 16.23 23.17 20.07 53.50 61.75 38.41  0.00  4.00 38.25 40.57 26.63
pyramidkv     18.81 19.83 40.71 22.34 17.10  9.08 16.10 22.93 19.50 60.00 61.01 38.65  0.50  5.00 38.23 39.13 26.81
ada_snapkv    18.99 21.08 41.18 22.89 17.64  9.52 16.71 23.05 20.48 67.00 61.27 38.74  0.00  3.50 39.60 40.96 27.66
ada_pyramid   18.78 20.32 40.50 22.73 17.01  9.37 16.05 23.60 19.93 69.00 61.43 39.07  2.00  5.00 38.40 40.08 27.70
budget: 512
h2o           18.61 20.07 39.82 22.08 17.21 10.13 17.62 23.65 21.41 54.50 61.84 38.74  3.00  5.50 39.23 40.08 27.09
streaming_llm 13.94 13.13 33.06 18.26 14.44  7.41 25.24 21.00 23.78 60.50 52.04 26.31  1.00  3.00 30.10 31.76 23.44
snapkv        18.45 21.96 42.01 23.25 17.42  9.88 17.68 23.62 21.30 68.00 61.77 39.02  1.00  4.50 40.09 40.79 28.17
pyramidkv     18.46 22.85 42.24 23.27 16.75  9.45 17.41 24.62 21.20 70.00 60.61 39.32  3.00  6.50 39.63 40.78 28.51
ada_snapkv    18.83 22.39 42.15 23.52 18.27  9.63 17.66 23.99 21.23 70.00 61.72 38.93  2.00  4.50 40.11 41.28 28.51
ada_pyramid   18.64 22.86 41.81 23.61 16.67  9.45 17.35 23.75 20.79 70.00 60.66 39.61  3.00  5.50 39.87 40.99 28.41
budget: 1024
h2o           17.11 22.34 41.26 22.09 17.47  9.60 18.82 23.94 22.49 61.00 62.33 38.68  3.00  5.50 41.23 41.18 28.00
streaming_llm 14.78 16.77 37.64 18.77 14.63  7.39 26.43 21.47 24.21 67.00 53.00 25.99  0.50  3.00 31.51 32.31 24.71
snapkv        18.45 24.18 42.50 23.53 17.32 10.23 19.00 24.26 23.04 69.50 62.22 39.88  3.00  5.50 41.15 41.91 29.10
pyramidkv     18.48 24.87 42.11 23.45 16.97  9.84 18.93 24.50 22.77 69.50 61.65 39.73  2.50  5.00 41.07 41.27 28.91
ada_snapkv    18.94 23.68 43.27 23.28 17.15  9.89 18.58 23.46 22.65 70.00 62.24 39.83  2.50  5.50 41.68 42.88 29.10
ada_pyramid   19.00 23.83 43.36 23.48 17.03  9.32 18.70 24.11 22.61 69.50 61.83 39.75  2.50  6.00 40.85 41.80 28.98
"""

_NEEDLE: Final = (Column("average score", ("needle",), "contains"),)


def _averages() -> tuple[Row, ...]:
    """Figure 5 draws the averages of Tables 1 and 2."""
    rows = read(_TABLE1) + read(_TABLE2)
    return tuple(Row(r.model, r.method, r.budget, r.values[-1:]) for r in rows)


ENTRIES: Final = (
    Entry(
        "ada-kv", "table1", "LongBench's 16 English sets, Mistral-7B, at four budgets", "section 3.6", "scores",
        METHODS, ENGLISH, read(_TABLE1), _SETTINGS,
        notes="Section 4.2 says that Ada-SnapKV is better than SnapKV on 15 of 16 sets at B = 128h; the last is a tie.",
    ),
    Entry(
        "ada-kv", "table2", "LongBench's 16 English sets, LWM-Text-Chat-1M, at four budgets", "appendix A.4", "scores",
        METHODS, ENGLISH, read(_TABLE2), _SETTINGS,
    ),
    Entry(
        "ada-kv", "table3", "LongBench's 16 English sets: metrics, average lengths, numbers of rows", "appendix A.5",
        "settings", notes="its lengths and numbers of rows are in catalogue.py",
    ),
    Entry("ada-kv", "figure1", "budgets of heads, uniform against adaptive (an illustration)", "section 1", "drawing"),
    Entry(
        "ada-kv", "figure2", "attention that heads retain against their budget", "section 3.5", "drawn",
        figures=("head_concentration",),
        claims=(
            Claim("budget share at which head 1 of layer 8 retains 0.95", 0.01, "section 3.5"),
            Claim("budget share at which head 18 of layer 8 retains nearly 0.95", 0.5, "section 3.5"),
        ),
        notes="figure only, but for two heads",
    ),
    Entry(
        "ada-kv", "figure3", "bound of the eviction loss by layer, uniform against adaptive", "section 3.5", "drawn",
        settings=(("budget", "128 a head on average"),), figures=("loss_bound",),
        notes="figure only: the bound is lower in every layer, most in layers 8 to 30",
    ),
    Entry(
        "ada-kv", "figure4", "needle in a haystack, depth against length, LWM-Text-Chat-1M", "section 4.3", "scores",
        METHODS, _NEEDLE,
        read(
            """
            model: lwm-text-chat-1m
            budget: ?
            full -
            snapkv 95.40
            ada_snapkv 96.56
            pyramidkv 96.62
            ada_pyramid 97.02
            """
        ),
        (("window", "32 recent tokens, kernel 7"), ("lengths", "to 33K with the full cache, to 217K with eviction")),
        notes="The text's budget is a formula that is lost; choose one with --budget. Averages are over depths and "
        "lengths.",
    ),
    Entry(
        "ada-kv", "figure5", "average LongBench score against budget, both models", "section 4.2", "scores",
        METHODS, (Column("Ave. Score", tuple(c.data[0] for c in ENGLISH[:-1]), "longbench"),), _averages(), _SETTINGS,
        notes="drawn in the paper; these are the averages of its Tables 1 and 2",
    ),
    Entry(
        "ada-kv", "figure6", "attention that heads retain against their budget, all layers", "appendix A.6", "drawn",
        figures=("head_concentration",), notes="figure only",
    ),
)  # fmt: skip
