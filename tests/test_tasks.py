"""Tasks over running text and rows: laws of all of them, and what each hides, asks and scores."""

import dataclasses
import importlib.util
import itertools
import pathlib
import re
import sys
import types
import uuid

import numpy as np
import pytest

from kvjax.experiments import corpus, tasks
from kvjax.experiments.tasks import RULER, TASKS, Task, ruler
from kvjax.experiments.tasks.base import sentences
from kvjax.experiments.tasks.needle import CITIES, DEPTHS, LENGTHS, SANDWICH, needle
from kvjax.experiments.tasks.text import cut_middle, grid, most_that_fit

LENGTH = 1500
PERPLEXITY = "sliding_perplexity", "streaming_perplexity", "evicted_perplexity"
OVER_ROWS = "summarise", "dialogue", "qa_1", "qa_2"
HIDING = "needle", "needle_number", "two_instructions", "multi_turn", "multi_turn_key_value", "reconstruction"
READS = "needle", "two_instructions", "reconstruction", "niah_single_2"
OVER_TEXT = (*(name for name in RULER if name not in OVER_ROWS), *HIDING)
ROWS = tuple(
    {
        "context": f"In the year {1800 + i} the town of Hill{i} built a mill. It stood by the river for {i} years.",
        "question": f"When did Hill{i} build a mill?",
        "answers": {"text": [str(1800 + i)], "answer_start": [12]},
        "article": f"Hill{i} has a mill. It was built in {1800 + i}.",
        "summary": f"Hill{i} built a mill.",
        "dialogue": [f"Do you know Hill{i}?", "It has a mill.", f"Since {1800 + i}?"],
        "speakers": ["Ada", "Bo", "Ada"],
        "narrative": f"Ada and Bo talk about Hill{i}.",
    }
    for i in range(80)
)


class Tokenizer:
    """A stand-in: pieces of words of four letters at most, so that ids turn back into the same text."""

    def __init__(self):
        self.pieces: list[str] = ["<bos>"]
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        found = re.findall(r"\w{1,4}|\W", text)
        for piece in found:
            if piece not in self.ids:
                self.ids[piece] = len(self.pieces)
                self.pieces.append(piece)
        return [self.ids[piece] for piece in found]

    def decode(self, ids) -> str:
        return "".join(self.pieces[i] for i in ids)


TOKENIZER = Tokenizer()
TEXT = " ".join(f"Sentence number {i} says that {w} was {v}ed." for i, (w, v) in
                enumerate(itertools.islice(itertools.product(corpus.NOUNS, corpus.ADJECTIVES), 900)))  # fmt: skip


def task(length: int = LENGTH, **options) -> Task:
    return Task(TOKENIZER.encode, (0,), length, options.pop("seed", 0), **options)


def text_of(e) -> str:
    return TOKENIZER.decode(e.context)


@pytest.fixture(autouse=True)
def wonderwords(monkeypatch):
    """Words of the project's own in place of those of the package, which the main environment may lack."""
    kinds = {"noun": [a + b for a in corpus.NOUNS for b in corpus.NAMES[:5]], "adjective": corpus.ADJECTIVES}
    fake: object = types.SimpleNamespace(
        filter=lambda start, include_categories: kinds.get(*include_categories, ["go"])
    )
    module: object = types.SimpleNamespace(RandomWord=lambda: fake)
    monkeypatch.setitem(sys.modules, "wonderwords", module)
    ruler.words.cache_clear()
    yield
    ruler.words.cache_clear()


# --- laws of all tasks ---


def made(name: str, index: int, **options):
    """An example of a task, over rows where it takes some."""
    return TASKS[name](task(rows=ROWS if name in OVER_ROWS else (), **options), index)


@pytest.mark.parametrize("text", ["", TEXT], ids=["filler", "text"])
def test_the_tasks_of_the_readme_are_tasks(text):
    readme = pathlib.Path(tasks.__file__).with_name("README.md").read_text()
    found = {}
    for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        exec(block, found)
    chat = tuple(tuple(TOKENIZER.encode(x)) for x in ("<user> ", " <model> "))
    for name in ("short_needle", "door"):
        e = found[name](task(text=text, chat=chat), 1)
        (question,) = e.questions
        assert question.references
        assert " <model> " in TOKENIZER.decode(question.ids)
        assert ("same_context" in dict(e.meta)) == bool(text)
        assert len(e.context) + len(question.ids) <= LENGTH
    assert found["door"](task(), 0).questions[0].references[0] in text_of(found["door"](task(), 0))


