"""How well generated text matches references: numbers in [0, 1], by their names in the field.

Where there are several references, the best counts, but for `contains_all` and `values_in_place`, which need them all.

| metric | what it is | where it is used |
|---|---|---|
| `exact_match` | equal after SQuAD's normalisation: lower case, no punctuation, no a, an, the | question answering |
| `f1` | F1 of words after that normalisation | SQuAD, LongBench's English questions |
| `f1_zh` | F1 of words as jieba cuts them, without punctuation | LongBench's Chinese questions |
| `contains` | a reference stands in the output, in upper or lower case | RULER's qa (`string_match_part`) |
| `contains_all` | the share of references that do | RULER's other tasks (`string_match_all`) |
| `values_in_place` | the share of values found, the first at the start | kvjax's retrieval tasks |
| `rouge_1`, `rouge_2`, `rouge_l` | F-measures with stemming, by rouge-score | CNN/DailyMail |
| `longbench_rouge_l` | F-measure of distinct words, by rouge | LongBench's English summaries |
| `longbench_rouge_l_zh` | the same of words as jieba cuts them | LongBench's Chinese summaries |
| `bleu` | BLEU of a sentence, by sacrebleu | translation, reconstruction |
| `meteor` | METEOR, by nltk and WordNet | summaries |
| `edit_similarity` | of the first line of code to the reference, by difflib | LongBench's code completion |
| `names` | the share of the reference's names (several capitalised words) that the output has | RoCo's Figure 6 |
| `final_step` | the last step equals the reference's; a step ends with ";" | kvjax's tasks that think aloud |
| `leading_steps` | the share of the reference's steps before the first that is otherwise | those |
| `count` | the share of the output's numbers that equal the reference | LongBench's passage_count |
| `retrieval` | the share that equal the reference's paragraph | LongBench's passage_retrieval |

LongBench's classification is not among them: it weighs the right class against all others that an output names, and
so needs to know the classes.
"""

import collections
import dataclasses
import difflib
import functools
import inspect
import itertools
import logging
import numbers
import re
import string
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvjax.configs import loading
from kvjax.experiments.core.command import imported

Function = Callable[[str, Sequence[str]], float]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A function (output, references) -> number in [0, 1].

    Attributes:
      name: what results call it.
      function: what it is.
      prepare: raises ValueError where something that the function needs is missing.
    """

    name: str
    function: Function
    prepare: Callable[[], Any] = lambda: None

    def __call__(self, output: str, references: Sequence[str]) -> float:
        """The score of an output.

        Raises:
          ValueError: references that are no list of texts, none, or a blank one; or a function that returns anything
            but a number in [0, 1].
        """
        if isinstance(references, str) or not references or not all(isinstance(r, str) for r in references):
            raise ValueError(f"{self.name}: references must be a list of at least one text, not {references!r:.100}")
        if not all(r.strip() for r in references):
            raise ValueError(f"{self.name}: a reference is blank, which every output would match; leave it out")
        score = self.function(output, references)
        if not isinstance(score, numbers.Real) or not 0 <= score <= 1:
            raise ValueError(f"{self.name} returned {score!r:.100}, but a metric is a number in [0, 1]")
        return float(score)


def find(name: str) -> Metric:
    """A metric by name, ready to be used.

    Args:
      name: one of `METRICS`, or "path.py:function" for a function (output, references) of one's own.

    Raises:
      ValueError: no such metric, naming those that exist; or something that it needs is missing.
    """
    if name in METRICS:
        METRICS[name].prepare()
        return METRICS[name]
    if ".py:" not in name:
        raise loading.unknown("metric", name, METRICS, "write path.py:function for your own")
    function = loading.function(name)
    try:
        inspect.signature(function).bind("output", ["reference"])
    except TypeError as e:
        raise ValueError(f"{name} cannot be called with (output, references): {e}") from e
    return Metric(name, function)


# --- how references are taken together, and what libraries are needed ---


def _best(score: Callable[[str, str], float]) -> Function:
    """The best score over references."""
    return lambda output, references: max(score(output, reference) for reference in references)


def _library(module: str) -> types.ModuleType:
    """A module of the extra "eval".

    Raises:
      ValueError: it is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jieba's source has escapes that Python warns about
        return imported(module, "eval")


