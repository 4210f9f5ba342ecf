"""How many CPUs the quotas of control groups leave, read from files as Linux writes them.

And which instructions the CPU has: what the kernel found out by itself, beside what Linux says.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.needs("fused")

NONE = 0


def quota(folder: Path, membership: str, files: dict[str, str]) -> int:
    """What is read where these control groups are mounted."""
    from regard import _fused

    for name, text in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return _fused.cpu_quota(str(folder / "mounted"), str(folder / "membership"))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000\n", NONE),
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        ("150000 100000\n", 2),
        ("200000 100000\n", 2),
        ("200001 100000\n", 2),
        ("210000 100000\n", 3),
        ("6400000 50000\n", 128),
        ("-1 100000\n", NONE),
        ("0 100000\n", NONE),
        ("100000 0\n", NONE),
        ("100000\n", NONE),
        ("", NONE),
        ("\n\n", NONE),
        ("nan 100000\n", NONE),
        ("inf 100000\n", 1_000_000),
        ("1e300 1e-300\n", 1_000_000),
        ("garbage garbage\n", NONE),
        ("9" * 5000 + " 100000\n", 1_000_000),
        ("\0" * 5000, NONE),
    ],
    ids=lambda x: repr(x)[:24],
)
def test_the_quota_of_a_group_is_its_time_in_each_period_rounded_up(tmp_path, text, cpus):
    np.testing.assert_equal(quota(tmp_path, "0::/\n", {"cpu.max": text}), cpus)


@pytest.mark.parametrize(
    ("time", "period", "cpus"),
    [("-1\n", "100000\n", NONE), ("150000\n", "100000\n", 2), ("100000\n", "", NONE)],
)
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_the_quota_of_a_group_of_the_first_generation_stands_in_two_files(
    tmp_path, time, period, cpus, controllers
):
    folder = f"{controllers}/jobs/one"
    files = {f"{folder}/cpu.cfs_quota_us": time, f"{folder}/cpu.cfs_period_us": period}
    membership = f"9:name=systemd:/\n4:memory:/jobs/one\n1:{controllers}:/jobs/one\n0::/\n"
    np.testing.assert_equal(quota(tmp_path, membership, files), cpus)


def test_the_smallest_quota_of_a_group_and_those_around_it_counts(tmp_path):
    own, around, outermost = "user/session/job", "user", "."
    files = {
        f"{own}/cpu.max": "800000 100000\n",
        f"{around}/cpu.max": "300000 100000\n",
        f"{outermost}/cpu.max": "max 100000\n",
    }
    np.testing.assert_equal(quota(tmp_path, f"0::/{own}\n", files), 3)
    np.testing.assert_equal(quota(tmp_path, f"0::/{around}\n", files), 3)
    np.testing.assert_equal(quota(tmp_path, "0::/another\n", files), NONE)
    np.testing.assert_equal(quota(tmp_path, "0::/\n", files), NONE)


def test_a_group_whose_name_is_not_mounted_here_is_looked_for_further_out(tmp_path):
    # In a container the file may say what the group is called outside.
    files = {"cpu.max": "400000 100000\n"}
    np.testing.assert_equal(quota(tmp_path, "0::/docker/0123abcd\n", files), 4)


@pytest.mark.parametrize(
    "membership",
    ["", "\n", "0\n", "0:\n", ":::\n", "1:memory:/\n", "x" * 10_000, "0::" + "/" * 999],
)
def test_a_membership_that_names_no_group_for_time_sets_no_limit(tmp_path, membership):
    np.testing.assert_equal(quota(tmp_path, membership, {"cpuset/cpu.max": "1 1"}), NONE)


def test_files_that_are_not_there_set_no_limit(tmp_path):
    from regard import _fused

    nowhere = str(tmp_path / "nowhere")
    np.testing.assert_equal(_fused.cpu_quota(nowhere, nowhere), NONE)


def test_no_more_cpus_are_used_than_the_quota_of_this_process_allows():
    from regard import _fused

    limit = _fused.cpu_quota("/sys/fs/cgroup", "/proc/self/cgroup")
    np.testing.assert_array_less(0, _fused.usable_cpus())
    if limit:
        np.testing.assert_array_less(_fused.usable_cpus(), limit + 1)


# What each target is compiled with, in the words of /proc/cpuinfo.
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDED = {
    "baseline": set(),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": AVX512 | {"avx512_bf16", "avx512_vnni"},
}
CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPUINFO.exists(), reason="needs Linux on x86-64"
)
def test_a_target_is_usable_where_linux_says_that_the_cpu_has_its_instructions():
    from regard import _fused

    lines = CPUINFO.read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    expected = {target: needed <= flags for target, needed in NEEDED.items()}
    assert dict(_fused.targets()) == expected


@pytest.mark.full
@pytest.mark.needs("qemu")
@pytest.mark.parametrize(
    ("cpu", "best"),
    [("Haswell", "avx2")]
    + [(f"Haswell,-{absent}", "baseline") for absent in ("avx2", "fma", "f16c", "xsave")],
)
def test_an_emulated_cpu_uses_no_target_that_it_lacks_an_instruction_of(cpu, best):
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    program = "from regard import _fused; print(next(t for t, runs in _fused.targets() if runs))"
    child = subprocess.run(
        [str(emulator), "-cpu", cpu, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert child.stdout.split() == [best]
