"""Encodes prompts and chats, with BOS as their model expects it, and decodes text piece by piece."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kvjax.contract import Tokenizer
from kvjax.observe import Reread
from kvjax.pallas_kernels import kinds

Chat = Sequence[Mapping[str, Any]]  # messages such as {"role": ..., "content": ...}
_REPEAT = "\n\nRepeat the previous context exactly."  # the released code's instructions (KVzip, arXiv 2505.23416)
_REPEAT_NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
MARK = "\ue000"  # stands for a place in a text; of the private use area, which no text or template should hold
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what stands for the first bytes of a character, and for bytes of none


def encode(tokenizer: Tokenizer, prompt: str | Chat, *, bos: bool | None = None, **template: Any) -> list[int]:
    """Token ids of a prompt that is to be continued, with BOS at most once.

    A tokenizer's BOS stands at the front if the tokenizer puts it before texts, or the text or chat template has it
    already, and never twice. What a tokenizer puts behind texts (EOS) is left out, as the text goes on.

    transformers' `apply_chat_template(tokenize=True)` gives the same but for templates that write no BOS where the
    tokenizer puts one before every text: it leaves that out, as `bos=False` does.

    Args:
      tokenizer: one of transformers, as `kvjax.models.load_tokenizer` returns.
      prompt: a text, or the messages of a chat, `{"role": ..., "content": ...}`, which the tokenizer's chat template
        makes a text of.
      bos: True for one BOS in any case, False for none.
      **template: what the chat template is given besides the messages. `add_generation_prompt` is True unless given.

    Returns:
      Ids of one sequence. `kvjax.models.pad_left` makes a batch of several.

    Raises:
      ValueError: neither text nor messages, a tokenizer without a chat template or without BOS where it is wanted,
        messages that the template refuses.
    """
    check_tokenizer(tokenizer)
    if not isinstance(prompt, str):
        prompt = rendered(tokenizer, prompt, **template)
    elif template:
        raise ValueError(f"{sorted(template)} are for chat templates, but prompt is a text; give messages")
    check_whole_text("prompt", prompt)
    ids, first = list(tokenizer(prompt, add_special_tokens=False).input_ids), tokenizer.bos_token_id
    if first is None:
        if bos:
            raise ValueError("bos=True, but the tokenizer has no BOS token; use bos=None")
        return ids
    written = _leading(ids, first)
    if bos is None:
        bos = written > 0 or _leading(tokenizer(prompt).input_ids, first) > 0
    return [first] * bos + ids[written:]


def check_whole_text(name: str, text: str) -> None:
    """Raises ValueError for a text with half of a character (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{name} has half of a character, which no tokenizer takes: {e}") from e


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises ValueError for what is no tokenizer of transformers."""
    if not callable(tokenizer) or not all(hasattr(tokenizer, name) for name in ("bos_token_id", "decode")):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}, not one such as models.load_tokenizer returns")


def is_chat(prompt: Any) -> TypeGuard[Chat]:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def rendered(tokenizer: Any, messages: Any, **template: Any) -> str:
    """The text that a chat template makes of messages; options and errors are those of `encode`."""
    if not is_chat(messages) or not all("role" in m for m in messages):
        raise ValueError(f'prompt={messages!r} is neither a text nor messages such as {{"role": ..., "content": ...}}')
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the tokenizer has no chat template; encode a text, or set tokenizer.chat_template")
    if own := {"tokenize", "return_tensors", "return_dict"} & set(template):
        raise ValueError(f"{sorted(own)} are for what comes after a chat template; encode returns ids")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **template})
    except Exception as e:  # a template is code of the model's authors, and raises what it likes
        raise ValueError(f"the tokenizer's chat template refuses these messages: {e}") from e


def around_mark(tokenizer: Any, messages: Any, **template: Any) -> tuple[str, str]:
    """The text of a chat before and after `MARK`, which stands in one of its messages."""
    before, *after = rendered(tokenizer, messages, **template).split(MARK)
    if len(after) != 1:
        raise ValueError(
            f"the tokenizer's chat template writes a message {len(after)} times, but the text goes on in one place; "
            "give texts instead of messages, or set tokenizer.chat_template"
        )
    return before, after[0]


def repeating(tokenizer: Tokenizer) -> Reread:
    """The instructions of KVzip's released code to repeat a prompt, as ids, within the chat template.

    Args:
      tokenizer: the model's, one of transformers.

    Raises:
      ValueError: what is no tokenizer of transformers, or a chat template that does not write a message once.
    """
    check_tokenizer(tokenizer)
    chat = [{"role": "user", "content": MARK}]
    plain = getattr(tokenizer, "chat_template", None) is None
    ids = lambda text: tuple(tokenizer(text, add_special_tokens=False).input_ids)
    before, after = map(ids, ("", "\n") if plain else around_mark(tokenizer, chat, enable_thinking=False))
    return Reread(ids(_REPEAT), ids(_REPEAT_NEXT), after, len(before))


def _leading(ids: Sequence[int], token: int) -> int:
    """How many times a token stands at the front."""
    return next((i for i, x in enumerate(ids) if x != token), len(ids))


class TextPieces:
    """Decodes the tokens of one sequence to pieces of text.

    The pieces together are the text of all tokens, without special ones. What may still change is held back: the bytes
    of a character that is not complete, and the beginning of a stop string.

    Attributes:
      text: all pieces so far, where they are kept.
      stopped: whether a stop string has come. The text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, keep: bool = True):
        self.text, self.stopped, self._keep = "", False, keep
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._done = 0  # of the ids, which are those since the last piece's: how many are in pieces
        self._held = ""

    def push(self, token: int | None, *, last: bool = False) -> str:
        """Reads a token, None for one without text, and returns the text that is complete; all of it if `last`."""
        if self.stopped:
            return ""
        self._ids += [] if token is None else [token]
        before, after = self._decode(self._ids[: self._done]), self._decode(self._ids)
        if last or not after.endswith(_INCOMPLETE):
            new = after[len(before) :]
            if new:  # a token without text may not become the first that is decoded: some decoders strip spaces there
                del self._ids[: self._done]
                self._done = len(self._ids)
            self._held += new
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        self.stopped = bool(ends)
        first = min(ends, default=None)  # the one that is complete first, however tokens cut the text
        kept = first[1] if first is not None else len(self._held) - (0 if last else self._open())
        piece, self._held = self._held[:kept], self._held[kept:]
        self.text += piece if self._keep else ""
        return piece

    def _open(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(self._held[-n:]) for stop in self._stop)), 0)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""


kinds.doors(__name__)
