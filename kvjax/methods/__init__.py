"""The methods of the papers, each a composition. What released code does otherwise is `kvjax.methods.released`."""

from kvjax.methods.attention import ahakv as ahakv
from kvjax.methods.attention import aqas as aqas
from kvjax.methods.attention import h2o as h2o
from kvjax.methods.attention import key_attention as key_attention
from kvjax.methods.attention import keyformer as keyformer
from kvjax.methods.attention import lazy_eviction as lazy_eviction
from kvjax.methods.attention import mas as mas
from kvjax.methods.attention import r_kv as r_kv
from kvjax.methods.attention import roco as roco
from kvjax.methods.attention import scissorhands as scissorhands
from kvjax.methods.attention import tova as tova
from kvjax.methods.attention import vase as vase
from kvjax.methods.heads import duo_attention as duo_attention
from kvjax.methods.hidden import dilated_window as dilated_window
from kvjax.methods.hidden import quest as quest
from kvjax.methods.hidden import think as think
from kvjax.methods.keys import capkv as capkv
from kvjax.methods.keys import compactor as compactor
from kvjax.methods.keys import curdkv as curdkv
from kvjax.methods.keys import expected_attention as expected_attention
from kvjax.methods.keys import keydiff as keydiff
from kvjax.methods.keys import knorm as knorm
from kvjax.methods.keys import kvzap as kvzap
from kvjax.methods.keys import lagkv as lagkv
from kvjax.methods.keys import q_filters as q_filters
from kvjax.methods.keys import triattention as triattention
from kvjax.methods.nacl import nacl as nacl
from kvjax.methods.position import full as full
from kvjax.methods.position import random as random
from kvjax.methods.position import random_attention as random_attention
from kvjax.methods.position import streaming_llm as streaming_llm
from kvjax.methods.position import window as window
from kvjax.methods.profile import fastgen as fastgen
from kvjax.methods.token_classes import token_classes as token_classes
from kvjax.methods.votes import ada_pyramid as ada_pyramid
from kvjax.methods.votes import ada_snapkv as ada_snapkv
from kvjax.methods.votes import attention_matching as attention_matching
from kvjax.methods.votes import cake as cake
from kvjax.methods.votes import chunkkv as chunkkv
from kvjax.methods.votes import criticalkv as criticalkv
from kvjax.methods.votes import defensivekv as defensivekv
from kvjax.methods.votes import dropkv as dropkv
from kvjax.methods.votes import entropy_chunkkv as entropy_chunkkv
from kvjax.methods.votes import finch as finch
from kvjax.methods.votes import headkv as headkv
from kvjax.methods.votes import kvcompose as kvcompose
from kvjax.methods.votes import kvzip as kvzip
from kvjax.methods.votes import lava as lava
from kvjax.methods.votes import layer_defensivekv as layer_defensivekv
from kvjax.methods.votes import merging as merging
from kvjax.methods.votes import pyramidkv as pyramidkv
from kvjax.methods.votes import simlayerkv as simlayerkv
from kvjax.methods.votes import snapkv as snapkv
from kvjax.pallas_kernels import kinds

kinds.doors(__name__)
