"""`sottovoce ledger`: what an operator does with a vault, as functions and as texts."""

from sottovoce.client.ledger.account import Account, Release, account, table
from sottovoce.client.ledger.operate import act_as, backup, create, create_for, make, rebind, show
from sottovoce.client.ledger.verification import Check, Verified, verify

__all__ = [
    "Account",
    "Check",
    "Release",
    "Verified",
    "account",
    "act_as",
    "backup",
    "create",
    "create_for",
    "make",
    "rebind",
    "show",
    "table",
    "verify",
]
