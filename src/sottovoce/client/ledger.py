"""`sottovoce ledger`: what an operator does with a vault, as functions and as texts."""

from __future__ import annotations

import json
import math
import os
import pwd
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from sottovoce._version import __version__
from sottovoce.client import vault as vaults
from sottovoce.client.node import Node
from sottovoce.client.vault import Policy, Vault, VaultReceipt, fingerprint_file
from sottovoce.client.vault.chain import Line
from sottovoce.client.vault.chest import Chest, require_there
from sottovoce.client.vault.journal import Turn
from sottovoce.errors import InputError, VaultRefusal
from sottovoce.privacy.budget import Guarantee, format_claim
from sottovoce.privacy.tank import FULL

if TYPE_CHECKING:
    from sottovoce.schemas.documents import (
        CertificateDocument,
        NoteEntry,
        PolicyEntry,
        ReceiptEntry,
        ReleaseEntry,
        VaultGuaranteeEntry,
    )

# What a vault says of itself: the promise, the fuel, and every release, when and to whom.


SCHEMA: Final = "sottovoce.certificate/1"
_WIDTH = 30  # of the fuel gauge
_NOTES = {
    "create": "the vault was made",
    "tighten": "the policy was tightened",
    "rebind": "the records changed; all debits stayed",
    "move": "the vault was moved",
    "restore": "a backup was restored",
    "stop": "an answer failed after it was paid for; nothing more is booked until `ledger resume`",
    "resume": "the operator let it go on",
}
_DISCLOSED = {True: "disclosed to servers", False: "not disclosed"}


@dataclass(frozen=True)
class Release:
    """One turn as it was booked: `answered` if an upload was stored for it, else it burnt."""

    seq: int
    time: str
    server: str
    run: str
    t: int
    releases: int
    units: int
    mu: float  # of the turn's releases together
    share: float  # of the budget
    answered: bool
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Note:
    """Something else that happened to the vault."""

    seq: int
    time: str
    kind: str
    text: str


@dataclass(frozen=True)
class Statement:
    """A vault's statement. `to_json` is `ledger show --json` and certificate.json."""

    vault: str
    made: str
    issued: str
    dataset: str  # the fingerprint, which stays here
    seal: str  # what others are told instead
    policy: Policy  # as it stands
    promised: Policy  # as it stood at the first release: holds for everything released
    since: Mapping[str, int]  # from which line each term of `policy` holds
    guarantee: Guarantee
    capacity: float  # μ² of the budget as it stands
    spent: float  # μ², what was burnt included
    burnt: float  # μ² that restores have booked for what they could not know
    left: float  # share of the budget
    receipt: VaultReceipt
    releases: tuple[Release, ...]
    notes: tuple[Note, ...]
    only_ledger: bool  # of these rows, as far as it is recorded or this machine has seen
    other_ledgers: tuple[str, ...]  # of the same rows: recorded, or seen by this machine

    @property
    def runs(self) -> int:
        """How many runs have asked."""
        return len({release.run for release in self.releases})

    @property
    def answered(self) -> int:
        """How many uploads were made."""
        return sum(release.answered for release in self.releases)

    def to_json(self) -> CertificateDocument:
        """Return one object, as `sottovoce schema certificate` describes it."""
        return {
            "schema": SCHEMA,
            "vault": self.vault,
            "made": self.made,
            "issued": self.issued,
            "dataset": self.seal,
            "policy": cast("PolicyEntry", self.policy.to_json()),
            "promised": cast("PolicyEntry", self.promised.to_json()),
            "guarantee": cast("VaultGuaranteeEntry", self.guarantee.to_json()),
            "budget": {
                "capacity": self.capacity,
                "spent": self.spent,
                "burnt": self.burnt,
                "left": self.left,
            },
            "receipt": cast("ReceiptEntry", self.receipt.to_proof()),
            "releases": [
                cast("ReleaseEntry", {**asdict(release), "facts": dict(release.facts)})
                for release in self.releases
            ],
            "notes": [cast("NoteEntry", asdict(note)) for note in self.notes],
            "only_ledger": self.only_ledger,
            "other_ledgers": list(self.other_ledgers),
            "software": __version__,
        }


