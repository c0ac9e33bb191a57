"""The recipe's `model:` section, and the fields of a config.json. Reads no file (open_config.py does). No torch.

A model is named in one of three ways: `preset` (a named shape), `from` (a Hugging Face directory, or a name of the hub),
`family` (and its sizes). Any further key is a field of that family's own Hugging Face config and overrides the other two. A
field that is unknown, or whose value would change the maths in a way that is not implemented, is refused by name: never
ignored. An unknown one that is null sets nothing: it is left out, and announced. So is a model that brings code of its own
(`auto_map`): it may compute anything, and code of a model is never run.

A file is read as transformers reads it: types exactly, and fields that training does not use are passed over. A recipe may
write numbers as YAML leaves them ("1e-5") and counts as 32k, and a field without effect is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ConfigDict, Field, ValidationError

from windlass.errors import UserError, nearest, raise_all
from windlass.hub.config import revision_errors
from windlass.model.architecture import Architecture
from windlass.model.families.family import ANSWERS
from windlass.model.families.family_table import FAMILIES, NEAREST, Family
from windlass.model.families.presets import PRESETS
from windlass.model.families.rope_scaling import merge_rope
from windlass.other_names.answers import REMOVE
from windlass.other_names.renamed_keys import renamed_elsewhere, renamed_key_advice
from windlass.settings import Settings, Violation, cut, meant, read_count

NEAR_FIELD: Final = 0.75
"""difflib's ratio from which a key is taken for a slip of a field. At the usual 0.6 `block_size` was one of `vocab_size`: 0.7."""


