"""The import path in every config file: `cluster.app:build_app`. The application is in `cluster/serve/app.py`."""

from cluster.serve.app import build_app

__all__ = ["build_app"]
