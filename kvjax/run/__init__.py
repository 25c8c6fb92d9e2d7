"""Runs a model under a policy: `layers` is one pass over all layers, `steps` reads prompts and decodes tokens."""
