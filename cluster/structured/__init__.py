"""Answers that match a grammar: checked at the ingress, followed in the coordinator, in processes that may die."""
