"""Whether the rows that share a sequence see each other: what the tool of a file does, as settings of ours. No torch.

Sources (2026): axolotl's utils/data/streaming.py and its `pretrain_multipack_attn`; LLaMA-Factory's data/processor/supervised.py
and pretrain.py; torchtune's datasets/_packed.py, whose masks keep the samples of a pack apart.
"""

from typing import Final

from windlass.commands.recipes.foreign_facts import Keys, RowBorders
from windlass.settings import as_yaml

ALONE: Final = (
    "a sequence holds one row there, and several here that do not see each other, so that a step learns from more rows"
)
CUT: Final = "; the end of a text that is longer is not lost here, but a sequence of its own"


def borders_of_axolotl(keys: Keys, is_streamed: bool) -> RowBorders:
    """`is_streamed`: whether the data are those of `pretraining_dataset`."""
    is_packed = bool(keys.take("sample_packing"))
    if is_streamed:
        is_apart = keys.take("pretrain_multipack_attn", True) is not False
        is_joined = bool(keys.take("pretraining_sample_concatenation"))
        if is_packed:
            return RowBorders(f"sample_packing: true, pretrain_multipack_attn: {as_yaml(is_apart)}", is_apart)
        if is_joined:
            return RowBorders("pretraining_sample_concatenation: true: texts see those before them", isolate=False)
        return RowBorders(f"texts are not packed: {ALONE}{CUT}", isolate=True)
    if is_packed:
        return RowBorders("sample_packing: true: rows of a sequence do not see each other", isolate=True)
    return RowBorders(f"no sample_packing: {ALONE}", isolate=True)


def borders_of_llama_factory(keys: Keys, stage: str) -> RowBorders:
    """Texts of stage pt are packed where nothing says it, rows of other stages are not."""
    is_neat, is_packed = bool(keys.take("neat_packing")), bool(keys.take("packing", stage == "pt"))
    if stage == "pt" and is_packed:
        return RowBorders("texts follow each other, and see those before them", isolate=False, packing="concatenate")
    if is_neat:
        return RowBorders("neat_packing: true: rows of a sequence do not see each other", isolate=True)
    if is_packed:
        return RowBorders("packing: true without neat_packing: rows see those before them", isolate=False)
    return RowBorders(f"no packing: {ALONE}{CUT if stage == 'pt' else ''}", isolate=True)


def borders_of_torchtune(datasets: list[Keys]) -> RowBorders:
    """A text that does not end in its pack goes on in the next, unless `split_across_pack` is false."""
    packed = [bool(data.take("packed")) for data in datasets]
    is_split = [data.take("split_across_pack", True) is not False for data in datasets]
    if not packed or not all(packed):
        return RowBorders(f"a data set is not packed: {ALONE}", isolate=True)
    packing = "concatenate" if all(is_split) else "best-fit"
    return RowBorders("packed: true: rows of a pack do not see each other", isolate=True, packing=packing)
