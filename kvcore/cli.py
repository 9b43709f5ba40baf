"""The ``kvcore`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvcore import __version__
from kvcore.cli_options import UsageError
from kvcore.cli_replay import add_replay
from kvcore.cli_sweep import add_sweep
from kvcore.trace import TraceError

__all__ = ["main"]

FAILED, INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 1: a file could not be read or written, or the replay failed. 2: the
    options make no sense (argparse itself exits with it). 130: interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="kvcore", description="Block manager and scheduler of a paged KV cache."
    )
    parser.add_argument("--version", action="version", version=f"kvcore {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_replay(commands)
    add_sweep(commands)
    options = parser.parse_args(argv)
    try:
        code: int = options.run(options)
    except UsageError as error:
        options.parser.error(str(error))
    except BrokenPipeError:
        # The reader of our output has seen enough. What is still buffered goes nowhere,
        # or the interpreter would complain about it on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (TraceError, OSError) as error:
        print(f"kvcore: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code
