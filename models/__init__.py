"""Language models for kvjax: Flax Linen definitions and checkpoints.

A name is imported with its module when it is first used, since Flax takes long to import.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.config import DecoderConfig as DecoderConfig
    from models.decoder import LanguageModel as LanguageModel
    from models.llama import ModelConfig as ModelConfig
    from models.presets import PRESETS as PRESETS
    from models.presets import Preset as Preset
    from models.presets import preset as preset
    from models.rope import Rope as Rope
    from models.tokenizer import encode as encode
    from models.tokenizer import load_tokenizer as load_tokenizer
    from models.tokenizer import pad_left as pad_left
    from models.tokenizer import token_classes as token_classes
    from models.weights import default_sampler as default_sampler
    from models.weights import fingerprint as fingerprint
    from models.weights import load as load
    from models.weights import num_params as num_params
    from models.weights import save as save

_NAMES = {
    "config": "DecoderConfig",
    "decoder": "LanguageModel",
    "llama": "ModelConfig",
    "presets": "PRESETS Preset preset",
    "rope": "Rope",
    "tokenizer": "encode load_tokenizer pad_left token_classes",
    "weights": "default_sampler fingerprint load num_params save",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """A name of one of the modules here."""
    if name not in _MODULES:
        raise AttributeError(f"module 'models' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"models.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All names, those that were not used yet too."""
    return sorted({*globals(), *_MODULES})
