"""``python -m kvcore.engine PROMPT``: text from a small model, and the pool as it fills."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING

from kvcore import BlockManager, Counter
from kvcore.cli_options import whole
from kvcore.engine.models import load_model
from kvcore.engine.sampling import Greedy, Temperature
from kvcore.engine.serve import Engine
from kvcore.engine.text_lines import TextLines
from kvcore.engine.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from kvcore.engine.tokenizer import Tokenizer

WIDTH = 56
BAR = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 if a text had to be given up."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcore.engine",
        description="Serve prompts with a small Llama in numpy, whose keys and values "
        "kvcore places. Each line of text ends with the pool at that moment.",
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument(
        "--n", type=whole(1), default=1, help="samples of each prompt (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=whole(1), default=100, metavar="N", help="of a sample (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (%(default)s)"
    )
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N")
    parser.add_argument(
        "--blocks", type=whole(1), default=64, metavar="N", help="in the pool (%(default)s)"
    )
    parser.add_argument(
        "--block-size", type=whole(1), default=16, metavar="N", help="tokens (%(default)s)"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="by default KVCORE_MODEL, else small random weights"
    )
    options = parser.parse_args(argv)
    try:
        model, tokenizer = load_model(options.model)
        sampling = (
            Temperature(options.temperature, options.seed) if options.temperature else Greedy()
        )
        bm = BlockManager(options.blocks, options.block_size, prefix_caching=True)
        engine = Engine(model, bm)
        for place, prompt in enumerate(options.prompts):
            first, *others = ((place, sample) for sample in range(options.n))
            engine.add(
                first,
                tokenizer.encode(prompt),
                max_tokens=options.max_tokens,
                sampling=sampling,
                siblings=others,
                end_token=tokenizer.end,
            )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if isinstance(tokenizer, ByteTokenizer):
        print(
            "Random weights, so the text makes no sense; --model or KVCORE_MODEL names a model.",
            file=sys.stderr,
        )
    return show(engine, tokenizer)


def show(engine: Engine, tokenizer: Tokenizer) -> int:
    """Run an engine until it is idle, and print its texts as they grow."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    lines = {seq: TextLines(WIDTH) for seq in engine.texts}
    shown = dict.fromkeys(engine.texts, 0)
    names: dict[Hashable, int] = {seq: number for number, seq in enumerate(engine.texts, 1)}
    steps = 0
    while not engine.is_idle:
        engine.step()
        steps += 1
        for seq, tokens in engine.texts.items():
            text = tokenizer.decode(tokens)
            for line in lines[seq].feed(text[shown[seq] :]):
                print(f"{names[seq]:>3} {line:<{WIDTH}} {pool_bar(engine.bm)}", flush=True)
            shown[seq] = len(text)
    for seq in engine.texts:
        print(f"{names[seq]:>3} {lines[seq].end():<{WIDTH}} {pool_bar(engine.bm)}")
    counters = engine.scheduler.counters
    print(
        f"{counters.sampled_tokens} tokens in {steps} steps; "
        f"{engine.bm.counters[Counter.COW_COPIES]} blocks copied, "
        f"{counters.preemptions_recompute} preemptions, "
        f"{counters.recomputed_tokens} tokens computed again"
    )
    for seq, verdict in engine.rejected.items():
        print(f"{names[seq]:>3} was given up: {verdict.reason.value}", file=sys.stderr)
    return 1 if engine.rejected else 0


def pool_bar(bm: BlockManager) -> str:
    """Return a picture of how full the pool is: used ``#``, cached and evictable ``+``."""
    pool = bm.pool
    used = -(-BAR * pool.num_used // pool.num_blocks)
    held = -(-BAR * (pool.num_used + pool.num_evictable) // pool.num_blocks)
    bar = ("#" * used).ljust(held, "+").ljust(BAR, ".")
    return f"[{bar}] {pool.num_used} used, {pool.num_evictable} cached, {pool.num_free} free"


if __name__ == "__main__":
    sys.exit(main())
