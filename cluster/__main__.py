"""`python -m cluster`."""

from cluster.commands.cli import app

if __name__ == "__main__":
    app(prog_name="python -m cluster")
