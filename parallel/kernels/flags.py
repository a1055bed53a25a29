"""Sizes of the flags by which programs of several ranks meet. Separate from the kernels, because planning the memory
must not need Triton."""

MAX_RANKS = 8
MAX_PROGRAMS = 256
"""Largest number of programs of a launch that waits for other ranks."""
FLAG_BYTES = 2 * 4 * MAX_RANKS * MAX_PROGRAMS
"""Bytes of the flags at the start of a rank's memory."""
