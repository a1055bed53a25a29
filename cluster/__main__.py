"""`python -m cluster`."""

from cluster.cli import app

if __name__ == "__main__":
    app(prog_name="python -m cluster")
