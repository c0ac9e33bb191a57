"""What a host has left, read from files of the kernel."""

import pytest

from windlass.training.sizing.host_memory import available_bytes

MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n"


def written(folder, meminfo=MEMINFO, limit=None, current="3000000\n"):
    """Files as the kernel has them -> what is available by them."""
    (folder / "meminfo").write_text(meminfo)
    if limit is not None:
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(current)
        (folder / "memory.stat").write_text("anon 1900000\ninactive_file 1000000\nactive_file 100000\n")
    return available_bytes(folder / "meminfo", folder)


@pytest.mark.parametrize(
    ("limit", "left"),
    [(None, 8_192_000), ("max\n", 8_192_000), ("4000000\n", 2_000_000), ("900000000\n", 8_192_000), ("100\n", 0)],
)
def test_the_lesser_of_the_kernels_word_and_the_containers_limit(tmp_path, limit, left):
    assert written(tmp_path, limit=limit) == left


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 16000 kB\n", "MemAvailable: much\n"])
def test_where_the_kernel_does_not_say_it_is_not_known(tmp_path, meminfo):
    assert written(tmp_path, meminfo) is None and available_bytes(tmp_path / "absent", tmp_path) is None


def test_this_host_says_so():
    found = available_bytes()
    assert found is None or found > 1 << 20
