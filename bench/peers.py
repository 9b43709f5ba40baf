"""Other block managers and prefix caches, if they are installed, as contenders in our rows.

Each is called as its own scheduler calls it, without a model and without a GPU. What they
do in a call differs, and so does what they leave for later; the classes say it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import warnings
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from bench.harness import Contender
from bench.workload import BLOCK_SIZE

__all__ = [
    "SglangCache",
    "VllmCache",
    "absent",
    "allocate_or_free",
    "evict",
    "hit_and_free",
    "match",
    "match_hashed",
    "present",
    "publish",
]

SEQ_TOKENS_MOST = 1 << 20


@lru_cache
def absent() -> Mapping[str, str]:
    """Peers that are known here and cannot be used, and why."""
    reasons = {}
    for cache in (VllmCache, SglangCache):
        if importlib.util.find_spec(cache.name) is None:
            reasons[cache.name] = "not installed"
            continue
        try:
            cache.parts()
        except Exception as error:
            # Whatever another package raises at import: ours must be measured all the same.
            reasons[cache.name] = f"does not work here: {type(error).__name__}: {error}"
    return reasons


def present() -> list[type[VllmCache] | type[SglangCache]]:
    """The peers that can be used."""
    return [cache for cache in (VllmCache, SglangCache) if cache.name not in absent()]


def imported(*names: str) -> SimpleNamespace:
    """What these ``module:attribute`` name, by attribute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {}
        for name in names:
            module, _, attribute = name.partition(":")
            found[attribute] = getattr(importlib.import_module(module), attribute)
    return SimpleNamespace(**found)


