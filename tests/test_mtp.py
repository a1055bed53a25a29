"""MTP: what the ranks draft with a checkpoint's own layer is what transformers' layer does, and answers with its drafts
are those without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.schema import SpeculationConfig
from tests import mtp, test_moe_models
from tests.local_group import Limits, LocalGroup
from tests.test_eagle3 import Known, Trained, cheap_tokens, check_answers, check_drafts  # noqa: F401 -- a fixture

SEVEN = SpeculationConfig(method="mtp", num_speculative_tokens=7)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def trained(path: Path) -> Trained:
    case = test_moe_models.case_of("glm4_moe", path)
    known, head = Known.of(path), mtp.Head(case)
    head.train(known.texts, 20)
    head.write(path)
    return Trained(head, known, SEVEN)


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, path: Path, trained: Trained) -> Iterator[LocalGroup]:
    group = LocalGroup(path, request.param, Limits().num_pages, speculation=SEVEN)
    yield group
    group.close()


@pytest.mark.parametrize("group", [1, 3], indirect=True)
def test_ranks_draft_what_transformers_layer_does(
    group: LocalGroup, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafts(group, trained, monkeypatch)


@pytest.mark.parametrize(
    ("group", "num_drafts", "num_pages"), [(1, 3, 2048), (2, 7, 18), (3, 4, 18)], indirect=["group"]
)
def test_answers_with_drafts_equal_those_without(
    group: LocalGroup, trained: Trained, num_drafts: int, num_pages: int
) -> None:
    check_answers(group, trained, num_drafts, num_pages)
