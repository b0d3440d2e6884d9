"""Summarises each error of the S3 client in one line, with its cause.

The client hides the cause of an error in a long line about its retries, or in many lines about its
internal state. This module extracts the server's status and code, or the reason why no answer came.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from .address import S3Address

_REQUEST: Final = re.compile(r"Error performing [A-Z]+ (\S+) in .*? - ")
_STATUS: Final = re.compile(r"status code: ([0-9]{3})([^:<\n]{0,40})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_REASONS: Final = (
    re.compile(r'(?:message|error): "((?!error sending)[^"\n]{1,200})"'),
    re.compile(r"(?:InvalidCertificate|InvalidMessage)\((\w{1,64})"),
)
_KIND: Final = re.compile(r"kind: (Connect|Timeout)\b")
_METADATA: Final = ("/latest/api/token", "/latest/meta-data/")
"""Paths at which the client requests a role from the host's metadata service. It does so only if it has
found no other credentials."""


class RefusalCause(StrEnum):
    """The kinds of causes of a failed request. `Refusal.with_remedy` has a remedy for each kind."""

    NO_BUCKET = "no_bucket"
    NO_ANSWER = "no_answer"
    NO_CREDENTIALS = "no_credentials"
    REFUSED = "refused"
    """The server refused these credentials, or refused a request without credentials."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request failed, with a one-line summary."""

    cause: RefusalCause
    line: str
    origin: str = ""
    """The scheme, host and port of the server."""

    def with_remedy(self, address: S3Address) -> str:
        """Return a message for the user who opened the store at `address`: the cause and the remedy."""
        rights = "list and read" if address.read_only else "read and write"
        match self.cause:
            case RefusalCause.NO_BUCKET:
                return (
                    f"bucket {address.bucket!r} does not exist at {self.origin}; create it, or give "
                    "another"
                )
            case RefusalCause.NO_ANSWER:
                return f"{self.line}; start the server, or correct endpoint="
            case RefusalCause.NO_CREDENTIALS:
                return (
                    "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give "
                    "the machine a role, or add anonymous=1"
                )
            case RefusalCause.REFUSED if address.anonymous:
                return (
                    f"the server refuses requests without credentials ({self.line}); leave anonymous=1 "
                    f"out, and give credentials that may {rights} the bucket"
                )
            case RefusalCause.REFUSED:
                return (
                    f"the server refuses the credentials of this process ({self.line}); give some that "
                    f"may {rights} the bucket"
                )
            case RefusalCause.OTHER:
                return f"{self.line}; check bucket, endpoint= and region="


def refusal_of(error: BaseException) -> Refusal:
    """Return the cause and a summary of an error that the client raised."""
    text = str(error)
    request = _REQUEST.search(text)
    if request is None:
        return Refusal(RefusalCause.OTHER, first_line(error))
    url, answer = urlsplit(request[1]), text[request.end() :]
    origin = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
    status = _STATUS.search(answer.partition("\n")[0])
    if any(each in url.path for each in _METADATA):
        return Refusal(RefusalCause.NO_CREDENTIALS, "no credentials were found", origin)
    if status is not None:
        return Refusal(_cause_of_status(status[1]), _line_of_status(status, answer), origin)
    kind = _KIND.search(answer)
    if kind is None:
        return Refusal(RefusalCause.OTHER, answer.partition("\n")[0], origin)
    reasons = [found[1] for each in _REASONS if (found := each.search(answer)) is not None]
    default_reason = "it timed out" if kind[1] == "Timeout" else "the connection failed"
    reason = reasons[0] if reasons else default_reason
    is_sentence = " " in reason and reason[1:2].islower()
    shown = reason[:1].lower() + reason[1:] if is_sentence else reason
    return Refusal(RefusalCause.NO_ANSWER, f"nothing answers at {origin} ({shown})", origin)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, because the S3 client's messages have many lines."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _cause_of_status(status: str) -> RefusalCause:
    match status:
        case "404":
            # A 404 here means that the bucket is missing, because callers handle a missing object
            # earlier.
            return RefusalCause.NO_BUCKET
        case "401" | "403":
            return RefusalCause.REFUSED
        case _:
            return RefusalCause.OTHER


def _line_of_status(status: re.Match[str], answer: str) -> str:
    code = _CODE.search(answer)
    return f"{status[1]}{status[2].rstrip()}" + (f", {code[1]}" if code is not None else "")