@pytest.mark.parametrize("text", ["", TEXT], ids=["filler", "text"])
@pytest.mark.parametrize("name", [*OVER_TEXT, *PERPLEXITY, *OVER_ROWS])
def test_examples_are_reproducible_and_as_long_as_wanted(name, text):
    for index in range(2):
        e = made(name, index, text=text)
        assert e == made(name, index, text=text)
        assert (e.task, e.index, e.context[0]) == (name, index, 0)
        assert e.questions
        room = max(q.max_new_tokens for q in e.questions) if name in (*RULER, "reconstruction") else 0
        total = len(e.context) + max(len(q.ids) + len(q.continuation) for q in e.questions) + room
        length = dict(e.meta)["length"] if name in ("needle", "needle_number") else LENGTH
        assert total <= length
        if name not in ("summarise", "dialogue"):
            assert total > length - 130  # a unit of the largest: a document, or a sentence twice
        for q in e.questions:
            assert bool(q.references) == bool(q.max_new_tokens) == (not q.continuation)
    assert made(name, 0, text=text) != made(name, 1, text=text)
    if name not in (*PERPLEXITY, "summarise", "dialogue") or not (text or name in OVER_ROWS):
        assert made(name, 0, text=text, seed=1) != made(name, 0, text=text)


@pytest.mark.parametrize("name", [*READS, "single_needle", "multi_turn"])
def test_examples_read_passages_of_their_own_as_long_as_there_are_any(name):
    """Every sentence of the text has a number. A passage that is read again is the same context."""
    numbers = lambda e: {int(n) for n in re.findall(r"number (\d+) says", text_of(e))}
    of = task(LENGTH // 3, text=TEXT, seed=1)
    found = [TASKS[name](of, i) for i in range(len(of.passages) + 1)]
    assert len(of.passages) > 10
    for one, other in itertools.combinations(found[:-1], 2):
        assert numbers(one).isdisjoint(numbers(other))
    same = [dict(e.meta)["same_context"] for e in found]
    assert len({*same}) == len(of.passages)
    assert same[-1] == same[0]
    assert numbers(found[-1]) & numbers(found[0])
    assert [of.passage(i) for i in range(3)] != [task(LENGTH // 3, text=TEXT).passage(i) for i in range(3)]
    other = dataclasses.replace(of, seed=5, order=(1, 4))  # of a run whose first seed, 1, has 4 examples
    assert [other.passage(i) for i in range(3)] == [of.passage(i) for i in range(4, 7)]


def test_long_sentences_leave_no_prompt_short():
    """Of a text without punctuation, with spaces or without any."""
    for text in ("more words " * 4000, "字" * 40000):
        e = tasks.needle_number(task(text=text), 0)
        assert 0.8 * LENGTH < len(e.context) <= LENGTH
        assert max(map(len, sentences(text))) <= 600


@pytest.mark.parametrize("name", ["niah_single_2", "niah_multikey_1", "single_needle", "key_value"])
def test_running_text_fills_a_prompt_to_2_percent(name):
    """RULER keeps room for an answer of 128 tokens, or of as many as are asked for."""
    e = made(name, 0, text=TEXT, answer=16)
    assert 0.98 * LENGTH <= len(e.context) + len(e.questions[0].ids) <= LENGTH


@pytest.mark.parametrize("name", [*OVER_TEXT, "qa_1", "summarise", "single_needle"])
def test_what_is_asked_stands_in_a_chat(name):
    """The message is the context and the question; how the answer begins stands behind it, in the model's turn."""
    before, after = (tuple(TOKENIZER.encode(x)) for x in ("<user> ", " <model> "))
    e, raw = made(name, 0, text=TEXT, chat=(before, after)), made(name, 0, text=TEXT)
    assert e.context[: len(before)] == before
    q, plain = (TOKENIZER.decode(x.questions[0].ids) for x in (e, raw))
    asked, begun = q.split(" <model> ")
    assert begun in ("", *(plain[-i:] for i in range(len(plain))))
    assert len(asked) == len(plain) - len(begun)
    assert len(e.context) + len(e.questions[0].ids) <= LENGTH


@pytest.mark.parametrize("text", ["", TEXT], ids=["filler", "text"])
@pytest.mark.parametrize("name", [*OVER_TEXT, "qa_1", "qa_2"])
def test_answers_stand_in_the_context(name, text):
    for e in (made(name, index, text=text) for index in range(3)):
        for q in e.questions:
            for reference in q.references:
                times = text_of(e).count(reference)
                assert times == 1 or (times and name in ("vt", "cwe", "fwe"))  # whose answers are counted and traced
                assert reference not in TOKENIZER.decode(q.ids)


@pytest.mark.parametrize("name", [*OVER_TEXT, *PERPLEXITY, *OVER_ROWS])
def test_lengths_that_are_too_small_are_refused(name):
    small = 1 if name in PERPLEXITY else 9
    with pytest.raises(ValueError, match=rf"{name}.* length={small};|facts need .* give --length"):
        made(name, 0, length=small)


@pytest.mark.parametrize("name", ["needle", "niah_single_2", "reconstruction", *PERPLEXITY])
def test_texts_that_are_too_short_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name}.* \d+ .*length[= ]{LENGTH}.*(give more|more text)"):
        made(name, 0, text=TEXT[:1000])


# --- needles ---


@pytest.mark.parametrize(("lengths", "depths"), [(4, 11), (4, 8), (3, 1), (6, 9), (1, 5)])
def test_any_number_of_examples_covers_a_grid_evenly(lengths, depths):
    cells = [grid(i, lengths, depths) for i in range(2 * lengths * depths)]
    assert cells[0] == (0, 0)
    assert len(set(cells[: lengths * depths])) == lengths * depths
    for n in range(1, len(cells)):
        for axis, size in enumerate((lengths, depths)):
            counts = [sum(c[axis] == i for c in cells[:n]) for i in range(size)]
            assert max(counts) - min(counts) <= 1


def test_needles_stand_at_their_depth_after_a_sentence():
    count = len(LENGTHS) * len(DEPTHS)
    examples = [needle(task(text=TEXT), i) for i in range(count)]
    assert len({e.meta for e in examples}) == count
    for e in examples:
        meta = dict(e.meta)
        before, after = (part.strip() for part in text_of(e).removeprefix("<bos>").split(SANDWICH.fact))
        assert before == "" or before.endswith(".")
        assert abs(len(before) - meta["depth"] * (len(before) + len(after))) < 60  # within a sentence
        assert meta["length"] == LENGTHS[e.index % len(LENGTHS)] * LENGTH
        start = int(meta["needle_at"])
        assert SANDWICH.fact in TOKENIZER.decode(e.context[start : start + int(meta["needle_tokens"])])
    e = tasks.needle_number(task(text=TEXT), 1, lengths=(900, 0.5), depths=(0.5,))
    assert sum(city in text_of(e) for city in CITIES) == 1
    assert dict(e.meta)["length"] == 0.5 * LENGTH


def test_haystacks_leave_out_what_would_give_an_answer_away():
    spoilt = TEXT.replace("number 7 ", "number 7, to sit in Dolores Park, ")
    assert text_of(needle(task(8000, text=spoilt), 0)).count("Dolores Park") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (2000,)}, r"length 2000 must be tokens up to length=1500 .int. or a share"),
        ({"lengths": (1.5,)}, r"length 1\.5 must be"),
        ({"lengths": ()}, "give at least one of each"),
        ({"depths": (0.5, 1.1)}, r"depth 1\.1 must be in \[0, 1\]"),
    ],
)
def test_grids_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        needle(task(), 0, **options)


