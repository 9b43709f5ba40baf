"""An engine: a scheduler's steps, carried out on a model and a paged cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.arguments import at_least
from kvcore.engine.cache import PagedCache
from kvcore.engine.llama import Chunk
from kvcore.engine.sampling import BeamSearch, Greedy
from kvcore.scheduler import Scheduler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvcore.block_manager import BlockManager
    from kvcore.engine.drafts import Drafter
    from kvcore.engine.llama import Llama
    from kvcore.engine.sampling import Sampling
    from kvcore.request import Verdict
    from kvcore.step import Step

__all__ = ["Engine"]


class _Generation:
    """How a sequence is generated.

    Attributes
    ----------
    sample : int
        Its place among the samples or beams of its request.
    group : list of hashable
        Those samples or beams, itself included.
    score : float
        Of a beam: the logarithm of the probability of what it has generated.
    """

    def __init__(
        self,
        sampling: Sampling | BeamSearch,
        sample: int,
        group: list[Hashable],
        end_token: int | None,
    ) -> None:
        self.sampling = sampling
        self.sample = sample
        self.group = group
        self.end_token = end_token
        # All beams begin with the same logits: the first one continues for all of them.
        self.score = 0.0 if sample == 0 else -np.inf


class _Results:
    """The tokens that a step has sampled, and the beams that go on from others."""

    def __init__(self) -> None:
        self.tokens: dict[Hashable, list[int]] = {}
        self.parents: dict[Hashable, Hashable] = {}


class Engine:
    """Serves requests with a model whose keys and values only kvcore places.

    Parameters
    ----------
    model : Llama
    bm : BlockManager
        The blocks of the cache.
    token_budget : int
        Most tokens that a step computes.
    host : BlockManager, optional
        Blocks in host memory, for preempted sequences.
    drafter : Drafter, optional
        Guesses ``draft_tokens`` tokens for each sequence that decodes.
    **scheduling
        Everything else that ``Scheduler`` takes, but for ``in_flight`` and ``window``:
        this engine has the results of a step before it plans the next, and its model
        attends to everything.

    Attributes
    ----------
    scheduler : Scheduler
    cache, host_cache : PagedCache
        What is in the blocks. Without a host, ``host_cache`` is None.
    texts : dict of seq to list of int
        The tokens of each sequence, prompt included. They stay after its end.
    rejected : dict of seq to Verdict
        Requests that were dropped, and why.
    """

    def __init__(
        self,
        model: Llama,
        bm: BlockManager,
        *,
        token_budget: int = 256,
        host: BlockManager | None = None,
        drafter: Drafter | None = None,
        **scheduling: Any,
    ) -> None:
        for name in ("in_flight", "window"):
            if scheduling.get(name):
                raise ValueError(f"{name} is {scheduling[name]}, which this engine cannot do")
        if bool(scheduling.get("draft_tokens")) != (drafter is not None):
            raise ValueError(
                f"draft_tokens and drafter need each other, got "
                f"{scheduling.get('draft_tokens', 0)} and {drafter!r}"
            )
        self.model = model
        self.bm = bm
        self.host = host
        self.drafter = drafter
        self.scheduler = Scheduler(bm, token_budget=token_budget, host=host, **scheduling)
        self.cache = PagedCache(model.shape, bm.num_blocks, bm.block_size)
        self.host_cache = (
            None if host is None else PagedCache(model.shape, host.num_blocks, host.block_size)
        )
        self.texts: dict[Hashable, list[int]] = {}
        self.rejected: dict[Hashable, Verdict] = {}
        self._generations: dict[Hashable, _Generation] = {}

    def add(
        self,
        seq: Hashable,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | BeamSearch | None = None,
        siblings: Sequence[Hashable] = (),
        end_token: int | None = None,
        **request: Any,
    ) -> None:
        """Queue a request.

        Parameters
        ----------
        seq : hashable
        tokens : sequence of int
            The prompt.
        max_tokens : int
            Most tokens to generate, at least 1.
        sampling : Sampling or BeamSearch, optional
            Default greedy.
        siblings : sequence of hashable
            Further samples of the same prompt; with ``BeamSearch``, further beams.
        end_token : int, optional
            Ends the sequence that samples it.
        **request
            Everything else that ``Scheduler.add`` takes.

        Raises
        ------
        ValueError
            The sequence would outgrow the model's context, a token is none of the
            model's, or what ``Scheduler.add`` raises. Nothing has changed.
        """
        shape = self.model.shape
        at_least(max_tokens, 1, "max_tokens")
        if len(tokens) + max_tokens > shape.context:
            raise ValueError(
                f"max_tokens is {max_tokens}: after {len(tokens)} tokens the model has room for "
                f"{shape.context - len(tokens)}"
            )
        for token in tokens:
            if not 0 <= token < shape.vocab:
                raise ValueError(f"tokens: {token} is not from 0 to {shape.vocab - 1}")
        self.scheduler.add(seq, tokens=tokens, max_tokens=max_tokens, siblings=siblings, **request)
        group = [seq, *siblings]
        for sample, one in enumerate(group):
            self.texts[one] = list(tokens)
            self._generations[one] = _Generation(sampling or Greedy(), sample, group, end_token)

    def abort(self, seq: Hashable) -> bool:
        """End a sequence wherever it is; False if it is not here. Its text stays."""
        is_here = self.scheduler.abort(seq)
        self._generations.pop(seq, None)
        self._forget_idle()
        return is_here

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to do."""
        scheduler = self.scheduler
        return not (scheduler.running or scheduler.waiting or scheduler.swapped)

    def run(self) -> None:
        """Run steps until there is nothing left to do.

        Raises
        ------
        RuntimeError
            Somebody waits for blocks that only others can give back.
        """
        idle = 0
        while not self.is_idle:
            step = self.step()
            # What one step sorts out another one must use.
            idle = idle + 1 if step.is_empty and not step.rejected else 0
            if idle > 1:
                raise RuntimeError(f"step {step.number} has nothing to do, and somebody waits")

    def step(self) -> Step:
        """Plan a step, carry it out and report its results. Returns what was planned."""
        step = self.scheduler.step()
        self.rejected.update(step.rejected)
        for seq in step.rejected:
            self._generations.pop(seq, None)
        self.copy_blocks(step)
        chunks = self.chunks(step)
        if chunks:
            self._report(step, self._sample(step, chunks, self.forward(chunks)))
        elif not step.is_updated:
            self.scheduler.update(step)
        self._forget_idle()
        return step

    def copy_blocks(self, step: Step) -> None:
        """Run the block copies of a step, in their order."""
        if self.host_cache is not None:
            self.host_cache.copy(step.swap_out, self.cache)
            self.cache.copy(step.swap_in, self.host_cache)
        self.cache.copy(step.copies)

    def chunks(self, step: Step) -> list[Chunk]:
        """List what a step computes: first those that decode, in its order, then the prompts."""
        chunks = []
        counts = np.ones(len(step), np.int32) if step.counts is None else step.counts
        starts = np.cumsum(counts) - counts
        for place, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            text = self.texts[step[place]]
            tokens = [text[-1], *self._drafts(text, count - 1)]
            slots = step.slots[start : start + count]
            table = self.bm.block_tables[step.rows[place]]
            chunks.append(Chunk(tokens, len(text) - 1, slots, table, count))
        for seq, start, count in step.prefills:
            tokens = self.texts[seq][start : start + count]
            slots = self.bm.slots(seq, start, start + count)
            table = self.bm.block_tables[self.bm.row(seq)]
            chunks.append(Chunk(tokens, start, slots, table, int(seq in step.completed)))
        return chunks

    def _drafts(self, text: list[int], count: int) -> list[int]:
        """Exactly ``count`` drafts: a slot without a guess gets one that is likely wrong."""
        if not count:
            return []
        assert self.drafter is not None
        drafts = self.drafter.propose(text, count)
        return drafts + [text[-1]] * (count - len(drafts))

    def forward(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Compute the chunks of a step; see ``Llama.forward``."""
        return self.model.forward(chunks, self.cache)

    def _report(self, step: Step, results: _Results) -> None:
        """Tell the scheduler what a step has sampled, and write it into the texts."""
        rejected = None
        unwanted: list[int] = []
        if step.counts is not None:
            rejected = step.counts - np.array([len(results.tokens[seq]) for seq in step])
            ends = np.cumsum(step.counts)
            for end, count in zip(ends.tolist(), rejected.tolist(), strict=True):
                unwanted += step.slots[end - count : end].tolist()
        before = {parent: self.texts[parent] for parent in results.parents.values()}
        finished = []
        for seq, tokens in results.tokens.items():
            parent = results.parents.get(seq)
            self.texts[seq] = (self.texts[seq] if parent is None else before[parent]) + tokens
            if tokens[-1] == self._generations[seq].end_token:
                finished.append(seq)
        ended = self.scheduler.update(
            step,
            [token for seq in step.sampled for token in results.tokens[seq]],
            finished=finished,
            rejected=rejected,
            parents=results.parents,
        )
        self.cache.erase_slots(np.array(unwanted, np.int64))
        for seq in ended:
            del self._generations[seq]

    def _sample(self, step: Step, chunks: list[Chunk], logits: NDArray[np.float32]) -> _Results:
        """Sample from the logits of a step's chunks."""
        results = _Results()
        beams: dict[Hashable, NDArray[np.float32]] = {}
        starters: dict[Hashable, list[Hashable]] = {seq: [seq] for seq in step.completed}
        for parent, child in step.forks:
            starters[parent].append(child)
        computed = [*step, *(seq for seq, _, _ in step.prefills)]
        end = 0
        for place, (seq, chunk) in enumerate(zip(computed, chunks, strict=True)):
            start, end = end, end + chunk.sampled
            drafts = chunk.tokens[len(chunk.tokens) - chunk.sampled + 1 :]
            # Who decodes samples for itself; who has completed a prompt, for all that share it.
            for one in [seq] if place < len(step) else starters.get(seq, ()):
                generation = self._generations[one]
                if isinstance(generation.sampling, BeamSearch):
                    beams[one] = logits[start]
                    continue
                position = len(self.texts[one])
                tokens = results.tokens[one] = []
                for row, draft in zip(logits[start:end], [*drafts, None], strict=True):
                    token = generation.sampling.choose(row, generation.sample, position)
                    position += 1
                    tokens.append(token)
                    if token != draft or token == generation.end_token:
                        break
        while beams:
            self._advance_beams(beams, results)
        return results

    def _advance_beams(self, beams: dict[Hashable, NDArray[np.float32]], results: _Results) -> None:
        """Let the first of these beams and those of its request go on together.

        Beams that came apart, as when only some of them found a block, are compared with
        those that are equally long.
        """
        first = next(iter(beams))
        length = len(self.texts[first])
        group = [
            seq
            for seq in self._generations[first].group
            if seq in beams and len(self.texts[seq]) == length
        ]
        search = self._generations[first].sampling
        assert isinstance(search, BeamSearch)
        scores = np.array([self._generations[seq].score for seq in group])
        logits = np.stack([beams.pop(seq) for seq in group])
        for seq, continuation in zip(group, search.advance(scores, logits), strict=True):
            results.tokens[seq] = [continuation.token]
            self._generations[seq].score = continuation.score
            if group[continuation.parent] != seq:
                results.parents[seq] = group[continuation.parent]

    def _forget_idle(self) -> None:
        """Erase the blocks that are free now."""
        self.cache.erase(self.bm.pool.free_blocks())
        if self.host is not None and self.host_cache is not None:
            self.host_cache.erase(self.host.pool.free_blocks())
