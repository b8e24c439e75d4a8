"""`sottovoce ledger`: what an operator does with a vault, as functions and as texts.

`make_statement` collects what a vault says of itself: the promise, the budget left, and every
release, when and to whom. `verify` checks hashes, pages, stored bytes, witness and place.
`create_vault`, `read_statement` and `rebind` are the calls behind the command line.
"""

from __future__ import annotations

import json
import math
import os
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
from sottovoce.client.vault.chest import Chest, require_file
from sottovoce.errors import InputError, VaultRefusal
from sottovoce.privacy.budget import Guarantee, format_budget
from sottovoce.privacy.tank import FULL

try:
    import pwd
except ImportError:  # Windows
    raise InputError(
        "a vault needs the file locks and accounts of POSIX, which this system has not; keep "
        "vaults, and run federate and its nodes, on Linux or macOS"
    ) from None

if TYPE_CHECKING:
    from sottovoce.schemas import (
        CertificateDocument,
        NoteEntry,
        PolicyEntry,
        ReceiptEntry,
        ReleaseEntry,
        VaultGuaranteeEntry,
    )


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
class Statement:
    """A vault's statement. `to_json` is `ledger show --json` and certificate.json."""

    vault: str
    made: str
    issued: str
    seal: str  # of the dataset: its fingerprint stays in the vault
    policy: Policy  # as it stands
    promised: Policy  # that of the first release, which holds for everything released
    since: Mapping[str, int]  # from which line each term of `policy` holds
    guarantee: Guarantee
    capacity: float  # μ² of the budget as it stands
    spent: float  # μ², what was burnt included
    burnt: float  # μ² that restores have booked for what they could not know
    left: float  # share of the budget
    receipt: VaultReceipt
    releases: tuple[ReleaseEntry, ...]  # every booked turn; without an upload its debit was burnt
    notes: tuple[NoteEntry, ...]  # what else happened to the vault
    only_ledger: bool  # of these rows, as far as it is recorded or this machine has seen
    other_ledgers: tuple[str, ...]  # of the same rows: recorded, or seen by this machine

    @property
    def runs(self) -> int:
        """How many runs have asked."""
        return len({release["run"] for release in self.releases})

    @property
    def answered(self) -> int:
        """How many uploads were made."""
        return sum(release["answered"] for release in self.releases)

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
            "releases": list(self.releases),
            "notes": list(self.notes),
            "only_ledger": self.only_ledger,
            "other_ledgers": list(self.other_ledgers),
            "software": __version__,
        }


def make_statement(vault: Vault) -> Statement:
    """Return the statement of an open vault."""
    unit = vault.capacity / FULL
    releases: list[ReleaseEntry] = [
        {
            "seq": entry.seq,
            "time": entry.time,
            "server": entry.server,
            "run": entry.run,
            "t": entry.t,
            "releases": len(entry.units),
            "units": sum(entry.units),
            "mu": math.sqrt(unit * sum(entry.units)),
            "share": sum(entry.units) / vault.limit,
            "answered": vault.find_answered_reserve(entry.run, entry.t) == entry.seq,
            "facts": dict(entry.facts),
        }
        for entry in vault.entries()
    ]
    notes: list[NoteEntry] = []
    since, terms, most_samples = dict[str, int](), dict[str, Any](), 1
    stated: list[list[str]] = []  # other ledgers of the same rows, by each statement of them
    for line in vault.lines():
        facts, new = line.facts, terms
        if "policy" in facts:  # of a new, a tightened, a rebound or a restored vault
            new = Policy.from_json(facts["policy"]).to_json()
        changed = {name: value for name, value in new.items() if terms.get(name) != value}
        if "second" in facts:
            stated.append(facts["second"])
        if line.kind in _NOTES and (terms or stated):
            changes = [f"{name} {terms[name]} → {now}" for name, now in changed.items() if terms]
            text = _NOTES[line.kind] + (f": {', '.join(changes)}" if changes else "")
            text += _describe_word(line)
            note = {"seq": line.seq, "time": line.time, "kind": line.kind, "text": text}
            notes.append(cast("NoteEntry", note))
        since |= dict.fromkeys(changed, line.seq)
        terms, most_samples = new, max(most_samples, new["samples"])
    others = tuple(sorted({*vault.other_ledgers}.union(*stated)))
    also = ["other-ledgers"] if stated or others else []
    return Statement(
        vault=vault.id,
        made=vault.made,
        issued=datetime.now(UTC).isoformat(timespec="seconds"),
        seal=vault.seal,
        policy=vault.policy,
        promised=vault.promised,
        since=since,
        # For the largest number of records it ever had: whether δ is small enough depends on it.
        guarantee=replace(vault.promised, samples=most_samples).guarantee(*also),
        capacity=unit * vault.limit,
        spent=unit * vault.spent,
        burnt=unit * vault.burnt,
        left=vault.left,
        receipt=vault.receipt(),
        releases=tuple(releases),
        notes=tuple(notes),
        only_ledger=not also,
        other_ledgers=others,
    )


