"""How well a compressed cache predicts and continues text; what is read at once, and what token by token.

| task | read as a prompt, then evicted | scored, a token at a time | source |
|---|---|---|---|
| `perplexity` | all but the last 64 tokens of facts and questions in filler | these | the project's own language |
| `sliding_perplexity` | a window's first half | its second half; windows overlap by half | fixed-length models |
| `streaming_perplexity` | a quarter | all that follows, far past the budget | StreamingLLM, RoCo (Fig. 5) |
| `evicted_perplexity` | all but the last 256 tokens | these | the prefix is evicted once |
| `continuation` | all but the last 48 tokens | F1 of what is generated in their place | RoCo, section 5 |
| `summary` | a text, and the request to sum it up | F1 of 48 generated tokens with the text | RoCo, section 5 |

The text is the task's own, or filler with a document for every example. A length is that of both parts together, and
the results' perplexity is that of the mean over all scored tokens. "in_prompt" and "after_compression" are the same
here.
"""

import dataclasses

from kvjax.experiments import corpus
from kvjax.experiments.tasks.base import Example, Question, Task, Tokens, example
from kvjax.experiments.tasks.text import check_room, filler

SCORED = 64


def perplexity(task: Task, index: int) -> Example:
    """How likely the last 64 tokens of a text are: held-out text with facts and questions about them, or one's own.

    The context before them is the prompt, so both protocols are the same. Of a text of one's own, every example is the
    next stretch of the wanted length.

    Raises:
      ValueError: a length that leaves no token before them, or a text of one's own without so many stretches.
    """
    if task.text or task.length <= SCORED + len(task.bos):
        return _cut(task, index, "perplexity", apart=task.length - len(task.bos), scored=SCORED)
    rng = task.rng("perplexity", index)
    known: list[tuple[str, list[str]]] = []
    names = [corpus.NAMES[i] for i in rng.permutation(len(corpus.NAMES))]
    tokens: tuple[int, ...] = task.bos
    while len(tokens) < task.length:
        stated, asked = corpus.draw_phrasings(rng)
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


def sliding_perplexity(task: Task, index: int, *, stride: int | None = None) -> Example:
    """Window `index` over the text: its last `stride` tokens are scored, those before them are the prompt.

    Windows begin `stride` tokens apart, so that examples in a row score every token after the first prompt once.

    Args:
      task: text, tokenizer and the window's length.
      index: which window.
      stride: half of the window if not given.

    Raises:
      ValueError: a stride that leaves no prompt or nothing to score, or a text that ends before.
    """
    stride = task.length // 2 if stride is None else stride
    return _cut(task, index, "sliding_perplexity", apart=stride, scored=stride)


def streaming_perplexity(task: Task, index: int, *, prompt: float = 0.25) -> Example:
    """A document of `length` tokens: a share of it is the prompt, the rest is scored as it streams in.

    A policy that evicts while decoding holds its budget all along, as StreamingLLM (arXiv:2309.17453) does over text
    longer than a model's window, and RoCo (arXiv:2402.06262) at a fixed number of slots. Budgets that are shares are
    shares of the prompt.

    Args:
      task: text, tokenizer and the document's length.
      index: which document; one begins where the last ends.
      prompt: share of the document that is read at once.

    Raises:
      ValueError: a share outside (0, 1), or a text that ends before.
    """
    if not 0 < prompt < 1:
        raise ValueError(f"streaming_perplexity: prompt={prompt!r} must be a share in (0, 1)")
    scored = task.length - max(round(prompt * task.length), 1)
    return _cut(task, index, "streaming_perplexity", apart=task.length - len(task.bos), scored=scored)


def evicted_perplexity(task: Task, index: int, *, scored: int = 256) -> Example:
    """A document of `length` tokens, of which the last are scored after all before them were read and evicted.

    Args:
      task: text, tokenizer and the document's length.
      index: which document; one begins where the last ends.
      scored: how many tokens.

    Raises:
      ValueError: no prompt or nothing to score, or a text that ends before.
    """
    return _cut(task, index, "evicted_perplexity", apart=task.length - len(task.bos), scored=scored)


def continuation(task: Task, index: int, *, max_new_tokens: int = 48) -> Example:
    """A text of `length` tokens without its last 48, to be continued; the reference is these.

    RoCo (arXiv:2402.06262) compares what an evicted cache writes with what the full one writes, as
    `experiments.core.table.beside_full` does.

    Args:
      task: text, tokenizer and the text's length.
      index: which stretch of the text.
      max_new_tokens: of the continuation.

    Raises:
      ValueError: no prompt, or a text that ends before.
    """
    made = _cut(task, index, "continuation", apart=task.length - len(task.bos), scored=max_new_tokens)
    goes_on = str(task.tokenizer.decode(made.questions[0].continuation))
    asked = Question(references=(goes_on,), metric="f1", max_new_tokens=max_new_tokens)
    return dataclasses.replace(made, questions=(asked,))


def long_continuation(task: Task, index: int) -> Example:
    """A `continuation` of 256 tokens, most of which are written after a policy has evicted while decoding."""
    return dataclasses.replace(continuation(task, index, max_new_tokens=256), task="long_continuation")


def summary(task: Task, index: int, *, max_new_tokens: int = 48) -> Example:
    """A text that is to be summed up; the text is the reference, as summaries of it are not at hand.

    Made to be compared with what the full cache writes, as `continuation` is.

    Args:
      task: text, tokenizer, and the length of text and request together.
      index: which stretch of the text.
      max_new_tokens: of the summary.

    Raises:
      ValueError: no room for two tokens of text, or a text that ends before.
    """
    question = tuple(task.encode("\n\nIn short, this text says that"))
    check_room("summary", task, len(task.bos) + 2 + len(question), "two tokens of text and the request")
    text = _tokens(task, index, "summary", task.length - len(task.bos))[: -len(question)]
    says = str(task.tokenizer.decode(text))
    asked = Question(question, references=(says,), metric="f1", max_new_tokens=max_new_tokens)
    return example("summary", index, task.bos + text, asked, length=float(task.length))


def _cut(task: Task, index: int, name: str, *, apart: int, scored: int) -> Example:
    """Document `index` of documents that begin `apart` tokens from each other, its last tokens to be scored."""
    before = task.length - scored
    if scored < 1 or before <= len(task.bos):
        raise ValueError(
            f"{name} scores the last {scored} tokens of a prompt, but length={task.length}; raise the length "
            f"to {max(scored, 1) + len(task.bos) + 1} at least, or score fewer tokens, one at least"
        )
    ids = task.bos + _tokens(task, index, name, apart)
    question = Question(continuation=ids[before:])
    return example(name, index, ids[:before], question, length=float(before))


def _tokens(task: Task, index: int, name: str, apart: int) -> Tokens:
    count = task.length - len(task.bos)
    if not task.text:
        return tuple(task.encode(" ".join(filler(task.rng(name, index), count))))[:count]
    ids, start = task.text_ids, index * apart
    if start + count > len(ids):
        possible = max(0, (len(ids) - count) // apart + 1)
        raise ValueError(
            f"{name}: example {index} needs tokens {start} to {start + count} of the text, but it has {len(ids)}: "
            f"there are {possible} examples of length {task.length}; ask for fewer, shorten them, or give more text"
        )
    return ids[start : start + count]
