"""LongBench's sets as columns: sixteen English ones, as Ada-KV's tables have them, and six groups of all twenty-one."""

from typing import Final

from kvjax.experiments.papers.tables.base import Column

_METRICS: Final = {
    "f1": ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
    "f1_zh": ("multifieldqa_zh",),
    "longbench_rouge_l": ("gov_report", "qmsum", "multi_news", "samsum"),
    "longbench_rouge_l_zh": ("dureader", "vcsum"),
    "classification": ("trec", "lsht"),
    "count": ("passage_count",),
    "retrieval": ("passage_retrieval_en", "passage_retrieval_zh"),
    "edit_similarity": ("lcc", "repobench-p"),
}
METRIC: Final = {name: metric for metric, names in _METRICS.items() for name in names}
FIRST_LINE: Final = ("trec", "triviaqa", "samsum", "lsht")  # of an output, its first line alone is scored

LONGBENCH: Final = "longbench"  # a column's metric where its sets have their own

TITLES: Final = {
    "NrtvQA": "narrativeqa",
    "Qasper": "qasper",
    "MF-en": "multifieldqa_en",
    "HotpotQA": "hotpotqa",
    "2WikiMQA": "2wikimqa",
    "Musique": "musique",
    "GovReport": "gov_report",
    "QMSum": "qmsum",
    "MultiNews": "multi_news",
    "TREC": "trec",
    "TriviaQA": "triviaqa",
    "SAMSum": "samsum",
    "PCount": "passage_count",
    "PRe": "passage_retrieval_en",
    "Lcc": "lcc",
    "RB-P": "repobench-p",
}
ENGLISH: Final = (
    *(Column(title, (name,), LONGBENCH) for title, name in TITLES.items()),
    Column("Ave. Score", of=tuple(TITLES)),
)

_GROUPS: Final = {
    "Code Complete": ("lcc", "repobench-p"),
    "Few Shot": ("trec", "triviaqa", "samsum", "lsht"),
    "Single-doc QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "Multi-doc QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "Summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "Passage Retrieval": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
}
GROUPS: Final = (
    *(Column(title, names, LONGBENCH) for title, names in _GROUPS.items()),
    Column("Average", of=tuple(_GROUPS)),
)
