"""What a node's GPUs can do, as their driver says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from configs.cards import CARDS, Card
from tests.helpers.fake_driver import make_driver
from worker.device.card import node_card


def test_the_facts_of_a_card_are_those_of_its_driver(tmp_path: Path) -> None:
    x9000 = Card("NVIDIA X9000", (13, 1), 300 << 10, 500 << 30)
    assert node_card(str(make_driver(tmp_path, [x9000]))) == x9000


def test_what_holds_for_a_node_is_what_holds_for_all_of_its_gpus(tmp_path: Path) -> None:
    cards = [replace(CARDS["rtx-4090"], memory_bytes=1 << 40), CARDS["a100-40gb"], CARDS["a100-40gb"]]
    found = node_card(str(make_driver(tmp_path, cards)))
    assert found == Card("A100 and RTX 4090", (8, 0), 99 << 10, 40960 << 20, has_peers=False)


def test_gpus_that_a_process_may_not_see_are_asked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray hides them by this variable from processes to which it gave none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    library = make_driver(tmp_path, [CARDS["h200"]], on_start='getenv("CUDA_VISIBLE_DEVICES") ? 100 : 0')
    assert node_card(str(library)) == CARDS["h200"]


def test_a_node_without_a_driver_or_with_a_broken_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nowhere\.so: cannot open shared object file"):
        node_card(str(tmp_path / "nowhere.so"))
    with pytest.raises(RuntimeError, match="cuInit failed with CUDA's error 999"):
        node_card(str(make_driver(tmp_path, [CARDS["h200"]], on_start="999")))
