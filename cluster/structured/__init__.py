"""Answers that match a grammar. The replica checks grammars in a process that may die of one, and threads of the
coordinator compute masks."""