def accepted(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that this version of the function knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


class VllmCache:
    """vLLM's ``KVCacheManager`` with one group of full attention, caching on.

    A prompt is a list of ints, and its chain of SHA-256 hashes is made when the request is.
    A match trusts them; it finds objects, not an array. Blocks are cached by hash when they
    are allocated. Eviction happens as blocks are taken.
    """

    name = "vllm"

    @staticmethod
    @lru_cache
    def parts() -> SimpleNamespace:
        """The classes, imported; takes ten seconds."""
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        logging.getLogger("torch").setLevel(logging.ERROR)
        parts = imported(
            "torch:float32",
            "vllm.sampling_params:SamplingParams",
            "vllm.utils.hashing:sha256",
            "vllm.v1.core.block_pool:BlockPool",
            "vllm.v1.core.kv_cache_manager:KVCacheManager",
            "vllm.v1.core.kv_cache_utils:get_request_block_hasher",
            "vllm.v1.core.kv_cache_utils:init_none_hash",
            "vllm.v1.kv_cache_interface:FullAttentionSpec",
            "vllm.v1.kv_cache_interface:KVCacheConfig",
            "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
            "vllm.v1.request:Request",
        )
        parts.init_none_hash(parts.sha256)
        return parts

    def __init__(self, num_blocks: int) -> None:
        parts = self.parts()
        spec = parts.FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=parts.float32
        )
        config = parts.KVCacheConfig(
            num_blocks=num_blocks + 1,  # one of them is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[parts.KVCacheGroupSpec(["layer"], spec)],
        )
        arguments = {
            "max_model_len": SEQ_TOKENS_MOST,
            "scheduler_block_size": BLOCK_SIZE,
            "hash_block_size": BLOCK_SIZE,
            "max_in_flight_tokens": SEQ_TOKENS_MOST,
            "enable_caching": True,
        }
        known = accepted(parts.KVCacheManager.__init__, arguments)
        self.manager = parts.KVCacheManager(config, **known)
        self.pool = self.manager.block_pool
        self.requests = 0

    def request(self, tokens: Iterable[int]) -> Any:
        """A request with this prompt, hashed."""
        parts = self.parts()
        self.requests += 1
        return parts.Request(
            request_id=str(self.requests),
            prompt_token_ids=list(tokens),
            sampling_params=parts.SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=parts.get_request_block_hasher(BLOCK_SIZE, parts.sha256),
        )

    def fill(self, prompts: Iterable[Sequence[int]]) -> None:
        """Compute each prompt and let it go again; it stays cached."""
        for prompt in prompts:
            request = self.request(prompt)
            self.manager.get_computed_blocks(request)
            if self.manager.allocate_slots(request, len(prompt)) is None:
                raise AssertionError("vllm had no room for a prompt")
            self.manager.free(request)

    def match(self, tokens: Sequence[int], hashed: bool) -> Contender:
        """Find the cached prefix of a prompt, whose hashes are there or are made first."""
        request = self.request(tokens)
        find = "manager.get_computed_blocks(request)"
        again = "request.block_hashes.clear(); request.update_block_hashes(); "
        return Contender(
            find if hashed else again + find,
            "_ in turns",
            {"manager": self.manager, "request": request, "turns": range(4)},
            operations=4,
            verify=lambda: self.expect_hit(request, len(tokens)),
        )

    def expect_hit(self, request: Any, tokens: int) -> None:
        """Fail unless all full blocks of the prompt are found, but for its last token."""
        found = self.manager.get_computed_blocks(request)[1]
        if found != (tokens - 1) // BLOCK_SIZE * BLOCK_SIZE:
            raise AssertionError(f"vllm found {found} tokens of {tokens}")

    def publish(self, prompts: Sequence[Sequence[int]]) -> Contender:
        """``cache_full_blocks`` of blocks held, their hashes being there."""
        requests = [self.request(prompt) for prompt in prompts]
        count = len(requests[0].block_hashes)
        held = [self.pool.get_new_blocks(count) for _ in requests]
        names = {
            "cache": self.pool.cache_full_blocks,
            "pairs": list(zip(requests, held, strict=True)),
            "count": count,
            "size": BLOCK_SIZE,
        }

        def forget() -> None:
            for blocks in held:
                self.pool.evict_blocks({block.block_id for block in blocks})

        return Contender(
            "cache(request, blocks, 0, count, size, 0)",
            "request, blocks in pairs",
            names,
            operations=count * len(requests),
            prepare=forget,
        )

    def hit_and_free(self, tokens: Sequence[int]) -> Contender:
        """Admit a request whose prompt is cached, and end it; its hashes are there."""
        request = self.request(tokens)
        cached = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        return Contender(
            "blocks = manager.get_computed_blocks(request)[0]; "
            "manager.allocate_slots(request, rest, cached, blocks); manager.free(request)",
            "_ in turns",
            {
                "manager": self.manager,
                "request": request,
                "cached": cached,
                "rest": len(tokens) - cached,
                "turns": range(4),
            },
            operations=4,
        )

    def evict(self, prompts: Sequence[Sequence[int]], count: int) -> Contender:
        """Take blocks from a pool in which all are cached; the prompts fill it."""
        requests = [self.request(prompt) for prompt in prompts]
        per_request = len(requests[0].block_hashes)
        turns = len(requests) * per_request // count
        for request in requests:
            blocks = self.pool.get_new_blocks(per_request)
            self.pool.cache_full_blocks(request, blocks, 0, per_request, BLOCK_SIZE, 0)
            self.pool.free_blocks(reversed(blocks))
        held: list[list[Any]] = []
        state = {"turn": 0}

        def put_back() -> None:
            while held:
                taken = held.pop()
                if any(block.block_hash is not None for block in taken):
                    raise AssertionError("vllm did not evict what it took")
                for start in range(0, count, per_request):
                    blocks = taken[start : start + per_request]
                    request = requests[state["turn"] % len(requests)]
                    state["turn"] += 1
                    self.pool.cache_full_blocks(request, blocks, 0, per_request, BLOCK_SIZE, 0)
                    self.pool.free_blocks(reversed(blocks))

        if turns < 2:
            raise AssertionError("the pool must hold more than one run evicts")
        return Contender(
            "held.append(pool.get_new_blocks(count))",
            "_ in once",
            {"pool": self.pool, "held": held, "count": count, "once": (None,)},
            operations=1,
            prepare=put_back,
        )


