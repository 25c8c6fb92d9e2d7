"""Language models for kvjax: Flax Linen definitions and checkpoints.

A name is imported with its module when it is first used, since Flax takes long to import.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax.models.config import DecoderConfig as DecoderConfig
    from kvjax.models.decoder import LanguageModel as LanguageModel
    from kvjax.models.llama import ModelConfig as ModelConfig
    from kvjax.models.presets import PRESETS as PRESETS
    from kvjax.models.presets import Preset as Preset
    from kvjax.models.presets import preset as preset
    from kvjax.models.rope import Rope as Rope
    from kvjax.models.tokenizer import encode as encode
    from kvjax.models.tokenizer import load_tokenizer as load_tokenizer
    from kvjax.models.tokenizer import pad_left as pad_left
    from kvjax.models.weights import default_sampler as default_sampler
    from kvjax.models.weights import fingerprint as fingerprint
    from kvjax.models.weights import load as load
    from kvjax.models.weights import num_params as num_params
    from kvjax.models.weights import read_config as read_config
    from kvjax.models.weights import save as save

_NAMES = {
    "config": "DecoderConfig",
    "decoder": "LanguageModel",
    "llama": "ModelConfig",
    "presets": "PRESETS Preset preset",
    "rope": "Rope",
    "tokenizer": "encode load_tokenizer pad_left",
    "weights": "default_sampler fingerprint load num_params read_config save",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A name of one of the modules here."""
        if name not in _MODULES:
            raise AttributeError(f"module 'kvjax.models' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"kvjax.models.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """All names, those that were not used yet too."""
    return sorted({*globals(), *_MODULES})
