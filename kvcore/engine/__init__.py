"""A reference engine: a small Llama in numpy, served through kvcore alone.

It exists to show how an engine uses kvcore, and to prove that what kvcore decides keeps a
real model's results. It is not fast. Nothing in kvcore imports it.
"""

from kvcore.engine.byte_pairs import BytePairTokenizer
from kvcore.engine.cache import PagedCache
from kvcore.engine.drafts import Drafter, PromptLookup
from kvcore.engine.gguf import GGUFFile, load_gguf
from kvcore.engine.llama import Chunk, Llama, LlamaShape, LlamaWeights
from kvcore.engine.models import load_model
from kvcore.engine.random_model import random_llama
from kvcore.engine.sampling import BeamSearch, Greedy, Sampling, Temperature
from kvcore.engine.serve import Engine
from kvcore.engine.stories import StoriesTokenizer, load_stories
from kvcore.engine.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "BeamSearch",
    "BytePairTokenizer",
    "ByteTokenizer",
    "Chunk",
    "Drafter",
    "Engine",
    "GGUFFile",
    "Greedy",
    "Llama",
    "LlamaShape",
    "LlamaWeights",
    "PagedCache",
    "PromptLookup",
    "Sampling",
    "StoriesTokenizer",
    "Temperature",
    "Tokenizer",
    "load_gguf",
    "load_model",
    "load_stories",
    "random_llama",
]
