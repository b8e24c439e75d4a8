"""Real federations on Flower: certificates, processes, messages. Nothing else imports flwr.

`client_app` and `server_app` are the two Flower apps, `worker` and `server_worker` run the
installed ones, `transport` carries bytes, `supernode` watches a SuperNode. `certificates` and
`deploy/` make what a deployment needs; `keeper`, `processes` and `local` start everything on one
machine, and `federate` is the command. From outside use `federate` and `deploy`.
"""
