"""A text or chat that goes on: the tokens that were read, and the ids of questions that follow."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.contract import Tokenizer, value
from kvjax.text.encode import MARK, Chat, around_mark, check_whole_text, encode, is_chat

_TAIL = 64  # characters before, which decide how a tokenizer cuts what follows


@value
class Dialogue:
    """A context, the turns that have followed it, and how far a cache has read them.

    In a chat, a question goes on with the last message where that is the user's, as a document with a question behind
    it does, and is a message of its own elsewhere.

    Attributes:
      tokenizer: one of transformers.
      context: the text, or the messages of a chat.
      turns: questions and answers so far.
      ids: the tokens that the cache has read.
      unread: those of the last answer that it has not.
    """

    tokenizer: Tokenizer
    context: str | Chat
    turns: tuple[tuple[str, str], ...] = ()
    ids: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()

    @classmethod
    def opened(cls, tokenizer: Tokenizer, context: str | Chat) -> "Dialogue":
        """Opens a context, with the ids to read that are the same for every question.

        Raises:
          ValueError: neither a text nor messages of texts, or an empty one.
        """
        check_context(context)
        new = cls(tokenizer, context if isinstance(context, str) else tuple(map(dict, context)))
        return dataclasses.replace(new, ids=tuple(encode(tokenizer, new._opening()[0])))

    def question(self, question: str) -> tuple[int, ...]:
        """The tokens to read for a question, up to where its answer begins.

        They are those that the text has behind the text before it, where the ids of that stay what they are.

        Raises:
          ValueError: no text, or an empty one.
        """
        if not isinstance(question, str) or not question:
            raise ValueError(f"question={question!r}: must be a text of at least one character")
        check_whole_text("question", question)
        if MARK in question:
            raise ValueError(f"question={question!r}: U+E000 stands for a place in the text; leave it out")
        before, text = self._around(question)
        tail = before[-_TAIL:]
        ids = lambda x: list(self.tokenizer(x, add_special_tokens=False).input_ids)
        alone, joined = ids(tail), ids(tail + text)
        found = joined[len(alone) :] if joined[: len(alone)] == alone else ids(text)
        if not found:
            raise ValueError(f"question={question!r}: the tokenizer makes no token of it; give a text with words")
        return (*self.unread, *found)

    def after(self, question: str, answer: tuple[int, ...], ends: tuple[int, ...] = ()) -> "Dialogue":
        """The dialogue after one more turn, of which a cache has read all but the answer's last token.

        Args:
          question: the question.
          answer: the tokens of its answer.
          ends: tokens that end an answer, and are no part of the text.
        """
        told = answer[:-1] if answer[-1] in ends else answer
        text = self.tokenizer.decode(list(told), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ids = (*self.ids, *self.question(question), *answer[:-1])
        return Dialogue(self.tokenizer, self.context, (*self.turns, (question, text)), ids, told[len(answer) - 1 :])

    def _opening(self) -> tuple[str, str, str]:
        """The text before the first question, the spaces at its end, and the text behind the question.

        Spaces are read with the question, as many tokenizers make one token of a space and the word behind it.
        """
        if isinstance(self.context, str):
            before, after = self.context, ""
        else:
            before, after = around_mark(self.tokenizer, self._messages((), MARK))
        read = before.rstrip(" ") or before
        return read, before[len(read) :], after

    def _around(self, question: str) -> tuple[str, str]:
        """The text before a question, and what is to be read now."""
        if not self.turns:
            before, spaces, after = self._opening()
            return before, spaces + question + after
        asked, answer = self.turns[-1]
        if isinstance(self.context, str):
            return answer, question
        messages = self._messages(self.turns[:-1], asked)
        messages += [{"role": "assistant", "content": MARK}, {"role": "user", "content": question}]
        return answer, around_mark(self.tokenizer, messages)[1]

    def _messages(self, turns: Sequence[tuple[str, str]], question: str) -> list[Mapping[str, Any]]:
        """The chat after some turns, up to a question."""
        messages = list(self.context) if not isinstance(self.context, str) else []
        for asked, answer in (*turns, (question, None)):
            last = messages[-1]
            if last["role"] == "user":
                messages[-1] = {**last, "content": last["content"] + asked}
            else:
                messages.append({"role": "user", "content": asked})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return messages


def check_context(context: object) -> None:
    """Refuses what is neither a text nor messages of texts, and an empty one."""
    if not isinstance(context, str) and not is_chat(context):
        raise ValueError(f"context={context!r} is neither a text nor messages of a chat")
    if not context:
        raise ValueError("the context is empty; give a text or messages, or use kvjax.generate")
    text = lambda message: all(isinstance(message.get(name), str) for name in ("role", "content"))
    if not isinstance(context, str) and not all(map(text, context)):
        raise ValueError(f"context={context!r}: the role and the content of every message must be a text")
