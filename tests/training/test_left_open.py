"""What a recipe leaves open: warm-up by the length, precision by the devices; a run that goes on keeps both."""

import pytest
import torch
import yaml

from tests import tiny
from windlass.errors import UserError
from windlass.hardware import Accelerator
from windlass.optim.config import OptimConfig
from windlass.runtime import Runtime, start_runtime
from windlass.training.assemble import assemble
from windlass.training.left_open import choose_policy, describe_few_steps, keep_choices, without_missing_fp8
from windlass.training.loop import train

CPU = Accelerator("CPU", None)
P100, V100 = Accelerator("Tesla P100-PCIE-16GB", (6, 0)), Accelerator("Tesla V100-SXM2-32GB", (7, 0))
T4, A100 = Accelerator("Tesla T4", (7, 5)), Accelerator("NVIDIA A100-SXM4-80GB", (8, 0))
H100 = Accelerator("NVIDIA H100 80GB HBM3", (9, 0))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("precision")


@pytest.mark.parametrize(
    ("devices", "policy"),
    [
        ([A100, H100], "bf16"),
        ([T4], "fp16"),
        ([V100, V100], "fp16"),
        ([H100, T4], "fp16"),
        ([P100], "fp32"),
        ([CPU, CPU], "fp32"),
    ],
)
def test_auto_takes_what_all_devices_have(base, devices, policy):
    chosen, sentences = choose_policy(tiny.recipe(base), devices)  # auto is the default
    assert chosen.precision.policy == policy
    assert sentences == [f"precision.policy=auto: {policy} on {', '.join(sorted({one.name for one in devices}))}"]


@pytest.mark.parametrize("policy", ["bf16", "bf16-pure"])
def test_bf16_on_a_device_without_it_is_one_warning_with_the_factor(base, policy):
    config = tiny.recipe(base, precision={"policy": policy})
    same, (sentence,) = choose_policy(config, [T4, A100, V100, T4])
    assert same is config, "what a recipe asks for is not changed"
    names = "Tesla T4 (compute capability 7.5), Tesla V100-SXM2-32GB (compute capability 7.0)"
    assert (
        sentence.startswith(f"warning: precision.policy={policy} on {names}, which has no matrix units for bf16")
        and "about 8 times slower than fp16 (data sheets: T4 65 against 8.1" in sentence
    )


def test_a_device_without_any_matrix_units_is_no_case_for_fp16(base):
    _, (sentence,) = choose_policy(tiny.recipe(base, precision={"policy": "bf16"}), [P100, T4])
    assert "on Tesla P100-PCIE-16GB (compute capability 6.0), Tesla T4 (compute capability 7.5), which has" in sentence
    assert sentence.endswith(
        "so that bf16 saves memory and no time. A new run with precision.policy=auto takes fp32 there"
    )


@pytest.mark.parametrize(
    ("policy", "device"), [("bf16", A100), ("bf16", CPU), ("fp16", T4), ("fp32", CPU), ("fp32", P100)]
)
def test_there_is_no_warning_elsewhere(base, policy, device):
    assert choose_policy(tiny.recipe(base, precision={"policy": policy}), [device])[1] == []


@pytest.mark.parametrize(("device", "faster"), [(H100, "bf16"), (T4, "fp16")])
def test_fp32_on_a_gpu_with_matrix_units_names_what_is_faster(base, device, faster):
    same, (sentence,) = choose_policy(config := tiny.recipe(base, precision={"policy": "fp32"}), [device])
    assert same is config and sentence.startswith(
        "precision.policy=fp32 multiplies in fp32, without the matrix units of "
    )
    assert sentence.endswith(f"{device.name}; a new run with precision.policy=auto takes {faster} there")


def test_settings_that_do_not_go_with_the_choice_are_refused_by_name(base):
    config = tiny.recipe(base, precision={"policy": "auto", "parameters": "bf16"})
    assert choose_policy(config, [A100])[0].precision.policy == "bf16"
    with pytest.raises(UserError) as caught:
        choose_policy(config, [T4])
    assert caught.value.given == (
        f"precision.policy=auto, which is fp16 on {T4.name}: precision.parameters=bf16 with precision.policy=fp16"
    )
    assert caught.value.change == "remove precision.parameters, or use precision.policy=bf16-pure or bf16"


def test_settings_that_do_not_go_with_the_choice_are_refused_before_data_is_prepared(base):
    """`parameters: bf16` is for bf16, and a CPU computes in fp32."""
    config = tiny.recipe(base, "unchosen", precision={"policy": "auto", "parameters": "bf16"})
    config = config.changed(data=config.data.changed(directory=str(base / "unprepared")))
    with pytest.raises(UserError, match=r"precision\.parameters=bf16 with precision\.policy=fp32"):
        train(config)
    assert not (base / "unprepared").exists() and not config.run.directory.exists()


