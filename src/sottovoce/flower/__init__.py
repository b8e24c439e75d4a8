"""A real federation on Flower: certificates, processes, messages. Only this room imports flwr.

| file | what it does |
|---|---|
| `certificates` | an authority, a server certificate and node keys, made on the spot |
| `keeper`, `processes` | a small process that starts the others and leaves none behind |
| `local` | SuperLink and SuperNodes on this machine, over TLS, with authenticated nodes |
| `loopback` | ports, environment and configuration that Flower's processes get here |
| `control` | what `flwr` does from the command line: register nodes, start and follow runs |
| `transport` | bytes to nodes, bytes back, before a deadline |
| `worker` | answers a SuperNode's messages with the installed app, never the shipped one |
| `server_worker` | leads runs with the installed ServerApp, never the submitted one |
| `grid` | the ServerApp's connection: patient with a busy SuperLink, careful with replies |
| `supernode` | Flower's SuperNode, watched: ends when nobody hears it, names a wrong clock |
| `deploy/` | keys, proxy configuration and units of a server and of a client between machines |
| `logs` | a node's log as JSON: kinds of errors, no data |
| `leading` | a run's configuration in, `coordinator.conduct`, the run folder out |
| `client_app`, `server_app` | the two Flower apps; `app/` is the bundle that names them |
"""
