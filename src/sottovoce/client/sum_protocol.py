"""The sum view, the client's side: a server learns the sum of a cohort's uploads, and no other.

Five messages a round (Bonawitz et al., CCS 2017, against a server that lies), rules S1 to S7 of
docs/protocol.md:

    keys    → a fresh X25519 key, a promise of noise and n, signed with the long-term Ed25519 key
    shares  → t-of-K Shamir shares of the mask key and of the self-mask seed, one for each receiver
    input   → S_i + Z_i + PRG(b_i) + Σ_{j>i} PRG(k_ij) − Σ_{j<i} PRG(k_ij)  mod 2⁶⁴
    set     → a signature on the set of clients whose inputs arrived: one set a round
    unmask  → for each client its seed's share (in the set) or its key's share (not in the set)

A `Party` keeps nothing in memory between two messages: what it must not do twice is in its `Notes`,
written once and durable before anything is sent; the secrets of a round are made of 32 random bytes
that are kept for that round alone. Keys are fresh in every round, so a key that was revealed for a
client that had dropped out opens nothing later.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from sottovoce.client import messages
from sottovoce.client.vault import Vault
from sottovoce.client.vault.chain import encode_canonical, sha256
from sottovoce.client.vault.witness import write_secret
from sottovoce.errors import InputError, Malformed, PolicyRefusal, RoundAnswered
from sottovoce.privacy import grid

Words = NDArray[np.uint64]

PRIME = 2**256 + 297  # the smallest prime above all secrets of 32 bytes
MOST_MEMBERS = 512  # of one cohort: each adds a stream of masks for each, and messages grow
_SHARE = 33  # bytes of one share
_VERSION = "sottovoce.sum/1"
_HEX = re.compile(r"(?:[0-9a-f]{2})+")


@dataclass(frozen=True)
class SumTerms:
    """A client's own terms: whose keys it knows, how many of them it trusts, and for what.

    Of any h + c roster members at least h are honest, this client included, if at most c are not.
    """

    roster: frozenset[str]  # long-term public keys in hexadecimal, this client's included
    honest: int  # h: the clients whose noise is counted, this one included
    corrupt: int  # c: the roster members that may work together with the server

    def __post_init__(self) -> None:
        for name, least in (("honest", 1), ("corrupt", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST_MEMBERS:
                bound = f"a whole number from {least} to {MOST_MEMBERS}"
                raise InputError.of(f"policy.sum.{name}", value, bound, "count roster members")
        if len(self.roster) < self.honest + self.corrupt:
            bound = f"at least honest + corrupt = {self.honest + self.corrupt} keys"
            remedy = "add clients to the roster, or count on fewer"
            raise InputError.of("policy.sum.roster", len(self.roster), bound, remedy)


def read_roster(path: Path) -> frozenset[str]:
    """Read a file of PEM public keys (Ed25519), one for each client that may be counted on."""
    try:
        blocks = path.read_text("ascii").split("-----END PUBLIC KEY-----")
        ends = [block + "-----END PUBLIC KEY-----\n" for block in blocks[:-1]]
        keys = [serialization.load_pem_public_key(end.encode()) for end in ends]
    except (OSError, ValueError) as error:
        kind = getattr(error, "strerror", None) or "it is damaged"
        raise InputError.of(
            "policy.sum.roster", str(path), "a file of PEM public keys", f"{kind}; write it anew"
        ) from None
    if blocks[-1].strip() or not keys or not all(isinstance(k, Ed25519PublicKey) for k in keys):
        bound = "a file of Ed25519 public keys and nothing else"
        raise InputError.of("policy.sum.roster", str(path), bound, "collect the clients' keys anew")
    names = [name_key(key) for key in keys if isinstance(key, Ed25519PublicKey)]
    if len(set(names)) < len(names):
        remedy = "two clients have one key"
        raise InputError.of("policy.sum.roster", str(path), "one key for each client", remedy)
    return frozenset(names)


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a client's long-term private key, a PEM file without a password."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        bound, remedy = "a PEM file with an Ed25519 private key", "make it with openssl genpkey"
        raise InputError.of("policy.sum.key", str(path), bound, remedy)
    return key


def write_keys(
    path: Path, key: Ed25519PrivateKey, roster: Path, keys: Iterable[Ed25519PrivateKey]
) -> None:
    """Write a client's private key, for its owner's eyes alone, and the roster of all clients."""
    path.touch(mode=0o600)
    pem = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(pem, form, plain))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    roster.write_bytes(b"".join(k.public_key().public_bytes(pem, public) for k in keys))


def name_key(key: Ed25519PublicKey) -> str:
    """Return a public key as 64 hexadecimal digits: a client's name in this protocol."""
    return key.public_bytes_raw().hex()


