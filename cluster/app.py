"""The import path of every config file: `cluster.app:build_app`. The application is `cluster/serve/app.py`'s."""

from cluster.serve.app import build_app

__all__ = ["build_app"]
