"""What will run: one frozen value, from TOML or from Python, checked before any data is read.

`plan`      `Plan`: the whole, loading, overriding, writing
`data`      the table `[data]`, with `columns`: what is public about the columns of your own table
`sections`  the tables `[model]`, `[local]`, `[privacy]`, `[rounds]`, `[server]`
`section`   what all of them are
`text`      TOML, `--set` and the file of budgets as plain data, and back
`refusals`  one sentence for everything that cannot be a plan
"""

from sottovoce.plan.data import Data
from sottovoce.plan.plan import Plan
from sottovoce.plan.sections import Local, Model, Privacy, Rounds, Server

__all__ = ["Data", "Local", "Model", "Plan", "Privacy", "Rounds", "Server"]
