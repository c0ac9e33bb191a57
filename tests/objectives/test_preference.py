"""Preferences: losses and gradients as TRL's, the tangent's value and slope, what counts, and the figures."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests import cases
from tests.parallel.tiny import make_program
from windlass.model.config import ModelConfig
from windlass.model.head.loss import as_bits
from windlass.model.hf import load_weights
from windlass.model.lora.adapter import B
from windlass.model.open_config import architecture_of
from windlass.objectives.config import ObjectiveConfig
from windlass.objectives.preference import REFERENCE, Preference, pair_losses
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of

LOSSES = {
    "sigmoid": {},
    "ipo": {"loss": "ipo"},
    "robust": {"loss": "robust", "label_smoothing": 0.1},
    "hinge": {"loss": "hinge", "beta": 0.02},
}


def config_of(**given):
    return ObjectiveConfig(kind="dpo", **given)


def losses(log_p, log_q, tokens, **given):
    return pair_losses(
        *(torch.tensor(x, dtype=torch.float64) for x in (log_p, log_q, tokens)), config_of(**given)
    ).tolist()


def test_the_formulas_by_hand():
    given = [[-10.0, -14.0]], [[-11.0, -12.0]], [[5, 4]]
    d = 0.1 * ((-10 + 11) - (-14 + 12))
    means = (-10 + 11) / 5 - (-14 + 12) / 4
    sigmoid = -math.log(1 / (1 + math.exp(-d)))
    flipped = -math.log(1 / (1 + math.exp(d)))
    assert losses(*given) == pytest.approx([sigmoid])
    assert losses(*given, loss="robust", label_smoothing=0.2) == pytest.approx([(0.8 * sigmoid - 0.2 * flipped) / 0.6])
    assert losses(*given, loss="hinge") == pytest.approx([1 - d])
    assert losses(*given, loss="ipo") == pytest.approx([(means - 5) ** 2])
    margin = 2.0 * (-10 / 5 + 14 / 4) - 0.3
    none = [[0.0, 0.0]]
    simpo = losses(given[0], none, given[2], loss="simpo", beta=2.0, target_margin=0.3)
    assert simpo == pytest.approx([math.log1p(math.exp(-margin))])
    chosen, rejected = math.exp(-10 / 5), math.exp(-14 / 4)
    ratio = chosen / (1 - chosen) / (rejected / (1 - rejected))
    orpo = losses(given[0], none, given[2], loss="orpo", beta=0.2)
    assert orpo == pytest.approx([10 / 5 + 0.2 * math.log1p(1 / ratio)])


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_losses_without_a_reference_are_trls(loss):
    """TRL's supervised part of orpo counts the prompt too, so it is left out here, and added by hand."""
    trainers = pytest.importorskip("trl.experimental.cpo"), pytest.importorskip("trl.experimental.orpo")
    generator = torch.Generator().manual_seed(3)
    means_P2 = -3 * torch.rand((50, 2), generator=generator, dtype=torch.float64) - 0.1
    tokens_P2 = torch.randint(1, 9, (50, 2), generator=generator)
    given = {"loss": loss, "beta": 1.7, **({"target_margin": 0.4} if loss == "simpo" else {})}
    found = pair_losses(means_P2 * tokens_P2, torch.zeros_like(means_P2), tokens_P2, config_of(**given))
    stand_in = SimpleNamespace(
        beta=1.7,
        simpo_gamma=0.4,
        alpha=0.0,
        label_smoothing=0.0,
        loss_type=loss,
        accelerator=SimpleNamespace(device="cpu"),
    )
    if loss == "simpo":
        expected = trainers[0].CPOTrainer.cpo_loss(stand_in, *means_P2.unbind(1))[0]
    else:
        expected = -means_P2[:, 0] - trainers[1].ORPOTrainer.odds_ratio_loss(stand_in, *means_P2.unbind(1))[0]
    assert (found - expected).abs().max() <= (1e-12 if loss == "simpo" else 1e-6), "TRL takes the odds in fp32"


