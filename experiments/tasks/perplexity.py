"""How well a compressed cache predicts the text that follows."""

from experiments import corpus
from experiments.tasks.base import Example, Question, Task, example

SCORED = 64


def perplexity(task: Task, index: int) -> Example:
    """Held-out text with facts in it and, here and there, questions about them; its last 64 tokens are scored.

    The context before them is the prompt, so both protocols are the same.

    Raises:
      ValueError: a length that leaves no token before them.
    """
    if task.length <= SCORED:
        raise ValueError(
            f"perplexity scores the last {SCORED} tokens of a prompt, but length={task.length}; raise the length to "
            f"{SCORED + 1} at least"
        )
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
