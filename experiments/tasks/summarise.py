"""Summaries of one's own rows, in the forms of CNN/DailyMail, XSum, GovReport and SAMSum."""

from kvjax.experiments.tasks.base import Example, Question, Task, example
from kvjax.experiments.tasks.rows import answers_of, row_of, text_of
from kvjax.experiments.tasks.text import check_room, cut_middle

DOCUMENT = ("article", "document", "report", "dialogue", "context")
SUMMARY = ("highlights", "summary", "answers")
_BEFORE = "Summarize the following text.\n\nText:\n"
_QUESTION = "\n\nSummary:"


def summarise(task: Task, index: int, *, max_new_tokens: int = 128, num_beams: int = 1) -> Example:
    """A row's document, and its summary as reference: CNN/DailyMail, XSum and GovReport by their fields' names.

    The score is ROUGE-L as rouge-score gives it; `experiments.core.table.rescored` adds ROUGE-1, ROUGE-2, BLEU and
    METEOR to a finished run. RoCo (arXiv:2402.06262) evicts the prompt alone and compares with the full cache's
    output; Keyformer (arXiv:2403.09054) searches with four beams. A document that does not fit is cut in its middle, as
    LongBench cuts; meta `cut` counts the tokens. Papers do not say their prompts: this one is plain, for base models
    too.

    Args:
      task: rows, tokenizer and length.
      index: which row.
      max_new_tokens: of a summary: 128 (CNN/DailyMail, XSum); LongBench takes 512 for GovReport.
      num_beams: hypotheses of a beam search; 1 for greedy generation, 4 in Keyformer.

    Raises:
      ValueError: no such row, a row without document or summary, or a length without room for a document.
    """
    row = row_of("summarise", task, index)
    document = task.encode(text_of("summarise", index, row, DOCUMENT))
    references = answers_of("summarise", index, row, SUMMARY)
    before, question = (*task.bos, *task.encode(_BEFORE)), tuple(task.encode(_QUESTION))
    check_room("summarise", task, len(before) + len(question) + 2, "instruction and a document of two tokens")
    kept = cut_middle(document, task.length - len(before) - len(question))
    asked = Question(
        question, references=references, metric="rouge_l", max_new_tokens=max_new_tokens, num_beams=num_beams
    )
    cut = float(len(document) - len(kept))
    return example("summarise", index, (*before, *kept), asked, length=float(len(before) + len(kept)), cut=cut)