# --- words ---

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
# What LongBench takes for punctuation in Chinese; some brackets are not among them.
_PUNCTUATION_ZH: Final = re.compile(
    rf"[\s{re.escape(string.punctuation)}–—‘’‛-‟…‧、-〃》-】〔-〟〰〾〿﹏！-－／：-｠｢-､｡｛-､［-｀]"  # noqa: RUF001
)


def _normalised(text: str) -> str:
    """Text as SQuAD's evaluation compares it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of two bags of words; of two empty ones 1, as in SQuAD 2 (LongBench gives 0)."""
    if not found or not wanted:
        return float(found == wanted)
    return 2 * (collections.Counter(found) & collections.Counter(wanted)).total() / (len(found) + len(wanted))


def _cut(text: str) -> list[str]:
    """The words of Chinese text."""
    jieba = _library("jieba")
    jieba.setLogLevel(logging.WARNING)
    return list(jieba.cut(text))


def _words_zh(text: str) -> list[str]:
    words = (_PUNCTUATION_ZH.sub("", word.lower()) for word in _cut(text.strip()))
    return [word for word in words if word]


# --- containment ---


def _contains(output: str, reference: str) -> bool:
    return reference.lower() in output.lower()


def _values_in_place(output: str, references: Sequence[str]) -> float:
    """The share of values that text holds: the first at its start, others anywhere; white space is one space."""
    text, first, *others = (" ".join(t.split()) for t in (output, *references))
    return (text.startswith(first) + sum(value in text for value in others)) / len(references)


def _names(output: str, reference: str) -> float:
    """The share of a reference's names that an output holds."""
    names = {*re.findall(r"\b[A-Z][\w'.\u2019-]*(?: [A-Z][\w'\u2019-]*\w)+", reference)}
    if not names:
        raise ValueError(f"names: there are no two capitalised words in a row in {reference!r:.60}")
    return sum(name in output for name in names) / len(names)


def _share_of_numbers(output: str, wanted: str) -> float:
    found = re.findall(r"\d+", output)
    return found.count(wanted) / len(found) if found else 0.0


def _final_step(output: str, reference: str) -> float:
    return float(_steps(output)[-1] == _steps(reference)[-1])


def _leading_steps(output: str, reference: str) -> float:
    wanted = _steps(reference)
    same = (a == b for a, b in zip(_steps(output), wanted, strict=False))
    return len([*itertools.takewhile(bool, same)]) / len(wanted)


def _steps(text: str) -> list[str]:
    """Steps of an answer, each with one space between its words."""
    return [" ".join(step.split()) for step in text.split(";")]


def _retrieval(output: str, reference: str) -> float:
    paragraph = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    if paragraph is None:
        raise ValueError(f"retrieval: a reference must be like 'Paragraph 7' or '段落7', not {reference!r:.100}")
    return _share_of_numbers(output, paragraph[1])


# --- overlap ---


@functools.cache
def _rouge_score(kind: str) -> Any:
    return _library("rouge_score.rouge_scorer").RougeScorer([kind], use_stemmer=True)


def _rouge(kind: str) -> Function:
    """ROUGE as rouge-score computes it, which drops all but Latin letters and digits."""

    def score(output: str, reference: str) -> float:
        if not re.search("[a-z0-9]", reference.lower()):
            raise ValueError(f"ROUGE here counts Latin letters and digits, of which {reference!r:.60} has none")
        return _rouge_score(kind).score(reference, output)[kind].fmeasure

    return _best(score)


