"""The version of this checkout. pyproject.toml has the same."""

VERSION = "0.1.0"
