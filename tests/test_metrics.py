"""Text metrics against values worked out by hand, and against the harness that LongBench is run with."""

import importlib
import json
import sys

import pytest

from kvjax.experiments.core import metrics

REFERENCES = {"count": "12", "retrieval": "Paragraph 7", "names": "Al Pacino"}
REFERENCES |= {"f1_zh": "我喜欢苹果", "longbench_rouge_l_zh": "我喜欢苹果"}
FACTS = [
    ("exact_match", "The  Eiffel Tower!", ["Paris", "eiffel tower"], 1.0),
    ("exact_match", "It is the Eiffel Tower", ["eiffel tower"], 0.0),
    ("f1", "the cat sat", ["a cat ran"], 1 / 2),  # articles do not count
    ("f1", "cat cat cat", ["dog", "cat ran"], 2 / 5),  # one of three, one of two
    ("f1_zh", "我喜欢苹果。", ["我喜欢香蕉"], 2 / 3),
    ("contains", "they met in PARIS.", ["London", "Paris"], 1.0),
    ("contains", "they met in Rome", ["London", "Paris"], 0.0),
    ("contains_all", "12, 35 and 7", ["35", "12", "9", "8"], 2 / 4),
    ("values_in_place", "12  34 and\nthe key 7", ["12 34", "key 7", "key 8"], 2 / 3),
    ("values_in_place", "so 12 34", ["12 34"], 0.0),
    ("rouge_1", "the cats sat", ["the cat ran home"], 2 * 2 / 7),  # stems agree
    ("rouge_2", "the cats sat", ["the cat ran home"], 2 * 1 / 5),
    ("rouge_l", "sat the cats", ["the cat ran home"], 2 * 2 / 7),
    ("longbench_rouge_l", "the cat the cat sat", ["the cat ran"], 2 / 3),  # distinct words
    ("longbench_rouge_l", " ... ", ["the cat ran"], 0.0),
    ("longbench_rouge_l", "a " * 600, ["b " * 600], 0.0),  # beyond what Python's limit of recursion allows
    ("longbench_rouge_l_zh", "我喜欢苹果", ["我喜欢香蕉"], 2 / 3),
    ("bleu", "a b c d e", ["a b c d f"], (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)),
    ("meteor", "the car", ["the auto"], 1 - 0.5 * (1 / 2) ** 3),  # two words, one of them a synonym, in one chunk
    ("edit_similarity", "\n\n# sets x\n```python\nx = 1\ny = 2", ["x = 2"], 4 / 5),
    ("edit_similarity", "# sets x\n\nx = 2", ["x = 2"], 0.0),  # LongBench takes the blank line after a comment
    ("edit_similarity", "# nothing else", ["x = 2"], 0.0),
    ("names", "Al Pacino, Lin-Manuel O'Hara", ["1. **Al Pacino** It\n2. Lin-Manuel O'Hara, Meryl B. Streep"], 2 / 3),
    ("count", "There are 12 of 30, so 12.", ["12"], 2 / 3),
    ("final_step", "a = 1 ;  b = 2 ; final  2", ["a = 7 ; final 2"], 1.0),
    ("final_step", "final 2 ; b", ["final 2"], 0.0),
    ("leading_steps", "a = 1 ; b = 3 ; final 2", ["a = 1 ; b = 2 ; final 2"], 1 / 3),
    ("retrieval", "Paragraph 7, not 17 or 70", ["Paragraph 7"], 1 / 3),
    ("retrieval", "段落7", ["段落7"], 1.0),
]


def ready(name):
    """A metric, where what it needs is installed."""
    try:
        return metrics.find(name)
    except ValueError as e:
        return pytest.skip(str(e))


@pytest.mark.parametrize(("name", "output", "references", "expected"), FACTS)
def test_values_by_hand(name, output, references, expected):
    assert ready(name)(output, references) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", metrics.METRICS)
def test_every_metric_is_one_for_its_reference_and_zero_for_nothing(name):
    reference, metric = REFERENCES.get(name, "five words for the cat"), ready(name)
    assert metric(reference, [reference]) == pytest.approx(1.0, abs=0.01)  # METEOR is a little less
    assert metric("", [reference]) == 0.0
    other = reference.replace("7", "8").replace("12", "13") + " and more"
    if name not in ("contains_all", "values_in_place"):
        assert metric(reference, [other, reference]) >= metric(reference, [reference])


