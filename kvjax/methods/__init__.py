"""Published methods, each a composition under its paper's name."""

from kvjax.methods.ada_snapkv import ada_snapkv as ada_snapkv
from kvjax.methods.full import full as full
from kvjax.methods.h2o import h2o as h2o
from kvjax.methods.pyramidkv import pyramidkv as pyramidkv
from kvjax.methods.random import random as random
from kvjax.methods.snapkv import snapkv as snapkv
from kvjax.methods.streaming_llm import streaming_llm as streaming_llm
from kvjax.methods.tova import tova as tova
from kvjax.methods.window import window as window
