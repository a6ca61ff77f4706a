"""Counts what devices say to each other in a compiled program."""

import collections
import re

import jax

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
    "send",
    "recv",
)


def in_text(hlo):
    """{kind: how many} of an HLO text; an operation in two halves, -start and -done, counts once."""
    return dict(collections.Counter(re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", hlo)))


def of(f, *args):
    """{kind: how many} of `f` compiled for these arguments."""
    return in_text(jax.jit(f).lower(*args).compile().as_text())