class ModelConfig(Settings):
    """Exactly one of `preset`, `from`, `family`; more keys are fields of the family's Hugging Face config."""

    model_config = ConfigDict(extra="allow")

    preset: str | None = None
    """A named shape with random weights: gpt2-124m, gpt2-1.3b, gpt2-26b, gpt2-65b, llama-2-13b, llama-3.1-8b,
    qwen2.5-1.5b, qwen2.5-7b, qwen3-4b, qwen3-30b-a3b, smollm3-3b."""
    from_: str | None = Field(None, alias="from")
    """A model with its weights: a local Hugging Face directory, or a name on the hub such as Qwen/Qwen3-4B."""
    revision: str | None = None
    """With a hub name: the branch, tag or full commit to take; main if not given."""
    commit: str | None = None
    """With a hub name: the revision's commit when the run began. windlass writes it into resolved.yaml."""
    hub_cache: str | None = Field(None, exclude=True)
    """hub.cache of the recipe, which fills it in."""
    family: str | None = None
    """qwen3, qwen3_moe, llama, gpt2, mistral, qwen2, smollm3, mixtral, olmo2, olmo3, granite, phi3, gemma2, gemma3_text,
    starcoder2, glm4, exaone4, ernie4_5 or cohere2, with random weights; sizes are given in Hugging Face's own names."""

    def rules(self) -> Sequence[Iterator[Violation]]:
        return self._no_trust(), self._revision(), self._named()

    def _no_trust(self) -> Iterator[UserError]:
        if "trust_remote_code" in (self.__pydantic_extra__ or {}):
            yield UserError(
                "model.trust_remote_code",
                "code that a model brings is never run: its family is computed here, or it is refused",
                "remove the setting",
            )

    def _revision(self) -> Iterator[UserError]:
        yield from revision_errors("model", self.from_, self.revision, self.commit)

    def _named(self) -> Iterator[UserError]:
        """One model, and fields that it has."""
        given = {"preset": self.preset, "from": self.from_, "family": self.family}
        named = [f"{key}: {value}" for key, value in given.items() if value is not None]
        if len(named) != 1:
            yield UserError(
                f"model: {' and '.join(named) if named else 'none of preset, from, family'}",
                "a model is named by exactly one of `preset`, `from` and `family`",
                "keep one of them" if named else self._meant() + "give one, such as `preset: gpt2-124m`",
            )
        elif self.preset is not None and self.preset not in PRESETS:
            yield _unknown("preset", self.preset, list(PRESETS))
        elif self.from_ is None:
            _checked(self.hf_fields())

    def _meant(self) -> str:
        """The nearest name for a key that was to say which model: `familly` is nobody's field."""
        given = self.__pydantic_extra__ or {}
        hints = [
            renamed_key_advice("model", key, value) or nearest(key, ["preset", "from", "family"])
            for key, value in given.items()
        ]
        return next((hint for hint in hints if hint), "")

    def hf_fields(self, file: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The family's config: preset, `file` or nothing, overridden by the recipe's own keys; has `model_type`. `file`: the
        config.json of `from`."""
        if self.preset is not None:
            base = dict(PRESETS[self.preset])
        elif self.from_ is not None:
            assert file is not None
            base = _causal(file, self.from_)
        else:
            base = {"model_type": self.family}
        aliases = _family(base["model_type"]).aliases
        nulls = self.nulls_left_out(base["model_type"])
        given = {key: value for key, value in (self.__pydantic_extra__ or {}).items() if key not in nulls}
        known = _family(base["model_type"]).model_fields
        named = {aliases.get(key, key): value for key, value in given.items()}
        own = {key: read_count(value) if key in known else value for key, value in named.items()}
        if own.pop("model_type", base["model_type"]) != base["model_type"]:
            raise UserError("model: model_type", "the family is that of the preset or directory", "remove model_type")
        family = _family(base["model_type"])
        own.pop("trust_remote_code", None)  # refused by a rule of its own
        if wrong := [*_unknown_fields(own, family), *_useless_fields(own, family)]:
            raise_all([*wrong, *_wrong_values({key: own[key] for key in own if key in family.model_fields}, family)])
        merged = merge_rope(base, own)
        family.check_own(own, merged)
        return merged

    def nulls_left_out(self, model_type: str) -> list[str]:
        """Keys of the recipe that are null, and that the family does not know: they set nothing."""
        family = _family(model_type)
        known = {*family.model_fields, *family.aliases, *family.harmless, *family.fixed, "model_type"}
        return [key for key, value in (self.__pydantic_extra__ or {}).items() if value is None and key not in known]

    def architecture(self, vocab_size: int | None = None, file: Mapping[str, Any] | None = None) -> Architecture:
        """The model. `vocab_size`: the tokenizer's, which is the model's when the recipe gives none. `file`: the config.json of
        `from`; open_config.architecture_of reads it."""
        fields = _checked(self.hf_fields(file))
        rows = fields.vocab_size if fields.vocab_size is not None else vocab_size
        if rows is None:
            raise UserError(
                "model: no vocab_size and no tokenizer",
                "the size of the vocabulary comes from the recipe or from the tokenizer",
                "give model.vocab_size or data.tokenizer",
            )
        if vocab_size is not None and vocab_size > rows:
            change = f"set model.vocab_size to {vocab_size} or more, or take the model's own tokenizer"
            if self.from_ is not None:
                change = (
                    f"where it is the model's own with tokens added, set model.vocab_size={vocab_size}: new rows begin as the "
                    "mean of the others; else take the model's own"
                )
            raise UserError(
                f"model: vocab_size {rows}, and a tokenizer with {vocab_size} entries",
                "every token of the tokenizer has a row in the embedding",
                change,
            )
        return fields.to_architecture(rows)

    def shape(self, vocab_size: int | None) -> Architecture | None:
        """The model where the recipe alone says it, with `vocab_size` where it gives none; no file is read. None: it does not."""
        if self.from_ is not None:
            return None
        fields = _checked(self.hf_fields())
        rows = fields.vocab_size if fields.vocab_size is not None else vocab_size
        return None if rows is None else fields.to_architecture(rows)


def architecture_from_hf(config: dict[str, Any]) -> Architecture:
    """config.json's content -> Architecture. Raises UserError for what would be another model here."""
    fields = _checked(_causal(config, "config.json"))
    if fields.vocab_size is None:
        raise UserError("config.json: no vocab_size", "a model needs the size of its vocabulary", "add vocab_size")
    return fields.to_architecture(fields.vocab_size)


def _causal(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A copy with Hugging Face's field names, if its family is one of ours."""
    if "model_type" not in config:
        raise UserError(f"{source}: no model_type", "config.json names its family", f"add one of {', '.join(FAMILIES)}")
    own = sorted(str(name) for name in (config.get("auto_map") or {}) if name != "AutoTokenizer")
    if own:
        raise UserError(
            f"{source}: auto_map: the model brings code of its own ({', '.join(own)})",
            f"that code may compute something else than {config['model_type']}, and code of a model is never run here",
            "if you know that it computes the same, use a local copy of the directory without auto_map in its config.json",
        )
    family = _family(config["model_type"])
    fields = {family.aliases.get(key, key): value for key, value in config.items()}
    try:  # text for a number, or 6.0 for 6, is no config.json that transformers takes
        family.model_validate({key: fields[key] for key in fields if key in family.model_fields}, strict=True)
    except ValidationError as error:
        raise_all(_wrong_kind(source, family, one) for one in error.errors() if one["type"] != "missing")
    return fields


def _family(name: str) -> type[Family]:
    if str(name) not in FAMILIES:
        raise _unknown("family", name, list(FAMILIES))
    return FAMILIES[name]


def _unknown(what: str, name: str, choices: list[str]) -> UserError:
    rule = f"the {'families' if what == 'family' else 'presets'} are {', '.join(choices)}"
    kin = [word for word in NEAREST if str(name).startswith(word)] if what == "family" else []
    if kin:
        near, difference = NEAREST[max(kin, key=len)]
        return UserError(
            f"model.{what}: {name}",
            f"{rule}; {name} has what none of them has: {difference}",
            f"the nearest is {near}: take a model of that family",
        )
    return UserError(f"model.{what}: {name}", rule, f"{nearest(str(name), choices)}give one of these")


def _field_meant(key: str, value: Any, family: type[Family]) -> str:
    """The setting that `key` is another word for, where the family has it, or the nearest field in spelling; what else to do."""
    for hint in (renamed_key_advice("model", key, value), renamed_elsewhere(key, value)):
        field = re.match(r"use model\.(\w+)=", hint)
        if hint and (field is None or field[1] in family.model_fields or field[1] == "from"):
            return hint.removesuffix("; ") if hint.startswith(REMOVE) else f"{hint}or remove `{key}`"
    near = nearest(key, [*family.model_fields, *family.aliases], NEAR_FIELD)
    return f"{near}write that, or remove `{key}`" if near else f"remove `{key}`"


def _unknown_fields(given: dict[str, Any], family: type[Family]) -> Iterator[UserError]:
    """Keys that are no field of the family, and values that are not implemented."""
    for key, value in given.items():
        if key in family.fixed:
            if value not in family.fixed[key]:
                yield UserError(
                    f"model: {key}: {cut(json.dumps(value, default=str))}",
                    f"{family.architecture_class} with this field set computes what is not implemented here",
                    f"take a model without it; accepted: {key}: {json.dumps(family.fixed[key][0])}",
                )
        elif key not in family.model_fields and key not in family.harmless:
            yield UserError(
                f"model: {key}: {cut(json.dumps(value, default=str))}",
                f"{family.architecture_class} has no such field known here; an ignored one may change the maths",
                _field_meant(key, value, family),
            )


def _useless_fields(own: dict[str, Any], family: type[Family]) -> Iterator[UserError]:
    """Keys of a recipe that a config.json may have, and that change nothing here."""
    useless = [key for key in own if key in family.harmless]
    if useless:
        yield UserError(
            "; ".join(f"model: {key}: {cut(json.dumps(own[key], default=str))}" for key in useless),
            "a setting that has no effect on training is refused in a recipe",
            "; ".join(f"{key}: {ANSWERS.get(key, 'remove it')}" for key in useless),
        )


def _checked(fields: dict[str, Any]) -> Family:
    """The typed fields. Raises UserError for unknown keys, refused values, wrong types, and missing sizes."""
    family = _family(fields["model_type"])
    present = {key: value for key, value in fields.items() if value is not None or key in family.model_fields}
    raise_all(_unknown_fields(present, family))
    missing = [key for key in family.required if fields.get(key) is None]
    if missing:
        raise UserError(
            f"model: {fields['model_type']} without {', '.join(missing)}",
            f"these sizes have no default: {', '.join(family.required)}",
            f"give model.{missing[0]}" if len(missing) == 1 else "give all of them",
        )
    try:
        return family(**{key: value for key, value in present.items() if key in family.model_fields})
    except ValidationError as error:
        raise_all(_wrong_kind("model", family, one) for one in error.errors())
        raise


def _wrong_values(known: Mapping[str, Any], family: type[Family]) -> Iterator[UserError]:
    """Mistakes in the fields that the family knows, to be listed beside the fields that it does not."""
    try:
        family(**known)
    except ValidationError as error:
        yield from (_wrong_kind("model", family, one) for one in error.errors() if one["type"] != "missing")


def _wrong_kind(source: str, family: type[Family], error: Any) -> UserError:
    """One complaint of pydantic as a sentence with what the field takes."""
    name = str(error["loc"][0])
    field = ".".join(str(part) for part in error["loc"])
    words = str(error["ctx"]["error"]) if error["type"] == "value_error" else f"{field} must be {meant(error)}"
    return UserError(f"{source}: {field}: {cut(repr(error['input']))}", words, f"give {name} as {family.kind_of(name)}")
