"""Which layers share a program."""

import dataclasses

from kvjax import models
from kvjax.models.gpt2 import GPT2Config


def test_layers_with_scales_of_their_own_are_of_kinds_of_their_own():
    sizes = {"vocab_size": 61, "embed_dim": 32, "mlp_dim": 48, "num_layers": 2, "num_query_heads": 4}
    config = GPT2Config(**sizes, num_kv_heads=4, head_dim=8)
    assert config.kind(0) == config.kind(1)
    assert models.LanguageModel(config).alike == (0, 0)
    config = dataclasses.replace(config, scaled_by_layer=True)
    assert config.kind(0) != config.kind(1)
