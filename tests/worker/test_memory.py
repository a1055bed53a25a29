"""The steps of the profile run, and what is made of its figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
import torch

import worker.device.memory
from cluster.ranks.host import node_cores
from configs.errors import EngineError
from configs.schema import NO_SPECULATION, SpeculationConfig
from worker.device.cgroup import available_bytes, available_cores
from worker.device.memory import DeviceMemory, _largest_frames, await_idle, await_room, free_bytes
from worker.frame_checks import FrameLimits, check_frame
from worker.protocol import RowFlag, StepFrame


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "max_model_len", "num_drafts"),
    [(256, 8192, 8192, 0), (256, 8192, 2048, 7), (8, 256, 100, 3), (2, 300, 100, 0)],
)
def test_the_profile_runs_the_largest_steps_that_a_scheduler_may_send(
    max_rows: int, max_tokens: int, max_model_len: int, num_drafts: int
) -> None:
    speculation = NO_SPECULATION
    if num_drafts:
        speculation = SpeculationConfig(method="ngram", num_speculative_tokens=num_drafts)
    limits = FrameLimits(max_rows + 1, 100, max_model_len, 1 + num_drafts)
    prefill, decode = _largest_frames(max_rows, max_tokens, max_model_len, 16, speculation)
    for frame in (prefill, decode):
        check_frame(StepFrame.decode(frame.encode()), limits)
        assert ((frame.flags & RowFlag.SAMPLE) != 0).all()
        rows, indices, pages = frame.page_deltas.T
        assert len(np.unique(pages)) == len(pages), "a page of two rows"
        assert pages.max() <= -(-max_tokens // 16) + max_rows, "more pages than the profile's pool has"
        for row, length in zip(frame.rows, frame.lens, strict=True):
            assert sorted(indices[rows == row]) == list(range(-(-int(length) // 16)))
    assert prefill.lens.sum() == min(max_tokens, max_rows * max_model_len)
    assert len(decode.rows) == max_rows
    assert decode.samples_per_row.sum() == speculation.max_sampled(max_rows)
    assert len(decode.params) == max_rows


def test_what_a_step_needs_is_taken_off_and_said() -> None:
    gib = 1 << 30
    memory = DeviceMemory(100 * gib, 3 * gib, 2 * gib, gib)
    assert memory.usable_bytes == 94 * gib
    assert str(memory).endswith("less 3.00 for the largest step, 2.00 for CUDA graphs and 1.00 for sampling: 94.00 GiB")
    assert DeviceMemory(gib, gib, gib).usable_bytes == 0


# Where a rank takes the place of one that died

CUDA = torch.device("cuda:0")


def test_a_rank_waits_until_the_last_ones_memory_is_freed_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter([10 << 30, 10 << 30, 99 << 30, 0])
    monkeypatch.setattr(worker.device.memory, "free_bytes", lambda _: next(free))
    assert await_room(CUDA, 99 << 30) == 99 << 30
    assert not caplog.records
    monkeypatch.setattr(worker.device.memory, "free_bytes", lambda _: 10 << 30)
    assert await_room(CUDA, 0) == 10 << 30  # the first to be there
    monkeypatch.setattr(worker.device.memory, "_ROOM_TIMEOUT_S", 0.1)
    assert await_room(CUDA, 99 << 30) == 10 << 30
    assert "cuda:0 has 10.00 GiB free, but had 99.00" in caplog.text


def test_a_device_that_never_gets_done_is_said_to_be_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])

    class Event:
        def record(self, stream: object) -> None:
            assert stream == CUDA

        def query(self) -> bool:
            return next(answers, False)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    await_idle(CUDA)
    monkeypatch.setattr(worker.device.memory, "_IDLE_TIMEOUT_S", 0.1)
    with pytest.raises(EngineError, match="cuda:0 is not idle"):
        await_idle(CUDA)


# What a container leaves

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


def control_group(root: Path, folder: str, limit: object, used: int, reclaimable: int = 0) -> None:
    """Writes the files of one control group, of the version that `folder` is of."""
    made = root / "sys/fs/cgroup" / folder
    made.mkdir(parents=True, exist_ok=True)
    is_v1 = folder.startswith("memory")
    (made / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(f"{limit}\n")
    (made / ("memory.usage_in_bytes" if is_v1 else "memory.current")).write_text(f"{used}\n")
    name = "total_inactive_file" if is_v1 else "inactive_file"
    (made / "memory.stat").write_text(f"anon {used}\n{name} {reclaimable}\n")


def membership(root: Path, *lines: str) -> None:
    """Writes which control groups this process is in."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(line + "\n" for line in lines))


def test_a_containers_limit_bounds_what_is_free_less_what_it_uses(tmp_path: Path) -> None:
    membership(tmp_path, "0::/")
    control_group(tmp_path, "", 8 * GIB, used=3 * GIB, reclaimable=GIB)
    assert available_bytes(tmp_path) == 6 * GIB
    control_group(tmp_path, "", 2 * GIB, used=3 * GIB)
    assert available_bytes(tmp_path) == 0


def test_the_tightest_of_all_groups_above_counts_and_those_without_a_limit_do_not(tmp_path: Path) -> None:
    membership(tmp_path, "0::/pods/one/main")
    control_group(tmp_path, "pods", 64 * GIB, used=60 * GIB)
    control_group(tmp_path, "pods/one", 8 * GIB, used=GIB)
    control_group(tmp_path, "pods/one/main", "max", used=GIB)
    assert available_bytes(tmp_path) == 4 * GIB
    control_group(tmp_path, "pods", "max", used=60 * GIB)
    assert available_bytes(tmp_path) == 7 * GIB


def test_a_container_of_version_1_that_has_another_name_inside_is_found_at_the_mount(tmp_path: Path) -> None:
    membership(tmp_path, "12:cpu,cpuacct:/docker/4711", "4:memory:/docker/4711", "0::/")
    control_group(tmp_path, "memory", 4 * GIB, used=GIB)
    assert available_bytes(tmp_path) == 3 * GIB


def test_without_a_limit_all_of_the_nodes_memory_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None, "a system without control groups"
    membership(tmp_path, "4:memory:/", "0::/")
    control_group(tmp_path, "memory", UNLIMITED_V1, used=GIB)
    left = available_bytes(tmp_path)
    assert left is None or left > 1 << 60
    free = free_bytes(torch.device("cpu"))
    assert 0 < free <= psutil.virtual_memory().total


def test_a_containers_quota_bounds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_cores(tmp_path) is None, "a system without control groups"
    membership(tmp_path, "0::/pods/one")
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "pods/one").mkdir(parents=True)
    (groups / "pods/one/cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) is None
    (groups / "pods/cpu.max").write_text("150000 100000\n")
    assert available_cores(tmp_path) == 1.5
    (groups / "pods/one/cpu.max").write_text("50000 100000\n")
    assert available_cores(tmp_path) == 0.5
    for quota, cores in ((None, 4), (0.5, 1), (2.9, 2), (64.0, 4)):
        monkeypatch.setattr("cluster.ranks.host.available_cores", lambda quota=quota: quota)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
        assert node_cores() == cores


def test_a_quota_of_version_1_is_found_under_all_the_controllers_of_its_group(tmp_path: Path) -> None:
    membership(tmp_path, "4:memory:/", "12:cpu,cpuacct:/docker/4711", "0::/")
    group = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert available_cores(tmp_path) is None
    (group / "cpu.cfs_quota_us").write_text("300000\n")
    assert available_cores(tmp_path) == 3.0
