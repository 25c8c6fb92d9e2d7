"""SnapKV with other windows and without pooling, for `board.py --policy variants.py:NAME`."""

from kvjax import Evict, methods


def window_4(budget: int) -> Evict:
    """Four rows vote."""
    return methods.snapkv(budget, window=4)


def window_32(budget: int) -> Evict:
    """Thirty-two rows vote."""
    return methods.snapkv(budget, window=32)


def unpooled(budget: int) -> Evict:
    """Sixteen rows vote, and no vote is pooled."""
    return methods.snapkv(budget, window=16, kernel=1)


def unpooled_window_4(budget: int) -> Evict:
    """Four rows vote, and no vote is pooled."""
    return methods.snapkv(budget, window=4, kernel=1)
