"""Values of other tools for a key of ours: by name what this version has not, with what to write, which is taken."""

import pytest

from tests.other_names.test_accepted import refusal, settings_in
from tests.other_names.test_renamed_keys import answers_to

SAID = {
    "optim.kind=lion": ("lion is not in this version", "use optim.kind=adamw, or muon"),
    "optim.kind=adafactor": ("adafactor is not in this version", "use optim.kind=adamw, or muon"),
    "optim.kind=galore_adamw": ("galore_adamw is not in this version", "use optim.kind=adamw, or muon"),
    "optim.kind=adamw_8bit": (
        "an optimizer whose states have 8 bits or fewer is not in this version",
        "use optim.kind=adamw, and precision.states=bf16 for smaller states",
    ),
    "optim.kind=PagedAdamW8bit": (
        "an optimizer whose states have 8 bits or fewer is not in this version",
        "use optim.kind=adamw, and precision.states=bf16 for smaller states",
    ),
    "optim.kind=paged_adamw": (
        "an optimizer that pages its states is not in this version",
        "use optim.kind=adamw, and parallel.offload=true for states in host memory",
    ),
    "optim.kind=adam": (
        "Adam with its decay in the gradient is not in this version",
        "use optim.kind=adamw, which is the same with optim.weight_decay=0",
    ),
    "optim.kind=adamw_torch_fused": ("adamw_torch_fused is another tool's word", "use optim.kind=adamw"),
    "optim.schedule=constant_with_warmup": (
        "constant_with_warmup is another tool's word",
        "use optim.schedule=constant, and its warm-up as optim.warmup_steps",
    ),
    "optim.schedule=cosine_with_restarts": (
        "cosine_with_restarts is not in this version",
        "use optim.schedule=cosine, which has no restarts",
    ),
    "optim.schedule=polynomial": (
        "polynomial is not in this version",
        "use optim.schedule=linear, which is a polynomial of degree 1",
    ),
    "optim.schedule=inverse_sqrt": (
        "inverse_sqrt is not in this version",
        "use optim.schedule=wsd, which is constant until its last part, or cosine",
    ),
    "optim.schedule=cosine_with_min_lr": (
        "cosine_with_min_lr is another tool's word",
        "use optim.schedule=cosine, and its lowest rate as optim.floor, a share of the highest",
    ),
    "optim.schedule=reduce_lr_on_plateau": (
        "reduce_lr_on_plateau is not in this version",
        "use optim.schedule=constant, or wsd, which decays over its last part",
    ),
    "optim.schedule=warmup_stable_decay": ("warmup_stable_decay is another tool's word", "use optim.schedule=wsd"),
    "objective.kind=distill": (
        "learning from a teacher's outputs is not in this version",
        "use objective.kind=sft on answers that the teacher has written",
    ),
    "objective.kind=mlm": (
        "mlm is not in this version",
        "use objective.kind=pretrain on texts, sft on conversations, or dpo on pairs",
    ),
    "objective.kind=pt": ("pt is another tool's word", "use objective.kind=pretrain"),
}


@pytest.mark.parametrize("override", SAID)
def test_a_value_of_another_tool_is_answered_by_name(override):
    """The list of what is allowed was all that was said, and `adamw_8bit` was taken for a slip."""
    (error,) = answers_to([override]).values()
    reason, change = SAID[override]
    assert error.given == override.replace("=", "='") + "'"
    assert error.rule.startswith(f"{reason}; {override.partition('=')[0]} must be ") and error.change == change
    assert [one for one in settings_in(change) if refusal(*one) is not None] == []


@pytest.mark.parametrize("word", ["grpo", "kto", "ppo", "rm"])
def test_objectives_that_are_not_here_are_named(word):
    (error,) = answers_to([f"objective.kind={word}"]).values()
    assert "not in this version" in error.rule and error.change.startswith("use objective.kind=dpo on pairs")


def test_orpo_is_a_loss_of_pairs():
    (error,) = answers_to(["objective.kind=orpo"]).values()
    assert error.change == "use objective.kind=dpo objective.loss=orpo"


@pytest.mark.parametrize(("override", "near"), [("optim.kind=adamq", "adamw"), ("optim.schedule=cosin", "cosine")])
def test_a_slip_is_answered_with_the_nearest(override, near):
    (error,) = answers_to([override]).values()
    assert error.change.startswith(f"did you mean `{near}`?")
