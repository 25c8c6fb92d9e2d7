"""A model that decodes under a policy: `steps` join the two, `loop` repeats them, the others are uses of these."""
