"""The plan: one frozen value, from TOML or from Python, checked before any data is read.

`plan` is the whole (`Plan`: loading, overriding, writing), `data` the table `[data]`, `sections`
the other tables, `base` their base class, the text of a plan, and the sentences that refuse one.
"""

from sottovoce.plan.data import Data
from sottovoce.plan.plan import Plan
from sottovoce.plan.sections import Local, ModelSection, Privacy, Rounds, Server

__all__ = ["Data", "Local", "ModelSection", "Plan", "Privacy", "Rounds", "Server"]
