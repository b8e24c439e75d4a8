"""Certificates and keys of a federation, made on the spot: an authority, a server, nodes.

Flower wants three things on disk: a PEM authority that clients trust, a PEM certificate and key of
the SuperLink whose names include the address clients dial, and for every SuperNode an OpenSSH
ECDSA key pair. All keys are on P-384. Every file is made new (an existing one is never
overwritten) and is readable by its owner alone, whom root names. `sottovoce server init` and
`sottovoce node init` make those of a federation between machines; a renewal keeps every key.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from sottovoce.errors import InputError

Owner = tuple[int, int]  # the numbers of a user and of a group
LOOPBACK = ("localhost", "127.0.0.1")
SERVER = x509.Name.from_rfc4514_string("CN=sottovoce server")
YEAR = 365
# Clocks differ, and jump: a certificate is valid from some time before it was made, else a clock
# that is set back by an hour would end every connection.
SKEW = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Who signs the server's certificate: `certificate` goes to every node, `key` stays here.

    With a passphrase the key is stored encrypted, and a thief of the file cannot use it.
    """

    certificate: Path
    key: Path
    passphrase: bytes | None = None


@dataclass(frozen=True)
class ServerKeys:
    """What a SuperLink needs for TLS."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKey:
    """A node's key pair: `private` never leaves the node, `public` is registered."""

    private: Path
    public: Path


