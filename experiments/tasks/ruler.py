"""RULER's tracing and counting: vt, cwe and fwe (Hsieh et al. 2024, arXiv:2404.06654; Apache-2.0).

Prompts and settings are RULER's, misspelling included; draws come from the run's seed, and every prompt is as long as
fits. A length is that of prompt and answer together. Below 4,096 tokens, where RULER defines less, worked examples are
shorter.
"""

import itertools
import string

import numpy as np
import scipy  # its parts are imported when they are first used

from kvjax.experiments.tasks.base import Example, Question, Task, Tokens, example
from kvjax.experiments.tasks.ruler_needles import NOISE
from kvjax.experiments.tasks.ruler_words import words
from kvjax.experiments.tasks.text import check_enough, check_room, most_that_fit

FULL = 4096  # tokens from which on RULER's settings hold

# --- variable tracking ---

VT_ANSWER, HOPS = 30, 4
_VT_TASK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_VT_QUESTION = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assgined the value {value}, they are: "
)


def vt(task: Task, index: int) -> Example:
    """RULER: a chain of five variables, four of which take the value of the one before; all five are asked for.

    A worked example of its own chain goes before. The score is the share of variables that the answer holds.

    Raises:
      ValueError: a length too small for the chain.
    """
    rng = task.rng("vt", index)
    shown, shown_chain, shown_value = _chain(rng, letters=3)
    names, chain, value = _chain(rng, letters=5)
    noises = 10 if task.length >= FULL else HOPS + 1
    before = _tracked(noises, shown_chain, rng) + _vt_question(shown_value) + " " + " ".join(shown) + "\n\n\n\n"
    question = tuple(task.encode(_vt_question(value)))

    def context(count: int) -> Tokens:
        text = before + _tracked(count, chain, task.rng("vt/places", index))
        return (*task.bos, *task.encode(text))

    size = lambda count: len(context(count)) + len(question) + VT_ANSWER
    check_room("vt", task, size(len(chain)), f"a worked example, the chain, question and {VT_ANSWER} tokens of answer")
    count = most_that_fit(size, task.length, least=len(chain), most=task.length)
    asked = Question(question, references=tuple(names), metric="contains_all", max_new_tokens=VT_ANSWER)
    return example("vt", index, context(count), asked, length=float(task.length))


