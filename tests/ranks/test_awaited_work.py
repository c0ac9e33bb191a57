"""How the work of one rank ends for those that wait for it. Over several ranks: tests/hall/test_runtime.py."""

import pytest
import torch.distributed as dist

from windlass.errors import Unavailable, UserError
from windlass.ranks.awaited_work import FailedElsewhere, do_for_all, wait_for


def fail(error):
    raise error


def test_what_is_done_is_waited_for_and_its_result_stays_where_it_was_done():
    store = dist.HashStore()
    assert [do_for_all(store, key, lambda: 7) for key in ("a", "b")] == [7, 7]
    assert wait_for(store, ["a", "b"]) is None


def test_a_mistake_travels_as_it_is_and_the_first_key_that_failed_counts():
    store, error = dist.HashStore(), Unavailable("what", "rule", "change")
    do_for_all(store, "fine", lambda: None)
    for key, one in (("first", error), ("second", UserError("later", "rule", "change"))):
        with pytest.raises(type(one)):
            do_for_all(store, key, lambda one=one: fail(one))
    with pytest.raises(Unavailable) as caught:
        wait_for(store, ["fine", "first", "second"])
    assert caught.value.given == "what" and caught.value.elsewhere and not error.elsewhere


class Unpicklable(UserError):
    def __init__(self):
        super().__init__("given", "rule", "change")
        self.held = lambda: None


@pytest.mark.parametrize(("error", "code"), [(ValueError("a bug"), 1), (KeyboardInterrupt(), 130), (Unpicklable(), 2)])
def test_what_cannot_travel_ends_the_others_with_its_code_and_words(error, code):
    store = dist.HashStore()
    with pytest.raises(type(error)):
        do_for_all(store, "key", lambda: fail(error))
    with pytest.raises(FailedElsewhere) as caught:
        wait_for(store, ["key"])
    assert caught.value.code == code and str(caught.value) == str(error)
