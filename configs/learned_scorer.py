"""A learned prediction of future attention."""

from kvjax.configs.learning import LearnedScorer as get_config

__all__ = ["get_config"]
