"""Memory that the keeper holds is there when the process that made it is not."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import pytest
import torch

from configs.errors import EngineError
from parallel.persistent_memory import Keeper, PersistentMemory

WRITER = """
import os, signal, sys
import torch
from parallel.persistent_memory import PersistentMemory

kept = PersistentMemory("\\0" + sys.argv[1], 1, torch.device(sys.argv[2]))
memory = kept.new("kv", 5000)
kept.write_note("kv", "of before")
memory.view(torch.int32)[:4] = torch.tensor([1, 2, 3, 4])
if memory.is_cuda:
    torch.cuda.synchronize()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_a_killed_process_wrote_is_found_by_the_next(keeper: Keeper, device: torch.device) -> None:
    writer = subprocess.run([sys.executable, "-c", WRITER, keeper.address[1:], str(device)], check=False)
    assert writer.returncode == -signal.SIGKILL
    assert (keeper.num_bytes(1), keeper.num_bytes(0)) == (5000, 0)
    found = PersistentMemory(keeper.address, 1, device).find("kv")
    assert found is not None
    assert found.note == "of before"
    assert found.memory.view(torch.int32)[:6].tolist() == [1, 2, 3, 4, 0, 0]
    assert PersistentMemory(keeper.address, 0, device).find("kv") is None


def test_a_block_is_one_memory_for_all_who_map_it_until_another_takes_its_place(
    keeper: Keeper, device: torch.device
) -> None:
    one, other = PersistentMemory(keeper.address, 0, device), PersistentMemory(keeper.address, 0, device)
    one.new("before", 1)  # a GPU's driver opens files of its own once
    keeper.drop()
    gc.collect()  # a file that an earlier test left to it was closed below, once
    before = num_files()
    first = one.new("weights", 4096)
    other.existing("weights", 4096)[7] = 9
    assert first[7] == 9
    other.write_note("weights", "whole")
    found = one.find("weights")
    assert found is not None
    assert found.note == "whole"
    assert len(found.memory) == 4096
    second = other.new("weights", 4096)
    assert one.existing("weights", 4096)[7] == 0
    assert first[7] == 9, "who has the old one keeps it"
    with pytest.raises(EngineError, match="rank 0 has no block 'weights' of 8192 bytes in persistent memory"):
        one.existing("weights", 8192)
    del first, second, found
    keeper.drop()
    assert num_files() == before


def test_memory_that_outlives_a_process_is_found_to_be_there(keeper: Keeper, device: torch.device) -> None:
    before = num_files()
    assert PersistentMemory(keeper.address, 0, device).is_possible
    assert num_files() - before < 10, "a driver may open files of its own"
    assert not keeper.num_bytes(0)


def test_only_what_is_named_is_dropped(keeper: Keeper, device: torch.device) -> None:
    for rank in (0, 1):
        for name in ("kv", "weights"):
            PersistentMemory(keeper.address, rank, device).new(name, 100)
    keeper.drop(name="kv")
    keeper.drop(1)
    assert [(keeper.num_bytes(rank)) for rank in (0, 1)] == [100, 0]
    assert PersistentMemory(keeper.address, 0, device).find("weights") is not None


def test_a_keeper_that_is_gone_is_named(keeper: Keeper, device: torch.device) -> None:
    keeper.close()
    with pytest.raises(EngineError, match="rank 3 cannot reach the keeper of its memory"):
        PersistentMemory(keeper.address, 3, device).find("kv")


@pytest.mark.gpu
def test_memory_of_a_device_is_free_once_nobody_has_it(keeper: Keeper) -> None:
    device, num_bytes = torch.device("cuda:0"), 3 << 30
    kept = PersistentMemory(keeper.address, 0, device)
    kept.new("before", 1)
    free = torch.cuda.mem_get_info(device)[0]
    memory = kept.new("kv", num_bytes)
    assert not memory.any()
    assert free - torch.cuda.mem_get_info(device)[0] >= num_bytes
    del memory
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info(device)[0] >= num_bytes, "the keeper has it"
    keeper.drop(name="kv")
    assert free - torch.cuda.mem_get_info(device)[0] < num_bytes // 8
    with pytest.raises(torch.OutOfMemoryError, match="has no room"):
        kept.new("kv", 1 << 40)


CRASHER = """
import os, signal, sys
from parallel.persistent_memory import PersistentMemory

def falls_over():
    os.kill(os.getpid(), int(sys.argv[2]))

PersistentMemory("\\0" + sys.argv[1], 2, None).write_down_crashes()
falls_over()
"""


@pytest.mark.parametrize(("number", "says"), [(signal.SIGSEGV, True), (signal.SIGABRT, True), (signal.SIGKILL, False)])
def test_a_process_that_crashes_leaves_where_it_was(keeper: Keeper, number: signal.Signals, says: bool) -> None:
    crasher = subprocess.run([sys.executable, "-c", CRASHER, keeper.address[1:], str(int(number))], check=False)
    assert crasher.returncode == -number
    assert ("in falls_over" in keeper.crash(2)) == says
    assert not keeper.crash(1)
