"""The last turn of a dialogue, from the turns before: the form of SODA (arXiv:2212.10465), which Keyformer runs."""

from collections.abc import Mapping
from typing import Any

from kvjax.experiments.tasks.base import Example, Question, Task, Tokens, example
from kvjax.experiments.tasks.rows import field, row_of
from kvjax.experiments.tasks.text import check_room

TURN = 64  # new tokens
_SPEAKERS = ("A", "B")


def dialogue(task: Task, index: int, *, max_new_tokens: int = TURN, num_beams: int = 1) -> Example:
    """The turns of a row but the last, a line each, and the last one as reference.

    A row has `dialogue`, a list of texts, and if there are any as many `speakers`, and `narrative`, which goes first,
    as in SODA; or `messages` of `role` and `content`, as chats are stored. Where the turns do not fit, the earliest are
    left out; meta `cut` counts them. The score is ROUGE-L. Keyformer (arXiv:2403.09054) searches with four beams; its
    prompt is not given.

    Args:
      task: rows, tokenizer and length.
      index: which row.
      max_new_tokens: of the turn.
      num_beams: hypotheses of a beam search; 1 for greedy generation, 4 in Keyformer.

    Raises:
      ValueError: no such row, a row with fewer than two turns or of another form, or a length too small for one turn.
    """
    row = row_of("dialogue", task, index)
    turns = _turns(index, row)
    speaker, reference = turns.pop()
    question = tuple(task.encode(f"{speaker}:"))
    narrative = row.get("narrative")
    first = f"{narrative.strip()}\n" if isinstance(narrative, str) and narrative.strip() else ""
    lines = [f"{who}: {what}\n" for who, what in turns]

    def context(cut: int) -> Tokens:
        return (*task.bos, *task.encode(first + "".join(lines[cut:])))

    check_room(
        "dialogue", task, len(context(len(lines) - 1)) + len(question), f"row {index}: a turn and the next speaker"
    )
    cut = next(c for c in range(len(lines)) if len(context(c)) + len(question) <= task.length)
    ids = context(cut)
    asked = Question(
        question, references=(reference,), metric="rouge_l", max_new_tokens=max_new_tokens, stop=("\n",),
        num_beams=num_beams,
    )  # fmt: skip
    return example("dialogue", index, ids, asked, length=float(len(ids)), cut=float(cut))


def _turns(index: int, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Who said what.

    Raises:
      ValueError: no list of turns, fewer than two of them, an empty one, or another number of speakers.
    """
    found = field("dialogue", index, row, ("dialogue", "messages"))
    if not isinstance(found, list | tuple) or len(found) < 2:
        raise ValueError(f"dialogue: row {index}: there must be a list of at least 2 turns, not {found!r:.60}")
    if all(isinstance(turn, Mapping) for turn in found):
        speakers, texts = [turn.get("role") for turn in found], [turn.get("content") for turn in found]
    else:
        speakers, texts = row.get("speakers"), list(found)
        speakers = [_SPEAKERS[i % 2] for i in range(len(texts))] if speakers is None else list(speakers)
    if len(speakers) != len(texts):
        raise ValueError(f"dialogue: row {index}: {len(texts)} turns, but {len(speakers)} speakers; give one a turn")
    if not all(isinstance(s, str) and s.strip() for s in (*speakers, *texts)):
        raise ValueError(f"dialogue: row {index}: every turn must be text that is not blank, said by someone")
    return [(who.strip(), " ".join(what.split())) for who, what in zip(speakers, texts, strict=True)]
