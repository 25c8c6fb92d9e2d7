"""Runs a model under a policy: `steps` join the two, `loop` repeats steps, the others use these."""
