"""A whole run with groups and Muon: what it reports, saves and exports; what drift it refuses."""

import json
import re

import pytest
import torch

from tests import tiny
from tests.training.runs.resuming import GROUPS, checkpoint
from windlass.checkpoint.keep import diff
from windlass.commands.models.export import export
from windlass.errors import UserError
from windlass.training.left_open import keep_choices
from windlass.training.start.drift import check_drift, newest_trainer_state

OPTIM = {"kind": "muon", "groups": GROUPS}


@pytest.fixture(scope="module")
def whole(runs):
    return runs.whole("muon and groups", "shard2")[0].run.directory


def test_what_is_frozen_is_saved_and_stays_and_has_no_state(whole):
    names = set(json.loads((checkpoint(whole) / "index.json").read_text())["tensors"])
    states = {name for name in names if name.startswith("optimizer.")}
    assert len(names - states) == 24 and not any("layers.0" in name or "embed" in name for name in states)
    assert len(states) == 7 + 5 * 3, "7 matrices of block 1 by Muon, 4 norms of it and the last norm by AdamW"
    changed = diff(checkpoint(whole, 0), checkpoint(whole))
    assert {name for name in names - states if name in changed.bytes} == {
        name for name in names - states if "layers.1" in name or name == "model.model.norm.weight"
    }


def test_the_table_reports_what_is_trained(whole):
    derived = tiny.lines(whole)[0]["derived"]
    assert derived["trainable"].endswith("parameters in 12 tensors")
    assert derived["frozen"].endswith("in 12 tensors; model.embed_tokens.weight and lm_head.weight are one")
    assert derived["optim.groups[1]"].startswith("learning_rate_scale 0.5, weight_decay 0.01: ")
    assert derived["optimizer"] == "Muon for 7 hidden matrices of 4.42 k parameters, AdamW for 5 other tensors"


def test_an_export_holds_what_is_frozen(whole):
    from transformers import AutoModelForCausalLM

    written = export(whole)
    assert written.largest_difference <= 1e-5
    model = AutoModelForCausalLM.from_pretrained(written.directory, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 16184


REFUSED = [
    (
        {"groups": GROUPS[:1]},
        [],
        "in the checkpoint, [{'frozen': True, 'learning_rate_scale': 1.0, 'names': ['lm_head.weight', 'model.layers.0.*']}",
    ),
    (
        {"groups": GROUPS[1:]},
        ["optim.groups"],
        "12 are trained that were frozen; the first is model.embed_tokens.weight",
    ),
    (
        {"groups": [{"names": ["model.layers.0.*", "lm_head*", "model.norm.weight"], "frozen": True}]},
        ["optim.groups"],
        "optim.groups: 1 parameters are frozen that were trained, 0 are trained",
    ),
    ({"kind": "adamw"}, ["optim.kind"], "optim.kind: muon in the checkpoint, adamw now"),
]


@pytest.mark.parametrize(("optim", "accepted", "said"), REFUSED)
def test_other_groups_are_drift_and_other_state_is_never_accepted(base, whole, optim, accepted, said):
    config = tiny.recipe(base, "whole", optim={**OPTIM, **optim}, run={"accept_drift": accepted})
    with pytest.raises(UserError, match=re.escape(said)):
        check_drift(newest_trainer_state(whole), config, None)


def test_other_rates_may_be_accepted(base, whole):
    faster = [GROUPS[0], {**GROUPS[1], "learning_rate_scale": 2.0}]
    config = tiny.recipe(base, "whole", optim={**OPTIM, "groups": faster}, run={"accept_drift": ["optim.groups"]})
    trainer_state = newest_trainer_state(whole)
    (sentence,) = check_drift(trainer_state, keep_choices(config, trainer_state), None)
    assert sentence.startswith("accepted drift: optim.groups")


def test_the_remedy_for_unfreezing_works(base, ranks, whole):
    config = tiny.recipe(base, "unfrozen", run={"start_from": str(whole), "steps": 3}, optim={"groups": []})
    ranks.run(2, tiny.train, config)
    changed = diff(checkpoint(whole), checkpoint(config.run.directory, 3))
    assert "model.model.embed_tokens.weight" in changed.bytes
