"""When a policy evicts. Scores are updated at every step whether or not eviction is due."""

import dataclasses

from kvjax.pallas_kernels.values import Value, checked, flag, optional, settle, tokens
from kvjax.sizes.budget import Count, Tokens, counted


@dataclasses.dataclass(frozen=True)
class Schedule(Value):
    """Eviction times, and how far a cache may grow between them.

    Attributes:
      prefill: evict once after the prompt has been read, layer by layer.
      every: in decoding, evict at every `every`-th step; None never evicts by step count.
      over: in decoding, evict as soon as a head holds its budget plus `over` tokens; None never does.
      drop: with `over`, how many tokens a head that is due loses at once, the one that has just come among its
        candidates: exactly so many where they are more than it holds beyond its budget, else those beyond the budget
        (0: back to the budget). Protected tokens stay, so fewer go where too few are left beside them. Scissorhands
        drops half of its budget at once. A number of tokens (int), a share of the prompt (float), or `Share` of the
        budget; no more than the budget.
      before_append: evict before the new token is appended instead of after it was attended to, so that a cache never
        holds more than its budget (StreamingLLM). Only for policies that need no statistics.
    """

    prefill: bool = True
    every: int | None = None
    over: int | None = None
    drop: int | float | Count = 0
    before_append: bool = False

    def __post_init__(self):
        steps = optional(tokens(1, "must be a whole number of at least 1, or None for never"))
        settle(self, prefill=flag, every=steps, over=steps, drop=counted, before_append=flag)
        if self.every is not None and self.over is not None:
            raise ValueError(f"Schedule(every={self.every}, over={self.over}): give one of them, not both")
        if self.drop != Tokens(0) and self.over is None:
            raise ValueError(f"Schedule(drop={self.drop}) needs over=: a cache drops when it is over its budget")
        if self.before_append and self.every != 1:
            raise ValueError(
                f"Schedule(before_append=True, every={self.every}): before_append evicts at every step (1)"
            )
        if not self.prefill and not self.decodes:
            raise ValueError("Schedule(prefill=False) without every= or over= never evicts; use identity()")

    @property
    def decodes(self) -> bool:
        """Whether this schedule ever evicts while decoding."""
        return self.every is not None or self.over is not None

    def room(self, max_new_tokens: int) -> int:
        """Slots needed on top of the budget between evictions."""
        if self.before_append:
            return 0
        return min(max_new_tokens, self.every or self.over or max_new_tokens)


def after_prefill() -> Schedule:
    """Once, after the prompt; generated tokens are all kept."""
    return Schedule()


def every_step() -> Schedule:
    """After the prompt and at every decode step."""
    return Schedule(every=1)


def every(m: int) -> Schedule:
    """After the prompt and at every m-th decode step; a cache grows to budget + m."""
    return Schedule(every=checked(tokens(1), "m", m))


def when_over(m: int, *, drop: int | float | Count = 0) -> Schedule:
    """After the prompt, and whenever a head has grown to budget + m: back to the budget, or by `drop` if more."""
    return Schedule(over=checked(tokens(1), "m", m), drop=drop)


def before_append() -> Schedule:
    """After the prompt and before every decode step appends its token; a cache never exceeds its budget."""
    return Schedule(every=1, before_append=True)