@pytest.mark.parametrize("name", ["f1_zh", "rouge_l", "longbench_rouge_l", "bleu", "meteor"])
def test_a_missing_library_is_told_before_anything_runs(name, monkeypatch):
    for module in ("jieba", "rouge_score.rouge_scorer", "rouge", "sacrebleu", "nltk.corpus"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"\w+ cannot be imported .*pip install 'kvjax\[eval\]'"):
        metrics.find(name)


def test_missing_data_of_meteor_are_told_before_anything_runs(monkeypatch):
    corpus = pytest.importorskip("nltk.corpus")
    loader = corpus.util.LazyCorpusLoader("wordnet", corpus.reader.WordNetCorpusReader, None)
    monkeypatch.setattr(corpus, "wordnet", loader)  # not yet loaded
    monkeypatch.setattr(importlib.import_module("nltk.data"), "path", [])
    with pytest.raises(ValueError, match=r"nltk\.download\('wordnet'\)"):
        metrics.find("meteor")


def test_a_metric_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def half(output, references): return 0.5\n"
        "def percent(output, references): return 50\n"
        "def alone(output): return 1.0\n"
        "def breaks(output, references): return 1 / 0\n"
    )
    assert metrics.find(f"{file}:half")("", ["a"]) == 0.5
    with pytest.raises(ValueError, match=r"percent returned 50, but a metric is a number in \[0, 1\]"):
        metrics.find(f"{file}:percent")("", ["a"])
    with pytest.raises(ValueError, match=r"alone cannot be called with \(output, references\)"):
        metrics.find(f"{file}:alone")
    with pytest.raises(ValueError, match=r"mine.py, line 4: ZeroDivisionError"):
        metrics.find(f"{file}:breaks")("", ["a"])
    with pytest.raises(ValueError, match="defines no function 'third'; it has half, percent, alone, breaks"):
        metrics.find(f"{file}:third")
    with pytest.raises(ValueError, match="there is no Python file"):
        metrics.find(f"{tmp_path}/other.py:half")
    with pytest.raises(ValueError, match=r"no metric 'acc'; there are exact_match, .*path\.py:function"):
        metrics.find("acc")


@pytest.mark.parametrize(
    ("name", "references", "message"),
    [
        ("f1", "cat", "list of at least one text, not 'cat'"),
        ("f1", [12], r"list of at least one text, not \[12\]"),
        ("rouge_l", ["我喜欢苹果"], "Latin letters and digits"),
    ],
)
def test_references_that_are_refused(name, references, message):
    with pytest.raises(ValueError, match=message):
        ready(name)("a cat", references)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "theirs", "sets"),
    [
        ("f1", "qa_f1", "2wikimqa hotpotqa multifieldqa_en musique narrativeqa qasper triviaqa"),
        ("f1_zh", "qa_f1_zh", "multifieldqa_zh"),
        ("longbench_rouge_l", "rouge", "gov_report multi_news qmsum samsum"),
        ("longbench_rouge_l_zh", "rouge_zh", "dureader vcsum"),
        ("edit_similarity", "code_sim", "lcc repobench-p"),
        ("count", "count", "passage_count"),
        ("retrieval", "retrieval", "passage_retrieval_en"),
        ("retrieval", "retrieval_zh", "passage_retrieval_zh"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the harness and its libraries
def test_longbench_rows_are_scored_as_by_the_harness(name, theirs, sets, shared_data):
    harness = pytest.importorskip("lm_eval.tasks.longbench.metrics", exc_type=ImportError)
    score, mine = getattr(harness, f"get_{theirs}_score"), ready(name)
    for task in sets.split():
        for row in json.loads((shared_data / "longbench_mini" / f"{task}.json").read_text()).values():
            (expected,) = score({"answers": row["gold"]}, [row["prediction"]]).values()
            assert mine(row["prediction"], row["gold"]) == pytest.approx(expected, abs=1e-9)
