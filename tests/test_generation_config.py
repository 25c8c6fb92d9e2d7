"""What a checkpoint's `generation_config.json` says of end tokens and sampling."""

import dataclasses
import json

import pytest

from kvjax import models
from kvjax.generation.sampling import Greedy, RepetitionPenalty, Sample
from kvjax.models.weights import read_config

DRAWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
SAMPLERS = [
    ({}, Greedy()),
    ({"temperature": 0.6, "top_p": 0.9, "typical_p": 0.5}, Greedy()),
    ({"repetition_penalty": 1.1, "do_sample": False}, Greedy(RepetitionPenalty(1.1))),
    ({"do_sample": True}, Sample(top_k=50)),  # what transformers does where the file is silent
    (DRAWN | {"top_k": 20, "min_p": 0, "repetition_penalty": 1.05}, Sample(0.6, 20, 0.95, 0.0, 1.05)),
    (DRAWN | {"top_k": 0, "min_p": 0.1, "no_repeat_ngram_size": 0, "num_beams": 1}, Sample(0.6, None, 0.95, 0.1)),
    (DRAWN | {"top_k": None, "bad_words_ids": None, "suppress_tokens": []}, Sample(0.6, 50, 0.95)),
]
REFUSED = [
    ({"do_sample": 1}, "do_sample=1 must be True or False"),
    (DRAWN | {"temperature": 0}, "temperature=0 must be a number above 0"),
    (DRAWN | {"top_k": -1}, "top_k=-1.*whole number from 1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a positive number"),
    (DRAWN | {"typical_p": 0.9}, "typical_p=0.9 is an option that no sampler has; choose a sampler"),
    ({"num_beams": 4}, "num_beams=4 is an option that no sampler has; search with kvjax.generate_beams"),
    ({"suppress_tokens": [3]}, r"suppress_tokens=\[3\] is an option"),
    ([], "the file holds a list, not an object"),
]


@pytest.fixture
def checkpoint(tmp_path, tiny):
    """A directory with a config.json whose end token is 5, and a function that writes the other file."""
    config = models.families.to_hugging_face(tiny[0].config, dtype="float32") | {"eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, lambda raw: (tmp_path / "generation_config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("raw", "sampler"), SAMPLERS)
def test_the_sampler_is_what_transformers_would_do(checkpoint, raw, sampler):
    path, write = checkpoint
    assert models.default_sampler(path) == Greedy()
    write(raw)
    assert models.default_sampler(path) == sampler


@pytest.mark.parametrize(("raw", "message"), REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_what_no_sampler_does_is_refused_with_the_file_the_key_and_the_value(checkpoint, raw, message):
    path, write = checkpoint
    write(raw)
    with pytest.raises(ValueError, match=f"{path}/generation_config.json: .*{message}"):
        models.default_sampler(path)


def test_end_tokens_are_those_of_the_generation_config(checkpoint):
    path, write = checkpoint
    assert read_config(path).eos_ids == (5,)
    for raw, expected in (({"eos_token_id": [7, 9]}, (7, 9)), ({"eos_token_id": 7}, (7,)), ({"top_k": 3}, (5,))):
        write(raw)
        assert read_config(path).eos_ids == expected
    for bad in ("</s>", [1.5], -1):
        write({"eos_token_id": bad})
        with pytest.raises(ValueError, match=f"{path}/generation_config.json: eos_token_id="):
            models.load(path)
    (path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json is not JSON in UTF-8"):
        models.load(path)


def test_saved_end_tokens_are_the_models(tmp_path, tiny):
    """Whatever a file that stood there says; the rest of it stays."""
    model, params = tiny
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7], "temperature": 0.6}))
    model = models.LanguageModel(dataclasses.replace(model.config, eos_ids=(3,)))
    models.save(tmp_path, model, params)
    assert models.load(tmp_path)[0].config.eos_ids == (3,)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [3], "temperature": 0.6}
