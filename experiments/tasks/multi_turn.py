"""One context that is compressed once, and several questions about it: the form of SCBench (arXiv:2412.10319).

SCBench asks its questions in turns of one session or as requests that share a context. Here they are requests: each is
asked of the context alone, from a copy of the compressed cache. So a policy that looks at the question must keep what
all of them need; "in_prompt", every question is a prompt of its own.
"""

import json
import uuid

from kvjax.experiments import corpus
from kvjax.experiments.tasks.base import Example, Question, Task, Tokens, example
from kvjax.experiments.tasks.text import check_room, most_that_fit

TURNS = 5
_KEY_VALUE_TASK = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
_KEY_VALUE_QUESTION = '\n\nKey: "{key}"'
_KEY_VALUE_BEGUN = "\nThe value associated with the specified key is:"
_FEWEST_TOKENS = 4  # of a pair of UUIDs


def multi_turn(task: Task, index: int, *, facts: int = 16, turns: int = TURNS) -> Example:
    """Facts at random places of filler, as in `several_needles`; some are asked for one by one, in random order.

    Raises:
      ValueError: more questions than facts, more facts than names, or a length too small for the facts.
    """
    _check("multi_turn", facts, turns)
    if facts > len(corpus.NAMES):
        raise ValueError(f"multi_turn: facts={facts}, but there are {len(corpus.NAMES)} names; ask for fewer")
    rng = task.rng("multi_turn", index)
    names, values = corpus.draw_facts(rng, facts)
    stated, asked = corpus.draw_phrasings(rng)
    questions = []
    for i in rng.permutation(facts)[:turns]:
        value = " ".join(values[i])
        ids = task.ask(task.ids(corpus.question(asked, [names[i]])))
        questions.append(Question(ids, references=(value,), max_new_tokens=len(task.encode(value)) + 2))
    places = rng.uniform(size=facts)
    inserts = [(p, corpus.fact(stated, n, v)) for p, n, v in zip(places, names, values, strict=True)]
    context = task.fill(rng, index, task.length - max(len(q.ids) for q in questions), inserts)
    return example("multi_turn", index, context, *questions, length=float(task.length), **task.shared(index))


def multi_turn_key_value(task: Task, index: int, *, turns: int = TURNS) -> Example:
    """SCBench's Retr.KV: a JSON object of random UUIDs, as many pairs as fit, whose values are asked for one by one.

    Keys are asked for in random order, from all of the object. A value is right where the answer contains it.

    Raises:
      ValueError: no question, or a length too small for so many pairs.
    """
    _check("multi_turn_key_value", turns, turns)
    rng = task.rng("multi_turn_key_value", index)
    count = max(task.length // _FEWEST_TOKENS, turns)
    drawn = [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(2 * count)]
    keys, values = drawn[:count], drawn[count:]
    ask = lambda key: task.ask(task.encode(_KEY_VALUE_QUESTION.format(key=key)), task.encode(_KEY_VALUE_BEGUN))
    longest = max(len(ask(key)) for key in keys[:64])

    def context(pairs: int) -> Tokens:
        table = json.dumps(dict(zip(keys[:pairs], values[:pairs], strict=True)), indent=1)
        return (*task.begin, *task.encode(_KEY_VALUE_TASK + table))

    size = lambda pairs: len(context(pairs)) + longest
    check_room("multi_turn_key_value", task, size(turns), f"{turns} pairs and a question")
    pairs = most_that_fit(size, task.length, least=turns, most=count)
    order = rng.permutation(count)
    chosen = lambda pairs: [int(i) for i in order if i < pairs][:turns]
    while len(context(pairs)) + max(len(ask(keys[i])) for i in chosen(pairs)) > task.length:
        pairs -= 1  # a key that is longer in tokens than those that were tried
    questions = tuple(
        Question(
            ask(keys[i]),
            references=(values[i],),
            metric="contains",
            max_new_tokens=len(task.encode(f' "{values[i]}"')) + 2,
            stop=("\n",),
        )
        for i in chosen(pairs)
    )
    return example("multi_turn_key_value", index, context(pairs), *questions, length=float(task.length))


def _check(name: str, facts: int, turns: int) -> None:
    if not 1 <= turns <= facts:
        raise ValueError(f"{name}: turns={turns} must be from 1 to facts={facts}")
