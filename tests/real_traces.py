"""The real trace files, found through ``KVCORE_TRACES``; a test that needs one skips without."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from kvcore.trace import Trace, read_trace

AZURE_CODE = "azure2023/AzureLLMInferenceTrace_code.csv"
AZURE_CONV = "azure2023/AzureLLMInferenceTrace_conv.csv"
CONVERSATION = "mooncake/conversation_trace.jsonl"
SYNTHETIC = "mooncake/synthetic_trace.jsonl"
SHAREGPT = "lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
ARXIV = "lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv"
AGENTIC = "agentic_claude_code"


def trace_path(name: str) -> Path:
    directory = os.environ.get("KVCORE_TRACES")
    if not directory:
        pytest.skip("KVCORE_TRACES does not name the directory of the real traces")
    path = Path(directory) / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def real_trace(name: str) -> Trace:
    return _read(trace_path(name))


_read = cache(read_trace)