def account(vault: Vault) -> Statement:
    """The statement of an open vault."""
    unit = float(vault.tank("").capacity) / FULL
    releases = []
    for entry in vault.entries():
        units = sum(entry.units)
        releases.append(
            Release(
                seq=entry.seq,
                time=entry.time,
                server=entry.server,
                run=entry.run,
                t=entry.t,
                releases=len(entry.units),
                units=units,
                mu=math.sqrt(unit * units),
                share=units / vault.limit,
                answered=vault.answered(entry.run, entry.t) == entry.seq,
                facts=entry.facts,
            )
        )
    notes, since, terms, most = list[Note](), dict[str, int](), dict[str, Any](), 1
    second: list[list[str]] = []  # ledgers of the same rows, as operators stated them
    for line in vault.lines():
        stated = line.facts.get("policy")  # of a new, a tightened and a rebound vault
        new = terms if stated is None else Policy.from_json(stated).to_json()
        changed = {name: value for name, value in new.items() if terms.get(name) != value}
        if "second" in line.facts:
            second.append(line.facts["second"])
        if line.kind in _NOTES and (terms or second):
            then = changed.items() if terms else ()
            how = ", ".join(f"{name} {terms.get(name)} → {now}" for name, now in then)
            text = _NOTES[line.kind] + (f": {how}" if how else "")
            text += _burnt(line.facts) + _stated(line)
            notes.append(Note(line.seq, line.time, line.kind, text))
        since |= dict.fromkeys(changed, line.seq)
        terms, most = new, max(most, new["samples"])
    others = tuple(sorted({*vault.other_ledgers, *(found for ids in second for found in ids)}))
    return Statement(
        vault=vault.id,
        made=vault.made,
        issued=datetime.now(UTC).isoformat(timespec="seconds"),
        dataset=vault.dataset,
        seal=vault.seal,
        policy=vault.policy,
        promised=vault.promised,
        since=since,
        # Of the most records that it was ever for: whether δ is small enough depends on them.
        guarantee=replace(vault.promised, samples=most).guarantee(),
        capacity=unit * vault.limit,
        spent=unit * vault.spent,
        burnt=unit * vault.burnt,
        left=max(0.0, 1 - vault.spent / vault.limit),
        receipt=vault.receipt(),
        releases=tuple(releases),
        notes=tuple(notes),
        only_ledger=not second and not others,
        other_ledgers=others,
    )


def table(told: Statement, *, most: int | None = 20) -> str:
    """The statement for people; of the releases the last `most`, or all of them."""
    policy, promised = told.policy, told.promised
    what = "one record" if promised.unit == "record" else "the whole data set"
    lines = [
        f"vault     {told.vault}, made {when(told.made)}",
        f"data      {policy.samples:,} records, sealed as {told.seal[:16]}…",
        *([] if told.only_ledger else [f"          {other_ledgers(told)}"]),
        f"promise   (ε, δ) = ({format_claim(promised.epsilon)}, {format_claim(promised.delta, 3)}) "
        f"for {what}, "
        f"{promised.calibration} calibration, all runs and servers together",
        *([f"          {tightened(told)}"] if tightened(told) else []),
        f"fuel      {gauge(told.left)} {percent_left(told)} left",
        f"          {turns(told)}",
        f"terms     clip {describe_term(told, 'clip', 'at most {:g}')}, "
        f"σ/Δ of a turn {describe_term(told, 'floor', 'at least {:g}')}, "
        f"{describe_term(told, 'max_rounds', 'at most {:,}')} rounds a run, "
        f"{describe_term(told, 'max_steps', 'at most {:,}')} steps a turn, "
        f"{describe_term(told, 'run_share', 'at most {:.0%}')} of the budget a run, "
        f"budget {describe_term(told, 'disclose', '{}')}",
        f"ledger    {_count(told.receipt.seq, 'line')}, the last {told.receipt.hash[:16]}…",
    ]
    lines += [f"note      {when(note.time)}: {note.text}" for note in told.notes]
    listed = told.releases if most is None else told.releases[-most:]
    if listed:
        lines += ["", f"{'when':<20} {'server':<16} {'run':<12} {'round':>5} {'μ':>8} {'share':>8}"]
        lines += [
            f"{when(r.time):<20} {_cut(r.server, 16):<16} {_cut(r.run, 12):<12} {r.t:>5} "
            f"{r.mu:>8.4f} {_share(r.share):>8}{'' if r.answered else '  burnt, no upload'}"
            for r in listed
        ]
    if hidden := len(told.releases) - len(listed):
        lines.append(f"… and {hidden:,} before these; --all shows them")
    return "\n".join([*lines, "", str(told.guarantee)])


