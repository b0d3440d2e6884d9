"""Classification of the S3 client's errors by their texts."""

import pytest

from lockstep.storage_backends.s3.refusals import RefusalCause, refusal_of

HOST = "https://store.example:9000"
ASKED = f"Generic S3 error: Error performing PUT {HOST}/bucket/a in 1.2ms"
RETRIED = f"{ASKED}, after 2 retries, max_retries: 2, retry_timeout: 10s "
STATUS = "Server returned non-2xx status code:"
SENT = "HTTP error: error sending request\n\nDebug source:\n"
REDIRECT = "Received redirect without LOCATION, this normally indicates a wrong region"
NO_NAME = "failed to lookup address information: Name or service not known"


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        (
            f"{RETRIED} - {STATUS} 503 Service Unavailable: <Error>\n<Code>SlowDown</Code></Error>",
            RefusalCause.OTHER,
            "503 Service Unavailable, SlowDown",
        ),
        (
            f"{ASKED} - {STATUS} 401 Unauthorized: \n\nDebug",
            RefusalCause.REFUSED,
            "401 Unauthorized",
        ),
        (f"{ASKED} - {REDIRECT}\n\nDebug source:\n", RefusalCause.OTHER, REDIRECT),
        (
            f'{RETRIED} - {SENT} kind: Connect,\n error: "{NO_NAME}",',
            RefusalCause.NO_ANSWER,
            f"nothing answers at {HOST} ({NO_NAME})",
        ),
        (
            f"{ASKED} - {SENT} kind: Timeout,\n",
            RefusalCause.NO_ANSWER,
            f"nothing answers at {HOST} (it timed out)",
        ),
        (
            f"{ASKED} - {SENT} kind: Connect,\n error: InvalidCertificate(UnknownIssuer)",
            RefusalCause.NO_ANSWER,
            f"nothing answers at {HOST} (UnknownIssuer)",
        ),
        (
            f"{ASKED} - {SENT} kind: Request,\n",
            RefusalCause.OTHER,
            "HTTP error: error sending request",
        ),
        ("the answer is longer\nthan that", RefusalCause.OTHER, "the answer is longer"),
        ("", RefusalCause.OTHER, "ValueError"),
    ],
)
def test_an_error_is_one_line_that_begins_with_its_cause(
    text: str, cause: RefusalCause, line: str
) -> None:
    refusal = refusal_of(ValueError(text))
    assert (refusal.cause, refusal.line) == (cause, line)


def test_what_a_request_for_credentials_carries_is_not_repeated() -> None:
    url = "https://sts.example/?Action=AssumeRoleWithWebIdentity&WebIdentityToken=s3kr1t"
    text = f"Generic S3 error: Error performing POST {url} in 1ms - {SENT} kind: Connect,"
    refusal = refusal_of(ValueError(text))
    assert refusal.line == "nothing answers at https://sts.example (the connection failed)"
