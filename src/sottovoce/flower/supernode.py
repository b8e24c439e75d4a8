"""Flower's SuperNode, watched: whether the server hears it, and whether the clocks agree.

    python -m sottovoce.flower.supernode (what flower-supernode takes)

A SuperNode whose heartbeat was refused once sends no more of them: it lives on, counts as offline
and is asked nothing, and no service manager notices. Here such a process ends, so that it is
started again. And a SuperNode whose clock is more than a few seconds ahead of the server's is
refused without a reason; here its log says that the clock is the reason.
"""

from __future__ import annotations

import http.client
import logging
import os
import ssl
import threading
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from sottovoce.errors import FederationError
from sottovoce.flower import certificates, processes

# A heartbeat is sent every 20 to 25 seconds, and counts for 60.
SILENT = 120.0
# Flower lets a clock be 5 seconds ahead and 305 behind.
AHEAD, BEHIND = 4.0, 300.0
OFFLINE = 75  # the exit code for: try again later (sysexits.h, EX_TEMPFAIL)
HEARTBEAT = "/v1/fleet/send-node-heartbeat"

log = logging.getLogger("sottovoce")


def describe_clock(date: str | None, now: float) -> str | None:
    """Return what is wrong with this machine's clock beside a server's Date header, if anything."""
    try:
        theirs = parsedate_to_datetime(date or "")
    except (ValueError, OverflowError):
        return None
    if theirs.tzinfo is None:
        theirs = theirs.replace(tzinfo=UTC)
    ahead = now - theirs.timestamp()
    if -BEHIND < ahead < AHEAD:
        return None
    way, bound = ("ahead of", "5 s ahead of") if ahead > 0 else ("behind", "5 minutes behind")
    return (
        f"this machine's clock is {abs(ahead):.0f} s {way} the server's, and the server turns away "
        f"what is signed more than {bound} it; set both by NTP (timedatectl set-ntp true)"
    )


def check_server(address: str, authority: Path | None) -> None:
    """Refuse in a sentence if the server does not answer here, or if the clocks differ."""
    host, _, port = address.rpartition(":")
    if authority is not None:
        certificates.read_end(authority)  # it is one
    trust = ssl.create_default_context(cafile=None if authority is None else str(authority))
    try:
        connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=trust)
        try:
            connection.request("GET", "/")
            date = connection.getresponse().getheader("Date")
        finally:
            connection.close()
    except ssl.SSLCertVerificationError as error:
        raise FederationError(
            f"the certificate of {address} does not hold ({error.verify_message}); is ca.crt that "
            "of the server, is this the name it was made for, and is this machine's clock right?"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise FederationError(
            f"{address} does not answer ({type(error).__name__}); is the address right, is the "
            "server up, and does its firewall let this machine in?"
        ) from None
    if (words := describe_clock(date, time.time())) is not None:
        raise FederationError(words)
    print(f"{address} answers, and the clocks agree ({datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC)")


class Watch:
    """Notes the heartbeats that the server accepted, and ends the process when there are none."""

    def __init__(self, seconds: float = SILENT) -> None:
        self.seconds = seconds
        self.heard = time.monotonic()

    def note(self, path: str, status: int, date: str | None) -> None:
        """Note one answer of the server."""
        if status == 401:
            reason = describe_clock(date, time.time())
            log.error("the server turns this node away (401): %s", reason or "its key is unknown")
        elif path.endswith(HEARTBEAT) and status == 200:
            self.heard = time.monotonic()

    def end_when_silent(self) -> None:
        """End the process when the server has accepted no heartbeat for too long."""
        while (left := self.heard + self.seconds - time.monotonic()) > 0:
            time.sleep(left)
        log.error("the server accepted no heartbeat for %.0f s: starting again", self.seconds)
        logging.shutdown()
        os._exit(OFFLINE)


def main() -> None:
    """Run Flower's SuperNode, watched."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.cli.flower_supernode import flower_supernode
    from flwr.supernode.fleet_http_client import FleetHttpClient

    processes.start_logging(as_json=False)
    watch = Watch()

    class Watched(FleetHttpClient):
        def _send(self, context: Any, *, stream: bool = False) -> Any:
            response = super()._send(context, stream=stream)
            watch.note(str(response.url.path), response.status_code, response.headers.get("date"))
            return response

    fleet_http_connection.FleetHttpClient = Watched  # type: ignore[attr-defined]
    threading.Thread(target=watch.end_when_silent, daemon=True).start()
    flower_supernode()


if __name__ == "__main__":
    main()
