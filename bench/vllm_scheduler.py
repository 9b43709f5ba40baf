"""vLLM's scheduler, if it is installed, for the rows of engine steps.

It is driven as its engine core does, with results made up instead of a model: ``schedule``
plans a step, ``update_from_output`` takes the tokens. The model is a configuration of a few
lines; nothing is downloaded, and no weights are made.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.peers import VllmCache, absent, accepted, imported
from bench.workload import BLOCK_SIZE

__all__ = ["VllmEngine", "is_present"]

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 65_536,
    "vocab_size": 50_272,
    "torch_dtype": "float16",
}
MODEL_TOKENS = 32_768
TOKEN = 7
"""What every sequence samples."""


@lru_cache
def parts() -> SimpleNamespace:
    """The classes, imported."""
    return SimpleNamespace(
        **vars(VllmCache.parts()),
        **vars(
            imported(
                "vllm.config:CacheConfig",
                "vllm.config:DeviceConfig",
                "vllm.config:ModelConfig",
                "vllm.config:SchedulerConfig",
                "vllm.config:VllmConfig",
                "vllm.v1.core.sched.scheduler:Scheduler",
                "vllm.v1.outputs:ModelRunnerOutput",
                "vllm.v1.request:RequestStatus",
                "vllm.v1.structured_output:StructuredOutputManager",
            )
        ),
    )


def is_present() -> bool:
    """Whether vLLM can be used."""
    return VllmCache.name not in absent()


class VllmEngine:
    """Its ``Scheduler`` over one group of full attention, chunked prefill on, no statistics."""

    name = VllmCache.name

    def __init__(self, num_blocks: int, *, running: int, budget: int, prefix_caching: bool) -> None:
        classes = parts()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            model = classes.ModelConfig(
                model=folder, dtype="float16", skip_tokenizer_init=True, max_model_len=MODEL_TOKENS
            )
            options = {
                "max_num_seqs": running,
                "max_num_batched_tokens": budget,
                "max_model_len": MODEL_TOKENS,
                "enable_chunked_prefill": True,
                "async_scheduling": False,
                "is_encoder_decoder": False,
                "watermark": 0.0,
            }
            cache = classes.CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching)
            config = classes.VllmConfig(
                model_config=model,
                scheduler_config=classes.SchedulerConfig(**options),
                cache_config=cache,
                device_config=classes.DeviceConfig("cpu"),
            )
        cache.num_gpu_blocks = num_blocks + 1  # one of them is its null block
        spec = classes.FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=classes.float32
        )
        blocks = classes.KVCacheConfig(
            num_blocks=num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[classes.KVCacheGroupSpec(["layer"], spec)],
        )
        known = accepted(
            classes.Scheduler.__init__,
            {"block_size": BLOCK_SIZE, "hash_block_size": BLOCK_SIZE, "log_stats": False},
        )
        self.scheduler = classes.Scheduler(
            vllm_config=config,
            kv_cache_config=blocks,
            structured_output_manager=classes.StructuredOutputManager(config),
            **known,
        )
        self.hasher = (
            classes.get_request_block_hasher(BLOCK_SIZE, classes.sha256) if prefix_caching else None
        )
        self.planned: Any = None

    def request(self, seq: str, tokens: Sequence[int], max_tokens: int) -> Any:
        """A request, its prompt hashed."""
        classes = parts()
        return classes.Request(
            request_id=seq,
            prompt_token_ids=list(tokens),
            sampling_params=classes.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def add(self, seq: str, tokens: Sequence[int], max_tokens: int = 20_000) -> None:
        """Queue a request."""
        self.scheduler.add_request(self.request(seq, tokens, max_tokens))

    def step(self) -> None:
        """Plan a step."""
        self.planned = self.scheduler.schedule()

    def results(self) -> Any:
        """What a model would answer: a token for each sequence whose tokens are all computed."""
        seqs = list(self.planned.num_scheduled_tokens)
        requests = [self.scheduler.requests[seq] for seq in seqs]
        return parts().ModelRunnerOutput(
            req_ids=seqs,
            req_id_to_index={seq: place for place, seq in enumerate(seqs)},
            sampled_token_ids=[
                [TOKEN] if request.num_computed_tokens >= request.num_tokens else []
                for request in requests
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def update(self, results: Any = None) -> None:
        """Report the results of the step planned last, if that has not been done."""
        if self.planned is not None:
            results = results or self.results()
            self.scheduler.update_from_output(self.planned, results)
            self.planned = None

    def abort(self, seqs: Sequence[str]) -> None:
        """End requests from outside."""
        status = parts().RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(list(seqs), status)

    def reset(self) -> None:
        """End everything."""
        self.update()
        self.abort(list(self.scheduler.requests))

    def lengths(self) -> int:
        """Tokens computed of all that run."""
        return sum(request.num_computed_tokens for request in self.scheduler.running)
