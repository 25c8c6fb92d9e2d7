"""Until /tmp/h.py calls `generation.generate`: the prototype's signature, for comparisons."""

from typing import Any

from kvjax.core.drivers import generation


def generate(model, params, tokens, lengths, policy, max_new_tokens, *, ends: Any = (), **options: Any) -> Any:
    """Tokens and the state."""
    how: dict[str, Any] = {
        "lengths": lengths,
        "policy": policy,
        "max_new_tokens": max_new_tokens,
        "eos_ids": ends,
        **options,
    }
    found = generation.generate(model, params, tokens, **how)
    return found.tokens, found.state
