"""How a checkpoint is meant to be sampled, and where its texts end: the contents of a `generation_config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from kvjax.contract.checks import flag, positive
from kvjax.generation.sampling import Greedy, RepetitionPenalty, Sample, Sampler
from kvjax.models.config import DecoderConfig, each

_TOP_K = 50  # of transformers, where a file is silent
_NEUTRAL: Final[dict[str, Any]] = {  # what no sampler here does, and the values with which transformers does nothing
    "num_beams": 1,
    "guidance_scale": 1,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "diversity_penalty": 0,
    "penalty_alpha": 0,
    "bad_words_ids": (),
    "force_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "watermarking_config": None,
}
_NEUTRAL_DRAWS: Final[dict[str, Any]] = {"top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}


def with_end_ids(config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
    """A config with the end tokens that the file names, which are more often complete than those of a config.json.

    Args:
      config: what it is where the file names none.
      raw: the file's contents.

    Raises:
      ValueError: end tokens that are no whole numbers from 0.
    """
    ids = _contents(raw).get("eos_token_id")
    if ids is None:
        return config
    ids = ids if isinstance(ids, list | tuple) else (ids,)
    return dataclasses.replace(config, eos_ids=each("eos_token_id", ids, least=0))


def read_sampler(raw: Mapping[str, Any]) -> Sampler:
    """The sampler that transformers would use: draws where `do_sample` is true, and the most likely token otherwise.

    Where draws are asked for and the file is silent, `top_k` is 50, as in transformers.

    Args:
      raw: the file's contents.

    Raises:
      ValueError: a value that its key cannot have, or an option that no sampler here has.
    """
    raw = {key: value for key, value in _contents(raw).items() if value is not None}
    draws = flag("do_sample", raw.get("do_sample", False))
    neutral = _NEUTRAL | (_NEUTRAL_DRAWS if draws else {})
    for key, nothing in neutral.items():
        value = tuple(raw[key]) if isinstance(raw.get(key), list) else raw.get(key, nothing)
        if value != nothing:
            fix = "search with kvjax.generate_beams" if key == "num_beams" else "choose a sampler yourself"
            raise ValueError(f"{key}={raw[key]!r} is an option that no sampler has; {fix}")
    if draws:
        names = [f.name for f in dataclasses.fields(Sample)]
        options = {"top_k": _TOP_K} | {name: raw[name] for name in names if name in raw}
        options["top_k"] = None if options["top_k"] == 0 else options["top_k"]
        return Sample(**options)
    penalty = positive("repetition_penalty", raw.get("repetition_penalty", 1.0))
    return Greedy() if penalty == 1 else Greedy(RepetitionPenalty(penalty))


def _contents(raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"the file holds a {type(raw).__name__}, not an object of names and values")
    return raw