def turns(told: Statement) -> str:
    """What the fuel went into, in a clause.

    Debits that no upload was stored for are counted too: nothing is refunded.
    """
    lost = len(told.releases) - told.answered
    parts = [f"{_count(told.answered, 'upload')} in {_count(told.runs, 'run')}"]
    if lost:
        parts.append(f"{_count(lost, 'debit')} burnt without an upload")
    if told.burnt:
        parts.append(f"{_share(told.burnt / told.capacity)} burnt by restoring a backup")
    return ", ".join(parts)


def describe_term(told: Statement, name: str, words: str) -> str:
    """Say what has held of a term for everything released, and since which line it is tighter.

    Terms are only tightened, so that the loosest is the one that stood at the first release.
    """
    now, then = (
        words.format(_DISCLOSED.get(value) if type(value) is bool else value)
        for value in (getattr(policy, name) for policy in (told.policy, told.promised))
    )
    return now if now == then else f"{then} ({now} since line {told.since[name]:,})"


def tightened(told: Statement) -> str:
    """What a budget tightened after the first release means, in a clause; else nothing."""
    now, then = told.policy, told.promised
    if (now.epsilon, now.delta, now.calibration) == (
        then.epsilon,
        then.delta,
        then.calibration,
    ):
        return ""
    return (
        f"tightened later: from now on nothing is released beyond ({format_claim(now.epsilon)}, "
        f"{format_claim(now.delta, 3)}) by {now.calibration} calibration; what was released before "
        "was promised as above"
    )


def other_ledgers(told: Statement) -> str:
    """Say what other ledgers of the same rows mean, in a clause."""
    known = f"{len(told.other_ledgers)} known" if told.other_ledgers else "none known here"
    return f"these rows may have other ledgers ({known}), and budgets add up"


def gauge(left: float) -> str:
    """A bar: full blocks are what is left, which is never shown as more than it is.

    >>> gauge(1.0).count("█"), gauge(0.5).count("█"), gauge(0.0).count("█")
    (30, 15, 0)
    """
    full = math.floor(left * _WIDTH)
    return "█" * full + "░" * (_WIDTH - full)


def percent_left(told: Statement) -> str:
    """The share that is left, never shown as more than it is."""
    return f"{math.floor(1e4 * told.left) / 100:.2f} %"


def when(time: str) -> str:
    """A moment for reading, to the second, in UTC.

    >>> when("2026-07-01T12:00:03.123+00:00")
    '2026-07-01 12:00:03'
    """
    return time[:19].replace("T", " ")


def _burnt(facts: Mapping[str, Any]) -> str:
    share = facts.get("burnt", 0) / FULL
    return f", {_share(share)} of the first budget burnt" if share else ""


def _stated(line: Line) -> str:
    """What rests on the operator's word alone."""
    text = ""
    if "second" in line.facts:
        earlier = ", ".join(line.facts["second"]) or "none that this machine has seen"
        text = (
            "; its operator stated that it may be a second ledger for the same rows: budgets add "
            f"up (earlier ones: {earlier})"
        )
    if line.facts.get("stated"):
        text += f"; its operator stated that {line.facts['stated']} (after line {line.seq - 1:,})"
    return text


def _share(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# Every check there is: hashes, pages, stored bytes, witness, place.


@dataclass(frozen=True)
class Check:
    """One check: what was looked at, and what is wrong with it, if anything."""

    name: str
    looks: str
    wrong: str | None


@dataclass(frozen=True)
class Verified:
    """What the checks found, in the order they were made; later ones need the earlier."""

    path: str
    checks: tuple[Check, ...]

    @property
    def broken(self) -> str | None:
        """The first thing that is wrong, as a sentence."""
        return next((check.wrong for check in self.checks if check.wrong), None)

    def require(self) -> None:
        """A refusal unless all is well."""
        if self.broken:
            raise VaultRefusal(self.broken)

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "path": self.path,
            "whole": self.broken is None,
            "checks": [asdict(check) for check in self.checks],
        }

    def __str__(self) -> str:
        return "\n".join(
            f"{'ok    ' if check.wrong is None else 'WRONG '} {check.name:<8} {check.looks}"
            for check in self.checks
        )


