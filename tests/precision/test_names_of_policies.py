"""Other tools' names for a precision are answered with our policy, and that policy is one we take."""

import re

import pytest

from windlass.config import check_recipe
from windlass.errors import UserError
from windlass.precision.config import PrecisionConfig
from windlass.precision.names_of_policies import WORDS, policy_of, refuse_other_precisions


def refused(recipe):
    """What is said of a recipe with that much in it; the settings it names must be taken."""
    with pytest.raises(UserError) as caught:
        check_recipe(recipe)
    for key, value in re.findall(r"precision\.(\w+)=([\w-]+)", caught.value.change):
        PrecisionConfig(**{"policy": "bf16"} | {key: value})
    return caught.value


@pytest.mark.parametrize(
    ("word", "policy"),
    [
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        ("32-true", "fp32"),
        ("bf16-true", "bf16-pure"),
        ("64-true", "fp64"),
        ("tf32", "fp32 (whether"),
        ("mixed_bf16", "bf16"),
        ("amp_bf16", "bf16"),
        ("BF16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("float16", "fp16"),
        ("float32", "fp32"),
        (16, "fp16"),
        (32, "fp32"),
        ("16-true", "fp16 (weights stay in fp32"),
        ("fp8", "bf16 (there is no fp8 here)"),
        (False, "fp32"),
    ],
)
def test_a_precision_by_another_tools_name_is_answered_with_ours(word, policy):
    error = refused({"precision": {"policy": word}})
    assert error.given == f"precision.policy={str(word).lower() if word is False else word}"
    assert f"{error.change} ".startswith(f"use precision.policy={policy}"), error.change
    assert "fp64, fp32, bf16, fp16, bf16-pure" in error.rule
    assert refused({"precision": word}).change == error.change


@pytest.mark.parametrize(
    ("recipe", "given", "change"),
    [
        ({"bf16": True}, "bf16=true", "use precision.policy=bf16"),
        ({"fp16": True}, "fp16=true", "use precision.policy=fp16"),
        (
            {"fp16": False, "bf16": True},
            "fp16=false; bf16=true",
            "use nothing (precision.policy alone says it); precision.p",
        ),
        ({"bf16": {"enabled": True}}, "bf16={enabled: true}", "use precision.policy=bf16"),
        ({"precision": {"mixed_precision": "fp16"}}, "precision.mixed_precision=fp16", "use precision.policy=fp16"),
        ({"mixed_precision": "no"}, "mixed_precision=no", "use precision.policy=fp32"),
        ({"precision": {"bf16": True}}, "precision.bf16=true", "use precision.policy=bf16"),
        ({"precision": {"mixed_precision_param": "bfloat16"}}, "precision.mixed_p", "use precision.parameters=bf16"),
        ({"precision": {"mixed_precision_reduce": "float32"}}, "precision.mixed_p", "use precision.reduce=fp32"),
        ({"parallel": {"mixed_precision": "fp16"}}, "parallel.mixed_precision=fp16", "use precision.policy=fp16"),
    ],
)
def test_keys_of_other_tools_have_ours(recipe, given, change):
    error = refused({"run": {}, "model": {"preset": "gpt2-124m"}, "data": {"sources": [{"path": "x"}]}, **recipe})
    assert error.given.startswith(given) and error.change.startswith(change), error


def test_our_own_names_and_words_that_are_nobodys_are_left_to_the_check_of_keys():
    for policy in ("fp64", "fp32", "bf16", "fp16", "bf16-pure", "best"):
        refuse_other_precisions({"precision": {"policy": policy, "reduce": "bf16"}})
    assert policy_of("best") is None
    assert {policy.split()[0] for policy in WORDS.values()} == {"fp64", "fp32", "bf16", "fp16", "bf16-pure"}
    with pytest.raises(UserError, match=r"precision\.policy='best'"):
        check_recipe({"precision": {"policy": "best"}})
