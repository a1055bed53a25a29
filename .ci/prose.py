"""Checks the prose of the product against .ci/prose.txt: `python .ci/prose.py`, part of `make check`.

The prose is every docstring, comment, log message and error message of the five packages. The table gives the most
matches of each pattern that a reader stumbles over. `--show PATTERN` lists the matches of one pattern, `--table` prints
the table as the prose is now, and `--draw SEED NUMBER docs|messages` draws texts at random for a reading test: explain
each from its text alone, then compare with the code.
"""

import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TABLE = ROOT / ".ci" / "prose.txt"
PACKAGES = ("configs", "parallel", "attention", "worker", "cluster")
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
MOST_FIRST_WORDS = 25
PATTERNS = {
    "whose, of which": r"\b(whose|of which|of whom)\b",
    "None: ...": r"\bNone:",
    "so many, as many": r"\b(so|as) (many|much)\b",
    "who, whoever": r"\b(who|whoever|whom)\b",
    "Does what X does": r"\b([Dd]oes (what|as)|(do|did) (what|as) \S+ (does|do|did|has|have)|as [`\w.]+ (does|do))\b",
    "as X has it": r"\bas [`\w.]+ (has|have) (it|them)\b",
    "those that, that of": r"\b([Tt]hose|[Tt]hat) (that|of|which)\b",
    "whatever, wherever": r"\b([Ww]hatever|[Ww]herever|[Ww]hichever)\b",
    "it is not to be": r"\b(is|are|was|were) (not )?to be\b",
    "has X done": r"\b([Hh]as|[Hh]ave) [`\w]+ (\w+ed|made|done|told|left|run)\b(?! (by|in|at))",
}
"""What a reader stumbles over, by name."""


class Text(NamedTuple):
    """One docstring, comment or message."""

    path: str
    line: int
    kind: str
    words: str

    @property
    def place(self) -> str:
        """Path and line."""
        return f"{self.path}:{self.line}"


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands alone: below a field as well."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def comments(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of each comment; a comment of several lines is one text."""
    found: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        words = token.string.lstrip("# ")
        if not token.line[:column].strip():
            if found and found[-1][1] == line - 1:
                found[-1] = (found[-1][0], line, f"{found[-1][2]} {words}")
            else:
                found.append((line, line, words))
        else:
            found.append((line, -1, words))
    for first, _, words in found:
        yield first, words


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of what is logged or raised; values that are filled in are shown as {...}."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in LOG_METHODS:
                values: list[ast.expr] = [first]
            case ast.Raise(exc=ast.Call(args=args)):
                values = list(args)
            case _:
                continue
        text = " ".join(filter(None, map(_literal, values)))
        if " " in text:
            yield node.lineno, text


def _literal(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_literal(part) for part in parts)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
    return ""


@cache
def texts() -> tuple[Text, ...]:
    """All prose of the product, in order of file and line."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text()
            tree = ast.parse(source)
            name = path.relative_to(ROOT).as_posix()
            parts = {"docstring": docstrings(tree), "comment": comments(source), "message": messages(tree)}
            for kind, part in parts.items():
                found += [Text(name, line, kind, " ".join(words.split())) for line, words in part]
    return tuple(sorted(found))


def matches(pattern: str) -> list[Text]:
    """The texts that match, once for each match."""
    return [text for text in texts() for _ in re.finditer(pattern, text.words)]


def first_lines() -> list[Text]:
    """Docstrings whose first sentence is longer than the rule."""
    return [
        text
        for text in texts()
        if text.kind == "docstring" and len(re.split(r"(?<=[.:;])\s", text.words)[0].split()) > MOST_FIRST_WORDS
    ]


def unknown_names() -> list[Text]:
    """Texts with a name in backticks that no code has."""
    known: set[str] = set()
    for path in [*ROOT.rglob("*.py"), *ROOT.rglob("*.yaml"), *ROOT.glob("pyproject.toml")]:
        if ".venv" not in path.parts:
            source = path.read_text()
            bare = re.sub(r"`[^`]*`", "", source)
            known.update(re.findall(r"[A-Za-z_]\w*", bare))
    return [text for text in texts() for name in re.findall(r"`([a-z_][a-z0-9_]*)`", text.words) if name not in known]


def figures() -> dict[str, list[Text]]:
    """What the table counts."""
    counted = {name: matches(pattern) for name, pattern in PATTERNS.items()}
    return counted | {f"first sentence above {MOST_FIRST_WORDS} words": first_lines(), "unknown names": unknown_names()}


def table() -> dict[str, int]:
    """The committed budget."""
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): int(count) for count, name in (line.split(maxsplit=1) for line in lines)}


def draw(seed: str, number: int, kind: str) -> list[Text]:
    """`number` texts drawn at random: docstrings and comments, or messages."""
    wanted = ("message",) if kind == "messages" else ("docstring", "comment")
    directive = re.compile(r"noqa|type: ignore|fmt: ")
    found = [text for text in texts() if text.kind in wanted and not directive.match(text.words)]
    return random.Random(seed).sample(found, number)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--table"]:
            for name, found in figures().items():
                print(f"{len(found):6} {name}")
        case ["--show", name]:
            for text in figures()[name]:
                print(f"{text.place}: {text.words}")
        case ["--draw", seed, number, kind]:
            for text in draw(seed, int(number), kind):
                print(f"{text.place} ({text.kind}): {text.words}\n")
        case []:
            budget, over = table(), 0
            for name, found in figures().items():
                if len(found) > budget.get(name, 0):
                    over += 1
                    print(f"{len(found)} times {name!r}; .ci/prose.txt allows {budget.get(name, 0)}", file=sys.stderr)
            return int(over > 0)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
