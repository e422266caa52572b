"""The memory of the host is read as a container sees it, and the processor time that others take."""

import os

from torchdelta.host import HostMemory, read_host_memory, read_stolen_s

MEMINFO = "MemTotal:       8000000 kB\nMemFree:         100 kB\nMemAvailable:   6000000 kB\nHugePages_Total:       0\n"


def fake_host(root, cgroup, limits):
    """Write the files of /proc and /sys that are read."""
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **limits}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_host_memory(root)


def test_without_a_limit_all_memory_is_usable(tmp_path):
    """No control group limits this process."""
    host = fake_host(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "max\n"})
    assert host == HostMemory(ram_bytes=8_192_000_000, available_bytes=6_144_000_000, cgroup_limit_bytes=None)
    assert host.usable_bytes == host.ram_bytes


def test_the_lowest_limit_of_the_groups_above_counts(tmp_path):
    """A job inside a slice: the slice's limit holds for the job too."""
    limits = {
        "sys/fs/cgroup/slice/job/memory.max": "4000000000\n",
        "sys/fs/cgroup/slice/memory.max": "3000000000\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }
    host = fake_host(tmp_path, "0::/slice/job\n", limits)
    assert host.cgroup_limit_bytes == host.usable_bytes == 3_000_000_000


def test_version_one_groups_are_read_too(tmp_path):
    """The older hierarchy names its controllers, and writes "no limit" as a huge number."""
    limits = {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000\n",
    }
    host = fake_host(tmp_path, "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n", limits)
    assert host.cgroup_limit_bytes == 2_000_000_000


def test_a_limit_above_the_memory_gives_no_more_than_the_memory(tmp_path):
    """The lesser of the two is usable."""
    host = fake_host(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "99000000000\n"})
    assert host.usable_bytes == host.ram_bytes


def test_this_machine_has_memory():
    """The real files give something sensible."""
    host = read_host_memory()
    assert 2**26 < host.usable_bytes <= host.ram_bytes


def test_what_is_free_is_the_lesser_of_available_and_left(tmp_path):
    """Version two: the page cache that was not read lately can be given back, and the tightest group counts."""
    limits = {
        "sys/fs/cgroup/slice/job/memory.max": "4000000000\n",
        "sys/fs/cgroup/slice/job/memory.current": "3500000000\n",
        "sys/fs/cgroup/slice/job/memory.stat": "anon 100\ninactive_file 500000000\nactive_file 7\n",
        "sys/fs/cgroup/slice/memory.max": "9000000000\n",
        "sys/fs/cgroup/slice/memory.current": "8900000000\n",
    }
    host = fake_host(tmp_path, "0::/slice/job\n", limits)
    assert host.cgroup_left_bytes == host.free_bytes == 100_000_000  # of the slice; the job has 1 GB left
    (tmp_path / "sys/fs/cgroup/slice/memory.current").write_text("1000000000\n")
    assert read_host_memory(tmp_path).free_bytes == 1_000_000_000
    (tmp_path / "proc/meminfo").write_text(MEMINFO.replace("6000000", "600000"))
    assert read_host_memory(tmp_path).free_bytes == 614_400_000


def test_what_is_left_in_groups_of_version_one(tmp_path):
    """Their files have other names; a usage above the limit leaves nothing."""
    group = "sys/fs/cgroup/memory/job/"
    limits = {
        group + "memory.limit_in_bytes": "2000000000\n",
        group + "memory.usage_in_bytes": "1500000000\n",
        group + "memory.stat": "inactive_file 1\ntotal_inactive_file 200000000\n",
    }
    host = fake_host(tmp_path, "4:cpu,memory:/job\n", limits)
    assert host.cgroup_left_bytes == host.free_bytes == 700_000_000
    (tmp_path / group / "memory.usage_in_bytes").write_text("2500000000\n")
    assert read_host_memory(tmp_path).free_bytes == 0


def test_no_more_than_a_limit_is_free_where_its_usage_is_not_known(tmp_path):
    """The group has a limit below what the machine has, and no file says how much of it is taken."""
    host = fake_host(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "1000000000\n"})
    assert (host.cgroup_left_bytes, host.free_bytes) == (None, 1_000_000_000)


def test_without_a_limit_what_is_available_is_free(tmp_path):
    """And where the kernel does not say, what is usable."""
    host = fake_host(tmp_path, "0::/\n", {})
    assert (host.cgroup_left_bytes, host.free_bytes) == (None, 6_144_000_000)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8000000 kB\n")
    assert read_host_memory(tmp_path).free_bytes == 8_192_000_000


STAT = """cpu  9 9 9 9 9 999 999 999 0 0
cpu0 100 0 50 900 7 3 4 5 0 0
cpu{other} 100 0 50 900 7 100 100 100 0 0
intr 12345 6 7
"""


def test_stolen_time_is_that_of_interrupts_and_the_hypervisor_on_our_processors(tmp_path, monkeypatch):
    """The sum over all processors, and processors that this process may not use, do not count."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text(STAT.format(other=1))
    assert read_stolen_s(tmp_path) == 12 / os.sysconf("SC_CLK_TCK")


def test_stolen_time_is_unknown_where_the_kernel_does_not_tell(tmp_path):
    """No such file, a kernel without these columns, and a sandbox that has zeros there."""
    assert read_stolen_s(tmp_path) is None
    (tmp_path / "proc").mkdir()
    for line in ("cpu0 100 0 50 900 7\n", "cpu0 100 0 50 900 7 0 0 0 0 0\n"):
        (tmp_path / "proc/stat").write_text(line)
        assert read_stolen_s(tmp_path) is None


def test_stolen_time_of_this_machine_never_falls():
    """The real file gives something sensible."""
    first_s = read_stolen_s()
    assert first_s is not None
    assert 0.0 <= first_s <= (read_stolen_s() or 0.0)
