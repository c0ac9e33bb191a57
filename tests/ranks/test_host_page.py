import copy
import gc
import mmap
import os
import time

import pytest
import torch.distributed as dist

from windlass.ranks import host_page
from windlass.ranks.host_page import NEVER, HostPage
from windlass.ranks.tree import Tree


def heard(folder_of_rank, steps):
    """Per step: what this rank heard, and how often it asked in all. The answer is ten times the step."""
    asked = []
    page = HostPage(Tree(dist.group.WORLD), (folder_of_rank[dist.get_rank()],))
    left = sorted(folder_of_rank[dist.get_rank()].iterdir())

    def ask(step):
        asked.append(step)
        return 10 * step

    answers = []
    for step in range(1, steps + 1):
        dist.barrier()  # a step
        answers.append(page.after(step, lambda step=step: ask(step)))
    return page.is_first, answers, len(asked), left


def test_one_rank_of_a_host_asks_and_all_hear(ranks, tmp_path):
    found = ranks.run(4, heard, [tmp_path] * 4, 20)
    assert [is_first for is_first, *_ in found] == [True, False, False, False]
    assert [asked for _, _, asked, _ in found] == [20, 0, 0, 0]
    assert all(answers == [10 * step for step in range(1, 21)] for _, answers, *_ in found)
    assert not list(tmp_path.iterdir()), "nothing is left, however a rank ends"


def test_ranks_that_share_no_memory_ask_each_for_themselves(ranks, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "a", tmp_path / "b"]
    for folder in set(folders):
        folder.mkdir()
    found = ranks.run(4, heard, folders, 3)
    assert [(is_first, asked) for is_first, _, asked, _ in found] == [(True, 3), (True, 3), (False, 0), (False, 0)]
    assert all(answers == [10, 20, 30] for _, answers, *_ in found)


def late(folder):
    """The first rank is late: the other waits for the answer to this very step."""
    page = HostPage(Tree(dist.group.WORLD), (folder,))
    if page.is_first:
        page.after(1, lambda: NEVER)
        time.sleep(0.3)
        return page.after(2, lambda: 2)
    return page.after(1, lambda: 0), page.after(2, lambda: 0)


def test_an_answer_is_not_older_than_the_step(ranks, tmp_path):
    assert ranks.run(2, late, tmp_path) == [2, (NEVER, 2)]


def test_a_first_rank_that_never_comes_ends_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(host_page, "WAIT_S", 0.05)
    first = HostPage(Tree(None), (tmp_path,))
    with pytest.raises(TimeoutError, match="end of step 3"):
        other(first).after(3, lambda: 0)


def test_a_first_rank_that_answers_and_ends_between_two_looks_is_heard(tmp_path, monkeypatch):
    monkeypatch.setattr(host_page, "LOOKS", 1)
    first = HostPage(Tree(None), (tmp_path,))
    page = other(first)
    page._is_abandoned = lambda: first.after(2, lambda: 7) == 7
    assert page.after(2, lambda: 0) == 7


def other(first):
    """The page as another rank of the host has it."""
    page = copy.copy(first)
    page.is_first, page._file = False, os.open(f"/proc/self/fd/{first._file}", os.O_RDWR)
    page._memory = mmap.mmap(page._file, 8)
    return page


def test_a_first_rank_that_is_gone_is_noticed_at_once(tmp_path):
    first = HostPage(Tree(None), (tmp_path,))
    page = other(first)
    first.after(2, lambda: NEVER)
    assert page.after(2, lambda: 0) == NEVER
    del first  # and with it the lock, as the kernel does with a killed process
    gc.collect()
    with pytest.raises(ConnectionResetError, match="has ended before the end of step 3"):
        page.after(3, lambda: 0)
    assert page.after(2, lambda: 0) == NEVER, "what it wrote before is there"


def test_it_takes_the_first_folder_that_may_be_written(tmp_path):
    page = HostPage(Tree(None), (tmp_path / "absent", tmp_path))
    assert page.is_first and page.after(7, lambda: 9) == 9 and os.listdir(tmp_path) == []
