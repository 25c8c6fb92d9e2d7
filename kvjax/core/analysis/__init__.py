"""Eviction measured: the exact cost of a mask, its bounds, and losses of the model's output."""