def test_orpo_of_a_certain_answer_and_of_padding_is_finite():
    log_p_P2 = torch.tensor([[0.0, -3.0], [-2.0, 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    tokens_P2 = torch.tensor([[3, 2], [3, 2], [0, 0]])
    found_P = pair_losses(log_p_P2, torch.zeros_like(log_p_P2), tokens_P2, config_of(loss="orpo"))
    (slopes_P2,) = torch.autograd.grad(found_P.sum(), log_p_P2)
    assert found_P.isfinite().all() and slopes_P2.isfinite().all() and found_P[0] < 1e-2 < 2 < found_P[1]


def batches():
    (ids, targets), *_ = cases.pair_batches()
    ids, targets = ids % 150, targets.where(targets < 150, 1)
    targets[2:4] = -100  # a pair of padding
    return [{"input_ids": i, "targets": t} for i, t in zip(ids.split(4), targets.split(4), strict=True)]


def weighed(given):
    """On a rank: value and slope of the tangent, the count, the figures, and the same from the scores alone."""
    program, objective = make_program(1), Preference(config_of(**given))
    scores = program.score(batches())
    kept = [{**batch, REFERENCE: torch.full((4,), -30.0, dtype=torch.float64)} for batch in batches()]
    given, count = objective.weigh(kept, program)
    loss = program.run(given, count)
    evaluated = program.evaluate(given) / count
    figures = {name: value.item() for name, value in objective.figures().items()}
    return scores.tolist(), loss.item(), evaluated.item(), count.item(), figures, [sorted(batch) for batch in given]


@pytest.mark.parametrize("name", LOSSES)
def test_the_program_returns_the_true_loss_over_the_pairs_that_count(ranks, name):
    ((scores, loss, evaluated, count, figures, keys),) = ranks.run(1, weighed, LOSSES[name])
    log_p = torch.tensor(scores, dtype=torch.float64).view(-1, 2)
    tokens = torch.cat([(batch["targets"] != -100).sum(1) for batch in batches()]).view(-1, 2)
    is_pair = tokens.all(1)
    assert count == 2 == is_pair.sum() and keys == [["input_ids", "per_row", "targets"]] * 2
    expected = pair_losses(log_p, torch.full_like(log_p, -30.0), tokens.double(), config_of(**LOSSES[name]))[is_pair]
    assert loss == pytest.approx(expected.mean().item(), rel=1e-5) == evaluated
    rewards = (LOSSES[name].get("beta", 0.1) * (log_p + 30))[is_pair]
    margin = rewards[:, 0] - rewards[:, 1]
    assert figures["reward_chosen"] == pytest.approx(rewards[:, 0].mean().item())
    assert figures["margin"] == pytest.approx(margin.mean().item())
    assert figures["accuracy"] == pytest.approx((margin > 0).double().mean().item())


DROPS = {"family": "gpt2", "vocab_size": 150, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64}
DROPS |= {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def under_dropout():
    """On a rank: a pair's loss as a step computes it; and log p of its rows, each as a training step of that row alone has it."""
    program, objective = make_program(1, policy="fp64", model=DROPS), Preference(config_of())
    pair = {name: tensor[:2] for name, tensor in batches()[1].items()} | {"keys": torch.tensor([5, -9])}
    scores = program.score([pair])
    alone = []
    for row in range(2):
        weights_B2 = torch.zeros(2, 2, dtype=torch.float64)
        weights_B2[row, 0] = 1.0
        alone.append(-program.run([{**pair, "per_row": as_bits(weights_B2)}], torch.tensor(1.0)).item())
    clean = program.score([{name: tensor for name, tensor in pair.items() if name != "keys"}])
    given, count = objective.weigh([{**pair, REFERENCE: torch.full((2,), -30.0, dtype=torch.float64)}], program)
    return program.run(given, count).item(), alone, scores.tolist(), clean.tolist()


def test_a_step_with_dropout_scores_by_the_masks_that_it_trains_with(ranks):
    """Else the tangent is taken at another model's log p, and value and gradient are both wrong."""
    ((loss, alone, scores, clean),) = ranks.run(1, under_dropout)
    assert scores == pytest.approx(alone, abs=1e-9)
    assert all(abs(one - other) > 1e-2 for one, other in zip(scores, clean, strict=True)), "dropout drops something"
    log_p_P2 = torch.tensor([alone], dtype=torch.float64)
    expected = pair_losses(log_p_P2, torch.full_like(log_p_P2, -30.0), torch.ones_like(log_p_P2), config_of())
    assert loss == pytest.approx(expected.item(), abs=1e-9)


def scores_under_dropout():
    """On a rank: of a pair with dropout's keys, under an adapter, under its base, and under the base alone without keys."""
    adapter = {"rank": 2, "alpha": 4.0, "dropout": 0.3}
    adapted, plain = (make_program(1, policy="fp64", model=DROPS, adapter=one) for one in (adapter, None))
    with torch.no_grad():
        for record in adapted.records():
            if record.name.endswith(B):
                record.tensor.fill_(0.1)
    pair = {name: tensor[:2] for name, tensor in batches()[1].items()}
    with_keys = {**pair, "keys": torch.tensor([5, -9])}
    return (
        adapted.score([with_keys]).tolist(),
        adapted.score([with_keys], adapted=False).tolist(),
        plain.score([pair]).tolist(),
    )


def test_the_reference_is_the_base_without_dropout(ranks):
    ((policy, reference, base),) = ranks.run(1, scores_under_dropout)
    assert reference == pytest.approx(base, abs=1e-12)
    assert all(abs(one - other) > 1e-2 for one, other in zip(policy, base, strict=True))


def trl_rows():
    """Pairs of uneven answers, as text of which every word is a token."""
    generator = torch.Generator().manual_seed(9)

    def say(count):
        ids = torch.randint(3, cases.VOCABULARY, (count,), generator=generator)
        return " ".join(f"t{number}" for number in ids.tolist())

    return [{"prompt": say(3 + i), "chosen": f" {say(4 + i)} t2", "rejected": f" {say(9 - i)} t2"} for i in range(4)]


def ours(policy, base, ids, targets, given):
    """On a rank: loss and gradients of the model in `policy` beside the one in `base`."""
    architecture = architecture_of(ModelConfig.model_validate({"from": str(policy)}))

    def program_of(directory):
        parallel, precision = ParallelConfig(zero=3), precision_of(PrecisionConfig(policy="fp32"))
        mesh = make_mesh(parallel.layout(1), "cpu")
        parallelism = Parallelism(parallel, precision, mesh, torch.device("cpu"))
        return build_program(architecture, parallelism, lambda named: load_weights(directory, architecture, named))

    batch = {"input_ids": ids, "targets": targets}
    batch[REFERENCE] = program_of(base).score([batch]).double()
    program = program_of(policy)
    weighed, count = Preference(config_of(**given)).weigh([batch], program)
    loss = program.run(weighed, count).item()
    return loss, {record.name: cases.full(record.tensor.grad) for record in program.records()}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL's settings against a later transformers
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_trls(ranks, name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    policy, base = (cases.write_model(tmp_path / name, "qwen3", tied=False) for name in ("policy", "base"))
    moved = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.02)
    moved.save_pretrained(policy)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(cases.VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", pad_token="t1", unk_token="t0")
    ids, targets = torch.full((8, 24), 1), torch.full((8, 24), -100)
    for row, pair in enumerate(trl_rows()):
        prompt = tokenizer(pair["prompt"])["input_ids"]
        for number, key in enumerate(("chosen", "rejected")):
            whole = torch.tensor(prompt + tokenizer(pair[key])["input_ids"])
            ids[2 * row + number, : len(whole)] = whole
            targets[2 * row + number, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    given = LOSSES[name]
    settings = trl.DPOConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, max_length=None, beta=given.get("beta", 0.1), report_to=[],
        bf16=False, loss_type=[name], label_smoothing=given.get("label_smoothing", 0.0),
        per_device_train_batch_size=4,
    )  # fmt: skip
    model, reference = (AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32) for where in (policy, base))
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=settings,
        train_dataset=Dataset.from_list(trl_rows()),
        processing_class=tokenizer,
    )
    theirs = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    theirs.backward()
    ((loss, gradients),) = ranks.run(1, ours, str(policy), str(base), ids, targets, given)
    assert loss == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)  # IPO's is 25 in fp32: its last digit is 2e-6
    cases.assert_same_tensors(gradients, {n: p.grad for n, p in trainer.model.named_parameters()}, policy, 1e-5)