def _chain(rng: np.random.Generator, letters: int) -> tuple[list[str], list[str], int]:
    """Different names of variables, the assignments of a chain in their order, and its value."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(string.ascii_uppercase[i] for i in rng.integers(26, size=letters))
        if name not in names:
            names.append(name)
    value = int(rng.integers(10_000, 99_999))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    return names, lines, value


def _tracked(noises: int, chain: list[str], rng: np.random.Generator) -> str:
    """The task, and the assignments in their order before different ones of the noise lines."""
    lines = [f"{NOISE}\n"] * noises
    places = np.sort(rng.choice(noises, len(chain), replace=False))
    for i, (place, line) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + i, line)
    return _VT_TASK + " ".join(lines).replace(". \n", ".\n")


def _vt_question(value: int) -> str:
    return _VT_QUESTION.format(value=value, count=HOPS + 1)


# --- common words ---

CWE_ANSWER, COMMON = 120, 10
_CWE_TASK = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
_CWE_QUESTION = (
    "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often "
    "in the list are:"
)


def cwe(task: Task, index: int) -> Example:
    """RULER: a numbered list of words, ten of which stand in it 30 times and all others 3 times; the ten are asked for.

    A worked example of 40 words, 10 and 3 times, goes before. Below 4,096 tokens they stand in the list 6 times and
    once, and in one of 20 words 3 times and once. The score is the share of words that the answer holds.

    Raises:
      ValueError: a length too small for ten common words and another, too large for the words that there are, or
        wonderwords is not installed.
    """
    rng = task.rng("cwe", index)
    known = sorted({w for kind in ("noun", "adjective", "verb") for w in words(kind)})
    full = task.length >= FULL
    drawn = [known[i] for i in rng.permutation(len(known))]
    shown, answer = _numbered([known[i] for i in rng.permutation(len(known))[: 40 if full else 20]],
                              *((10, 3) if full else (3, 1)), rng)  # fmt: skip
    before = f"{_CWE_TASK}{shown}{_CWE_QUESTION}{' '.join(f'{i + 1}. {w}' for i, w in enumerate(answer))}\n{_CWE_TASK}"
    question = tuple(task.encode(_CWE_QUESTION))
    often, seldom = (30, 3) if full else (6, 1)

    def context(count: int) -> Tokens:
        listed = _numbered(drawn[:count], often, seldom, task.rng("cwe/places", index))[0]
        return (*task.bos, *task.encode(before + listed))

    size = lambda count: len(context(count)) + len(question) + CWE_ANSWER
    what = f"a worked example, {COMMON} common words and another, question and {CWE_ANSWER} tokens of answer"
    check_room("cwe", task, size(COMMON + 1), what)
    count = most_that_fit(size, task.length, least=COMMON + 1, most=len(drawn))
    check_enough("cwe", task, count, drawn, size(count), "words")
    references = tuple(drawn[:COMMON])
    asked = Question(question, references=references, metric="contains_all", max_new_tokens=CWE_ANSWER)
    return example("cwe", index, context(count), asked, length=float(task.length))


def _numbered(found: list[str], often: int, seldom: int, rng: np.random.Generator) -> tuple[str, list[str]]:
    """A numbered list of words in random order, the first ten of them more often, and these ten."""
    common, others = found[:COMMON], found[COMMON:]
    listed = common * often + others * seldom
    return " ".join(f"{i + 1}. {listed[j]}" for i, j in enumerate(rng.permutation(len(listed)))), common


# --- frequent words ---

FWE_ANSWER, FREQUENT, ALPHA, LETTERS = 50, 3, 2.0, 6
_FWE_TASK = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. "
)
_FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)


def fwe(task: Task, index: int) -> Example:
    """RULER: coded words whose counts fall with the square of their rank; the three most frequent are asked for.

    Words have six letters. The first rank is dots, which do not count. RULER's vocabulary is a fiftieth of the length;
    its prompts exceed the length by the answer, ours do not. The score is the share of words that the answer holds.

    Raises:
      ValueError: a length too small for the fourth rank to be more frequent than the fifth.
    """
    rng = task.rng("fwe", index)
    num_words = max(task.length // 50, FREQUENT + 2)
    coded: dict[str, None] = {}
    while len(coded) < num_words:
        coded["".join(string.ascii_lowercase[i] for i in rng.integers(26, size=LETTERS))] = None
    vocabulary = ["...", *list(coded)[1:]]
    question = tuple(task.encode(_FWE_QUESTION))

    def counts(total: int) -> np.ndarray:
        return (total * np.arange(1, num_words + 1) ** -ALPHA / scipy.special.zeta(ALPHA)).astype(int)

    def context(total: int) -> Tokens:
        listed = np.repeat(np.arange(num_words), counts(total))
        listed = task.rng("fwe/places", index).permutation(listed)
        return (*task.bos, *task.encode(_FWE_TASK + " ".join(vocabulary[i] for i in listed)))

    size = lambda total: len(context(total)) + len(question) + FWE_ANSWER
    clear = lambda total: all(np.diff(counts(total)[1 : FREQUENT + 2]) < 0)
    least = next(total for total in range(1, 1000) if clear(total))
    check_room("fwe", task, size(least), f"words of clear frequencies, question and {FWE_ANSWER} tokens of answer")
    total = most_that_fit(size, task.length, least=least, most=task.length)
    while not clear(total):
        total -= 1
    references = tuple(vocabulary[1 : FREQUENT + 1])
    asked = Question(question, references=references, metric="contains_all", max_new_tokens=FWE_ANSWER)
    return example("fwe", index, context(total), asked, length=float(task.length))
