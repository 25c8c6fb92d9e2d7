"""When a policy evicts. Scores are updated at every step whether or not eviction is due."""

import dataclasses

from kvjax.budget import Count, as_count


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Eviction times, and how far a cache may grow between them.

    Attributes:
      prefill: evict once after the prompt has been read, layer by layer.
      every: in decoding, evict at every `every`-th step; None never evicts by step count.
      over: in decoding, evict as soon as a head holds its budget plus `over` tokens; None never does.
      drop: with `over`, evict down to the budget minus this many (Scissorhands drops half of the cache at once), as far
        as tokens are not protected.
      before_append: evict before the new token is appended instead of after it was attended to, so that a cache never
        holds more than its budget (StreamingLLM). Only for policies that need no statistics.
    """

    prefill: bool = True
    every: int | None = None
    over: int | None = None
    drop: int | float | Count = 0
    before_append: bool = False

    def __post_init__(self):
        for name, value in (("every", self.every), ("over", self.over)):
            if value is not None and value < 1:
                raise ValueError(f"Schedule({name}={value}): must be at least 1, or None for never")
        if self.every is not None and self.over is not None:
            raise ValueError(f"Schedule(every={self.every}, over={self.over}): give one of them, not both")
        as_count(self.drop, "drop")
        if self.drop != 0 and self.over is None:
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
    return Schedule(every=m)


def when_over(m: int, *, drop: int | float | Count = 0) -> Schedule:
    """After the prompt, and whenever a head has grown to budget + m, back to the budget, or to `drop` below it."""
    return Schedule(over=m, drop=drop)


def before_append() -> Schedule:
    """After the prompt and before every decode step appends its token; a cache never exceeds its budget."""
    return Schedule(every=1, before_append=True)