def format_statement(statement: Statement, *, most: int | None = 20) -> str:
    """Return the statement as text, with the last `most` releases, or all of them."""
    policy, promised = statement.policy, statement.promised
    what = "the whole data set" if promised.unit == "client" else f"one {promised.unit}"
    lines = [
        f"vault     {statement.vault}, made {format_time(statement.made)}",
        f"data      {policy.samples:,} {'persons' if policy.unit == 'person' else 'records'}, "
        f"sealed as {statement.seal[:16]}…",
        *([] if statement.only_ledger else [f"          {describe_other_ledgers(statement)}"]),
        f"promise   (ε, δ) = {format_budget(promised.epsilon, promised.delta)} for {what}, "
        f"{promised.calibration} calibration, all runs and servers together",
        *(
            f"          {text}"
            for describe in (describe_sums, describe_open_terms, describe_tightening)
            if (text := describe(statement))
        ),
        f"fuel      {draw_gauge(statement.left)} {format_left(statement)} left",
        f"          {describe_turns(statement)}",
        f"terms     clip {describe_term(statement, 'clip', 'at most {:g}')}, "
        f"σ/Δ of a turn {describe_term(statement, 'floor', 'at least {:g}')}, "
        f"{describe_term(statement, 'max_rounds', 'at most {:,}')} rounds a run, "
        f"{describe_term(statement, 'max_steps', 'at most {:,}')} steps a turn, "
        f"{describe_term(statement, 'run_share', 'at most {:.0%}')} of the budget a run, "
        f"budget {describe_term(statement, 'disclose', '{}')}",
        f"ledger    {_count_nouns(statement.receipt.seq, 'line')}, "
        f"the last {statement.receipt.hash[:16]}…",
    ]
    lines += [f"note      {format_time(note['time'])}: {note['text']}" for note in statement.notes]
    listed = statement.releases if most is None else statement.releases[-most:]
    if listed:
        lines += ["", f"{'when':<20} {'server':<16} {'run':<12} {'round':>5} {'μ':>8} {'share':>8}"]
        lines += [
            f"{format_time(r['time']):<20} {_truncate(r['server'], 16):<16} "
            f"{_truncate(r['run'], 12):<12} {r['t']:>5} {r['mu']:>8.4f} "
            f"{_format_share(r['share']):>8}{'' if r['answered'] else '  burnt, no upload'}"
            for r in listed
        ]
    if hidden := len(statement.releases) - len(listed):
        lines.append(f"… and {hidden:,} before these; --all shows them")
    return "\n".join([*lines, "", str(statement.guarantee)])


def describe_turns(statement: Statement) -> str:
    """Say in a clause what the budget was spent on.

    Debits without a stored upload are counted, too: nothing is refunded.
    """
    lost = len(statement.releases) - statement.answered
    clauses = [
        f"{_count_nouns(statement.answered, 'upload')} in {_count_nouns(statement.runs, 'run')}"
    ]
    if lost:
        clauses.append(f"{_count_nouns(lost, 'debit')} burnt without an upload")
    if burnt := statement.burnt:  # it may be more than a budget that was tightened
        share = burnt / statement.capacity if burnt < statement.capacity else 1.0
        clauses.append(f"{_format_share(share)} burnt by restoring a backup")
    return ", ".join(clauses)


def describe_term(statement: Statement, name: str, words: str) -> str:
    """Say which term has held for everything released, and since which line it is tighter.

    Terms can only be tightened, so the loosest one is that of the first release.
    """
    now, then = (
        words.format(_DISCLOSED.get(value) if type(value) is bool else value)
        for value in (getattr(policy, name) for policy in (statement.policy, statement.promised))
    )
    return now if now == then else f"{then} ({now} since line {statement.since[name]:,})"


def describe_tightening(statement: Statement) -> str:
    """Say in a clause what a budget tightened after the first release means; else nothing."""
    now, then = statement.policy, statement.promised
    if (now.epsilon, now.delta, now.calibration) == (then.epsilon, then.delta, then.calibration):
        return ""
    return (
        "tightened later: from now on nothing is released beyond "
        f"{format_budget(now.epsilon, now.delta)} by {now.calibration} calibration; what was "
        "released before was promised as above"
    )


def describe_sums(statement: Statement) -> str:
    """Say in a clause on whom the promise rests where sums are released, and what holds alone."""
    promised = statement.promised
    if (alone := promised.compute_alone()) is None:
        return ""
    return (
        f"of sums as long as {promised.honest} of their clients are honest, this one included, and "
        f"at most {promised.corrupt} side with the server; whatever anyone does, (ε, δ) = "
        f"{format_budget(alone, promised.delta)}"
    )


