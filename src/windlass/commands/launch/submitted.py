"""What every kind of cluster asks of a recipe that is submitted to it."""

from windlass.config import RunConfig
from windlass.model.open_config import architecture_of


def check_layout_there(config: RunConfig, world: int) -> None:
    """Raises UserError where the layout cannot be one of `world` ranks. A base of `model.from` may be on the cluster's storage
    alone: its shape is not asked for."""
    is_known = config.model.from_ is None
    config.check_layout(architecture_of(config.model, config.data.tokenizer.train or 1) if is_known else None, world)
