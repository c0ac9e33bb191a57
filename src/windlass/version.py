"""The version of windlass, for exports and `windlass.__version__`. It imports nothing."""

__version__ = "0.1.0"
