"""Context reconstruction (RoCo, arXiv:2402.06262): what was read is to be written down again from the evicted cache."""

from kvjax.experiments.tasks.base import Example, Question, Task, example
from kvjax.experiments.tasks.rows import row_of, text_of
from kvjax.experiments.tasks.summarise import DOCUMENT
from kvjax.experiments.tasks.text import check_enough, check_room, haystack, most_that_fit, sentences

_BEFORE = "Text:\n"
_QUESTION = "\n\nRepeat the text above, word for word.\n\nText:\n"


def reconstruction(task: Task, index: int) -> Example:
    """A document, the request to repeat it, and room to do so: document twice, and the request, take `length` tokens.

    RoCo evicts CNN/DailyMail articles while prefilling and reports BLEU, ROUGE-1 and ROUGE-L against the output of the
    full cache; its prompt is not given. Here the reference is the document itself and the score ROUGE-L;
    `experiments.core.table.agreement` compares a finished run with the full cache's output by other metrics, too.
    Documents are those of the task's rows, cut at a sentence's end, else sentences of its text or of filler.

    Raises:
      ValueError: no such row, a length that holds no sentence, or a text that is too short.
    """
    before, question = (*task.bos, *task.encode(_BEFORE)), tuple(task.encode(_QUESTION))
    room = task.length - len(before) - len(question)
    if task.rows:
        row = row_of("reconstruction", task, index)
        found = sentences(text_of("reconstruction", index, row, DOCUMENT))
    else:
        found = haystack(task, task.rng("reconstruction", index), max(room, 1))
    size = lambda count: 2 * len(task.encode(" ".join(found[:count])))
    check_room("reconstruction", task, task.length - room + size(1), "a sentence twice and the request to repeat it")
    count = most_that_fit(size, room, least=1, most=len(found))
    if not task.rows:
        check_enough("reconstruction", task, count, found, size(count) // 2, "sentences of the text")
    document = " ".join(found[:count])
    ids = tuple(task.encode(document))
    asked = Question(question, references=(document,), metric="rouge_l", max_new_tokens=len(ids))
    return example("reconstruction", index, (*before, *ids), asked, length=float(len(before) + len(ids)))
