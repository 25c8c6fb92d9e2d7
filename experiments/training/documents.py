"""Documents that teach retrieval in many ways: running text, copies, facts in several wordings, lists.

Everything is text that any tokenizer reads. Words follow each other with a space before each, so that pieces which are
encoded one by one are what the whole text would be.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from kvjax.experiments import corpus
from kvjax.experiments.corpus import Phrasing
from kvjax.experiments.training.loop import ANSWER, FIRST, LANGUAGE

Ids = tuple[int, ...]


WORDINGS = (
    *corpus.PHRASINGS,
    Phrasing(("the code for", "is"), ("what is the code for", "?"), (":",)),
    Phrasing(("", "has the number"), ("which number has", "?"), (":",)),
    Phrasing(("note : the secret of", "was"), ("the secret of", ", please ."), ("it was",)),
    Phrasing(("they list", "with"), ("please list", "."), ("", "with")),
    Phrasing(("is", "near ? she has"), ("question :", "?"), ("answer :",)),
)
PAIR = Phrasing(("", ""), ("", ""), ("",))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What documents of a stage of training are like.

    Attributes:
      digits: lengths of values.
      worded: share of values that are words.
      filler: range of the share of sentences among facts.
      backwards: share of questions that give the value and ask for its name.
      echo: echoes are shorter than this many tokens.
    """

    digits: tuple[int, ...] = (2, 3, 4)
    worded: float = 0.3
    filler: tuple[float, float] = (0.0, 0.0)
    backwards: float = 0.1
    echo: int = 13


Say = Callable[[Sequence[int], int | Sequence[int]], None]


