"""Reading prompts: what a user sees meanwhile."""

import numpy as np

from kvjax import core
from kvjax.core import methods


def test_a_bar_counts_the_layers_that_are_read(embedded, capsys):
    model, params, _ = embedded
    tokens = np.full((1, 8), 5, np.int32)
    how = {"policy": methods.h2o(4), "max_new_tokens": 2}
    core.prefill(model, params, tokens, **how)
    assert not capsys.readouterr().err
    core.prefill(model, params, tokens, progress=True, **how)
    L = model.config.num_layers
    assert f"{L}/{L}" in capsys.readouterr().err