# --- RULER ---


@pytest.mark.parametrize("name", ruler.HIDDEN)
def test_rulers_needles(name):
    hidden = 4 if name in ("niah_multikey_1", "niah_multivalue", "niah_multiquery") else 1
    asked = 4 if name in ("niah_multivalue", "niah_multiquery") else 1
    e = made(name, 0, text=TEXT)
    (q,) = e.questions
    needles = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", text_of(e))
    keys, values = [key for _, key, _ in needles], [value for *_, value in needles]
    assert len(set(values)) == len(values)
    assert len(needles) > 10 if name in ("niah_multikey_2", "niah_multikey_3") else len(needles) == hidden
    assert len(set(keys)) == (1 if name == "niah_multivalue" else len(keys))
    assert len(q.references) == asked
    assert {key for key, value in zip(keys, values, strict=True) if value in q.references} == {
        key for key in keys if f" {key} " in TOKENIZER.decode(q.ids).replace(",", " ")
    }
    for value in values:
        assert uuid.UUID(value).version == 4 if needles[0][0] == "uuids" else re.fullmatch(r"[1-9]\d{6}", value)
    one = asked == 1
    assert TOKENIZER.decode(q.ids).startswith(f"\nWhat {'is' if one else 'are all'} the special magic ")
    assert TOKENIZER.decode(q.ids).endswith("mentioned in the provided text " + ("is" if one else "are"))
    assert ("A special magic" in text_of(e), "Some special magic" in text_of(e)) == (one, not one)
    assert (q.metric, q.max_new_tokens) == ("contains_all", 128)


