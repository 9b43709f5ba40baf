"""transformers' continuous batching says the same with kvcore underneath.

Every text is compared with what their own allocator gives and, token by token, with a plain
forward pass without a cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not transformers.__version__.startswith("5.24."):
    pytest.skip("the allocator is written for transformers 5.24", allow_module_level=True)

from transformers import (  # noqa: E402
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.continuous_batching import cache  # noqa: E402
from transformers.generation.continuous_batching.cache_allocators import (  # noqa: E402
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.requests import RequestState  # noqa: E402
from transformers_allocator import BlockManagerAllocator  # noqa: E402

VOCABULARY = 128
OUTPUT = 16
RECORDED = (
    "allocate_cache_to_request",
    "free_blocks",
    "fork_blocks",
    "acquire_prefix_blocks",
    "mark_complete_blocks",
    "copy_blocks",
)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,  # so that a text depends on all that comes before it
        eos_token_id=None,
    )
    made = LlamaForCausalLM(config).eval()
    gc.freeze()  # each stop collects garbage, in all that torch has imported
    yield made
    gc.unfreeze()
    torch.set_num_threads(threads)


class Served(NamedTuple):
    outputs: list[Any]
    calls: list[tuple[Any, ...]]  # of the allocator: a name and the arguments
    sharers: list[int]  # of the most shared block, after each call

    @property
    def texts(self) -> list[list[int]]:
        return [output.generated_tokens for output in self.outputs]

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]

    @property
    def preemptions(self) -> int:
        return sum(no_cache for _, _, no_cache in self.named("free_blocks"))


@pytest.fixture
def serve(model: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    def run(
        allocator: type, prompts: list[list[int]], *, samples: int = 1, **options: Any
    ) -> Served:
        served = Served([], [], [])

        def recorded(name: str) -> Callable[..., Any]:
            def method(self: Any, *arguments: Any) -> Any:
                result = getattr(allocator, name)(self, *arguments)
                served.calls.append((name, *arguments))
                if allocator is BlockManagerAllocator:
                    self.manager.check()
                    served.sharers.append(int(self.manager.ref.max()))
                return result

            return method

        kind = type("Recorded", (allocator,), {name: recorded(name) for name in RECORDED})
        monkeypatch.setitem(cache.ATTN_TYPE_TO_ALLOCATOR, FULL_ATTENTION, kind)
        generation = GenerationConfig(
            do_sample=samples > 1,
            num_return_sequences=samples,
            max_new_tokens=OUTPUT,
            eos_token_id=-1,
            pad_token_id=0,
        )
        usual = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 64}
        batching = ContinuousBatchingConfig(seed=1, return_logprobs=True, **usual | options)
        batches = model.init_continuous_batching(generation, batching)
        batches.warmup()
        batches.add_requests(prompts)  # before the start, or when each is seen is left to chance
        batches.start()
        try:
            while len(served.outputs) < samples * len(prompts):
                output = batches.get_result(timeout=60)
                assert output is not None, "no result"
                assert output.error is None, output.error
                served.outputs.append(output)
        finally:
            batches.stop(timeout=10)
            batches.destroy()
        if served.sharers:
            assert served.sharers[-1] == 0, "somebody holds blocks after the end"
        served.outputs.sort(key=lambda output: output.request_id)
        return served

    return run


def assert_as_without_a_cache(model: Any, served: Served) -> None:
    for output in served.outputs:
        assert len(output.generated_tokens) == OUTPUT
        tokens = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0]
        scores = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(output.logprobs), scores[-OUTPUT:], atol=1e-4, rtol=0
        )


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("options", "preempted"),
    [
        ({"allow_block_sharing": True}, False),
        ({"allow_block_sharing": False, "max_batch_tokens": 8}, False),
        ({"allow_block_sharing": True, "page_size": 16}, False),
        ({"allow_block_sharing": True, "num_blocks": 14}, True),
        ({"allow_block_sharing": False, "num_blocks": 14}, True),
    ],
    ids=["whole prompts", "chunks", "blocks of 16", "preempted", "preempted without sharing"],
)
def test_texts_are_those_of_their_own_allocator(
    model: Any, serve: Callable[..., Served], options: dict[str, Any], preempted: bool
) -> None:
    prompts = prompts_of(5, 17, 30, 3)
    theirs = serve(FullAttentionCacheAllocator, prompts, **options)
    ours = serve(BlockManagerAllocator, prompts, **options)
    assert ours.texts == theirs.texts
    assert_as_without_a_cache(model, ours)
    assert (ours.preemptions > 0) == preempted
    if not options["allow_block_sharing"]:  # who fits, who grows and who yields, and when
        assert ours.calls == theirs.calls


def test_texts_that_waited_in_host_memory(
    model: Any, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty  # pinned memory needs a GPU
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    prompts = prompts_of(5, 17, 30, 3)
    options = {"num_blocks": 20, "allow_block_sharing": False, "cpu_offload_space": 1e-3}
    theirs = serve(FullAttentionCacheAllocator, prompts, **options)
    ours = serve(BlockManagerAllocator, prompts, **options)
    assert ours.texts == theirs.texts
    assert_as_without_a_cache(model, ours)
    assert ours.preemptions > 0
    assert ours.calls == theirs.calls
    computed = sum(call[3] for call in ours.named("allocate_cache_to_request"))
    assert computed == sum(len(prompt) + OUTPUT - 1 for prompt in prompts), "nothing twice"


@pytest.mark.parametrize(
    ("options", "sharers", "hits"),
    [
        ({"max_batch_tokens": 21}, 6, [16] * 5),
        ({"max_batch_tokens": 126}, 6, []),
        ({"max_batch_tokens": 21, "num_blocks": 22, "safety_margin": 0}, 6, [16] * 5 + [20]),
        ({"max_requests_per_batch": 1, "num_blocks": 12}, 1, [16] * 5),
    ],
    ids=["one a step", "in one step", "preempted", "one after another, with evictions"],
)
def test_prompts_that_begin_alike_share_blocks(
    model: Any,
    serve: Callable[..., Served],
    options: dict[str, Any],
    sharers: int,
    hits: list[int],
) -> None:
    common, *others = prompts_of(19, 2, 2, 2, 2, 2, 2)
    prompts = [common + other for other in others]
    theirs = serve(FullAttentionCacheAllocator, prompts, **options)
    ours = serve(BlockManagerAllocator, prompts, **options)
    assert ours.texts == theirs.texts
    assert_as_without_a_cache(model, ours)
    assert max(ours.sharers) == sharers
    assert [call[2] for call in ours.named("acquire_prefix_blocks")] == hits


@pytest.mark.parametrize(("num_blocks", "preempted"), [(64, False), (36, True)])
def test_samples_share_their_prompt_until_they_write(
    model: Any, serve: Callable[..., Served], num_blocks: int, preempted: bool
) -> None:
    prompts = prompts_of(17, 18)
    options = {"num_blocks": num_blocks, "safety_margin": 0}
    theirs = serve(FullAttentionCacheAllocator, prompts, samples=4, **options)
    ours = serve(BlockManagerAllocator, prompts, samples=4, **options)
    assert_as_without_a_cache(model, ours)
    assert len({tuple(text) for text in ours.texts}) == 8
    assert ours.texts == theirs.texts
    assert max(ours.sharers) == 4
    # The samples of the first prompt begin at the end of a block, and nobody copies.
    assert len(ours.named("copy_blocks")) == 3
    assert (ours.preemptions > 0) == preempted


@pytest.fixture
def paged(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache of four blocks of four tokens, without the rest of the engine."""
    monkeypatch.setitem(cache.ATTN_TYPE_TO_ALLOCATOR, FULL_ATTENTION, BlockManagerAllocator)
    batching = ContinuousBatchingConfig(page_size=4, num_blocks=4, max_batch_tokens=16)
    batches = model.init_continuous_batching(GenerationConfig(eos_token_id=-1), batching)
    batches.warmup()
    return batches.batch_processor.cache


