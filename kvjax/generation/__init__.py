"""Makes one token after another: `loop` is the loop, `generate` and `beams` begin and end it."""