def describe_open_terms(statement: Statement) -> str:
    """Say in a clause that the terms of sums, unlike all others, may still become looser."""
    if statement.spent:
        return ""
    return "the terms of sums ([policy.sum]) may still change until the first release"


def describe_other_ledgers(statement: Statement) -> str:
    """Say what other ledgers of the same rows mean, in a clause."""
    count = len(statement.other_ledgers)
    how_many = f"{count} known" if count else "none known here"
    return f"these rows may have other ledgers ({how_many}), and budgets add up"


def draw_gauge(left: float) -> str:
    """Return a bar whose full blocks are the budget left, rounded down."""
    full = math.floor(left * _WIDTH)
    return "█" * full + "░" * (_WIDTH - full)


def format_left(statement: Statement) -> str:
    """Return the share of the budget that is left, rounded down."""
    return f"{math.floor(1e4 * statement.left) / 100:.2f} %"


def format_time(time: str) -> str:
    """Return a time for reading, to the second, in UTC.

    >>> format_time("2026-07-01T12:00:03.123+00:00")
    '2026-07-01 12:00:03'
    """
    return time[:19].replace("T", " ")


def _describe_word(line: Line) -> str:
    """Say what a restore has burnt, and what rests on the operator's word alone."""
    burnt = line.facts.get("burnt", 0) / FULL
    text = f", {_format_share(burnt)} of the first budget burnt" if burnt else ""
    if "second" in line.facts:
        earlier = ", ".join(line.facts["second"]) or "none that this machine has seen"
        who = "; its operator stated that it may be a second ledger for the same rows"
        if maker := line.facts.get("maker"):
            who = f" by `{maker}`, which cannot know of other ledgers over these rows"
        text += f"{who}: budgets add up (earlier ones: {earlier})"
    if line.facts.get("stated"):
        text += f"; its operator stated that {line.facts['stated']} (after line {line.seq - 1:,})"
    return text


