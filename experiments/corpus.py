"""A small artificial language: sentences of filler, facts hidden among them, and questions about the facts.

Everything is words, so that any tokenizer can read it. The embedded model has one token a word.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

PAD, BOS, EOS, UNK = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")

NAMES = tuple(
    """
    abel ada agnes aldo amos anya arlo astrid basil beata boris brigid cato cecil celia cleo cora cyril dag delia
    dmitri dora edith egon elsa emre enzo esme ezra fay felix fern floyd freya gale gemma gita gus hana harvey hazel
    hugo ida imre ines iris ivo jada jasper jette joel juno kai katya keira kofi lars leif lena linus lotte luca
    magda malik mara milo mina nadir neva nico noor odin olive omar orla otis paco pavel petra pia quincy ravi remy
    rhea rolf romy rufus sana selma silas sven tamar tariq thea tobias ula uma vera viggo vito wanda wolf xander
    yara yuri zadie zeno
    """.split()
)
ADJECTIVES = tuple(
    """
    ancient bitter blue brave brief bright broad calm careful cheap clean clever cold common cool cruel curious damp
    dark dear deep dry dull dusty early empty faint fair famous fierce fine firm flat foreign fresh gentle glad
    golden grand grey hollow honest huge humble idle keen kind late light loud lovely mild narrow neat noble odd
    pale plain polite proud pure quick quiet rare rough round rude rusty sharp short silent simple slow smooth soft
    sour steep stiff
    """.split()
)
NOUNS = tuple(
    """
    anchor apple arrow attic axe barn basin beach bell bench boat bowl branch bread brick brush bucket cabin cable
    canal candle carpet cart castle cave cellar chain cliff cloth coach corner cottage cradle cup curtain desk ditch
    dock donkey drawer fence ferry field flag flame flute forge fountain gate glove goat grain guitar hammer harbour
    hedge hill hook inn island jar kettle kite ladder lake lantern lawn ledge lemon lock loom market meadow mill
    mine mirror mountain needle net orchard oven paddle parcel path pear pillow plough pond porch quarry rail ribbon
    river roof rope
    """.split()
)
VERBS = tuple(
    """
    admired avoided borrowed broke built buried carried chased cleaned climbed copied counted covered crossed
    described drew emptied examined feared fetched filled followed found guarded hid ignored lifted loved measured
    mended missed moved noticed opened painted passed pushed raised reached
    """.split()
)
PREPOSITIONS = tuple(
    """
    above across against along behind below beneath beside beyond inside near outside past under
    """.split()
)
ADVERBS = tuple(
    """
    again always gladly never often once rarely slowly soon suddenly today together
    """.split()
)
DIGITS = tuple("0123456789")
FUNCTION_WORDS = tuple(
    """
    . , ? : a and answer are code for has he in is it list note number of please question repeat secret she the they
    to was what with
    """.split()
)

VOCABULARY = (*SPECIAL, *DIGITS, *FUNCTION_WORDS, *PREPOSITIONS, *ADVERBS, *VERBS, *ADJECTIVES, *NOUNS, *NAMES)
WORD_ID = {word: i for i, word in enumerate(VOCABULARY)}

_CLASSES = {"A": ADJECTIVES, "N": NOUNS, "V": VERBS, "P": PREPOSITIONS, "D": ADVERBS}
_SENTENCES = tuple(
    pattern.split()
    for pattern in (
        "the A N V the N .",
        "a N was P the A N .",
        "D the N V a A N .",
        "she V the A N and the N .",
        "they V a N P the N .",
        "the N of the N was A , and it was A .",
        "P the N he V the N D .",
        "it was a A N with a N .",
        "the N V the N , and the A N V it .",
        "he D V the N in the A N .",
    )
)


@dataclasses.dataclass(frozen=True)
class Phrasing:
    """How a fact is stated and asked for, around its name and its value.

    Attributes:
      fact: (before the name, between name and value).
      question: (before the name, after the name).
      answer: (before the name, between name and value). The answer repeats the name, so that what precedes the value is
        worded as in the fact; where it does not, this is (before the value,), and the value cannot be found by that.
    """

    fact: tuple[str, str]
    question: tuple[str, str]
    answer: tuple[str, ...]


PAIR = Phrasing(("", ""), ("", ""), ("", ""))  # a bare "name value ." table; the question is the name alone
PHRASINGS = (
    Phrasing(("the code for", "is"), ("what is the code for", "?"), ("the code for", "is")),
    Phrasing(("", "has the number"), ("question : what number has", "?"), ("answer :", "has the number")),
    Phrasing(("note : the secret of", "was"), ("please repeat the secret of", "."), ("the secret of", "was")),
)


def words(*parts: str | Sequence[str]) -> list[str]:
    """Parts, each a string of words or a list of them, as one list."""
    return [w for part in parts for w in (part.split() if isinstance(part, str) else part)]


def fact(phrasing: Phrasing, name: str, value: Sequence[str]) -> list[str]:
    """A sentence that states a value."""
    before, between = phrasing.fact
    return words(before, name, between, value, ".")


def question(phrasing: Phrasing, names: Sequence[str]) -> list[str]:
    """Asks for one or more names, and begins the answer up to the first value."""
    asked = [w for name in names for w in words(phrasing.question[0], name, phrasing.question[1])]
    if phrasing == PAIR:
        return words(names[0])
    return asked + words(phrasing.answer[0], names[0], phrasing.answer[1])


def answer(phrasing: Phrasing, names: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    """What follows `question`: the first value, then the other names with theirs."""
    text = words(values[0], ".")
    for name, value in zip(names[1:], values[1:], strict=True):
        text += words(phrasing.answer[0], name, phrasing.answer[1], value, ".")
    return text


def draw_value(rng: np.random.Generator, num_digits: int = 4) -> list[str]:
    """Different digits, so that one digit determines the next within a value."""
    return [DIGITS[i] for i in rng.permutation(10)[:num_digits]]


def draw_facts(rng: np.random.Generator, count: int) -> tuple[list[str], list[list[str]]]:
    """So many different names, and a value of each."""
    names = [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]
    return names, [draw_value(rng) for _ in names]


def draw_phrasings(rng: np.random.Generator) -> tuple[Phrasing, Phrasing]:
    """How facts are stated, and how they are asked for."""
    stated, asked = (PHRASINGS[i] for i in rng.integers(len(PHRASINGS), size=2))
    return stated, asked


@functools.cache
def _frequencies(n: int) -> np.ndarray:
    p = 1.0 / np.arange(1, n + 1) ** 0.7
    return p / p.sum()


@functools.cache
def sentence_bank(split: Literal["train", "held_out"], size: int = 6000) -> tuple[tuple[str, ...], ...]:
    """Filler sentences; the two splits are drawn apart. Words of a class differ in frequency."""
    rng = np.random.default_rng({"train": 11, "held_out": 12}[split])

    def pick(symbol: str) -> str:
        if symbol not in _CLASSES:
            return symbol
        members = _CLASSES[symbol]
        return members[rng.choice(len(members), p=_frequencies(len(members)))]

    patterns = rng.integers(len(_SENTENCES), size=size)
    bank = {tuple(pick(s) for s in _SENTENCES[i]): None for i in patterns}
    if split == "held_out":
        trained_on = set(sentence_bank("train"))
        bank = {s: None for s in bank if s not in trained_on}
    return tuple(bank)


def filler(rng: np.random.Generator, split: Literal["train", "held_out"]) -> tuple[str, ...]:
    """One sentence of filler."""
    bank = sentence_bank(split)
    return bank[rng.integers(len(bank))]
