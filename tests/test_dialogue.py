"""The token ids of a text that goes on are those of the whole text."""

import pytest
import tokenizers
import transformers

from kvjax.text.dialogue import Dialogue
from kvjax.text.encode import encode

TURNS = "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} </{{ m.role }}> {% endfor %}"
TURNS += "{% if add_generation_prompt %}<assistant>{% endif %}"
SYSTEM, DOCUMENT = {"role": "system", "content": "be brief"}, {"role": "user", "content": "a long document . "}


def made(template=None):
    """A tokenizer of bytes that merges some pairs, spaces before words among them, and puts BOS before texts."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    corpus = ["a long document . who wrote it ? the goat wrote it . be brief <user> </user> <assistant> </assistant>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet)
    raw.train_from_iterator(corpus * 9, trainer)
    single = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    raw.post_processor = single
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "context"),
    [
        (None, "a long document . "),
        (None, "a long document ."),
        (TURNS, [SYSTEM]),
        (TURNS, [DOCUMENT]),
        ("{{ bos_token }}" + TURNS, [SYSTEM, DOCUMENT, {"role": "assistant", "content": "what ?"}]),
    ],
)
def test_ids_are_those_of_the_whole_text(template, context):
    """Of the context and a question; then of that, its answer and another question."""
    tokenizer = made(template)
    dialogue, asked, answered = (
        Dialogue.opened(tokenizer, context),
        ["who wrote it ?", " the goat ?"],
        " the goat wrote it",
    )
    found = (*dialogue.ids, *dialogue.question(asked[0]))
    if template is None:
        whole = context + asked[0]
        assert list(found) == encode(tokenizer, whole)
    else:
        last = context[-1]
        said = last["content"] + asked[0] if last["role"] == "user" else asked[0]
        messages = [*(context[:-1] if last["role"] == "user" else context), {"role": "user", "content": said}]
        assert list(found) == encode(tokenizer, messages)
    answer = tuple(tokenizer(answered, add_special_tokens=False).input_ids)
    after = dialogue.after(asked[0], answer)
    assert (*after.ids, *after.unread) == (*found, *answer)
    found = (*after.ids, *after.question(asked[1]))
    if template is None:
        assert list(found) == encode(tokenizer, whole + answered + asked[1])
    else:
        turns = [{"role": "assistant", "content": answered}, {"role": "user", "content": asked[1]}]
        said = encode(tokenizer, [*messages, *turns])
        # A template may trim an answer; what was said stays as it was said.
        assert tokenizer.decode(list(found)).replace(" ", "") == tokenizer.decode(said).replace(" ", "")


@pytest.mark.parametrize(
    ("context", "question", "message"),
    [
        ("", "a", "the context is empty"),
        (3, "a", "context=3 is neither a text nor messages of a chat"),
        ([{"role": "user", "content": ["a"]}], "a", "the content of every message must be a text"),
        ([{"content": "a"}], "a", "the role and the content of every message must be a text"),
        ("a", "", "question='': must be a text of at least one character"),
        ("a", 3, "question=3: must be a text"),
        ("a", "\ud800", "question has half of a character"),
        ("a", "\ue000", r"U\+E000 stands for a place in the text"),
    ],
)
def test_what_is_no_dialogue_is_refused(context, question, message):
    with pytest.raises(ValueError, match=message):
        Dialogue.opened(made(), context).question(question)
