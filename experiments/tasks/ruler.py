"""RULER's tasks (Hsieh et al. 2024, arXiv:2404.06654; Apache-2.0): needles, tracing, counting and questions.

Prompts and settings are those of its code, misspelling included. What is not RULER's here: "essays" are the task's
text, or the project's filler where there is none; sentences are cut by punctuation instead of nltk's model; draws come
from the run's seed; keys and values are all different; and every prompt is as long as fits, where RULER goes in steps
of 500 words or 25 sentences. A length is that of prompt and answer together. Below 4,096 tokens, where RULER defines
less, worked examples are shorter.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import string
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import scipy  # its parts are imported when they are first used

from kvjax.experiments.tasks.base import Builder, Example, Question, Task, Tokens, example, sentences, whole_text
from kvjax.experiments.tasks.rows import Row, row_of
from kvjax.experiments.tasks.text import check_enough, check_room, filler, most_that_fit

FULL = 4096  # tokens from which on RULER's settings hold
HOPS, COMMON, FREQUENT, ALPHA, LETTERS = 4, 10, 3, 2.0, 6
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_ASKED = "special magic {kind} for {keys} mentioned in the provided text"
_DEPTHS = tuple(int(d) for d in np.round(np.linspace(0, 100, 40)))  # percent of the sentences
_FEWEST_TOKENS = 8  # of a needle
_DATA = {"qa_1": "SQuAD 2.0 (dev-v2.0)", "qa_2": "HotpotQA (hotpot_dev_distractor_v1)"}
_GIVEN = "Answer the question based on the given documents. Only give me the answer and do not output any other words."

Kind = Literal["words", "numbers", "uuids"]


class Template(NamedTuple):
    """What is written before a haystack and after it, how the answer begins, and the answer's new tokens."""

    before: str
    question: str
    begun: str
    answer: int

    def asked(self, **given: Any) -> tuple[str, str]:
        """The question and how its answer begins, with what is asked for."""
        return self.question.format(**given), self.begun.format(**given)


class Hidden(NamedTuple):
    """What a needle task hides, and in what: the noise sentence again and again, the task's text, or other needles.

    There are `num_keys * num_values` needles, and `num_queries` keys are asked for.
    """

    about: str
    haystack: Literal["noise", "text", "needles"]
    keys: Kind
    values: Kind
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


TEMPLATES: Final = {
    "niah": Template(
        "{some} special magic {kind} {be} hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the {kind} afterwards.\n",
        "\nWhat {what} the {asked}?",
        " The {asked} {be}",
        128,
    ),
    "vt": Template(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        "\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined "
        "the value {value}, they are: ",
        30,
    ),
    "cwe": Template(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
        "that appear most often.\n",
        "\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
        120,
    ),
    "fwe": Template(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. ",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
        "frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        50,
    ),
    "qa": Template(
        f"{_GIVEN}\n\nThe following are given documents.\n\n", f"\n\n{_GIVEN}\n\nQuestion: {{question}}", " Answer:", 32
    ),
}
HIDDEN: Final = {
    "niah_single_1": Hidden("a number under a word, in a sentence that repeats", "noise", "words", "numbers"),
    "niah_single_2": Hidden("a number under a word, in running text", "text", "words", "numbers"),
    "niah_single_3": Hidden("a UUID under a word, in running text", "text", "words", "uuids"),
    "niah_multikey_1": Hidden("four numbers under words, one of which is asked for, in running text",
                              "text", "words", "numbers", num_keys=4),
    "niah_multikey_2": Hidden("a number under a word, among nothing but other words and their numbers",
                              "needles", "words", "numbers"),
    "niah_multikey_3": Hidden("a UUID under a UUID, among nothing but other UUIDs", "needles", "uuids", "uuids"),
    "niah_multivalue": Hidden("four numbers under one word, all of which are asked for, in running text",
                              "text", "words", "numbers", num_values=4),
    "niah_multiquery": Hidden("four numbers under four words, all of which are asked for, in running text",
                              "text", "words", "numbers", num_keys=4, num_queries=4),
}  # fmt: skip