def verify(path: str | Path) -> Verified:
    """Look at everything. A backup is whole inside, and says that it is a copy."""
    require_there(Path(path))
    checks: list[Check] = []
    try:
        chest = Chest.open(Path(path), whole=True)
    except VaultRefusal as no:
        return Verified(
            str(path), (Check("chain", "lock, form, and the hashes of its lines", str(no)),)
        )
    with closing(chest):
        seq = chest.books.seq
        checks.append(
            Check(
                "chain",
                f"lock, form, and the hashes of {seq:,} line{'' if seq == 1 else 's'}",
                None,
            )
        )
        books = chest.books
        answers = list(books.stored())
        stored = [turn for run, t, turn in answers if not books.is_dropped(run, t)]
        dropped = len(answers) - len(stored)
        for name, looks, look in (
            ("pages", "SQLite's own check of the file", chest.check_pages),
            (
                "uploads",
                f"{len(stored):,} stored uploads, byte by byte"
                + (f"; {dropped:,} were acknowledged and dropped" if dropped else ""),
                lambda: _all(chest, stored),
            ),
            ("witness", "whether a newer state is known", lambda: _newest(chest)),
            ("place", "whether it is the original file", chest.require_original),
        ):
            try:
                look()
                checks.append(Check(name, looks, None))
            except VaultRefusal as no:
                checks.append(Check(name, looks, str(no)))
    return Verified(str(path), tuple(checks))


def _newest(chest: Chest) -> None:
    chest.require_witnessed()
    chest.require_known()


def _all(chest: Chest, stored: list[Turn]) -> None:
    for turn in stored:
        chest.upload(turn)


# Making a vault, reading it, and binding it anew: the calls behind the command line.


def act_as(user: str | None, state: Path | None, *, beside: Path | None) -> None:
    """Become the user whose vault is made, for the rest of this process; set its state folder.

    Root makes no vault in somebody else's folder: its second witness would lie in root's home,
    where the client's own process never looks.
    """
    if state is not None:
        os.environ["SOTTOVOCE_STATE"] = str(state)
    if user is None:
        folder = None if beside is None else beside.absolute().parent
        if os.geteuid() == 0 and folder is not None and folder.exists() and folder.stat().st_uid:
            raise InputError(
                f"{folder} belongs to {folder.owner()}, and root's own second witness would be of "
                f"no use to it; add --user {folder.owner()}"
            )
        return
    try:
        owner = pwd.getpwnam(user)
    except KeyError:
        raise InputError.of("user", user, "a user of this machine", "make it first") from None
    if os.geteuid() == owner.pw_uid:
        return
    if os.geteuid() != 0:
        raise InputError.of("user", user, "yourself, unless you are root", "leave --user out")
    os.initgroups(user, owner.pw_gid)
    os.setgid(owner.pw_gid)
    os.setuid(owner.pw_uid)
    os.environ["HOME"] = owner.pw_dir


def create(
    path: str | Path,
    *,
    data: str | Path,
    samples: int | None = None,
    second_ledger: bool = False,
    **terms: Any,
) -> Statement:
    """Make the vault of a data file; `terms` are those of `Policy`. The new vault's statement.

    The number of samples is the file's where the file tells it (.npz), and must be given else.
    Rows that have a ledger on this machine get another with `second_ledger`, which is recorded.
    """
    rows = _rows(samples, *fingerprint_file(data))
    policy = Policy(samples=rows[1], **terms)
    with Vault.create(path, policy, dataset=rows[0], second_ledger=second_ledger) as vault:
        return account(vault)


def make(
    path: str | Path | None,
    node: str | Path | None,
    *,
    second_ledger: bool = False,
    **terms: Any,
) -> Statement:
    """Make a vault from a node file alone, or from a path, a data file and terms."""
    if node is not None:
        if path is not None or terms:
            extra = "VAULT" if path is not None else f"--{next(iter(terms)).replace('_', '-')}"
            raise InputError(f"{extra} stands in the node file already; leave it out")
        return create_for(node, second_ledger=second_ledger)
    if path is None:
        raise InputError("create needs a VAULT or a --node file that names it, one of the two")
    for name in ("data", "epsilon", "delta", "clip"):
        if name not in terms:
            raise InputError(f"--{name} is missing; it has no default (or give a --node file)")
    return create(path, second_ledger=second_ledger, **terms)


def create_for(node: str | Path, *, second_ledger: bool = False) -> Statement:
    """Make the vault that a node file names, for its data and with its policy."""
    client = Node.load(node)
    rows = client.rows()
    policy = client.policy(len(rows.y))
    with Vault.create(
        client.vault, policy, dataset=rows.fingerprint, second_ledger=second_ledger
    ) as vault:
        return account(vault)


