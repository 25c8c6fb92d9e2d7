"""Text in, text out: `encode`, `session`, `stream`, and the `files` that hold what was read."""
