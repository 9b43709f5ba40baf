"""An engine: a scheduler's steps, carried out on a model and a paged cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.arguments import at_least
from kvcore.copier import run_copies
from kvcore.engine.cache import PagedCache
from kvcore.engine.llama import Chunk
from kvcore.engine.sampling import BeamSearch, Greedy
from kvcore.numpy_copier import NumpyCopier
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
    length : int or None
        Tokens of its text up to its end token. Until the scheduler knows of it, more may follow.
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
        self.length: int | None = None
        # All beams begin with the same logits: the first one continues for all of them.
        self.score = 0.0 if sample == 0 else -np.inf


class _Results:
    """What a step has sampled, the beams that go on from others, and the texts that end."""

    def __init__(self) -> None:
        self.tokens: dict[Hashable, list[int]] = {}
        self.parents: dict[Hashable, Hashable] = {}
        self.finished: list[Hashable] = []


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
    in_flight : int
        Steps whose results the scheduler does not know when the next is planned. They are
        computed all the same, one after the other: what is delayed is the report.
    window, sink_tokens : int
        What the model attends to, see ``Llama.forward``; default everything.
    **scheduling
        Everything else that ``Scheduler`` takes.

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
        in_flight: int = 0,
        window: int | None = None,
        sink_tokens: int = 0,
        **scheduling: Any,
    ) -> None:
        if bool(scheduling.get("draft_tokens")) != (drafter is not None):
            raise ValueError(
                f"draft_tokens and drafter need each other, got "
                f"{scheduling.get('draft_tokens', 0)} and {drafter!r}"
            )
        self.model = model
        self.bm = bm
        self.host = host
        self.drafter = drafter
        self.scheduler = Scheduler(
            bm,
            token_budget=token_budget,
            host=host,
            in_flight=in_flight,
            window=window,
            sink_tokens=sink_tokens,
            **scheduling,
        )
        self.cache = PagedCache(model.shape, bm.num_blocks, bm.block_size)
        self.host_cache = (
            None if host is None else PagedCache(model.shape, host.num_blocks, host.block_size)
        )
        self._copier = NumpyCopier(self.cache.planes)
        self._swap_out = self._swap_in = None
        if self.host_cache is not None:
            self._swap_out = NumpyCopier(self.cache.planes, self.host_cache.planes)
            self._swap_in = NumpyCopier(self.host_cache.planes, self.cache.planes)
        self.texts: dict[Hashable, list[int]] = {}
        self.rejected: dict[Hashable, Verdict] = {}
        self._generations: dict[Hashable, _Generation] = {}
        self._in_flight = in_flight
        self._window, self._sink_tokens = window, sink_tokens
        self._unreported: deque[tuple[Step, _Results]] = deque()

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
            model's, beams with steps in flight, or what ``Scheduler.add`` raises. Nothing
            has changed.
        """
        shape = self.model.shape
        if self._in_flight and isinstance(sampling, BeamSearch):
            raise ValueError(
                f"sampling: with in_flight {self._in_flight} beams cannot move in time"
            )
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
        return not (scheduler.running or scheduler.waiting or scheduler.swapped or self._unreported)

    def run(self) -> None:
        """Run steps until there is nothing left to do.

        Raises
        ------
        RuntimeError
            Somebody waits for blocks that only others can give back.
        """
        idle = 0
        while not self.is_idle:
            reported = not self._unreported
            step = self.step()
            # What one step sorts out another one must use.
            idle = idle + 1 if step.is_empty and reported and not step.rejected else 0
            if idle > 1:
                raise RuntimeError(f"step {step.number} has nothing to do, and somebody waits")

    def step(self) -> Step:
        """Plan a step and carry it out; report the results that are due. Returns the plan."""
        step = self.scheduler.step()
        self.rejected.update(step.rejected)
        for seq in step.rejected:
            self._generations.pop(seq, None)
        self.copy_blocks(step)
        chunks = self.chunks(step)
        results = self._sample(step, chunks, self.forward(chunks)) if chunks else _Results()
        self._unreported.append((step, results))
        if step.is_empty or len(self._unreported) > self._in_flight:
            self._report(*self._unreported.popleft())
        while self._unreported and self._unreported[0][0].is_updated:
            self._unreported.popleft()  # nothing runs in it, so there is nothing to wait for
        self._forget_idle()
        return step

    def copy_blocks(self, step: Step) -> None:
        """Run the block copies of a step, in their order."""
        if self.host_cache is not None:
            self.host_cache.begin_copies(step.swap_out[:, 1])
        self.cache.begin_copies(np.concatenate([step.swap_in[:, 1], step.copies[:, 1]]))
        run_copies(step, self._copier, self._swap_out, self._swap_in)

    def chunks(self, step: Step) -> list[Chunk]:
        """List what a step computes: first those that decode, in its order, then the prompts."""
        chunks = []
        counts = np.ones(len(step), np.int32) if step.counts is None else step.counts
        starts = np.cumsum(counts) - counts
        for place, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            position = int(step.lengths[place]) - count
            text = self.texts[step[place]][: position + 1]
            tokens = [text[-1], *self._drafts(text, count - 1)]
            slots = step.slots[start : start + count]
            table = self.bm.block_tables[step.rows[place]]
            chunks.append(Chunk(tokens, position, slots, table, count))
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
        return self.model.forward(chunks, self.cache, self._window, self._sink_tokens)

    def _report(self, step: Step, results: _Results) -> None:
        """Tell the scheduler what a step has sampled."""
        rejected = None
        unwanted: list[int] = []
        if step.counts is not None:
            rejected = step.counts - np.array([len(results.tokens[seq]) for seq in step])
            ends = np.cumsum(step.counts)
            for end, count in zip(ends.tolist(), rejected.tolist(), strict=True):
                unwanted += step.slots[end - count : end].tolist()
        ended = self.scheduler.update(
            step,
            [token for seq in step.sampled for token in results.tokens[seq]],
            finished=results.finished,
            rejected=rejected,
            parents=results.parents,
        )
        self.cache.erase_slots(np.array(unwanted, np.int64))
        for seq in ended:
            generation = self._generations.pop(seq)
            self.texts[seq] = self.texts[seq][: generation.length]

    def _sample(self, step: Step, chunks: list[Chunk], logits: NDArray[np.float32]) -> _Results:
        """Sample from the logits of a step's chunks."""
        results = _Results()
        beams: dict[Hashable, NDArray[np.float32]] = {}
        starters: dict[Hashable, list[Hashable]] = {seq: [seq] for seq in step.completed}
        for parent, child in step.forks:
            starters[parent].append(child)
        computed = [*step, *(seq for seq, _, _ in step.prefills)]
        end = 0
        for order, (seq, chunk) in enumerate(zip(computed, chunks, strict=True)):
            start, end = end, end + chunk.sampled
            drafts = chunk.tokens[len(chunk.tokens) - chunk.sampled + 1 :]
            # Who decodes samples for itself; who has completed a prompt, for all that share it.
            for one in [seq] if order < len(step) else starters.get(seq, ()):
                generation = self._generations[one]
                if isinstance(generation.sampling, BeamSearch):
                    beams[one] = logits[start]
                    continue
                # Not always the end of its text: what was sampled before a preemption may
                # have come too late for the scheduler, and then it is sampled again.
                position = chunk.start + len(chunk.tokens) - len(drafts)
                tokens: list[int] = []
                for row, draft in zip(logits[start:end], [*drafts, None], strict=True):
                    place = position + len(tokens)
                    tokens.append(generation.sampling.choose(row, generation.sample, place))
                    if tokens[-1] != draft or tokens[-1] == generation.end_token:
                        break
                self._go_on(one, self.texts[one][:position], tokens, results)
        while beams:
            self._advance_beams(beams, results)
        return results

    def _go_on(
        self, seq: Hashable, before: list[int], tokens: list[int], results: _Results
    ) -> None:
        """Write into a text what was sampled after ``before``."""
        self.texts[seq] = before + tokens
        results.tokens[seq] = tokens
        generation = self._generations[seq]
        length = len(self.texts[seq])
        if tokens[-1] == generation.end_token and generation.length in (None, length):
            generation.length = length
            results.finished.append(seq)

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
        before = [self.texts[seq] for seq in group]
        for seq, continuation in zip(group, search.advance(scores, logits), strict=True):
            self._go_on(seq, before[continuation.parent], [continuation.token], results)
            self._generations[seq].score = continuation.score
            if group[continuation.parent] != seq:
                results.parents[seq] = group[continuation.parent]

    def _forget_idle(self) -> None:
        """Erase the blocks that are free now."""
        self.cache.erase(self.bm.pool.free_blocks())
        if self.host is not None and self.host_cache is not None:
            self.host_cache.erase(self.host.pool.free_blocks())