def test_tracked_variables_have_the_value_that_is_asked_for():
    for index in range(3):
        e = tasks.vt(task(), index)
        (q,) = e.questions
        wanted = re.search(r"value (\d+) in", TOKENIZER.decode(q.ids))[1]
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", text_of(e)):
            values[name] = values.get(source, source)
        assert [name for name, value in values.items() if value == wanted] == list(q.references)
        assert len(q.references) == 5
        assert q.max_new_tokens == 30
    names, shown = list(values), re.search(r"they are:  ([A-Z ]+)\n", text_of(e))[1].split()
    assert shown == names[:5]  # the worked example answers its own question


@pytest.mark.parametrize(("length", "often", "seldom"), [(LENGTH, 6, 1), (4096, 30, 3)])
def test_common_words_are_more_frequent_than_all_others(length, often, seldom):
    e = tasks.cwe(task(length), 0)
    (q,) = e.questions
    before, listed = text_of(e).removeprefix("<bos>").split("appear most often.\n")[1:]
    entries = re.findall(r"(\d+)\. (\w+)", listed)
    assert [int(n) for n, _ in entries] == list(range(1, len(entries) + 1))
    words = [word for _, word in entries]
    assert {w for w in words if words.count(w) == often} == set(q.references)
    assert {words.count(w) for w in words} == {often, seldom}
    shown, answer = before.split("\nQuestion")
    shown, answer = re.findall(r"\. (\w+)", shown), re.findall(r"\d\. (\w+)", answer)
    assert len(answer) == len(q.references) == 10
    assert {shown.count(w) for w in answer} == {10 if length == 4096 else 3}


def test_frequent_words_are_the_most_frequent():
    e = tasks.fwe(task(), 0)
    listed = text_of(e).partition("coded words. ")[2].split()
    counts = {word: listed.count(word) for word in set(listed)}
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    assert ranked[0] == "..."
    assert tuple(ranked[1:4]) == e.questions[0].references
    assert counts[ranked[3]] > counts[ranked[4]]
    assert counts["..."] / counts[ranked[1]] == pytest.approx(4, rel=0.1)  # the square of the rank


def test_questions_over_rows_have_their_documents_among_those_of_the_same_title():
    rows = tuple({**row, "title": "odd" if i % 2 else "even"} for i, row in enumerate(ROWS))
    e = tasks.qa_1(task(rows=rows), 4)
    held = [int(i) for i in re.findall(r"town of Hill(\d+)", text_of(e))]
    assert 4 in held
    assert len(held) > 10
    assert all(i % 2 == 0 for i in held)
    pairs = [{"title": [f"T{i}", f"U{i}"], "sentences": [["One.", " Two."], [f"It is {i}."]]} for i in range(80)]
    rows = tuple({"context": c, "question": "Which?", "answer": str(i)} for i, c in enumerate(pairs))
    e = tasks.qa_2(task(rows=rows), 7)
    assert "T7\nOne. Two.\n" in text_of(e)
    assert "U7\nIt is 7." in text_of(e)
    assert e.questions[0].references == ("7",)


