"""What users give is checked before anything is traced."""

import jax
import numpy as np
import pytest

from kvjax import core
from kvjax.core import methods
from kvjax.core.methods import variants
from tests import helpers

IDS = np.asarray(helpers.token_ids(2, 24))
FASTGEN, STEPWISE = methods.fastgen((1,), (2,)), variants.h2o_stepwise_mask(8)
WHOLE = "FastGen looks at the whole prompt at once, but block=5 reads 24 tokens in parts; use block=None"
ROWS = (
    "every row of StepwiseMask decides what the next one reads, but block={} reads 24 tokens otherwise than one by one"
)


@pytest.mark.parametrize(
    ("policy", "block", "message"),
    [
        (FASTGEN, 5, WHOLE),
        (core.chain(FASTGEN, methods.tova(8)), 5, "Chain looks at the whole prompt"),
        (core.partition({"f": FASTGEN, "t": methods.tova(8)}, ["t", "f", "t"]), 5, "FastGen looks at the whole prompt"),
        (variants.h2o_next_step_mask(8), 5, "NextStepMask looks at the whole prompt"),
        (STEPWISE, None, ROWS.format(None)),
        (STEPWISE, 5, ROWS.format(5)),
        (methods.tova(8), 0, "block=0 must be a whole number from 1"),
    ],
)
def test_blocks_are_refused_where_a_policy_cannot_read_them(policy, block, message, tiny):
    with pytest.raises(ValueError, match=message):
        core.generate(*tiny, IDS, policy=policy, block=block, max_new_tokens=2)


@pytest.mark.parametrize(("policy", "block"), [(FASTGEN, None), (FASTGEN, 24), (STEPWISE, 1)])
def test_other_sizes_are_not(policy, block, shallow):
    model, _ = shallow
    read = lambda p: core.prefill(model, p, IDS, policy=policy, block=block, max_new_tokens=2)
    jax.eval_shape(read, model.shapes)


def test_what_is_read_by_other_doors_is_refused_too(shallow):
    model, params = shallow
    start = lambda policy: core.start(model, policy=policy, lengths=[24, 24], max_new_tokens=9)
    with pytest.raises(ValueError, match="StepwiseMask decides what the next one reads, but block=None reads 24"):
        core.forward(model, params, IDS, start(STEPWISE))
    with pytest.raises(ValueError, match="evict_layer reads 24 tokens at once"):
        core.evict_layer(STEPWISE, *helpers.qkv())