def make_authority(
    folder: Path, *, days: int = 5 * YEAR, passphrase: bytes | None = None
) -> Authority:
    """Make `ca.crt` and `ca.key`: an authority that may sign server certificates, nothing below."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name.from_rfc4514_string("CN=sottovoce federation authority")
    certificate = (
        _start_certificate(name, name, key.public_key(), datetime.now(UTC) + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_make_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return Authority(
        certificate=write_new(folder / "ca.crt", certificate.public_bytes(Encoding.PEM)),
        key=write_new(folder / "ca.key", _encode_key(key, passphrase)),
        passphrase=passphrase,
    )


def make_server_keys(
    folder: Path,
    signed_by: Authority,
    *,
    names: Sequence[str] = (),
    stem: str = "server",
    owner: Owner | None = None,
) -> ServerKeys:
    """Make `server.crt` and `server.key` for localhost, 127.0.0.1 and the `names` given."""
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _sign(signed_by, key.public_key(), names)
    return ServerKeys(
        authority=signed_by.certificate,
        certificate=write_new(folder / f"{stem}.crt", certificate, owner),
        key=write_new(folder / f"{stem}.key", _encode_key(key), owner),
    )


def renew_certificate(
    folder: Path, *, stem: str = "server", signed_by: Authority | None = None
) -> ServerKeys:
    """Replace `server.crt` by one for another year: same authority, `server.key` and names."""
    keys = ServerKeys(folder / "ca.crt", folder / f"{stem}.crt", folder / f"{stem}.key")
    old, key = _read_certificate(keys.certificate), _read_key(keys.key)
    subject = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    names = [str(name.value) for name in subject]
    signed = _sign(signed_by or find_authority(folder), key.public_key(), names)
    draft = folder / f"{stem}.crt.part"
    draft.unlink(missing_ok=True)
    former = keys.certificate.stat()  # root renews for the server's account
    write_new(draft, signed, (former.st_uid, former.st_gid) if os.geteuid() == 0 else None)
    draft.replace(keys.certificate)
    return keys


def find_authority(folder: Path, passphrase: bytes | None = None) -> Authority:
    """Return the authority that `make_authority` made in this folder before."""
    authority = Authority(folder / "ca.crt", folder / "ca.key", passphrase)
    if not authority.key.exists():
        raise InputError(
            f"{authority.key} is missing beside {authority.certificate.name}; bring it back from "
            "where you keep it, for as long as it signs"
        )
    _read_key(authority.key, passphrase)  # it is one, and this is its passphrase
    return authority


def _sign(
    signed_by: Authority, public_key: ec.EllipticCurvePublicKey, names: Sequence[str]
) -> bytes:
    issuer = _read_certificate(signed_by.certificate)
    issuer_key = _read_key(signed_by.key, signed_by.passphrase)
    public = issuer_key.public_key()
    if issuer.public_key() != public:
        raise InputError(f"{signed_by.key} is another key than that of {signed_by.certificate}")
    ends = min(datetime.now(UTC) + timedelta(days=YEAR), issuer.not_valid_after_utc)
    if ends <= datetime.now(UTC):
        raise InputError(
            f"{signed_by.certificate} has expired; make a new authority in another folder and "
            "give its ca.crt to every client"
        )
    known = [parse_name(name) for name in dict.fromkeys([*LOOPBACK, *names])]
    certificate = (
        _start_certificate(SERVER, issuer.subject, public_key, ends)
        .add_extension(x509.SubjectAlternativeName(known), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_make_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(issuer_key, hashes.SHA384())
    )
    return certificate.public_bytes(Encoding.PEM)


def read_end(path: Path) -> datetime:
    """Return until when a certificate is valid."""
    return _read_certificate(path).not_valid_after_utc


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read_file(path))
    except ValueError:
        raise InputError(f"{path} cannot be read as a certificate; name another") from None


def _read_key(path: Path, passphrase: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(_read_file(path), password=passphrase)
    except (ValueError, TypeError):
        how = "" if passphrase is None else " with this passphrase"
        raise InputError(
            f"{path} cannot be read as a key{how}; give the passphrase it was made with, if any, "
            "or put the right file back"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path} must hold an EC key; make a new one in another folder")
    return key


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; put it there, or name where it is") from None


def make_node_key(folder: Path, name: str, owner: Owner | None = None) -> NodeKey:
    """Make `NAME` and `NAME.pub`, as `ssh-keygen -t ecdsa -b 384` would."""
    if not name or Path(name).name != name:
        raise InputError.of("name", name, "a file name", "leave folders out of it")
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return NodeKey(
        private=write_new(folder / name, private, owner),
        public=write_new(folder / f"{name}.pub", public + f" {name}\n".encode(), owner),
    )


def find_or_make_node_key(folder: Path, name: str) -> NodeKey:
    """Return the key of an earlier session, or a new one; a public half is written last."""
    key = NodeKey(folder / name, folder / f"{name}.pub")
    if key.public.exists() and key.public.stat().st_size:
        return key
    for path in (key.private, key.public):  # half of a key, which nobody knows
        path.unlink(missing_ok=True)
    return make_node_key(folder, name)


def fingerprint_ssh(public: bytes) -> str:
    """Return an OpenSSH public key as `ssh-keygen -l` prints it."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def make_worker_secret(folder: Path, name: str, owner: Owner | None = None) -> Path:
    """Make `NAME.secret`, by which a SuperNode and its worker recognise each other."""
    return write_new(folder / f"{name}.secret", secrets.token_hex(32).encode(), owner)


def _start_certificate(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - SKEW)
        .not_valid_after(ends)
    )


def _make_key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only"
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **dict.fromkeys((*others.split(), "decipher_only"), False),
    )


def parse_name(name: str) -> x509.GeneralName:
    """Return a host name or an IP address as a certificate has it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not name or not name.isascii() or any(c.isspace() or c in "/:" for c in name):
        remedy = "leave scheme, port and path out"
        raise InputError.of("names", name, "host names or IP addresses", remedy)
    return x509.DNSName(name)


def _encode_key(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    how = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)


def write_new(path: Path, content: bytes, owner: Owner | None = None) -> Path:
    """Make a file that only its owner can read: its mode and owner are set while it is empty."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(
            f"{path} exists already and keys are never overwritten; choose another folder"
        ) from None
    with os.fdopen(handle, "wb") as file:
        if owner is not None:
            os.fchown(handle, *owner)
        file.write(content)
    return path
