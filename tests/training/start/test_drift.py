"""Which stream a resumed run must find again. (Settings and length: tests/hall/test_config.py and test_restore.py.)"""

import contextlib
import copy
import socket
from unittest import mock

import pytest
import torch.distributed as dist

from tests import tiny
from windlass.config import check_recipe
from windlass.errors import SeveralErrors, UserError
from windlass.runtime import start_runtime
from windlass.training.start import drift
from windlass.training.start.drift import begun, check_drift, check_ranks, newest_trainer_state, stream_to_keep


def test_the_stream_is_kept_unless_drift_of_the_data_is_accepted(tmp_path):
    trainer_state = {"data": {"stream": "abc"}}
    assert stream_to_keep(trainer_state, tiny.recipe(tmp_path)) == "abc"
    assert stream_to_keep(trainer_state, tiny.recipe(tmp_path, run={"accept_drift": ["data"]})) is None
    other = tiny.recipe(tmp_path, run={"accept_drift": ["data.shuffle_window"]})
    assert stream_to_keep(trainer_state, other) == "abc", "one setting of the data is not the data"


def test_a_new_run_has_begun_nothing_and_a_finished_one_its_last_step(tmp_path, run):
    assert begun(tiny.recipe(tmp_path)) is None
    assert begun(tiny.recipe(tmp_path, run={"directory": str(run)}))["step"] == tiny.STEPS
    assert begun(tiny.recipe(tmp_path, run={"start_from": str(run)})) is None, "weights alone begin anew"
    assert newest_trainer_state(run)["samples_consumed"] == 8 * tiny.STEPS


def test_a_setting_that_came_after_the_checkpoint_had_its_default(tmp_path, run):
    trainer_state = newest_trainer_state(run)
    config = check_recipe(trainer_state["config"])
    del trainer_state["config"]["data"]["stages"], trainer_state["config"]["data"]["sources"][0]["name"]
    assert check_drift(trainer_state, config, None) == []
    trainer_state["config"]["data"]["of_another_version"] = None
    with pytest.raises(UserError, match=r"data\.sources"):
        check_drift(trainer_state, config, None)


def test_how_data_is_encoded_and_packed_away_may_change_without_a_word(tmp_path, run):
    trainer_state = newest_trainer_state(run)
    tree = copy.deepcopy(trainer_state["config"])
    tree["data"] |= {"workers": 3, "compression": "zstd"}
    assert check_drift(trainer_state, check_recipe(tree), None) == []


def test_all_drift_is_listed_at_once(tmp_path, run):
    """The model's, the optimizer's state, and what may be accepted: of that, what is not yet."""
    trainer_state = newest_trainer_state(run)
    tree = copy.deepcopy(trainer_state["config"])
    tree["model"]["rope_theta"] = 5e5
    tree["optim"] |= {"kind": "muon", "beta1": 0.8, "beta2": 0.9}
    tree["run"] |= {"seed": 7, "accept_drift": ["optim.beta2"]}
    tree["launch"] = {"max_restarts": 9, "stall_s": 7}  # is none
    with pytest.raises(SeveralErrors) as caught:
        check_drift(trainer_state, check_recipe(tree), None)
    assert [error.given for error in caught.value.errors] == [
        "model.rope_theta: None in the checkpoint, 500000.0 now",
        "optim.kind: adamw in the checkpoint, muon now",
        "run.seed: 4 in the checkpoint, 7 now; optim.beta1: 0.9 in the checkpoint, 0.8 now",
    ]
    assert caught.value.errors[2].change.endswith("'run.accept_drift=[run.seed, optim.beta1]'")


def differ(config, change):
    """On a rank: the message where rank 1 has another recipe."""
    runtime = start_runtime()
    mine = config if runtime.rank == 0 else check_recipe(config.kept() | change)
    try:
        check_ranks(mine, runtime)
    except UserError as error:
        return error.given, error.change
    finally:
        runtime.close()
    return None


def test_ranks_with_another_recipe_are_refused_on_all_of_them(tmp_path, ranks):
    config = tiny.recipe(tmp_path)
    kept, host = config.kept(), socket.gethostname()
    assert ranks.run(2, differ, config, {"launch": {"max_restarts": 1, "stall_s": 5}}) == [None] * 2
    optim, run = kept["optim"] | {"learning_rate": 0.5}, kept["run"] | {"seed": 9}
    said = ranks.run(2, differ, config, {"optim": optim, "run": run})
    assert said[0] == said[1] and said[0][0] == (
        f"rank 1 on {host} has run.seed 9, rank 0 on {host} has 4; also different: optim.learning_rate"
    )


def test_a_host_may_have_caches_of_its_own(tmp_path, ranks):
    def recipe(disk):
        cache = {"directory": f"{disk}/shards", "limit_mib": 20}
        data = {"tokenizer": {"from": "org/name"}, "directory": "s3://bucket/run", "cache": cache}
        return tiny.recipe(tmp_path, data=data, hub={"cache": f"{disk}/hub"})

    first, second = recipe("/disk-a"), recipe("/disk-b").kept()
    assert ranks.run(2, differ, first, {"data": second["data"], "hub": second["hub"]}) == [None] * 2


def other_torch(config):
    rank_one = dist.get_rank() == 1
    with mock.patch.object(drift.metadata, "version", lambda name: "9.9") if rank_one else contextlib.nullcontext():
        return differ(config, {})


def test_ranks_with_another_torch_are_refused(tmp_path, ranks):
    first, second = ranks.run(2, other_torch, tiny.recipe(tmp_path))
    assert first == second and " has torch 9.9, rank 0 on " in first[0]


def test_of_sources_the_settings_that_differ_are_shown():
    def sources(*given):
        return {"data": {"sources": [{"path": path, "too_long": how, "hub": None} for path, how in given]}}

    (found,) = drift.drift(sources(("a", None), ("b", None)), sources(("a", "drop"), ("c", None)))
    assert found.key == "data.sources"
    assert str(found) == (
        "data.sources[0].too_long: None in the checkpoint, drop now; data.sources[1].path: b in the checkpoint, c now"
    )
    (found,) = drift.drift(sources(("a", None)), sources(("a", None), ("b", "drop")))
    assert str(found) == (
        "data.sources: [{'path': 'a'}] in the checkpoint, [{'path': 'a'}, {'path': 'b', 'too_long': 'drop'}] now"
    )
