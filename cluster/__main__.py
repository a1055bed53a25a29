"""Runs the command line: `python -m cluster`."""

from cluster.serve.haproxy import use_haproxy

use_haproxy()  # the next import imports ray.serve, which reads these variables

from cluster.commands.cli import app  # noqa: E402

if __name__ == "__main__":
    app(prog_name="python -m cluster")