class SglangSlots:
    """In place of SGLang's allocator of token slots: only counts what is given back."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.freed = 0

    def free(self, indices: Any) -> None:
        self.freed += len(indices)

    def free_segment(self, indices: Any, start_pos: int = 0) -> None:
        self.freed += len(indices)


class SglangCache:
    """SGLang's ``UnifiedRadixCache`` over its Rust tree, pages of our block size.

    A prompt is an ``array('q')``. Nothing is hashed: the tree holds tokens and a match
    compares them. It returns a node and a length; the indices are fetched when the
    request is admitted. The slots come from an allocator that is not part of it.
    """

    name = "sglang"

    @staticmethod
    @lru_cache
    def parts() -> SimpleNamespace:
        """The classes, imported; takes some seconds."""
        cache = "sglang.srt.mem_cache"
        return imported(
            "torch:arange",
            "torch:device",
            f"{cache}.base_prefix_cache:EvictParams",
            f"{cache}.base_prefix_cache:InsertParams",
            f"{cache}.base_prefix_cache:MatchPrefixParams",
            f"{cache}.cache_init_params:CacheInitParams",
            f"{cache}.radix_cache:RadixKey",
            f"{cache}.unified_cache.component_type:ComponentType",
            f"{cache}.unified_radix_cache:UnifiedRadixCache",
        )

    def __init__(self, num_blocks: int) -> None:
        parts = self.parts()
        self.slots = SglangSlots(parts.device("cpu"))
        self.cache = parts.UnifiedRadixCache(
            parts.CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.slots,
                page_size=BLOCK_SIZE,
                tree_components=(parts.ComponentType.FULL,),
                tree_core_backend="rust",
            )
        )

    def key(self, tokens: Iterable[int]) -> Any:
        """The prompt as a key of the tree."""
        return self.parts().RadixKey(array("q", tokens))

    def insertions(self, prompts: Iterable[Sequence[int]]) -> list[Any]:
        """An insertion for each prompt, with slots of its own."""
        parts = self.parts()
        return [
            parts.InsertParams(
                key=self.key(prompt),
                value=parts.arange(i * len(prompt), (i + 1) * len(prompt)),
            )
            for i, prompt in enumerate(prompts)
        ]

    def fill(self, prompts: Iterable[Sequence[int]]) -> None:
        """Insert each prompt."""
        for insertion in self.insertions(prompts):
            self.cache.insert(insertion)

    def match(self, tokens: Sequence[int], hashed: bool) -> Contender:
        """Find the cached prefix of a prompt. There is no hash to keep."""
        parts = self.parts()
        params = parts.MatchPrefixParams(key=self.key(tokens))
        full = len(tokens) // BLOCK_SIZE * BLOCK_SIZE

        def expect_hit() -> None:
            found = self.cache.match_prefix(params).device_prefix_len
            if found != full:
                raise AssertionError(f"sglang found {found} tokens of {full}")

        return Contender(
            "cache.match_prefix(params)",
            "_ in turns",
            {"cache": self.cache, "params": params, "turns": range(8)},
            operations=8,
            verify=expect_hit,
        )

    def publish(self, prompts: Sequence[Sequence[int]]) -> Contender:
        """Insert prompts that are not there."""
        evict_params = self.parts().EvictParams
        whole = [prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE] for prompt in prompts]
        everything = sum(map(len, whole))

        def remove() -> None:
            self.cache.evict(evict_params(num_tokens=everything))

        return Contender(
            "cache.insert(insertion)",
            "insertion in insertions",
            {"cache": self.cache, "insertions": self.insertions(whole)},
            operations=everything // BLOCK_SIZE,
            prepare=remove,
        )

    def hit_and_free(self, tokens: Sequence[int]) -> Contender:
        """Match, lock the path, fetch its indices, unlock."""
        params = self.parts().MatchPrefixParams(key=self.key(tokens))
        return Contender(
            "node = cache.match_prefix(params).best_match_node; lock = cache.inc_lock_ref(node); "
            "cache.path_device_indices(node); cache.dec_lock_ref(node, lock.to_dec_params())",
            "_ in turns",
            {"cache": self.cache, "params": params, "turns": range(8)},
            operations=8,
        )

    def evict(self, prompts: Sequence[Sequence[int]], count: int) -> Contender:
        """Evict whole prompts from a tree that holds only these."""
        params = self.parts().EvictParams(num_tokens=count * BLOCK_SIZE)
        insertions = self.insertions(prompts)
        for insertion in insertions:
            self.cache.insert(insertion)
        per_run = count * BLOCK_SIZE // len(prompts[0])
        state = {"turn": 0}

        def put_back() -> None:
            if self.slots.freed == 0:
                return
            if self.slots.freed != count * BLOCK_SIZE:
                raise AssertionError(f"sglang evicted {self.slots.freed} tokens")
            self.slots.freed = 0
            for _ in range(per_run):
                self.cache.insert(insertions[state["turn"] % len(insertions)])
                state["turn"] += 1

        return Contender(
            "cache.evict(params)",
            "_ in once",
            {"cache": self.cache, "params": params, "once": (None,)},
            operations=1,
            prepare=put_back,
        )


def match(
    num_blocks: int, prompts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> dict[str, Contender]:
    """Find the prefix of ``tokens`` in caches filled with the prompts, hashes and all."""
    return filled(num_blocks, prompts, lambda cache: cache.match(tokens, hashed=False))


def match_hashed(
    num_blocks: int, prompts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> dict[str, Contender]:
    """The same, where what can be kept of an earlier try is kept."""
    return filled(num_blocks, prompts, lambda cache: cache.match(tokens, hashed=True))


def hit_and_free(
    num_blocks: int, prompts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> dict[str, Contender]:
    """Admit and end a request whose prompt is cached."""
    return filled(num_blocks, prompts, lambda cache: cache.hit_and_free(tokens))


def filled(num_blocks: int, prompts: Sequence[Sequence[int]], ask: Any) -> dict[str, Contender]:
    """A contender of each peer, over a cache that holds the prompts."""
    contenders = {}
    for kind in present():
        cache = kind(num_blocks)
        cache.fill(prompts)
        contenders[cache.name] = ask(cache)
    return contenders


def publish(num_blocks: int, prompts: Sequence[Sequence[int]]) -> dict[str, Contender]:
    """Make computed prompts findable."""
    return {kind.name: kind(num_blocks).publish(prompts) for kind in present()}


def evict(num_blocks: int, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Contender]:
    """Evict ``count`` blocks of caches that the prompts fill."""
    return {kind.name: kind(num_blocks).evict(prompts, count) for kind in present()}


def allocate_or_free(blocks: int, sequences: int, freeing: bool) -> Mapping[str, Contender]:
    """Take ``blocks`` from the peer's pool, or give them back, for each sequence.

    vLLM: its ``BlockPool`` without prefix caching, which is less than what it does for a
    request. A request's blocks are freed last first, as its manager does.
    """
    if VllmCache.name in absent():
        return {}
    pool_class = VllmCache.parts().BlockPool
    arguments: dict[str, Any] = {
        "num_gpu_blocks": (sequences + 1) * blocks,
        "enable_caching": False,
        "hash_block_size": BLOCK_SIZE,
    }
    # hash_block_size came later; whatever the installed version does not know is left out.
    pool = pool_class(**accepted(pool_class, arguments))
    held: list[list[Any]] = []

    def prepare() -> None:
        while held:
            pool.free_blocks(reversed(held.pop()))
        if freeing:
            held.extend(pool.get_new_blocks(blocks) for _ in range(sequences))

    names = {"pool": pool, "held": held, "turns": range(sequences), "count": blocks}
    statement = (
        "pool.free_blocks(reversed(held.pop()))"
        if freeing
        else "held.append(pool.get_new_blocks(count))"
    )
    return {
        "vllm": Contender(statement, "_ in turns", names, operations=sequences, prepare=prepare)
    }