def _fitted(
    name: str,
    task: Task,
    index: int,
    text: Callable[[int, np.random.Generator], str],
    asked: tuple[str, str],
    references: Sequence[str],
    *,
    needs: str,
    least: int,
    most: int,
    units: str = "",
    metric: str = "contains_all",
    clear: Callable[[int], bool] = lambda count: True,
    shared: bool = False,
    **meta: str,
) -> Example:
    """The example whose context, `text` of a count and a generator, has as many units as fit.

    A count that is not `clear`, of which the answer is not right, is lowered. A passage of the task's text may be
    `shared` by examples. Errors name what the least one `needs`,
    and its `units` where all that there are would fit, if they are limited.
    """
    ids, answer = task.ask(*map(task.encode, asked)), TEMPLATES[name.partition("_")[0]].answer
    answer = min(answer, task.answer or answer)

    def context(count: int) -> Tokens:
        return (*task.begin, *task.encode(text(count, task.rng(f"{name}/places", index))))

    size = lambda count: len(context(count)) + len(ids) + answer
    check_room(name, task, size(least), f"{needs} and {answer} tokens of answer")
    count = most_that_fit(size, task.length, least=least, most=most)
    if units:
        check_enough(name, task, count, range(most), size(count), units)
    while not clear(count):
        count -= 1
    meta |= task.shared(index) if shared else {}
    question = Question(ids, references=tuple(references), metric=metric, max_new_tokens=answer)
    return example(name, index, context(count), question, length=float(task.length), **meta)


def _named(name: str, about: str, build: Callable[[str, Task, int], Example]):
    """A task of a table as a function of its own, with a first line of its docstring that says what differs."""

    def builder(task: Task, index: int) -> Example:
        return build(name, task, index)

    builder.__name__ = builder.__qualname__ = name
    builder.__doc__ = f"RULER: {about}.\n\n{inspect.getdoc(build)}"
    return builder


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """All words of a kind, "noun", "adjective" or "verb", of the package wonderwords, in alphabetical order.

    Raises:
      ValueError: wonderwords is not installed.
    """
    try:
        wonderwords = importlib.import_module("wonderwords")
    except ImportError as e:
        raise ValueError(f"RULER draws words of the package wonderwords ({e}); pip install 'kvjax[eval]'") from e
    return tuple(sorted(set(wonderwords.RandomWord().filter("", include_categories=[kind]))))


# --- needles ---


def _niah(name: str, task: Task, index: int) -> Example:
    """A needle task; the score is the share of values that the answer holds.

    Raises:
      ValueError: a length too small for the needles, a text too short for the length, or wonderwords is not installed.
    """
    s, rng = HIDDEN[name], task.rng(name, index)
    keys, drawn = _of_kind(rng, s.keys, s.num_keys), _of_kind(rng, s.values, s.num_keys * s.num_values)
    values = [drawn[i : i + s.num_values] for i in range(0, len(drawn), s.num_values)]
    needles = [_NEEDLE.format(kind=s.values, key=k, value=v) for k, vs in zip(keys, values, strict=True) for v in vs]
    needles = [needles[i] for i in rng.permutation(len(needles))]
    chosen = rng.permutation(s.num_keys)[: s.num_queries]
    units = _units(task, index, s, rng, keys, drawn)

    one = s.num_queries * s.num_values == 1
    kind, *listed = s.values[:-1] if one else s.values, *(keys[i] for i in chosen)
    listed = ", ".join((*listed[:-1], f"and {listed[-1]}") if len(listed) > 1 else listed)
    be, what, some = ("is", "is", "A") if one else ("are", "are all", "Some")
    how, asked = TEMPLATES["niah"], _ASKED.format(kind=kind, keys=listed)
    before = how.before.format(some=some, kind=kind, be=be)
    question = how.asked(what=what, asked=asked, be=be)
    references, least = [v for i in chosen for v in values[i]], len(needles)
    join, hide, unit = (" ", _among, "words of the text") if s.haystack == "text" else ("\n", _before, "sentences")
    text = lambda count, places: before + join.join(hide(units[:count], needles, places))
    return _fitted(
        name, task, index, text, question, references, needs=f"{least} needles, question",
        least=least, most=len(units), units=unit, shared=s.haystack == "text",
    )  # fmt: skip


def _units(
    task: Task, index: int, s: Hidden, rng: np.random.Generator, keys: Sequence[str], values: Sequence[str]
) -> tuple[str, ...]:
    """What the haystack is made of, more than fits: words of text, or sentences without the keys and values given."""
    if s.haystack == "text":
        return _words_of(task, index)
    most = task.length // _FEWEST_TOKENS + 1
    if s.haystack == "noise":
        return (NOISE,) * most
    pairs = zip(_of_kind(rng, s.keys, most, keys), _of_kind(rng, s.values, most, values), strict=True)
    return tuple(_NEEDLE.format(kind=s.values, key=k, value=v) for k, v in pairs)


def _words_of(task: Task, index: int) -> tuple[str, ...]:
    """Words of the passage of an example, and behind it, more than fit; or of filler where there is no text."""
    if not task.text:
        return tuple(" ".join(filler(np.random.default_rng(task.seed), task.length)).split())
    words = itertools.chain.from_iterable(s.split() for s in task.turned(whole_text(task.text), index))
    return tuple(itertools.islice(words, task.length + 1))