def store(paged: Any, name: str, prompt: list[int]) -> bool:
    state = RequestState(name, prompt)
    blocks = paged.count_new_complete_blocks(state, len(prompt))
    stored = paged.can_store_request_tokens(state, len(prompt))
    if stored:
        paged.mark_complete_blocks(state, blocks)
    return stored


def test_a_full_cache(paged: Any) -> None:
    first, second = prompts_of(9, 5)
    assert store(paged, "first", first)
    assert not store(paged, "second", second)
    assert paged.search_prefix_match("again", first) == 8
    assert store(paged, "last", second[:4])
    assert paged.compute_free_capacity() == 0
    assert paged.search_prefix_match("a third time", first) == 0, "no room for its last token"
    paged.free_blocks("last")
    assert paged.search_prefix_match("a third time", first) == 8
    paged.cache_allocators[FULL_ATTENTION].manager.check()


def test_reset_forgets_everything(paged: Any) -> None:
    (prompt,) = prompts_of(9)
    assert store(paged, "first", prompt)
    paged.reset()
    assert paged.compute_free_capacity() == 1
    assert paged.search_prefix_match("again", prompt) == 0
    assert store(paged, "again", prompt)
    assert paged.search_prefix_match("a third time", prompt) == 8
    paged.cache_allocators[FULL_ATTENTION].manager.check()


def test_other_kinds_of_layers_are_refused(
    model: Any, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "layer_types", [FULL_ATTENTION, SLIDING_ATTENTION], False)
    monkeypatch.setattr(model.config, "sliding_window", 8, False)
    with pytest.raises(ValueError, match="one allocator must have all the memory, not 2"):
        serve(BlockManagerAllocator, prompts_of(5))