def _format_share(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _count_nouns(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Check:
    """One check: what was looked at, and what is wrong with it, if anything."""

    name: str
    looks: str
    wrong: str | None


@dataclass(frozen=True)
class Verification:
    """Results of the checks, in the order they were made; later ones need the earlier."""

    path: str
    checks: tuple[Check, ...]

    @property
    def broken(self) -> str | None:
        """The first thing that is wrong, as a sentence."""
        return next((check.wrong for check in self.checks if check.wrong), None)

    def require(self) -> None:
        """Refuse unless all checks passed."""
        if self.broken:
            raise VaultRefusal(self.broken)

    def to_json(self) -> dict[str, Any]:
        """Return one object."""
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


def verify(path: str | Path) -> Verification:
    """Run all checks on a vault. A backup is intact inside, and reported as a copy."""
    require_file(Path(path))
    looks = "lock, form, and the hashes of {}"
    try:
        chest = Chest.open(Path(path), reading=True)
    except VaultRefusal as no:
        return Verification(str(path), (Check("chain", looks.format("its lines"), str(no)),))
    with closing(chest), chest.use() as journal:
        books = chest.books
        checks = [Check("chain", looks.format(_count_nouns(books.seq, "line")), None)]
        answers = list(books.list_stored())
        stored = [turn for run, t, turn in answers if not books.is_dropped(run, t)]
        dropped = len(answers) - len(stored)

        def require_newest() -> None:
            chest.require_witnessed()
            chest.require_known()

        for name, looks, look in (
            ("pages", "SQLite's own check of the file", journal.check_pages),
            (
                "uploads",
                f"{len(stored):,} stored uploads, byte by byte"
                + (f"; {dropped:,} were acknowledged and dropped" if dropped else ""),
                lambda: [journal.upload(turn) for turn in stored],
            ),
            ("witness", "whether a newer state is known", require_newest),
            ("place", "whether it is the original file", chest.require_original),
        ):
            try:
                look()
                checks.append(Check(name, looks, None))
            except VaultRefusal as no:
                checks.append(Check(name, looks, str(no)))
    return Verification(str(path), tuple(checks))


def act_as(user: str | None, state: Path | None, *, beside: Path | None) -> None:
    """Become the user whose vault is made, for the rest of this process; set its state folder.

    `beside` is the vault, or a file that lies beside it. Root makes no vault in somebody else's
    folder: its second witness would lie in root's home, where the client's own process never looks.
    """
    if state is not None:
        os.environ["SOTTOVOCE_STATE"] = str(state)
    if user is None:
        folder = None if beside is None else beside.absolute().parent
        if os.geteuid() == 0 and folder is not None and folder.exists() and folder.stat().st_uid:
            name, number = find_owner(folder), folder.stat().st_uid
            remedy = f"add --user {name}"
            if name is None:
                remedy = f"make a user with the id {number} and name it with --user"
            raise InputError(
                f"{folder} belongs to {name or number}, and root's own second witness would be of "
                f"no use to it; {remedy}"
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
    os.environ.pop("XDG_STATE_HOME", None)  # root's, where the user's worker never looks


def find_owner(folder: Path) -> str | None:
    """Return the user that a folder belongs to; None where there is no such folder or user."""
    try:
        return folder.owner()
    except (OSError, KeyError):
        return None


def create_from_data(
    path: str | Path,
    *,
    data: str | Path,
    samples: int | None = None,
    second_ledger: bool = False,
    **terms: Any,
) -> Statement:
    """Make the vault of a data file and return its statement; `terms` are those of `Policy`.

    The number of samples is that of the file where the file has it (.npz); otherwise it must be
    given. For rows that have a ledger on this machine, `second_ledger` is needed, and is recorded.
    """
    if terms.get("unit") == "person":
        remedy = "which names the persons"
        raise InputError.of("unit", "person", "record or client without a node file", remedy)
    dataset, counted = fingerprint_file(data)
    policy = Policy(samples=_require_samples(samples, counted), **terms)
    with Vault.create(path, policy, dataset=dataset, second_ledger=second_ledger) as vault:
        return make_statement(vault)


def create_vault(
    path: str | Path | None, node: str | Path | None, *, second_ledger: bool = False, **terms: Any
) -> Statement:
    """Make a vault from a node file alone, or from a path, a data file and terms."""
    if node is not None:
        if path is not None or terms:
            extra = "VAULT" if path is not None else f"--{next(iter(terms)).replace('_', '-')}"
            raise InputError(f"{extra} stands in the node file already; leave it out")
        return create_from_node(node, second_ledger=second_ledger)
    if path is None:
        raise InputError("create needs a VAULT or a --node file that names it, one of the two")
    for name in ("data", "epsilon", "delta", "clip"):
        if name not in terms:
            raise InputError(f"--{name} is missing; it has no default (or give a --node file)")
    return create_from_data(path, second_ledger=second_ledger, **terms)


def create_from_node(
    node: str | Path, *, second_ledger: bool = False, others: Sequence[str] = (), maker: str = ""
) -> Statement:
    """Make the vault that a node file names; `maker` is a command that asked no operator."""
    client = Node.load(node)
    rows = client.read_rows()
    policy = client.make_policy(len(rows.y))
    stated: dict[str, Any] = {"second_ledger": second_ledger, "others": others, "maker": maker}
    with Vault.create(client.vault, policy, dataset=rows.fingerprint, **stated) as vault:
        return make_statement(vault)


def read_statement(path: str | Path) -> Statement:
    """Return the statement of a vault; its data are not needed."""
    with Vault.open(path, dataset=None) as vault:
        return make_statement(vault)


@dataclass(frozen=True)
class RebindResult:
    """What `rebind` did."""

    text: str
    receipt: VaultReceipt
    burnt: float = 0.0  # share of the first budget

    def to_json(self) -> dict[str, Any]:
        """Return one object."""
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
) -> RebindResult:
    """Bind a vault to changed data, to another place, or to what a backup has left.

    A node file names vault and data.
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
            rows = client.read_rows()
            path, data, dataset = client.vault, client.data, rows.fingerprint
            counted: int | None = len(rows.y)
        else:
            dataset, counted = fingerprint_file(cast(Path, data))
        receipt = vaults.rebind(
            cast(Path, path),
            dataset=dataset,
            samples=_require_samples(samples, counted),
            overlap=overlap,
            second_ledger=second_ledger,
            counts_persons=node is not None,
        )
        return RebindResult(f"{path} now keeps the ledger of {data}; every debit stays", receipt)
    path = cast(Path, path)
    if moved:
        receipt = vaults.move(path, nothing_since=nothing_since, second_ledger=second_ledger)
        return RebindResult(f"{path} is in service; the original must not be used", receipt)
    proofs = [_read_receipt(text) for text in receipts]
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
    return RebindResult(text, receipt, share)


def _require_samples(stated: int | None, counted: int | None) -> int:
    """Return the number of samples, which the operator states where the file does not tell it."""
    if counted is not None and stated not in (None, counted):
        raise InputError.of("samples", stated, f"the file's {counted}", "leave it out")
    samples = stated if counted is None else counted
    if samples is None:
        raise InputError(
            "--samples is missing: this kind of file does not tell how many rows it has"
        )
    return samples


def _read_receipt(text: str) -> VaultReceipt:
    """Read a receipt from JSON, or from a file: alone, in a statement or in a certificate."""
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
