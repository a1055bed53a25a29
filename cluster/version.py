"""The version of this checkout, equal to that in pyproject.toml."""

VERSION = "0.1.0"
