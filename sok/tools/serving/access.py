"""Who may ask a server: certificates of TLS and tokens, read anew when their files change."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import os
import re
import ssl

from sok.tools.serving.refusal import Refused

logger = logging.getLogger("sok.serve")
_SHORTEST = 16  # characters of a token


@dataclasses.dataclass(frozen=True)
class Files:
    """Paths; None: there is none."""

    cert: str | None = None  # PEM: the server's certificate, and those between it and its authority
    key: str | None = None  # PEM
    client_ca: str | None = None  # PEM: authorities whose certificates clients must have
    tokens: str | None = None  # one a line: who may ask
    control_tokens: str | None = None  # who may load and unload as well


class Access:
    """What a client must have.

    Args:
        files: where secrets lie.
        with_control: whether clients may load and unload models.

    Raises:
        ValueError: a file is missing, or does not hold what it should.
    """

    def __init__(self, files: Files, with_control: bool = False) -> None:
        self._files, self.with_control = files, with_control or files.control_tokens is not None
        if files.cert is None and (files.key or files.client_ca):
            raise ValueError("--tls-key and --tls-client-ca are of a server with --tls-cert, which is missing.")
        self._seen = self._now()
        self.tls = None if files.cert is None else self._context()
        self._tokens, self._control_tokens = _tokens_in(files.tokens), _tokens_in(files.control_tokens)

    def check(self, header: str | None, is_control: bool) -> None:
        """`Refused` unless the `Authorization` of a request has a token that is asked for."""
        if is_control and self._files.control_tokens is not None:
            wanted = self._control_tokens
        elif self._files.tokens is not None:
            wanted = self._tokens + self._control_tokens
        else:
            return
        scheme, _, given = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Refused(401, "A token is wanted: Authorization: Bearer TOKEN.")
        # All are compared, each in a time that does not depend on where they differ.
        # Bytes that are no UTF-8 come as aiohttp has read them.
        one = given.strip().encode(errors="surrogateescape")
        if not any([hmac.compare_digest(one, token) for token in wanted]):
            raise Refused(401, "The token is none that may do this.")

    def refresh(self) -> None:
        """Reads files that have changed. Bad ones are not taken: the log says so, and what was read stays.

        Authorities are added and not taken away: OpenSSL's store of a context that is in use only grows.
        """
        now = self._now()
        if now == self._seen:
            return
        self._seen = now
        try:
            tokens, control_tokens = _tokens_in(self._files.tokens), _tokens_in(self._files.control_tokens)
            if self.tls is not None:
                self._context()  # a pair that does not fit would leave the one in use without its key
                self._load(self.tls)
        except ValueError as error:
            logger.error("certificates and tokens stay as they were: %s", error)
            return
        self._tokens, self._control_tokens = tokens, control_tokens
        logger.info("certificates and tokens are read anew")

    def _now(self) -> list[tuple[int, int, int] | None]:
        """What changes when a file does."""
        found: list[tuple[int, int, int] | None] = []
        for path in dataclasses.astuple(self._files):
            try:
                status = None if path is None else os.stat(path)
            except OSError:
                status = None
            found.append(None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino))
        return found

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        files = self._files
        try:
            # Without a function OpenSSL would ask whoever sits at the terminal.
            context.load_cert_chain(files.cert or "", files.key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--tls-cert {files.cert} and --tls-key {files.key or '(the same file)'} must be a certificate and its "
                f"key without a passphrase, PEM: {error}."
            ) from None
        if files.client_ca is None:
            return
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            raise ValueError(
                f"--tls-client-ca {files.client_ca} must be certificates of authorities, PEM: {error}."
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED


def _tokens_in(path: str | None) -> list[bytes]:
    """The tokens of a file; lines that are empty or begin with # are left out."""
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the tokens in {path} cannot be read: {error}.") from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    for number, token in enumerate(tokens, 1):
        if not re.fullmatch(rf"[A-Za-z0-9._~+/=-]{{{_SHORTEST},}}", token):
            raise ValueError(
                f"token {number} in {path} must have at least {_SHORTEST} of the characters A-Z a-z 0-9 . _ ~ + / = -, "
                f"as `openssl rand -hex 32` makes them."
            )
    if not tokens:
        raise ValueError(f"{path} has no token: one a line.")
    return [token.encode() for token in tokens]