def choose_threshold(cohort: int, honest: int, corrupt: int) -> int:
    """Return the smallest t with 2t > K + c and t ≥ h + c; refuse where it exceeds K.

    With 2t > K + c no two sets can get t signatures: an honest client signs one, a corrupt one two.
    """
    threshold = max((cohort + corrupt) // 2 + 1, honest + corrupt)
    if cohort > MOST_MEMBERS:
        bound = f"at most {MOST_MEMBERS} with privacy.view = sum"
        raise InputError.of("rounds.per_round", cohort, bound, "each masks for every other one")
    if threshold > cohort:
        raise InputError.of(
            "privacy.honest + privacy.corrupt",
            f"{honest} + {corrupt}",
            f"at most the {cohort} clients of a round, more than half of them not corrupt",
            "count on fewer, or ask more clients in a round",
        )
    return threshold


def has_room(samples: int, noise: float, clients: int) -> bool:
    """Return whether N samples and K noises stay within ±2⁶³ grid units: N·2³⁰ + 40·σ√K < 2⁶³.

    |Z| > 40·σ√K has probability below 10⁻³⁴⁷.
    """
    return samples * grid.NORM + 40 * noise * math.sqrt(clients) < 2**63


def complete_noise(
    sigma: int, promise: int, others: Iterable[int], honest: int, *, share: float
) -> int:
    """Return s_i: the noise that this client adds, in grid units, rounded up.

    s_i² ≥ σ_i² − Σ (the h − 1 smallest promises)², s_i ≥ what it promised, and s_i² ≥ σ_i²/share:
    whoever takes the other noises away sees a release of at most `share` times the price.
    """
    counted = sorted(others)[: honest - 1]
    if len(counted) < honest - 1:
        raise PolicyRefusal("fewer roster members promise noise than this client counts on")
    missing = sigma**2 - sum(value**2 for value in counted)
    completed = math.isqrt(missing - 1) + 1 if missing > 0 else 0
    return max(promise, completed, promise_noise(sigma, share))


def promise_noise(sigma: int, share: float) -> int:
    """Return at least σ/√share in whole grid units: the noise of one of `share` equal clients."""
    return math.ceil(sigma / math.sqrt(share) * (1 + 2**-50))


def split_secret(secret: bytes, threshold: int, points: int, entropy: bytes) -> list[int]:
    """Return the shares f(1), …, f(K) of a random polynomial of degree t − 1 with f(0) = secret.

    The coefficients are AES-256-CTR of `entropy`: a retry deals the same shares.
    """
    wide = 48  # bytes of a coefficient: modulo the prime it is uniform to 2⁻¹²⁷
    drawn = _stream(entropy, wide * (threshold - 1))
    rest = [int.from_bytes(drawn[at : at + wide]) % PRIME for at in range(0, len(drawn), wide)]
    shares = []
    for x in range(1, points + 1):
        value = 0
        for coefficient in reversed([int.from_bytes(secret), *rest]):
            value = (value * x + coefficient) % PRIME
        shares.append(value)
    return shares


def lagrange_weights(points: Sequence[int]) -> dict[int, int]:
    """Return the weight of each point's share in f(0), modulo the prime."""
    weights = {}
    for x in points:
        above, below = 1, 1
        for other in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        weights[x] = above * pow(below, -1, PRIME) % PRIME
    return weights


def join_shares(shares: Mapping[int, int], weights: Mapping[int, int] | None = None) -> int:
    """Return f(0) of the polynomial through these points."""
    weights = lagrange_weights(list(shares)) if weights is None else weights
    return sum(weights[x] * value for x, value in shares.items()) % PRIME


def expand_mask(seed: bytes, size: int) -> Words:
    """Return PRG(seed): so many words of AES-256-CTR."""
    return np.frombuffer(_stream(seed, 8 * size), dtype="<u8").astype(np.uint64, copy=False)


def _stream(key: bytes, size: int) -> bytes:
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return cipher.update(bytes(size)) + cipher.finalize()


def _derive(secret: bytes, purpose: str, *context: object) -> bytes:
    info = "\n".join([_VERSION, purpose, *map(str, context)]).encode()
    return HKDF(hashes.SHA256(), 32, None, info).derive(secret)


def derive_mask(key: bytes, other: str, run: str, t: int) -> bytes:
    """Return k_ij, the seed that two clients share in one round of one run (S5)."""
    return _derive(_agree(key, other), "mask", run, t)


def compute_public(key: bytes) -> str:
    """Return the public half of a mask key, in hexadecimal."""
    return X25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw().hex()


def _agree(key: bytes, other: str) -> bytes:
    public = X25519PublicKey.from_public_bytes(bytes.fromhex(other))
    try:
        return X25519PrivateKey.from_private_bytes(key).exchange(public)
    except ValueError:  # a point of small order: the secret would be known to all
        raise Malformed("a mask key of the round is not valid") from None


def sign(key: Ed25519PrivateKey, purpose: str, content: Any) -> str:
    """Return a signature, in hexadecimal, of plain data for one purpose."""
    return key.sign(_encode(purpose, content)).hex()


def is_signed(member: str, purpose: str, content: Any, signature: Any) -> bool:
    """Return whether this member has signed this content for this purpose."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(member))
        key.verify(bytes.fromhex(signature), _encode(purpose, content))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _encode(purpose: str, content: Any) -> bytes:
    return encode_canonical([_VERSION, purpose, content]).encode()


def digest(purpose: str, content: Any) -> str:
    """Return SHA-256 of plain data for one purpose, in hexadecimal."""
    return sha256(_encode(purpose, content))


@dataclass(frozen=True)
class RoundKey:
    """What a client says at the start of a round, signed: its mask key, its promise and its n."""

    run: str
    t: int
    request: str  # hash of the model and terms that it was asked with
    member: str
    mask_key: str
    promise: int  # the least noise that it will add, in grid units
    samples: int
    signature: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data, for a message."""
        return dict(vars(self))

    @property
    def content(self) -> dict[str, Any]:
        """What the signature is about."""
        return {name: value for name, value in vars(self).items() if name != "signature"}

    @classmethod
    def from_json(cls, values: Any) -> RoundKey:
        """Read and verify a key, or raise `Malformed`."""
        if not isinstance(values, Mapping) or values.keys() != cls.__dataclass_fields__.keys():
            raise Malformed("a key of the round must have the fields of a key")
        hexes = (("request", 32), ("member", 32), ("mask_key", 32), ("signature", 64))
        ranges = (0, 10**9), (1, grid.LARGEST_NOISE), (1, grid.MOST_SAMPLES)
        are_hex = all(is_hex(values[name], size) for name, size in hexes)
        if not (are_hex and isinstance(values["run"], str)):
            raise Malformed("a key of the round has a field that is not hexadecimal of its size")
        for name, (least, most) in zip(("t", "promise", "samples"), ranges, strict=True):
            if type(values[name]) is not int or not least <= values[name] <= most:
                raise Malformed(f"a key of the round has a {name} that is out of range")
        key = cls(**values)
        if not is_signed(key.member, "key", key.content, key.signature):
            raise Malformed("a key of the round is not signed by its member")
        return key


def is_hex(value: Any, size: int) -> bool:
    """Return whether a value is so many bytes in lower-case hexadecimal."""
    return isinstance(value, str) and len(value) == 2 * size and bool(_HEX.fullmatch(value))


@dataclass(frozen=True)
class Cohort:
    """The keys of a round and its threshold: what all its members must agree on."""

    run: str
    t: int
    keys: dict[str, RoundKey]  # by member, sorted
    threshold: int

    @classmethod
    def read(cls, keys: Any, threshold: Any, run: str, t: int) -> Cohort:
        """Read the server's list; every key is of this round and signed, no key occurs twice."""
        if not isinstance(keys, list) or not 1 <= len(keys) <= MOST_MEMBERS:
            raise Malformed(f"the round must have a list of 1 to {MOST_MEMBERS} keys")
        if type(threshold) is not int or not 1 <= threshold <= len(keys):
            raise Malformed(
                "the round's threshold must be a whole number from 1 to its number of keys"
            )
        round_keys = [RoundKey.from_json(values) for values in keys]
        by_member = {key.member: key for key in sorted(round_keys, key=lambda key: key.member)}
        if not len(by_member) == len({key.mask_key for key in round_keys}) == len(round_keys):
            raise Malformed("two members of the round have one key")
        if any((key.run, key.t) != (run, t) for key in round_keys):
            raise Malformed("a key of the round was made for another round")
        if len({key.request for key in round_keys}) > 1:
            raise Malformed("the members of the round were asked with different models or terms")
        return cls(run, t, by_member, threshold)

    @cached_property
    def digest(self) -> str:
        """The hash that stands for all of it."""
        return digest("cohort", [[k.to_json() for k in self.keys.values()], self.threshold])

    @cached_property
    def points(self) -> dict[str, int]:
        """Where each member's share lies: 1, 2, … in the order of the names."""
        return {member: x for x, member in enumerate(self.keys, start=1)}

    def bind_dealers(self, dealers: Iterable[str]) -> str:
        """Return the hash of this cohort and those of it that have dealt shares."""
        return digest("dealers", [self.digest, sorted(dealers)])

    def bind_set(self, dealers: Iterable[str], members: Iterable[str]) -> str:
        """Return what a set's signatures are about: cohort, dealers and the set itself."""
        return digest("set", [self.bind_dealers(dealers), sorted(members)])

    def read_members(self, members: Any, what: str) -> list[str]:
        """Read a list of members, sorted and each once, or raise `Malformed`."""
        if not isinstance(members, list) or not all(isinstance(m, str) for m in members):
            raise Malformed(f"{what} must be a list of members")
        if sorted(set(members)) != members or not self.keys.keys() >= set(members):
            raise Malformed(f"{what} must name members of the round, sorted and each once")
        return members


class MemoryNotes:
    """The notes of a simulated client, which lives no longer than its process.

    Notes are what a client writes down before it sends: each step of a round, once.
    """

    def __init__(self) -> None:
        self.notes: dict[tuple[str, int, str], str] = {}
        self.secrets: dict[tuple[str, int], bytes] = {}

    def find_note(self, run: str, t: int, step: str) -> str | None:
        """Return what was noted for a step of a round."""
        return self.notes.get((run, t, step))

    def write_note(self, run: str, t: int, step: str, content: str) -> None:
        """Note a step's content; a `Party` does so once."""
        self.notes[run, t, step] = content

    def make_secret(self, run: str, t: int) -> bytes:
        """Draw and keep 32 random bytes for this round; those of earlier rounds are forgotten."""
        self.secrets = {(run, t): os.urandom(32)}
        return self.secrets[run, t]

    def find_secret(self, run: str, t: int) -> bytes | None:
        """Return the round's secret while it is kept."""
        return self.secrets.get((run, t))


class VaultNotes:
    """The notes of a real client: in its vault, and the secrets of its rounds in a file beside it.

    The file has the newest round of each run. Without it the client takes no further part in that
    round; a ledger keeps its lines for good, and would keep the secrets of past rounds, too. Nor
    does it after a restore, which may have lost notes: a second input, with other noise under the
    same mask, would tell the difference of both noises, on which the other clients count.
    """

    def __init__(self, vault: Vault) -> None:
        self._vault, self._file = vault, vault.path.with_name(vault.path.name + ".secrets")
        self.find_note, self.write_note = vault.find_note, vault.write_note

    def make_secret(self, run: str, t: int) -> bytes:
        """Draw a secret and keep it, for its owner's eyes alone."""
        secret = os.urandom(32)
        others = dict(list(self._read().items())[-15:])  # of runs that go on side by side
        others.pop(run, None)
        content = json.dumps({**others, run: [t, secret.hex()]}).encode()
        write_secret(self._file, content, like=self._vault.path)
        return self._bind_ledger(secret)

    def find_secret(self, run: str, t: int) -> bytes | None:
        """Return the round's secret, while it is kept."""
        newest, drawn = self._read().get(run, (None, ""))
        return self._bind_ledger(bytes.fromhex(drawn)) if newest == t else None

    def _bind_ledger(self, drawn: bytes) -> bytes:
        """Return the secret that 32 random bytes are for this ledger, another after a restore."""
        return _derive(drawn, "ledger", self._vault.restored)

    def _read(self) -> dict[str, tuple[int, str]]:
        try:
            return dict(json.loads(self._file.read_text("ascii")))
        except (OSError, ValueError):
            return {}


@dataclass(frozen=True, eq=False)
class Booking:
    """How a client pays for its input of a round, and makes it."""

    request: str  # the hash of the model and terms that it was asked with
    samples: int
    size: int  # parameters of the model
    sigma: int  # σ_i, in grid units
    share: float  # how many times its price a release may be worth alone
    release: Callable[[int, Words], bytes]  # reserve, compute, add noise and mask, and store


class Party:
    """One client of the protocol: every method checks one message of the server and answers it.

    What the server sends is a claim until it is checked; what is checked is noted before the answer
    is made. A refusal depends on the message, the policy and the notes alone (S7).
    """

    def __init__(
        self, key: Ed25519PrivateKey, terms: SumTerms, notes: MemoryNotes | VaultNotes
    ) -> None:
        self._key, self.terms, self._notes = key, terms, notes
        self.member = name_key(key.public_key())
        if self.member not in terms.roster:
            bound = "a list with this client's own key"
            remedy = "add its public key, as for every other client"
            raise InputError.of("policy.sum.roster", self.member, bound, remedy)

    def answer(self, head: Mapping[str, Any], run: str, t: int, booking: Booking | None) -> bytes:
        """Answer one message of the server; a new key and `input` need a booking."""
        step = head.get("step")
        if step == "keys":
            return _pack(step, {"key": self.make_key(run, t, booking).to_json()})
        cohort = Cohort.read(head.get("keys"), head.get("threshold"), run, t)
        if step == "shares":
            return _pack(step, self.deal_shares(cohort))
        if step == "input" and booking is not None:
            return self.make_input(cohort, head.get("shares"), booking)
        members = cohort.read_members(head.get("set"), "the set")
        if step == "set":
            dealers = cohort.read_members(head.get("dealers"), "the list of dealers")
            return _pack(step, {"signature": self.sign_set(cohort, dealers, members)})
        if step == "unmask":
            signed = head.get("signatures")
            return _pack(step, self.reveal_shares(cohort, head.get("shares"), members, signed))
        raise Malformed("the message is not a step of a round")

    def make_key(self, run: str, t: int, booking: Booking | None) -> RoundKey:
        """Return this round's signed key; asked again, the same one."""
        if (noted := self._notes.find_note(run, t, "key")) is not None:
            key = RoundKey.from_json(json.loads(noted))
            if booking is not None and key.request != booking.request:
                raise RoundAnswered("this round was asked with another model or other terms")
            return key
        if booking is None:
            raise Malformed("the message is not a step of a round")
        public = compute_public(_derive(self._notes.make_secret(run, t), "mask key"))
        promise = promise_noise(booking.sigma, booking.share)
        key = RoundKey(run, t, booking.request, self.member, public, promise, booking.samples, "")
        key = replace(key, signature=sign(self._key, "key", key.content))
        self._notes.write_note(run, t, "key", json.dumps(key.to_json()))
        return key

    def deal_shares(self, cohort: Cohort) -> dict[str, Any]:
        """Return this client's shares, encrypted for every other member; one cohort a round."""
        secrets = self._require_cohort(cohort)
        self._note(cohort, "cohort", cohort.digest)
        shares, sealed = secrets.split(cohort), {}
        for member, x in cohort.points.items():
            if member != self.member:
                content = b"".join(share.to_bytes(_SHARE) for share in shares[x - 1])
                cipher = AESGCM(secrets.derive_cipher(cohort, self.member, member))
                # Each key seals one text: it is derived from fresh keys, cohort and direction.
                sealed[member] = cipher.encrypt(bytes(12), content, None).hex()
        return {"shares": sealed, "seal": seal_seed(secrets.seed)}

    def make_input(self, cohort: Cohort, sealed: Any, booking: Booking) -> bytes:
        """Return the masked input, paid for and stored.

        The dealers must be enough for a set that this client would unmask; their shares must open.
        """
        secrets, own_key = self._require_noted_cohort(cohort), cohort.keys[self.member]
        if own_key.request != booking.request:
            raise RoundAnswered("this round was asked with another model or other terms")
        if self._find_note(cohort, "set") is not None:
            raise RoundAnswered("this round's set is known, and the client's input came too late")
        dealers = sorted([*self._open_shares(cohort, sealed, secrets), self.member])
        self._require_enough(cohort, dealers)
        keys = [cohort.keys[member] for member in dealers]
        most = max(key.promise for key in keys)
        if not has_room(sum(key.samples for key in keys), most, len(keys)):
            raise PolicyRefusal("the sum of this round might leave ±2⁶³ grid units")
        self._note(cohort, "dealers", cohort.bind_dealers(dealers))
        promises = self.list_promises(cohort, dealers)
        noise = complete_noise(
            booking.sigma, own_key.promise, promises, self.terms.honest, share=booking.share
        )
        return booking.release(noise, secrets.make_mask(cohort, dealers, booking.size))

    def list_promises(self, cohort: Cohort, dealers: Iterable[str]) -> list[int]:
        """Return what the other roster members of the round have promised (S4)."""
        counted = self.terms.roster - {self.member}
        return [cohort.keys[member].promise for member in dealers if member in counted]

    def sign_set(self, cohort: Cohort, dealers: list[str], members: list[str]) -> str:
        """Return a signature on the set of clients whose inputs arrived: one set a round (S2)."""
        bound = self._require_set(cohort, dealers, members)
        self._note(cohort, "set", bound)
        return sign(self._key, "set", bound)

    def reveal_shares(
        self, cohort: Cohort, sealed: Any, members: list[str], signatures: Any
    ) -> dict[str, dict[str, str]]:
        """Return one share of every dealer: of its seed in the set, of its key outside (S1, S3)."""
        secrets = self._require_noted_cohort(cohort)
        opened = self._open_shares(cohort, sealed, secrets)
        dealers = sorted([*opened, self.member])
        bound = self._require_set(cohort, dealers, members)
        if self._find_note(cohort, "set") != bound:
            raise RoundAnswered("this round's set is another one, or was not signed here")
        if not isinstance(signatures, Mapping):
            raise Malformed("the set has no signatures")
        # Of members only: t others could sign for inputs that were made for fewer dealers, and
        # reveal the keys with which these are masked.
        signed = [m for m in members if is_signed(m, "set", bound, signatures.get(m))]
        if len(signed) < cohort.threshold:
            raise Malformed(f"the set has {len(signed)} signatures and needs {cohort.threshold}")
        opened[self.member] = secrets.split(cohort)[cohort.points[self.member] - 1]
        return {
            "seed": {m: f"{opened[m][1]:066x}" for m in dealers if m in members},
            "key": {m: f"{opened[m][0]:066x}" for m in dealers if m not in members},
        }

    def _require_cohort(self, cohort: Cohort) -> _RoundSecrets:
        """Refuse a cohort that this client is not in, or whose threshold protects it too little."""
        noted, own_key = self._find_note(cohort, "key"), cohort.keys.get(self.member)
        if own_key is None or noted is None or own_key.to_json() != json.loads(noted):
            raise Malformed("the round's keys do not contain the one that this client has sent")
        secret = self._notes.find_secret(cohort.run, cohort.t)
        secrets = None if secret is None else _RoundSecrets(self.member, secret)
        if secrets is None or compute_public(secrets.key) != own_key.mask_key:
            raise PolicyRefusal("the secrets of this round are gone; it goes on without the client")
        corrupt = self.terms.corrupt
        strangers = len(cohort.keys.keys() - self.terms.roster)  # each may be the server
        if 2 * cohort.threshold <= len(cohort.keys) + corrupt + strangers:
            raise PolicyRefusal("the threshold would let a lying server unmask two sets")
        # Others may unmask a set that this client refuses: t of any members must be enough for it.
        if cohort.threshold < self.terms.honest + corrupt + strangers:
            raise PolicyRefusal("the threshold is below honest + corrupt, with strangers")
        self._require_enough(cohort, list(cohort.keys))
        return secrets

    def _require_noted_cohort(self, cohort: Cohort) -> _RoundSecrets:
        secrets = self._require_cohort(cohort)
        if self._find_note(cohort, "cohort") != cohort.digest:
            raise RoundAnswered("this round has another cohort, or none that shares were made for")
        return secrets

    def _require_enough(self, cohort: Cohort, members: Sequence[str]) -> None:
        """Refuse fewer than t members, or fewer than h + c of this client's own roster (S4)."""
        known = len(self.terms.roster.intersection(members))
        if known < self.terms.honest + self.terms.corrupt:
            raise PolicyRefusal("fewer roster members take part than honest + corrupt")
        if len(members) < cohort.threshold:
            raise PolicyRefusal("fewer members take part than the round's threshold")

    def _require_set(self, cohort: Cohort, dealers: list[str], members: list[str]) -> str:
        """Refuse a set that this client does not unmask; return what its signatures are about."""
        self._require_noted_cohort(cohort)
        if self._find_note(cohort, "dealers") not in (None, cohort.bind_dealers(dealers)):
            raise RoundAnswered("this client has made its input for other dealers")
        if not set(dealers) >= {self.member, *members}:
            raise Malformed("the set has a member that has dealt no shares")
        self._require_enough(cohort, members)
        return cohort.bind_set(dealers, members)

    def _find_note(self, cohort: Cohort, step: str) -> str | None:
        return self._notes.find_note(cohort.run, cohort.t, step)

    def _note(self, cohort: Cohort, step: str, content: str) -> None:
        noted = self._find_note(cohort, step)
        if noted is None:
            self._notes.write_note(cohort.run, cohort.t, step, content)
        elif noted != content:
            raise RoundAnswered(f"this round has another {step} already")

    def _open_shares(
        self, cohort: Cohort, sealed: Any, secrets: _RoundSecrets
    ) -> dict[str, tuple[int, int]]:
        """Decrypt what the others dealt to this client: a share of the key and of the seed each."""
        if not isinstance(sealed, Mapping) or not cohort.keys.keys() - {self.member} >= set(sealed):
            raise Malformed("the round's shares are not those of its members")
        opened = {}
        for member, text in sealed.items():
            cipher = AESGCM(secrets.derive_cipher(cohort, member, self.member))
            try:
                content = cipher.decrypt(bytes(12), bytes.fromhex(text), None)
            except (InvalidTag, ValueError, TypeError):
                raise Malformed("a share of the round does not open") from None
            if len(content) != 2 * _SHARE:
                raise Malformed("a share of the round has another size")
            opened[member] = int.from_bytes(content[:_SHARE]), int.from_bytes(content[_SHARE:])
        return opened


class _RoundSecrets:
    """What a client derives from a round's 32 random bytes: its mask key, its seed, its shares."""

    def __init__(self, member: str, secret: bytes) -> None:
        self.member, self._secret = member, secret
        self.key, self.seed = _derive(secret, "mask key"), _derive(secret, "self-mask")

    def make_mask(self, cohort: Cohort, dealers: Iterable[str], size: int) -> Words:
        """Return PRG(b_i) + Σ_{j>i} PRG(k_ij) − Σ_{j<i} PRG(k_ij), mod 2⁶⁴."""
        mask = expand_mask(self.seed, size).copy()
        for member in dealers:
            if member != self.member:
                seed = derive_mask(self.key, cohort.keys[member].mask_key, cohort.run, cohort.t)
                add = np.add if self.member < member else np.subtract
                add(mask, expand_mask(seed, size), out=mask)
        return mask

    def derive_cipher(self, cohort: Cohort, sender: str, receiver: str) -> bytes:
        """Return the key that seals a share on its way from one member to another."""
        other = receiver if sender == self.member else sender
        agreed = _agree(self.key, cohort.keys[other].mask_key)
        return _derive(agreed, "share", cohort.digest, sender, receiver)

    def split(self, cohort: Cohort) -> list[tuple[int, int]]:
        """Return every member's share of the key and of the seed."""
        dealt = []
        for name, secret in (("key", self.key), ("seed", self.seed)):
            entropy = _derive(self._secret, "coefficients", name, cohort.digest)
            dealt.append(split_secret(secret, cohort.threshold, len(cohort.keys), entropy))
        return list(zip(*dealt, strict=True))


def seal_seed(seed: bytes) -> str:
    """Return the hash by which a server knows that it has put a seed together correctly."""
    return sha256(_VERSION.encode() + b"\nseal\n" + seed)


def _pack(step: str, content: Mapping[str, Any]) -> bytes:
    return messages.pack({"schema": messages.ANSWER, "kind": step, **content})