def test_wonderwords_has_the_words():
    if "wonderwords" in sys.modules:
        del sys.modules["wonderwords"]
    if importlib.util.find_spec("wonderwords") is None:
        with pytest.raises(ValueError, match=r"wonderwords .*pip install"):
            ruler.words("noun")
        with pytest.raises(ValueError, match=r"wonderwords .*pip install"):  # before a model is loaded
            tasks.find("niah_single_2")
    else:
        assert [len(ruler.words(kind)) > 900 for kind in ("noun", "adjective", "verb")] == [True] * 3


# --- several questions, text, rows ---


@pytest.mark.parametrize("build", [tasks.multi_turn, tasks.multi_turn_key_value])
def test_turns_ask_different_questions_of_one_context(build):
    e = build(task(text=TEXT), 0, turns=7)
    assert len(e.questions) == len({q.ids for q in e.questions}) == len({q.references for q in e.questions}) == 7
    order = [text_of(e).index(q.references[0]) for q in e.questions]
    assert order != sorted(order)


def test_windows_and_documents_tile_the_text():
    ids = TOKENIZER.encode(TEXT)
    scored = [t for i in range(5) for t in tasks.sliding_perplexity(task(101, text=TEXT), i).questions[0].continuation]
    assert scored == ids[50 : 50 + 250]  # after the first prompt, of 51 tokens with BOS
    for build, most, cut in ((tasks.streaming_perplexity, 25, 25), (tasks.evicted_perplexity, 400, 144)):
        length = 4 * most if build is tasks.streaming_perplexity else most
        found = [build(task(length, text=TEXT), i) for i in range(3)]
        assert {len(e.context) for e in found} == {cut}
        read = [t for e in found for t in (*e.context[1:], *e.questions[0].continuation)]
        assert read == ids[: 3 * (length - 1)]
    with pytest.raises(ValueError, match=rf"there are {(len(ids) - 100) // 50 + 1} examples of length 101"):
        tasks.sliding_perplexity(task(101, text=TEXT), 10**4)


def test_a_continuation_is_judged_by_how_the_text_goes_on():
    e = tasks.continuation(task(101, text=TEXT, tokenizer=TOKENIZER), 1, max_new_tokens=12)
    ids = TOKENIZER.encode(TEXT)[100:200]
    assert e.context[1:] == tuple(ids[:88])
    assert e.questions[0].references == (TOKENIZER.decode(ids[88:]),)
    assert e.questions[0].max_new_tokens == 12


def test_a_summary_is_asked_for_behind_as_much_text_as_fits():
    e = tasks.summary(task(101, text=TEXT, tokenizer=TOKENIZER), 1, max_new_tokens=12)
    (asked,) = e.questions
    assert asked.references == (TOKENIZER.decode(TOKENIZER.encode(TEXT)[100 : 200 - len(asked.ids)]),)
    assert TOKENIZER.decode(e.context[1:]) == asked.references[0]
    with pytest.raises(ValueError, match=r"summary: two tokens of text and the request need \d+ tokens"):
        tasks.summary(task(9, text=TEXT, tokenizer=TOKENIZER), 0)


def test_both_instructions_stand_ahead_of_the_text():
    e = tasks.two_instructions(task(text=TEXT), 0)
    ahead = text_of(e).partition("\n\n")[0]
    assert len(e.questions) == 2
    for q in e.questions:
        city = re.search(r"the word (.*) comes", TOKENIZER.decode(q.ids))[1]
        assert f"the word {city} comes up, say the number {q.references[0]}." in ahead
    chat = ((), tuple(TOKENIZER.encode(" <model> ")))
    (q, _) = tasks.two_instructions(task(text=TEXT, chat=chat), 0).questions
    assert TOKENIZER.decode(q.ids).partition("<model>")[2].strip() == "You say the number"


