"""How long one step of the engine takes: the clock of a replay.

Any callable of three whole numbers will do: the prompt tokens computed in the step,
the sequences that decode in it, and the tokens that those sequences have in the cache.
It returns seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

__all__ = ["LinearStepTime", "StepTime", "load_step_time"]

StepTime = Callable[[int, int, int], float]
"""``(prefill_tokens, decoding_sequences, context_tokens) -> seconds``"""


@dataclass(frozen=True)
class LinearStepTime:
    """A step costs something, and so does every token it computes and reads.

    The defaults are round assumptions, not measurements: a model of 8 billion 16-bit
    parameters with 128 KiB of cache a token, on an accelerator that reads 2 TB/s and
    does 320 TFLOP/s in practice. Reading 16 GB of weights takes 8 ms of a step, to
    which 2 ms of launching are added; a prompt token takes 16 GFLOP, 50 us; a cached
    token takes 64 ns to read; sampling is put at 20 us a sequence. Attention within a
    prompt is left out, so the prefill of very long prompts is too cheap.
    """

    per_step: float = 10e-3
    per_prefill_token: float = 50e-6
    per_sequence: float = 20e-6
    per_context_token: float = 64e-9

    def __call__(self, prefill_tokens: int, decoding_sequences: int, context_tokens: int) -> float:
        """Seconds of one step."""
        return (
            self.per_step
            + self.per_prefill_token * prefill_tokens
            + self.per_sequence * decoding_sequences
            + self.per_context_token * context_tokens
        )


def load_step_time(name: str) -> StepTime:
    """Import what ``"module:function"`` names, from the working directory too.

    Raises
    ------
    ValueError
        The name has another form, or names nothing that can be called.
    ImportError
        The module cannot be imported.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"step time must be given as module:function, not {name!r}")
    # An installed command, unlike python -m, does not look in the working directory.
    if "" not in sys.path:
        sys.path.insert(0, "")
    step_time = getattr(import_module(module_name), attribute, None)
    if not callable(step_time):
        raise ValueError(f"step time {name!r} is not a callable of {module_name}")
    return cast("StepTime", step_time)
