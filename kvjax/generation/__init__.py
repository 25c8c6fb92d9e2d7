"""Repeats steps: `loop` decodes, `generate` and `beams` begin and end it."""
