"""The recorder of what a process writes to its disk is built once."""

from support.vault_kills import shim  # noqa: F401
