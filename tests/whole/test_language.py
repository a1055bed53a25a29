"""Docstrings and comments are sentences that a newcomer can follow: each names its subject first."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDERS = ("configs", "parallel", "attention", "worker", "cluster", "benchmarks")

# A short comment behind a line may say "by id" of a dict.
_HALF_A_SENTENCE = re.compile(
    r"((?i:Of|As|Those|And|But|Or|Where|Whose|It all|The same)|By|From|That|To|Likewise)\b(?!:)"
)


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and text of every string that stands alone: below an attribute as well."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of every comment; one that goes on over several lines counts once."""
    last_own = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            stands_alone = not token.line[:column].strip()
            if not (stands_alone and line == last_own + 1):
                yield line, token.string.lstrip("# ")
            last_own = line if stands_alone else -1


def _half_sentences(source: str) -> list[tuple[int, str]]:
    texts = [*_docstrings(ast.parse(source)), *_comments(source)]
    return [(line, text) for line, text in texts if _HALF_A_SENTENCE.match(text)]


def test_half_a_sentence_is_found_wherever_it_stands() -> None:
    source = (
        '"""Of a module."""\n'
        "def f():\n"
        '    """As g."""\n'
        "    x: int = 1  # of a row\n"
        '    """Of rows."""\n'
        "    # Rows are counted\n"
        "    # as tokens are.\n"
    )
    assert [line for line, _ in _half_sentences(source)] == [1, 3, 5, 4]


@pytest.mark.parametrize("folder", _FOLDERS)
def test_every_docstring_and_comment_names_its_subject_first(folder: str) -> None:
    found = [
        f"{path.relative_to(_ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted((_ROOT / folder).rglob("*.py"))
        for line, text in _half_sentences(path.read_text())
    ]
    assert not found, "\n".join(found)