def show(path: str | Path) -> Statement:
    """The statement of a vault; its data are not needed."""
    with Vault.open(path, dataset=None) as vault:
        return account(vault)


def backup(path: str | Path, out: str | Path) -> VaultReceipt:
    """Write a backup of a vault to a new file; how far the vault has come in it."""
    return vaults.backup(path, out)


@dataclass(frozen=True)
class Rebound:
    """What binding a vault anew did."""

    text: str
    receipt: VaultReceipt
    burnt: float = 0.0  # share of the first budget

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {"text": self.text, "burnt": self.burnt, "receipt": self.receipt.to_proof()}


def rebind(
    path: str | Path | None = None,
    *,
    data: str | Path | None = None,
    node: str | Path | None = None,
    overlap: str | None = None,
    samples: int | None = None,
    moved: bool = False,
    restored: bool = False,
    receipts: Sequence[str] = (),
    burn_rest: bool = False,
    nothing_since: bool = False,
    second_ledger: bool = False,
) -> Rebound:
    """Bind a vault to changed data, to another place, or to what a backup has left.

    A node file names vault and data by itself.
    """
    if (path is None) == (node is None):
        raise InputError("rebind needs a VAULT or a --node file that names it, one of the two")
    if [data is not None or node is not None, moved, restored].count(True) != 1:
        raise InputError(
            "rebind needs one of DATA (the records changed), --moved (the file was moved) or "
            "--restored (a backup was put back)"
        )
    if (receipts or burn_rest) and not restored:
        raise InputError("--receipt and --burn-rest belong to --restored; leave them out")
    if nothing_since and not (moved or restored):
        raise InputError("--nothing-since belongs to --moved and --restored; leave it out")
    if (overlap is not None or samples is not None) and data is node is None:
        raise InputError("--overlap and --samples belong to changed DATA; leave them out")
    if data is not None or node is not None:
        if overlap is None:
            raise InputError(
                "--overlap must be all, some or none: say which old records are among the new ones"
            )
        if node is not None:
            client = Node.load(node)
            found = client.rows()
            path, data = client.vault, client.data
            dataset, rows = _rows(samples, found.fingerprint, len(found.y))
        else:
            dataset, rows = _rows(samples, *fingerprint_file(cast(Path, data)))
        receipt = vaults.rebind(
            cast(Path, path),
            dataset=dataset,
            samples=rows,
            overlap=overlap,
            second_ledger=second_ledger,
        )
        return Rebound(f"{path} now keeps the ledger of {data}; every debit stays", receipt)
    path = cast(Path, path)
    if moved:
        receipt = vaults.move(path, nothing_since=nothing_since, second_ledger=second_ledger)
        return Rebound(f"{path} is in service; the original must not be used", receipt)
    proofs = [_receipt(text) for text in receipts]
    receipt, burnt = vaults.restore(
        path,
        receipts=proofs,
        burn_rest=burn_rest,
        nothing_since=nothing_since,
        second_ledger=second_ledger,
    )
    share = burnt / FULL
    text = (
        f"{path} is in service; {100 * share:.2f} % of its first budget was burnt for what is lost"
    )
    return Rebound(text, receipt, share)


def _rows(given: int | None, dataset: str, counted: int | None) -> tuple[str, int]:
    if counted is None and given is None:
        raise InputError(
            "--samples is missing: this kind of file does not tell how many rows it has"
        )
    if counted is not None and given not in (None, counted):
        raise InputError.of("samples", given, f"the file's {counted}", "leave it out")
    return dataset, given if counted is None else counted  # type: ignore[return-value]


def _receipt(text: str) -> VaultReceipt:
    """A receipt as JSON, or the file that holds it: alone, in a statement or in a certificate."""
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            raise InputError.of(
                "receipt", text, "a receipt as JSON or a file that holds one", "check its name"
            ) from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError.of("receipt", text, "a JSON object", "copy it whole") from None
    return VaultReceipt.from_json(
        data["receipt"] if isinstance(data, dict) and "receipt" in data else data
    )


__all__ = [
    "Check",
    "Release",
    "Statement",
    "Verified",
    "account",
    "act_as",
    "backup",
    "create",
    "create_for",
    "make",
    "rebind",
    "show",
    "table",
    "verify",
]
