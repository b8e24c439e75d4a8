"""sottovoce: federated learning in which no client has to trust the server."""

__version__ = "0.1.0"
