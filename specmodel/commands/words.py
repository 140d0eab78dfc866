"""Moved to `specmodel.words`."""

from specmodel.words import *  # noqa: F403
