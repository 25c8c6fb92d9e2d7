"""How well a compressed cache predicts the text that follows."""

from kvjax.experiments import corpus
from kvjax.experiments.tasks.base import Example, Question, Task, example

SCORED = 64


def perplexity(task: Task, index: int) -> Example:
    """How likely the last 64 tokens of a text are: held-out text with facts and questions about them, or one's own.

    The context before them is the prompt, so both protocols are the same. Of a text of one's own, every example is the
    next stretch of the wanted length.

    Raises:
      ValueError: a length that leaves no token before them, or a text of one's own without so many stretches.
    """
    if task.length <= SCORED:
        raise ValueError(
            f"perplexity scores the last {SCORED} tokens of a prompt, but length={task.length}; raise the length to "
            f"{SCORED + 1} at least"
        )
    if task.text:
        return _of_text(task, index)
    rng = task.rng("perplexity", index)
    known: list[tuple[str, list[str]]] = []
    names = [corpus.NAMES[i] for i in rng.permutation(len(corpus.NAMES))]
    tokens: tuple[int, ...] = task.bos
    while len(tokens) < task.length:
        stated, asked = (corpus.PHRASINGS[i] for i in rng.integers(len(corpus.PHRASINGS), size=2))
        draw = rng.random()
        if known and draw < 0.2:
            name, value = known[rng.integers(len(known))]
            words = corpus.question(asked, [name]) + corpus.answer(asked, [name], [value])
        elif names and draw < 0.35:
            name, value = names.pop(), corpus.draw_value(rng)
            known.append((name, value))
            words = corpus.fact(stated, name, value)
        else:
            words = list(corpus.filler(rng, "held_out"))
        tokens += task.ids(words)
    cut = task.length - SCORED
    question = Question(continuation=tokens[cut : task.length])
    return example("perplexity", index, tokens[:cut], question, length=float(cut))


def _of_text(task: Task, index: int) -> Example:
    room, ids = task.length - len(task.bos), task.text_ids
    if (index + 1) * room > len(ids):
        raise ValueError(
            f"the text has {len(ids)} tokens, which is {len(ids) // room} examples of {room}; lower examples from "
            f"{index + 1}, or the length"
        )
    tokens = task.bos + ids[index * room : (index + 1) * room]
    cut = task.length - SCORED
    return example("perplexity", index, tokens[:cut], Question(continuation=tokens[cut:]), length=float(cut))
