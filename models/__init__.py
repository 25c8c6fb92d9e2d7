"""Language models for kvjax: Flax Linen definitions and checkpoints."""

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