def test_a_run_on_devices_with_bf16_trains_in_it_unless_the_recipe_says_otherwise(base, monkeypatch, capsys):
    """On this CPU, which is called an H100."""
    monkeypatch.setattr(Runtime, "accelerators", lambda _: [H100])
    for precision, policy, weight in (({}, "bf16", torch.bfloat16), ({"policy": "fp32"}, "fp32", None)):
        name = f"h100-{policy}"
        config = tiny.recipe(base, name, run={"steps": 2}, precision=precision)
        with start_runtime() as runtime, assemble(config, runtime, False) as run:
            copies = {None if one.copy is None else one.copy.dtype for one in run.program.records()}
            assert run.config.precision.policy == policy and copies == {weight}
        resolved = yaml.safe_load((config.run.directory / "resolved.yaml").read_text())
        assert resolved["precision"]["policy"] == policy
        said = "precision.policy=auto: bf16 on NVIDIA H100 80GB HBM3" in capsys.readouterr().out
        assert said == (policy == "bf16")


def test_a_resumed_run_keeps_the_policy_that_it_began_with(base):
    config = tiny.recipe(base, precision={"policy": "auto"})
    then = {"config": {"precision": {"policy": "bf16"}, "optim": {"warmup_steps": 3}}}
    assert keep_choices(config, then).precision.policy == "bf16" and keep_choices(config, None) is config
    fixed = tiny.recipe(base, precision={"policy": "fp32"})
    assert keep_choices(fixed, then) is fixed, "that is drift, which is refused"


def test_a_run_that_becomes_longer_keeps_its_warm_up(base):
    def config(steps, **optim):
        recipe = tiny.recipe(base, "longer", run={"steps": steps}, checkpoint={}, evaluate={"every_steps": 1000})
        return recipe.changed(optim=OptimConfig(learning_rate=3e-3, **optim))

    train(config(60))
    train(config(120))
    resolved = yaml.safe_load((base / "longer" / "resolved.yaml").read_text())
    assert resolved["optim"]["warmup_steps"] == 1, "2 % of 60; 120 steps of their own would have 2"
    start, resume = (line for line in tiny.lines(base / "longer") if "derived" in line)
    assert start["derived"]["learning rate"] == "0.003, cosine to 0.0003; warm-up over 1 steps (1.7% of the run)"
    assert resume["kind"] == "resume" and not any("warmup" in sentence for sentence in resume.get("drift", []))
    with pytest.raises(UserError, match=r"optim\.warmup_steps: 1 in the checkpoint, 9 now"):
        train(config(120, warmup_steps=9))


def test_a_run_with_auto_writes_what_it_chose_and_resumes(base, ranks):
    config = tiny.recipe(base, "auto", run={"steps": 2}, precision={"policy": "auto"})
    ranks.run(2, tiny.train, config)
    resolved = yaml.safe_load((config.run.directory / "resolved.yaml").read_text())
    assert resolved["precision"]["policy"] == "fp32"
    assert "precision.policy=auto: fp32 on CPU" in (config.run.directory / "logs/rank-0.log").read_text()
    longer = tiny.recipe(base, "auto", run={"steps": 4}, precision={"policy": "auto"})
    assert ranks.run(2, tiny.train, longer)[0]["step"] == 4


def test_fp8_is_refused_where_a_device_lacks_it_and_a_model_is_scored_in_bf16_there(base):
    sixteens = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    config = tiny.recipe(base, model=sixteens, precision={"policy": "fp8", "scaling": "rowwise"})
    assert choose_policy(config, [H100]) == without_missing_fp8(config, [H100]) == (config, [])
    with pytest.raises(UserError, match=r"precision\.policy=fp8 on NVIDIA A100"):
        choose_policy(config, [H100, A100])
    scored, (sentence,) = without_missing_fp8(config, [H100, A100])
    assert (scored.precision.policy, scored.precision.scaling) == ("bf16", None)
    assert sentence.startswith("precision.policy=fp8 on NVIDIA A100-SXM4-80GB: scored in bf16")
    other = tiny.recipe(base, precision={"policy": "fp32"})
    assert without_missing_fp8(other, [A100]) == (other, [])


@pytest.mark.parametrize(("steps", "length"), [(1, "1 step"), (9, "9 steps"), (10, None)])
def test_epochs_that_make_few_steps_are_one_sentence_that_names_the_batch(base, steps, length):
    """The page Text to chat made 2 steps of 300 chats, and nothing said why the model answered garbage."""
    asked = tiny.recipe(base, run={"steps": None, "epochs": 3}, optim={"warmup_steps": 0})
    sentence = (
        f"run.epochs=3 is {length} here, in which a model learns little: a smaller run.tokens_per_step (now 128) "
        "makes more steps of the same data"
    )
    assert describe_few_steps(asked, asked.with_steps(steps)) == ([sentence] if length else [])


@pytest.mark.parametrize("run", [{"steps": 2}, {"steps": None, "tokens": 256}])
def test_few_steps_that_were_asked_for_are_meant(base, run):
    asked = tiny.recipe(base, run=run, optim={"warmup_steps": 0})
    assert describe_few_steps(asked, asked.with_steps(2)) == []