def _longbench_rouge_l(output: str, reference: str) -> float:
    """ROUGE-L of distinct words over sentences that end in a full stop; 0 for an output without words.

    The library walks back along the common words by recursion, and LongBench gives 0 where Python's limit stops it.
    Here the limit makes room.
    """
    output, limit = output.strip(), sys.getrecursionlimit()
    if not output.replace(".", "").strip() or not reference.replace(".", "").strip():
        return 0.0
    scorer = _library("rouge").Rouge(metrics=["rouge-l"])
    sys.setrecursionlimit(limit + len(output.split()) + len(reference.split()))
    try:
        return scorer.get_scores(output, reference)[0]["rouge-l"]["f"]
    finally:
        sys.setrecursionlimit(limit)


def _longbench_rouge_l_zh(output: str, reference: str) -> float:
    return _longbench_rouge_l(" ".join(_cut(output.strip())), " ".join(_cut(reference)))


def _bleu(output: str, references: Sequence[str]) -> float:
    """BLEU of one sentence, smoothed exponentially; the BLEU of a corpus is not the mean over its sentences."""
    return min(1.0, _library("sacrebleu").sentence_bleu(output, list(references)).score / 100)


def _wordnet() -> None:
    """Raises ValueError where METEOR's data are missing."""
    corpus = _library("nltk.corpus")
    try:
        corpus.wordnet.synsets("text")
    except LookupError as e:
        raise ValueError(
            "meteor needs the WordNet data of nltk, which are in none of its folders; run "
            "python -c \"import nltk; nltk.download('wordnet')\", or set NLTK_DATA to a folder with corpora/wordnet"
        ) from e


def _meteor(output: str, references: Sequence[str]) -> float:
    """METEOR of words as the Penn Treebank splits them."""
    words = _library("nltk.tokenize").NLTKWordTokenizer().tokenize
    return _library("nltk.translate.meteor_score").meteor_score([words(r) for r in references], words(output))


def _edit_similarity(output: str, reference: str) -> float:
    """Of the first line that is neither a comment nor a fence, to whole percent as LongBench rounds it.

    As there, blank lines before all others are skipped and a later one is a line: after a comment it scores 0.
    """
    line = next((line for line in output.lstrip("\n").split("\n") if not re.search("`|#|//", line)), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


# --- all of them ---


def _needs(*modules: str) -> Callable[[], None]:
    def prepare() -> None:
        for module in modules:
            _library(module)

    return prepare


METRICS: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric("exact_match", _best(lambda output, reference: float(_normalised(output) == _normalised(reference)))),
        Metric("f1", _best(lambda output, reference: _f1(*(_normalised(t).split() for t in (output, reference))))),
        Metric("f1_zh", _best(lambda output, reference: _f1(*map(_words_zh, (output, reference)))), _needs("jieba")),
        Metric("contains", _best(_contains)),
        Metric("contains_all", lambda output, refs: sum(_contains(output, r) for r in refs) / len(refs)),
        Metric("values_in_place", _values_in_place),
        *(
            Metric(name, _rouge(kind), _needs("rouge_score.rouge_scorer"))
            for name, kind in (("rouge_1", "rouge1"), ("rouge_2", "rouge2"), ("rouge_l", "rougeL"))
        ),
        Metric("longbench_rouge_l", _best(_longbench_rouge_l), _needs("rouge")),
        Metric("longbench_rouge_l_zh", _best(_longbench_rouge_l_zh), _needs("rouge", "jieba")),
        Metric("bleu", _bleu, _needs("sacrebleu")),
        Metric("meteor", _meteor, _wordnet),
        Metric("edit_similarity", _best(_edit_similarity)),
        Metric("names", _best(_names)),
        Metric("count", _best(lambda output, reference: _share_of_numbers(output, reference.strip()))),
        Metric("retrieval", _best(_retrieval)),
        Metric("final_step", _best(_final_step)),
        Metric("leading_steps", _best(_leading_steps)),
    )
}
"""Every metric by its name; `find` makes sure that one can be used."""
