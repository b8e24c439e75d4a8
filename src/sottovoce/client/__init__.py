"""What runs where the records lie: a client prices, pays, computes, adds noise and answers.

`release` makes an upload, and nothing else does; `device` answers a server's request through the
vault; `node` is a client's configuration file; `messages` and `wire` are what travels; `vault/` is
the durable ledger and `ledger/` what its operator does with it.
"""