def test_documents_that_are_too_long_lose_their_middle():
    assert cut_middle(range(10), 5) == (0, 1, 7, 8, 9)
    e = tasks.summarise(task(101, rows=({"article": TEXT, "highlights": "Short."},)), 0)
    assert text_of(e).startswith("<bos>Summarize the following text.\n\nText:\nSentence number 0")
    assert text_of(e).endswith(TEXT[-20:])
    assert len(e.context) + len(e.questions[0].ids) == 101
    instruction = len(TOKENIZER.encode("Summarize the following text.\n\nText:\n"))
    assert dict(e.meta)["cut"] == len(TOKENIZER.encode(TEXT)) - (len(e.context) - 1 - instruction)


def test_the_last_turn_of_a_dialogue_is_asked_for():
    e = tasks.dialogue(task(rows=ROWS), 5)
    assert text_of(e) == "<bos>Ada and Bo talk about Hill5.\nAda: Do you know Hill5?\nBo: It has a mill.\n"
    assert (TOKENIZER.decode(e.questions[0].ids), e.questions[0].references) == ("Ada:", ("Since 1805?",))
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    e = tasks.dialogue(task(rows=(chat,)), 0)
    assert (text_of(e), TOKENIZER.decode(e.questions[0].ids)) == ("<bos>user: Hi\n", "assistant:")
    long = {"dialogue": [f"turn {i}" for i in range(50)]}
    e = tasks.dialogue(task(60, rows=(long,)), 0)
    assert text_of(e).endswith("A: turn 48\n")
    assert dict(e.meta)["cut"] == 49 - text_of(e).count("\n")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("summarise", {"summary": "s"}, r"has none of the fields article, .*; it has summary"),
        ("summarise", {"article": " ", "summary": "s"}, r".* must be text, not ' '"),
        ("summarise", {"article": "a b c d", "highlights": []}, r".* must be text or a list of texts"),
        ("dialogue", {"dialogue": ["one"]}, r"there must be a list of at least 2 turns"),
        ("dialogue", {"dialogue": ["a", "b"], "speakers": ["A"]}, r"2 turns, but 1 speakers"),
        ("dialogue", {"dialogue": ["a", ""]}, r"every turn must be text"),
        ("qa_1", {"question": "q", "answers": ["a"], "context": {"title": ["t"]}}, r"context must be text, or"),
        ("qa_1", {"question": "q", "answers": {"text": []}}, r"answers or answer must be text or a list of texts"),
    ],
)
def test_rows_that_lack_something_are_named(name, row, message):
    with pytest.raises(ValueError, match=f"row 0: {message}"):
        TASKS[name](task(rows=(row,)), 0)
    with pytest.raises(ValueError, match=r"needs \d+ rows.*the data have 0"):
        TASKS[name](task(), 3)


def test_a_form_over_a_file_names_its_bad_rows(tmp_path):
    path = tmp_path / "news.jsonl"
    path.write_text('{"article": "a", "highlights": "b"}\n\n["a"]\n{"article": "c"}\n{"article": "d", "summary": "e"}')
    name, build = tasks.find(f"summarise:{path}")
    assert (name, len(build)) == ("summarise:news", 4)
    e = build(task(), 3)
    assert (text_of(e).split()[-1], e.questions[0].references) == ("d", ("e",))
    for index, line, reason in ((1, 3, "a row is an object"), (2, 4, "has none of the fields highlights")):
        with pytest.raises(tasks.BadRow, match=rf"row {line}: {reason}"):
            build(task(), index)
    assert repr(build) == repr(tasks.find(f"summarise:{path}")[1])
    with pytest.raises(ValueError, match=r"no task 'sum:"):
        tasks.find(f"sum:{path}")


# --- text ---


def test_sentences_end_after_their_marks():
    text = 'One ends. "Two?" Three (so.) 3.5 is in four!\n\nA title\n\nLast'
    assert sentences(text) == ("One ends.", '"Two?"', "Three (so.)", "3.5 is in four!", "A title", "Last")
    assert sentences("第一。第二！") == ("第一。", "第二！")  # noqa: RUF001


def test_the_most_that_fits_is_the_most():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        sizes = np.concatenate([[rng.integers(50)], rng.integers(1, 40, size=300)]).cumsum()
        room, least = int(rng.integers(sizes[-1] + 100)), int(rng.integers(5))
        found = most_that_fit(lambda n, sizes=sizes: int(sizes[n]), room, least=least, most=300)
        assert found == max(int(np.searchsorted(sizes, room, side="right")) - 1, least - 1)
