"""`python -m cluster`."""

from cluster.serve.haproxy import use_haproxy

use_haproxy()  # before the next import brings ray.serve

from cluster.commands.cli import app  # noqa: E402

if __name__ == "__main__":
    app(prog_name="python -m cluster")
