"""Answers that match a grammar: checked at the ingress, in a process that may die of it, and followed by threads of the
coordinator."""
