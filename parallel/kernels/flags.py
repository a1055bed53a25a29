"""The flags by which programs of several ranks meet; whoever only plans their memory has no Triton."""

MAX_RANKS = 8
MAX_PROGRAMS = 256
"""The most programs of a launch that waits for other ranks."""
FLAG_BYTES = 2 * 4 * MAX_RANKS * MAX_PROGRAMS
"""Bytes of the flags that the ranks' memory begins with."""
