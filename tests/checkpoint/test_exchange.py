import pytest
import torch.distributed as dist

from windlass.checkpoint.exchange import Exchange, PeerFailed
from windlass.errors import BadCheckpoint, UserError


def make_exchange():
    return Exchange(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))


def reductions():
    exchange = make_exchange()
    rank = exchange.rank
    total = exchange.reduce(lambda: rank + 1, sum)
    folded = exchange.fold(lambda: [rank], lambda lower, higher: lower + higher, lambda ranks: ("of", *ranks))
    return total, folded, exchange.from_first(lambda: f"from {rank}")


def what_ranks_raise(where, kind):
    """One rank (or rank 0's lead) fails -> the type and the text that this rank sees, and that the group still
    works.
    """
    exchange = make_exchange()

    def work(failing):
        if failing:
            raise kind
        return 1

    try:
        if where == "lead":
            exchange.reduce(lambda: 1, lambda ones: work(True))
        elif where == "fold":
            exchange.fold(lambda: work(exchange.rank == 2), max, str)
        elif where == "join":
            exchange.fold(lambda: 1, lambda *_: work(True), str)
        elif where == "lead of fold":
            exchange.fold(lambda: 1, max, lambda _: work(True))
        else:
            exchange.reduce(lambda: work(exchange.rank in where), sum)
    except Exception as error:
        return type(error), str(error), exchange.reduce(lambda: 1, sum)
    return None


def test_every_rank_gets_the_value(ranks):
    found = ranks.run(3, reductions)
    assert found == [(6, ("of", 0, 1, 2), "from 0")] * 3


@pytest.mark.parametrize("where", [(2,), (0,), (1, 2), "lead", "fold", "join", "lead of fold"])
def test_an_error_of_the_user_on_one_rank_is_the_same_error_on_all(ranks, where):
    found = ranks.run(3, what_ranks_raise, where, BadCheckpoint("rank-00002.bin", "whole", "older"))
    assert len({(kind, text) for kind, text, _ in found}) == 1
    assert found[0][0] is BadCheckpoint and found[0][2] == 3


def test_any_other_error_stays_itself_where_it_happened_and_is_named_with_its_rank_elsewhere(ranks):
    found = ranks.run(3, what_ranks_raise, (2,), ZeroDivisionError("by zero"))
    assert [kind for kind, _, _ in found] == [PeerFailed, PeerFailed, ZeroDivisionError]
    assert "rank 2: ZeroDivisionError: by zero" in found[0][1]


def test_one_process_needs_no_torch_distributed():
    exchange = Exchange(0, 1, None)
    assert exchange.reduce(lambda: 4, lambda values: values * 2) == [4, 4]
    assert exchange.fold(lambda: 4, max, lambda value: value + 1) == 5
    with pytest.raises(UserError, match="given"):
        exchange.from_first(lambda: (_ for _ in ()).throw(UserError("given", "rule", "change")))


def test_an_error_of_the_system_on_one_rank_is_one_on_all_with_its_number(ranks):
    found = ranks.run(3, what_ranks_raise, (2,), PermissionError(13, "Permission denied"))
    assert [kind for kind, _, _ in found] == [PermissionError] * 3 and [rest for _, _, rest in found] == [3] * 3
    assert "rank 2: PermissionError: [Errno 13] Permission denied" in found[0][1]
