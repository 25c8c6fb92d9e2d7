"""FastGen: groups, rows that stand still, sizes, and whose tokens are of which kind."""

import dataclasses

import numpy as np
import pytest
import tokenizers
import transformers

import kvjax
from kvjax import methods, models
from kvjax.contract import LayerInfo
from kvjax.methods.profile import FastGen
from kvjax.models.embedded import EMBEDDED
from tests import tensors
from tests.by_hand import moment


def test_a_group_is_profiled_by_its_mean():
    """One query head looks at the special token, the other at itself: 0.5625 of their mean is on the special one."""
    first, itself = np.zeros((8, 8)), np.eye(8)
    first[:, 0] = 1
    q, k, v, scale = tensors.from_probabilities(np.stack([first, itself]))
    chosen = lambda recovery: (
        tensors.evicted(FastGen((0,), (7,), 0.0, 0.0, recovery), [{"q": q, "k": k, "v": v}], scale=scale)[0][0]
        .memory[2]
        .tolist()
    )
    assert (chosen(0.56), chosen(0.99)) == ([[0]], [[4]])


@pytest.mark.slow
def test_a_row_that_stands_still_keeps_its_cache(shallow):
    model, params = shallow
    policy = methods.fastgen(range(3), range(3, 30), recovery=0.7)
    _, before = kvjax.prefill(model, params, tensors.token_ids(2, 12), policy=policy, max_new_tokens=4)
    _, after = kvjax.decode_step(model, params, [40, 1], before, active=[True, False])  # a special token stands still
    (old,), (new,) = before.layers, after.layers
    np.testing.assert_array_equal(old.pos[1], new.pos[1])
    for x, y in zip(old.memory, new.memory, strict=True):
        np.testing.assert_array_equal(x[1], y[1])


def test_sizes():
    info, n = LayerInfo(0, 1, 4, 2, 8, 20, 8), np.array([20, 8])
    policy = methods.fastgen((), ())
    assert policy.sizes(info, n).per_head.tolist() == [28, 28]
    of = lambda budget: dataclasses.replace(policy, budget=budget).sizes(info, n)
    assert of(0.25).per_head.tolist() == [6, 3]
    assert of(100).per_head.tolist() == [28, 28]
    assert moment(dataclasses.replace(policy, budget=5), 20, prompt=20).hparams[2].tolist() == [5]


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="what heads need is known only later; give a budget"):
        FastGen((), (), pool=True)
    with pytest.raises(ValueError, match="tokens"):
        kvjax.evict_layer(methods.fastgen((0,), (1,)), *tensors.qkv())


def byte_level_tokenizer():
    """Pieces as byte-level BPE writes them: G with a dot is a leading space, and other bytes are letters too."""
    pieces = ["<s>", "</s>", "<|turn|>", ",", "Ġ.", "Ġ...", "âĢĶ", "âĢ", "Ġ", "a", "Ġa,", "+", "Ċ"]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, []))
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens([tokenizers.AddedToken("<|turn|>", special=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def test_token_classes():
    assert methods.token_classes(byte_level_tokenizer()) == ((0, 1, 2), (3, 4, 5, 6, 11))
    tokenizer = models.load_tokenizer(EMBEDDED)
    special, punctuation = methods.token_classes(tokenizer)
    assert set(special) == set(tokenizer.all_special_ids)
    words = tokenizer.convert_ids_to_tokens(list(punctuation))
    assert "." in words
    assert not any(c.isalnum() for word in words for c in word)
