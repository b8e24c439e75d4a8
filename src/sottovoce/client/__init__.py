"""What runs where the records lie: a client prices, pays, computes, adds noise and answers.

`release` makes an upload, and nothing else does. `device` answers a server's request through the
vault. `node` is a client's configuration file, `messages` what travels and its bytes, `vault/` the
durable ledger, `ledger` what its operator does with it. From outside use
`device.answer_request`, `Node`, `Vault`, the functions of `ledger` and the messages.
"""
