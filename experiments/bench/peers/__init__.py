"""kvjax beside transformers and kvpress: `python -m kvjax.experiments.bench.peers`."""