class Documents:
    """Draws documents, encoded by a tokenizer."""

    def __init__(self, encode: Callable[[str], Sequence[int]], bos: int, text: str):
        """Encodes what documents are made of.

        Args:
          encode: text to token ids, without special tokens.
          bos: the id that begins every document.
          text: running text, its paragraphs with an empty line between them.
        """
        self.bos, self._encode, self._known = bos, encode, dict[str, Ids]()
        self._text = np.asarray(encode(text), np.int32)
        paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
        self._sentences = [ids for p in paragraphs if 4 <= len(ids := self.ids(p)) <= 40]
        self._filler = [self.ids(" ".join(s)) for s in corpus.sentence_bank("train")]
        self._words = [self.ids(w) for w in (*corpus.NOUNS, *corpus.ADJECTIVES, *corpus.VERBS)]
        self._vocabulary = np.unique(self._text)

    def ids(self, text: str) -> Ids:
        """Token ids of words in running text."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = tuple(self._encode(" " + text))
        return found

    def draw(
        self, rng: np.random.Generator, length: int, kind: str, sizes: Sizes
    ) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "T"]]:
        """Token ids of one document of `length` tokens, and the class of each.

        Args:
          rng: draws it.
          length: T.
          kind: "running", "copies", "facts", "lists" or "echoes".
          sizes: of what it holds.
        """
        tokens, classes = [self.bos], [0]

        def say(ids: Sequence[int], kind: int | Sequence[int]) -> None:
            tokens.extend(ids)
            classes.extend([kind] * len(ids) if isinstance(kind, int) else kind)

        kinds: dict[str, Callable[[np.random.Generator, Say, int, Sizes], None]] = {
            "running": self._running,
            "copies": self._copies,
            "facts": self._facts,
            "lists": self._lists,
            "echoes": self._echoes,
        }
        while len(tokens) < length:
            kinds[kind](rng, say, length - len(tokens), sizes)
        return np.array(tokens[:length]), np.array(classes[:length])

    def _stretch(self, rng: np.random.Generator, size: int) -> list[int]:
        start = int(rng.integers(len(self._text) - size))
        return self._text[start : start + size].tolist()

    def _running(self, rng: np.random.Generator, say: Say, room: int, sizes: Sizes) -> None:
        """A stretch of the running text."""
        del sizes
        say(self._stretch(rng, room), LANGUAGE)

    def _in_any_order(self, rng: np.random.Generator, size: int) -> list[int]:
        return [t for i in rng.permutation(len(self._words))[:size] for t in self._words[i]][:size]

    def _echoes(self, rng: np.random.Generator, say: Say, room: int, sizes: Sizes) -> None:
        """Something short, over and over."""
        del room
        size = int(rng.integers(3, sizes.echo))
        words = rng.random() < 0.7
        part = self._in_any_order(rng, size) if words else rng.choice(self._vocabulary, size).tolist()
        say(part, 0)
        for _ in range(int(rng.integers(1, 5))):
            say(part, _answer(part, shown=1))

    def _copies(self, rng: np.random.Generator, say: Say, room: int, sizes: Sizes) -> None:
        """Something, perhaps running text, and the first again or its end."""
        del sizes
        size = int(rng.integers(4, max(5, min(room // 2, 48))))
        draw = rng.random()
        if draw < 0.5:
            part = rng.choice(self._vocabulary, size).tolist()
        elif draw < 0.75:
            part = self._in_any_order(rng, size)
        else:
            part = self._stretch(rng, size)
        between = self._stretch(rng, int(rng.integers(0, max(1, room - 2 * size))))
        say(part, 0 if draw < 0.75 else LANGUAGE)
        if rng.random() < 0.5:
            say(between, LANGUAGE)
        start = 0 if rng.random() < 0.6 else int(rng.integers(0, size - 2))
        say(part[start:], _answer(part[start:], shown=1))

    def _value(self, rng: np.random.Generator, sizes: Sizes) -> list[str]:
        if rng.random() < sizes.worded:
            return [str(w) for w in rng.choice((*corpus.NOUNS, *corpus.ADJECTIVES), int(rng.integers(1, 4)))]
        size = int(rng.choice(sizes.digits))
        return corpus.draw_value(rng, size) if rng.random() < 0.6 else [str(d) for d in rng.integers(10, size=size)]

    def _name(self, rng: np.random.Generator, taken: set[str]) -> str:
        while True:
            name = str(rng.choice(corpus.NAMES))
            if rng.random() < 0.25:
                name = f"{rng.choice(corpus.ADJECTIVES)} {rng.choice(corpus.NOUNS)}"
            if name not in taken:
                taken.add(name)
                return name

    def _facts(self, rng: np.random.Generator, say: Say, room: int, sizes: Sizes) -> None:
        """Facts among sentences, and questions about them in any order: between the facts, or all at the end."""
        share, real = rng.uniform(*sizes.filler), float(rng.choice((0.0, 0.5, 1.0)))
        at_end, mixed = rng.random() < 0.5, rng.random() < 0.5
        worded = lambda: PAIR if rng.random() < 0.2 else WORDINGS[rng.integers(len(WORDINGS))]
        stated, asked_as = worded(), worded()
        if rng.random() < 0.5:
            asked_as = stated
        questions_from = room * rng.uniform(0.4, 0.9)
        taken, known, unasked, used = set[str](), list[tuple[str, list[str]]](), list[int](), 0

        def put(ids: Sequence[int], kind: int | Sequence[int]) -> None:
            nonlocal used
            used += len(ids)
            say(ids, kind)

        while used < room:
            if mixed:
                stated, asked_as = worded(), worded()
            if known and (used >= questions_from if at_end else rng.random() < 0.5):
                if not unasked:
                    unasked = rng.permutation(len(known)).tolist()
                several = int(rng.integers(2, 5)) if asked_as is not PAIR and rng.random() < 0.2 else 1
                asked = [known[unasked.pop()] for _ in range(min(several, len(unasked)))]
                backwards = rng.random() < sizes.backwards
                if backwards and len(asked) == 1 and len(asked[0][1]) > 2:
                    self._ask_for_name(put, *asked[0])
                else:
                    self._ask(put, asked_as, asked)
            elif rng.random() < share:
                bank = self._sentences if rng.random() < real else self._filler
                put(bank[rng.integers(len(bank))], LANGUAGE)
            else:
                name, value = self._name(rng, taken), self._value(rng, sizes)
                known.append((name, value))
                self._worded(put, stated.fact, name)
                self._say_words(put, value)
                put(self.ids("."), LANGUAGE)

    def _say_words(self, put: Say, words: Sequence[str]) -> None:
        """Words that nothing tells of before."""
        for word in words:
            put(self.ids(word), 0)

    def _worded(self, put: Say, around: Sequence[str], name: str, named: int = 0) -> None:
        """What stands before a name and after it, the name's tokens of class `named`; or something alone."""
        before, *after = around
        for words, kind in ((before, LANGUAGE), (name if after else "", named), *((x, LANGUAGE) for x in after)):
            if words:
                put(self.ids(words), kind)

    def _ask(self, put: Say, wording: Phrasing, asked: Sequence[tuple[str, list[str]]]) -> None:
        """Asks for all names, then gives their values."""
        for name, _ in asked:
            self._worded(put, wording.question, name)
        for i, (name, value) in enumerate(asked):
            self._worded(put, wording.answer, name, named=ANSWER if i or len(wording.answer) == 2 else 0)
            self._reply(put, value)

    def _ask_for_name(self, put: Say, name: str, value: Sequence[str]) -> None:
        put(self.ids("who has"), LANGUAGE)
        self._say_words(put, value)
        put(self.ids("?"), LANGUAGE)
        self._reply(put, name.split())

    def _reply(self, put: Say, words: Sequence[str]) -> None:
        ids = [t for w in words for t in self.ids(w)]
        put(ids, _answer(ids, shown=0))
        put(self.ids("."), LANGUAGE)

    def _lists(self, rng: np.random.Generator, say: Say, room: int, sizes: Sizes) -> None:
        """Words, of which the commonest is asked for, or what stands after or before another."""
        del sizes
        kind = int(rng.integers(3))
        size = int(rng.integers(6, max(7, min(room // 3, 60))))
        if kind == 0:
            self._most_often(rng, say, size)
            return
        words = [str(w) for w in rng.choice((*corpus.NOUNS, *corpus.NAMES, *corpus.ADJECTIVES), size, replace=False)]
        self._list(say, words)
        say(self.ids("."), LANGUAGE)
        for _ in range(int(rng.integers(1, 5))):
            i = int(rng.integers(1, size))
            given, wanted = (words[i - 1], words[i]) if kind == 1 else (words[i], words[i - 1])
            say(self.ids("what is beside" if kind == 1 else "what is behind"), LANGUAGE)
            say(self.ids(given), 0)
            say(self.ids("?"), LANGUAGE)
            self._reply(say, [wanted])

    def _most_often(self, rng: np.random.Generator, say: Say, size: int) -> None:
        words = [str(w) for w in rng.choice(corpus.NOUNS, max(3, size // 3), replace=False)]
        weight = np.array([3.0, *[1.0] * (len(words) - 1)])
        said = [words[i] for i in rng.choice(len(words), size, p=weight / weight.sum())]
        counts = {w: said.count(w) for w in words}
        often = max(words, key=lambda w: (counts[w], w))
        if list(counts.values()).count(counts[often]) > 1:
            said.append(often)
        self._list(say, said)
        say(self.ids(". what was often in the list ?"), LANGUAGE)
        self._reply(say, [often])

    def _list(self, say: Say, words: Sequence[str]) -> None:
        say(self.ids("list :"), LANGUAGE)
        self._say_words(say, words)


def _answer(ids: Sequence[int], *, shown: int) -> list[int]:
    """Classes of an answer whose first tokens cannot be known."""
    return [*[0] * shown, FIRST, *[ANSWER] * len(ids)][: len(ids)]
