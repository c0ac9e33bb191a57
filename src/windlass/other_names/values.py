"""Values of other tools for a key of ours: what to write in their place, and which of them this version has not. No torch.

Sources: the names of optimizers, schedulers and trainers in transformers, TRL, axolotl, LLaMA-Factory, torchtune, bitsandbytes.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from windlass.other_names.spellings import optimizer_kind, schedule_of


class Meant(NamedTuple):
    """`reason`: what of the value this version has not, or whose word it is; `change`: what to write."""

    reason: str
    change: str


_NOT_HERE: Final = "{} is not in this version".format
_ANOTHER: Final = "{} is another tool's word".format
_OPTIMIZERS: Final = (
    "lion adafactor sgd adagrad adadelta rmsprop lamb lars sophia shampoo soap came dion lomo adalomo grokadamw stable_adamw "
    "ademamix galore apollo badam schedule_free prodigy adopt adan novograd radam nadam"
)
_SCHEDULES: Final = {
    "cosine_with_restarts": "use optim.schedule=cosine, which has no restarts",
    "cosine_annealing_warm_restarts": "use optim.schedule=cosine, which has no restarts",
    "polynomial": "use optim.schedule=linear, which is a polynomial of degree 1",
    "inverse_sqrt": "use optim.schedule=wsd, which is constant until its last part, or cosine",
    "reduce_lr_on_plateau": "use optim.schedule=constant, or wsd, which decays over its last part",
    **dict.fromkeys(
        (
            "one_cycle",
            "onecycle",
            "rex",
            "step",
            "exponential",
            "piecewise_constant",
            "cyclic",
            "jagged_cosine",
            "trapezoid",
        ),
        "use optim.schedule=cosine, wsd, linear or constant (`windlass keys optim.schedule` explains them)",
    ),
}
_MORE: Final = {
    "constant_with_warmup": "optim.schedule=constant, and its warm-up as optim.warmup_steps",
    "cosine_with_min_lr": "optim.schedule=cosine, and its lowest rate as optim.floor, a share of the highest",
}
_OBJECTIVES: Final = {
    "pretrain": "pt clm cpt lm causal_lm pretraining pre-training text",
    "sft": "finetune finetuning fine-tuning instruct instruction chat",
    "dpo": "preference preferences pref",
}
_WORDS: Final = {word: ours for ours, words in _OBJECTIVES.items() for word in words.split()}
_TEACHER: Final = "use objective.kind=sft on answers that the teacher has written"
_NO_OBJECTIVE: Final = {
    **dict.fromkeys(("distill", "distillation", "kd", "gkd"), ("learning from a teacher's outputs", _TEACHER)),
    **dict.fromkeys(
        (
            "mlm",
            "masked_lm",
            "diffusion",
            "classification",
            "embedding",
            "contrastive",
            "rlhf",
            "online_dpo",
            "reinforce",
        ),
        ("{}", "use objective.kind=pretrain on texts, sft on conversations, or dpo on pairs"),
    ),
}


def value_meant(path: str, value: Any) -> Meant | None:
    """What another tool's `value` of our key `path` means here. None where no tool is known to have it."""
    return _KEYS[path](str(value)) if path in _KEYS else None


def _optimizer(value: str) -> Meant | None:
    word, kind = value.lower().replace("-", "_"), optimizer_kind(value)
    if any(bits in word for bits in ("8bit", "4bit", "fp8")):
        change = f"use optim.kind={kind if kind == 'muon' else 'adamw, and precision.states=bf16 for smaller states'}"
        return Meant("an optimizer whose states have 8 bits or fewer is not in this version", change)
    if word.startswith("paged"):
        change = "use optim.kind=adamw, and parallel.offload=true for states in host memory"
        return Meant("an optimizer that pages its states is not in this version", change)
    if not {word, word.split("_")[0]}.isdisjoint(_OPTIMIZERS.split()):
        return Meant(_NOT_HERE(value), "use optim.kind=adamw, or muon")
    if word == "adam":
        reason = "Adam with its decay in the gradient is not in this version"
        return Meant(reason, "use optim.kind=adamw, which is the same with optim.weight_decay=0")
    return Meant(_ANOTHER(value), f"use optim.kind={kind}") if kind != value else None


def _schedule(value: str) -> Meant | None:
    word, ours = value.lower().replace("-", "_"), schedule_of(value)
    if word in _SCHEDULES:
        return Meant(_NOT_HERE(value), _SCHEDULES[word])
    return Meant(_ANOTHER(value), f"use {_MORE.get(word, f'optim.schedule={ours}')}") if ours != value else None


def _objective(value: str) -> Meant | None:
    word = value.lower()
    if word in _NO_OBJECTIVE:
        reason, change = _NO_OBJECTIVE[word]
        return Meant(_NOT_HERE(reason.format(value)), change)
    return Meant(_ANOTHER(value), f"use objective.kind={_WORDS[word]}") if word in _WORDS else None


_KEYS: Final[dict[str, Callable[[str], Meant | None]]] = {
    "optim.kind": _optimizer,
    "optim.schedule": _schedule,
    "objective.kind": _objective,
}
