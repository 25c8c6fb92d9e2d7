"""Runs a model under a policy: `layers` passes over them once, `steps` read prompts and decode tokens."""
