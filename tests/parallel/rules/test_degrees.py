"""Sizes of tp and context that a model or a length cannot have are refused with those it can."""

import importlib.metadata

import pytest

from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.parallel.config import MeshLayout, ParallelConfig
from windlass.parallel.rules.check_layout import OtherSettings, check_layout
from windlass.parallel.rules.degrees import degree_errors, exchange_errors, head_errors, nf4_errors, position_errors


def architecture(**changes):
    sizes = {"vocab_size": 150, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return ModelConfig.model_validate({"family": "qwen3", **sizes, **heads, **changes}).architecture()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sizes_that_divide_all_counts_pass_and_ranks_may_share_a_head_of_keys(tp):
    assert not list(degree_errors(tp, architecture()))


def test_heads_of_keys_are_shared_evenly_and_not_under_a_norm_over_all_of_them():
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3}
    assert not list(degree_errors(1, architecture(**heads)))
    (error,) = degree_errors(4, architecture(**heads))
    assert (error.given, error.change) == ("parallel.tp=4 for a model of 3 key/value heads", "use parallel.tp=1")
    whole = {"family": "olmo2", "head_dim": None, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    (error,) = degree_errors(8, architecture(**whole))
    assert error.change == "use parallel.tp=1 or 2 or 4"


@pytest.mark.parametrize(
    ("tp", "changes", "wrong"),
    [
        (
            5,
            {"num_attention_heads": 10, "num_key_value_heads": 2},
            "2 key/value heads and 256 rows of the vocabulary (padded)",
        ),
        (
            3,
            {},
            "8 query heads and 4 key/value heads and 40 channels of the MLP and 256 rows of the vocabulary (padded)",
        ),
        (4, {"intermediate_size": 42}, "42 channels of the MLP"),
        (
            3,
            {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 42},
            "256 rows of the vocabulary (padded)",
        ),
    ],
)
def test_other_sizes_are_refused_by_what_they_do_not_divide(tp, changes, wrong):
    (error,) = degree_errors(tp, architecture(**changes))
    assert error.given == f"parallel.tp={tp} for a model of {wrong}"


def test_the_refusal_names_the_sizes_that_work_and_they_do():
    (error,) = degree_errors(16, architecture())
    assert error.change == "use parallel.tp=1 or 2 or 4 or 8"
    assert "8 query heads, 40 channels of the MLP" in error.rule


@pytest.mark.parametrize(("length", "near"), [(13, "12 or 14"), (1, "2")])
def test_sequences_that_tp_does_not_divide_are_refused_with_the_nearest_that_it_does(length, near):
    (error,) = position_errors(2, length)
    assert error.given == f"data.sequence_length={length} with parallel.tp=2"
    assert error.rule == "the residual stream is cut over tp by positions, in equal parts: a length is a multiple of 2"
    assert error.change == f"use parallel.tp=1, or data.sequence_length={near} (the nearest that divide)"
    assert not list(position_errors(2, int(near.split()[-1])))


def test_tp_takes_its_ranks_before_replicate_and_shard():
    assert ParallelConfig(tp=2).layout(8) == MeshLayout(pp=1, replicate=1, shard=4, context=1, tp=2, expert=1)
    assert ParallelConfig(tp=2, zero=1, shard=1, replicate=-1).layout(8).replicate == 4
    with pytest.raises(UserError, match="tp"):
        ParallelConfig(tp=2).layout(3)


@pytest.mark.parametrize(("context", "tp"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (2, 4)])
def test_ulysses_takes_what_divides_the_query_heads_of_a_rank(context, tp):
    assert not list(head_errors(context, "ulysses", tp, architecture()))
    assert not list(head_errors(3, "allgather", tp, architecture()))


@pytest.mark.parametrize(
    ("context", "tp", "given", "change"),
    [
        (3, 1, "a model of 8 query heads", "use parallel.context=2 or 4 or 8, or parallel.context_kind=allgather"),
        (16, 1, "a model of 8 query heads", "use parallel.context=2 or 4 or 8, or"),
        (8, 2, "a model of 8 query heads, 4 on each of parallel.tp=2 ranks", "use parallel.context=2 or 4, or"),
    ],
)
def test_other_sizes_are_refused_with_those_that_ulysses_can_deal_out(context, tp, given, change):
    (error,) = head_errors(context, "ulysses", tp, architecture())
    assert error.given == f"parallel.context={context} with parallel.context_kind=ulysses for {given}"
    assert error.change.startswith(change)


@pytest.mark.parametrize(
    ("context", "tp", "length", "sizes", "near"),
    [
        (2, 1, 13, "parallel.context=1, or ", "12 or 16"),
        (3, 1, 16, "parallel.context=1 or 2 or 4, or ", "12 or 18"),
        (4, 1, 4, "parallel.context=1 or 2, or ", "8"),
        (2, 2, 18, "parallel.context=1 or 3, or ", "16 or 20"),
        (2, 3, 16, "parallel.tp=1 or 2 or 4, or ", "12 or 24"),
        (2, 3, 13, "", "12 or 24"),
    ],
)
def test_sequences_that_context_ranks_cannot_halve_are_refused_with_sizes_and_lengths_that_can(
    context, tp, length, sizes, near
):
    (error,) = position_errors(tp, length, context)
    beside = f" and parallel.tp={tp}" if tp > 1 else ""
    assert error.given == f"data.sequence_length={length} with parallel.context={context}{beside}"
    assert error.change == f"use {sizes}data.sequence_length={near} (the nearest that divide)"
    again = ", and tp cuts them again in equal parts" if tp > 1 else ""
    unit = {(2, 3): 12, (2, 2): 4}.get((context, tp), 2 * context)
    two = "each context rank has two equal slices of a sequence"
    assert error.rule == f"{two}{again}: a length is a multiple of {unit}"
    for legal in near.split(" or "):
        assert not list(position_errors(tp, int(legal), context))
        assert int(legal) % (2 * context) == 0 and int(legal) // context % tp == 0
    if sizes:
        axis, _, legal = sizes.removesuffix(", or ").partition("=")
        for size in legal.split(" or "):
            axes = {"tp": tp, "context": context, axis.removeprefix("parallel."): int(size)}
            assert not list(position_errors(**axes, length=length))


def test_a_length_is_refused_with_what_the_model_can_have_too():
    model = architecture(max_position_embeddings=32)
    for kind, sizes in (("allgather", "1 or 2 or 4 or 5 or 8 or 10"), ("ulysses", "2 or 4 or 8")):
        (error,) = position_errors(1, 40 * 2, 16, kind, architecture(max_position_embeddings=99))
        assert f"parallel.context={sizes}" in error.change, kind
    (error,) = position_errors(4, 30, 1, "allgather", model)
    assert error.change == "use parallel.tp=1 or 2, or data.sequence_length=28 or 32 (the nearest that divide)"
    (error,) = position_errors(4, 31, 1, "allgather", architecture(max_position_embeddings=31))
    assert error.change == "use parallel.tp=1, or data.sequence_length=28 (the nearest that divide)"
    (error,) = position_errors(4, 30, 1, is_fixed=True)
    assert error.change == "use parallel.tp=1 or 2 or 3 or 5 or 6"
    (error,) = position_errors(3, 13, 2, is_fixed=True)
    assert error.change == "use parallel.context=1 and parallel.tp=1", "neither alone would do"


def test_a_size_that_the_model_cannot_have_is_refused_before_a_length_that_would_not_help():
    with pytest.raises(UserError, match=r"parallel\.tp=3 for a model of 8 query heads"):
        check_layout(ParallelConfig(tp=3), architecture(), others=OtherSettings(sequence_length=256))
    with pytest.raises(UserError, match=r"context=3 with parallel\.context_kind=ulysses for a model of 8 query heads"):
        check_layout(
            ParallelConfig(context=3, context_kind="ulysses"), architecture(), others=OtherSettings(sequence_length=256)
        )
    with pytest.raises(UserError, match=r"data\.sequence_length=256 with parallel\.tp=3"):
        check_layout(ParallelConfig(tp=3), others=OtherSettings(sequence_length=256))


def test_a_kind_of_exchange_without_ranks_that_exchange_is_refused():
    with pytest.raises(UserError) as caught:
        check_layout(ParallelConfig(context_kind="ulysses"))
    assert caught.value.given == "parallel.context_kind=ulysses with parallel.context=1"
    check_layout(ParallelConfig(context_kind="ulysses", context=2))


def test_context_takes_its_ranks_before_replicate_and_shard():
    assert ParallelConfig(context=2).layout(8) == MeshLayout(pp=1, replicate=1, shard=4, context=2, tp=1, expert=1)
    assert ParallelConfig(context=2, tp=2, zero=1).layout(8).shard == 2
    assert ParallelConfig(context=4, zero=0).layout(8).replicate == 2
    assert ParallelConfig(context=2, shard=1, prefetch=1).layout(2).world == 2, "parameters are cut over context"
    with pytest.raises(UserError, match="context"):
        ParallelConfig(context=2).layout(3)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130"])
def test_a_torch_that_compiles_the_exchange_wrongly_is_refused(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    (error,) = exchange_errors(2, "ulysses", is_compiled=True)
    assert error.given == f"parallel.context_kind=ulysses with parallel.compile=true and torch {version}"
    for remedy in ((2, "ulysses", False), (2, "allgather", True), (1, "allgather", True)):
        assert not list(exchange_errors(*remedy))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.13.0")
    assert not list(exchange_errors(2, "ulysses", is_compiled=True))


def test_nf4_cuts_rows_at_whole_blocks():
    wide = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
    fits = architecture(**wide, intermediate_size=256)
    assert not list(nf4_errors(2, fits)) and not list(nf4_errors(4, fits))
    narrow = architecture(**wide, intermediate_size=320)
    (error,) = nf4_errors(2, narrow)
    assert error.given == "adapter.base=nf4 with parallel.tp=2 for a model of 320 channels of the MLP"
    assert error.change == "use parallel.tp=1, or adapter.base=plain" and not list(nf4_errors(1, narrow))
    with pytest.raises(UserError, match=r"adapter\.base=nf4 with parallel\.tp=2"):
        check_layout(ParallelConfig(tp=2), narrow, 2, OtherSettings(is_nf4=True))
    check_layout(ParallelConfig(tp=2), narrow, 2, OtherSettings())
