"""What will run: one frozen value, from TOML or from Python, checked before any data is read.

`plan`      `Plan`: the whole, loading, overriding, writing
`sections`  the tables `[data]`, `[model]`, `[local]`, `[privacy]`, `[rounds]`, `[server]`
`text`      TOML, `--set` and the file of budgets as plain data, and back
`refusals`  one sentence for everything that cannot be a plan
"""

from sottovoce.plan.plan import Plan
from sottovoce.plan.sections import Data, Local, Model, Privacy, Rounds, Server

__all__ = ["Data", "Local", "Model", "Plan", "Privacy", "Rounds", "Server"]
