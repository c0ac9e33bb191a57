"""Tests of windlass.commands.launch."""
