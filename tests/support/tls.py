"""Certificates for the tests of HTTPS, made by trustme: an authority and what it has signed, as PEM files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization


@dataclass(frozen=True, slots=True)
class Certificates:
    """The authority of `ca_certs` has signed `certificate`, which is for 127.0.0.1 and localhost and goes with `key`."""

    ca_certs: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, *, names: tuple[str, ...] = ("127.0.0.1", "::1", "localhost")) -> Certificates:
    """A new authority with one certificate for `names`; two calls trust each other as little as two companies."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    signed = authority.issue_cert(*names)
    made = Certificates(
        ca_certs=folder / "ca_certs.pem", certificate=folder / "certificate.pem", key=folder / "key.pem"
    )
    authority.cert_pem.write_to_path(made.ca_certs)
    for number, part in enumerate(signed.cert_chain_pems):
        part.write_to_path(made.certificate, append=number > 0)
    signed.private_key_pem.write_to_path(made.key)
    made.key.chmod(0o600)
    return made


def encrypt(key: Path, encrypted: Path) -> None:
    """Write the private key `key` to `encrypted`, with a password."""
    read = serialization.load_pem_private_key(key.read_bytes(), password=None)
    password = serialization.BestAvailableEncryption(b"password")
    encrypted.write_bytes(read.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, password))