def _of_kind(rng: np.random.Generator, kind: Kind, count: int, taken: Sequence[str] = ()) -> list[str]:
    """Random words, numbers or UUIDs, all different from each other and from those that are taken."""
    of = lambda known: known[rng.integers(len(known))]
    draw = {
        "numbers": lambda: str(rng.integers(10**6, 10**7)),
        "uuids": lambda: str(uuid.UUID(bytes=rng.bytes(16), version=4)),
        "words": lambda: f"{of(words('adjective'))}-{of(words('noun'))}",
    }
    return _distinct(draw[kind], count, taken)


def _distinct(draw: Callable[[], str], count: int, taken: Sequence[str] = ()) -> list[str]:
    """So many different strings that are drawn, none of them taken."""
    found = dict.fromkeys(taken)
    while len(found) < count + len(taken):
        found[draw()] = None
    return [*found][len(taken) :]


def _among(units: Sequence[str], needles: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Needles at different ones of 40 depths of running text, each after a sentence."""
    found = sentences(" ".join(units))
    depths = sorted(rng.choice(_DEPTHS, len(needles), replace=False))
    ends = [0, *(int(len(found) * depth / 100) for depth in depths), len(found)]
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        parts += [*found[start:end], *needles[i : i + 1]]
    return parts


def _before(units: Sequence[str], needles: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Needles before different ones of the units, the last needle first."""
    lines = list(units)
    places = sorted(rng.choice(len(lines), len(needles), replace=False), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return lines


# --- tracing and counting ---


def vt(task: Task, index: int) -> Example:
    """RULER: a chain of five variables, four of which take the value of the one before; all five are asked for.

    A worked example of its own chain goes before. The score is the share of variables that the answer holds.

    Raises:
      ValueError: a length too small for the chain.
    """
    rng = task.rng("vt", index)
    shown, shown_chain, shown_value = _chain(rng, letters=3)
    names, chain, value = _chain(rng, letters=5)
    how, noises = TEMPLATES["vt"], 10 if task.length >= FULL else HOPS + 1
    asked = lambda value: how.asked(value=value, count=HOPS + 1)
    before = f"{_tracked(noises, shown_chain, rng)}{''.join(asked(shown_value))} {' '.join(shown)}\n\n\n\n"
    return _fitted(
        "vt", task, index, lambda count, places: before + _tracked(count, chain, places), asked(value), names,
        needs="a worked example, the chain, question", least=len(chain), most=task.length,
    )  # fmt: skip


def _chain(rng: np.random.Generator, letters: int) -> tuple[list[str], list[str], int]:
    """Different names of variables, the assignments of a chain in their order, and its value."""
    names = _strings(rng, HOPS + 1, string.ascii_uppercase, letters)
    value = int(rng.integers(10_000, 99_999))
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    return names, lines, value


def _strings(rng: np.random.Generator, count: int, letters: str, length: int) -> list[str]:
    """Different strings of random letters."""
    return _distinct(lambda: "".join(letters[i] for i in rng.integers(len(letters), size=length)), count)


def _tracked(noises: int, chain: list[str], rng: np.random.Generator) -> str:
    """The task, and the assignments in their order before different ones of the noise lines."""
    lines = _before([f"{NOISE}\n"] * noises, chain[::-1], rng)
    return TEMPLATES["vt"].before + " ".join(lines).replace(". \n", ".\n")


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
    example_words = [known[i] for i in rng.permutation(len(known))[: 40 if full else 20]]
    shown = _numbered(example_words, *((10, 3) if full else (3, 1)), rng)
    answer = " ".join(f"{i + 1}. {w}" for i, w in enumerate(example_words[:COMMON]))
    how, (often, seldom) = TEMPLATES["cwe"], (30, 3) if full else (6, 1)
    before = f"{how.before}{shown}{how.question}{how.begun}{answer}\n{how.before}"
    return _fitted(
        "cwe", task, index, lambda count, places: before + _numbered(drawn[:count], often, seldom, places),
        how.asked(), drawn[:COMMON], least=COMMON + 1, most=len(drawn), units="words",
        needs=f"a worked example, {COMMON} common words and another, question",
    )  # fmt: skip


def _numbered(found: list[str], often: int, seldom: int, rng: np.random.Generator) -> str:
    """A numbered list of words in random order, the first ten of them more often."""
    listed = found[:COMMON] * often + found[COMMON:] * seldom
    return " ".join(f"{i + 1}. {listed[j]}" for i, j in enumerate(rng.permutation(len(listed))))


def fwe(task: Task, index: int) -> Example:
    """RULER: coded words whose counts fall with the square of their rank; the three most frequent are asked for.

    Words have six letters. The first rank is dots, which do not count. RULER's vocabulary is a fiftieth of the length;
    its prompts exceed the length by the answer, ours do not. The score is the share of words that the answer holds.

    Raises:
      ValueError: a length too small for the fourth rank to be more frequent than the fifth.
    """
    how, num_words = TEMPLATES["fwe"], max(task.length // 50, FREQUENT + 2)
    vocabulary = ["...", *_strings(task.rng("fwe", index), num_words, string.ascii_lowercase, LETTERS)[1:]]

    def counts(total: int) -> np.ndarray:
        return (total * np.arange(1, num_words + 1) ** -ALPHA / scipy.special.zeta(ALPHA)).astype(int)

    def text(total: int, places: np.random.Generator) -> str:
        listed = places.permutation(np.repeat(np.arange(num_words), counts(total)))
        return how.before + " ".join(vocabulary[i] for i in listed)

    clear = lambda total: all(np.diff(counts(total)[1 : FREQUENT + 2]) < 0)
    return _fitted(
        "fwe", task, index, text, how.asked(), vocabulary[1 : FREQUENT + 1], clear=clear,
        needs="words of clear frequencies, question", least=next(t for t in range(1, 1000) if clear(t)),
        most=task.length,
    )  # fmt: skip


# --- questions over rows ---


def _qa(name: str, task: Task, index: int) -> Example:
    """A row's question over its documents and as many of other rows as fit; right where any reference is contained.

    RULER takes SQuAD 2.0 (qa_1) and HotpotQA (qa_2), neither of which comes with the project: the rows are one's own.
    A row has `question`, `answers` or `answer`, and `context`: one text, as in SQuAD, or several with their titles, as
    in HotpotQA; `title` tells which texts belong together, and those of the same title are the first distractors. Rows
    that cannot be asked, as SQuAD 2.0's without an answer, still lend their documents.

    Raises:
      ValueError: no such row, one that lacks a field, or documents that are too many or too few for the length.
    """
    hint = f"; RULER's own are {_DATA[name]}: give rows with question, answers and context as --tasks {name}:rows.jsonl"
    row = row_of(name, task, index, hint)
    references, own, others = row.answers("answers", "answer"), _documents(row), _titles(_Same(task.rows))
    is_near = lambda title: title is not None and title == row.fields.get("title")
    near = [d for d, title in others.items() if is_near(title) and d not in own]
    far = [d for d, title in others.items() if not is_near(title) and d not in own]
    rng = task.rng(name, index)
    ordered = (*own, *(group[i] for group in (near, far) for i in rng.permutation(len(group))))
    how, asked = TEMPLATES["qa"], row.text("question")
    same = f"{zlib.crc32(''.join(own).encode()):08x}"  # rows that share a context are not independent

    def text(count: int, places: np.random.Generator) -> str:
        numbered = enumerate(places.permutation(count), 1)
        return how.before + "\n\n".join(f"Document {n}:\n{ordered[place]}" for n, place in numbered)

    return _fitted(
        name, task, index, text, how.asked(question=asked), references, needs=f"row {index}, its question",
        least=len(own), most=len(ordered), units="documents", metric="contains", same_context=same,
    )  # fmt: skip


class _Same:
    """Rows that equal no others: they hold lists, which have no hash."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.rows = rows

    def __hash__(self) -> int:
        return id(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.rows is other.rows


@functools.lru_cache(maxsize=2)
def _titles(data: _Same) -> dict[str, Any]:
    """The documents of every row that has some, each with the title of the first such row."""
    found: dict[str, Any] = {}
    for i, row in enumerate(data.rows):
        with contextlib.suppress(ValueError):  # it is named when it is asked for
            for document in _documents(Row("", i, row)):
                found.setdefault(document, row.get("title"))
    return found


def _documents(row: Row) -> tuple[str, ...]:
    """The documents of a row, a title in the first line where each has its own."""
    found = row.first("context")
    try:
        if isinstance(found, Mapping):
            found = list(zip(found["title"], found["sentences"], strict=True))
        if not isinstance(found, str):
            found = [f"{title}\n{''.join(parts)}" for title, parts in found]
    except (KeyError, TypeError, ValueError) as e:
        raise row.error(
            "context must be text, or documents as HotpotQA has them: pairs of a title and a list of sentences, or "
            f"lists 'title' and 'sentences' ({type(e).__name__}: {e})"
        ) from e
    found = tuple(d.strip() for d in ([found] if isinstance(found, str) else found) if d.strip())
    if not found:
        raise row.error("context has no text")
    return found


RULER: dict[str, Builder] = {
    **{name: _named(name, hidden.about, _niah) for name, hidden in HIDDEN.items()},
    **{"vt": vt, "cwe": cwe, "fwe": fwe},
    "qa_1": _named("qa_1", "a question of SQuAD's form over one's own rows, its document among others", _qa),
    "qa_2": _named("qa_2", "a question of HotpotQA's form over one's own rows, its documents among others", _qa),
}
"""RULER's tasks by their names."""
