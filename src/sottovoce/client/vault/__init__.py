"""A client's durable ledger and stored uploads: one file for one dataset, for all runs and servers.

    create → reserve (debit, durable) → compute → store (upload, durable) → send

The vault refuses rather than guesses: a missing file, a copy, an older state, another dataset, a
second process, a second answer to a round. docs/ledger.md is the operator's page.
"""

from sottovoce.client.vault.chain import fingerprint, fingerprint_file
from sottovoce.client.vault.policy import Policy
from sottovoce.client.vault.rebinding import backup, move, rebind, restore, resume
from sottovoce.client.vault.vault import Entry, Reservation, Vault
from sottovoce.client.vault.witness import VaultReceipt

__all__ = [
    "Entry",
    "Policy",
    "Reservation",
    "Vault",
    "VaultReceipt",
    "backup",
    "fingerprint",
    "fingerprint_file",
    "move",
    "rebind",
    "restore",
    "resume",
]
