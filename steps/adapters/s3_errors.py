"""What boto3's exceptions mean, in one line each, and whether to try again.

The classes are those of AWS's error list: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html. A HEAD
has no body, hence no code but the status.
"""

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.parsers import ResponseParserError
from s3transfer.exceptions import RetriesExceededError

from steps.adapters.retries import Outage
from steps.adapters.store import masked
from steps.errors import ConfigError, DataError, ServiceUnavailable

CAUGHT = (BotoCoreError, ClientError, HTTPClientError, ResponseParserError, RetriesExceededError)
_BROKEN_CONNECTION = (ConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError, RetriesExceededError)

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "400", "Bad Request"}
MISSING_KEY = {"NoSuchKey", "404", "NotFound"}
LOST_PRECONDITION = {"PreconditionFailed", "412"}

_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded"}
PASSING = _THROTTLED | {"InternalError", "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException"}
_LOST_RACE = {"ConditionalRequestConflict", "OperationAborted", "409", "UnknownError"}
"""AWS answers racing conditional writes with 409, radosgw with 500 UnknownError: the next try gets a clear answer."""
_DAMAGED = {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "IncompleteBody", "InvalidPart"}
_LOST_UPLOAD = {"NoSuchUpload"}
_BAD_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity"}
_WRONG_REGION = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidRegion",
    "PermanentRedirect",
    "301",
}
DENIED = {"AccessDenied", "403", "Forbidden"}

RACE_TRIES = 8
REPAIR_TRIES = 5
"""For what is wrong with the bytes or with the credentials: a few times, then it isn't chance."""


def code_of(error: BaseException) -> str:
    """S3's error code; "" for an error that isn't an answer."""
    return str(error.response.get("Error", {}).get("Code", "unknown")) if isinstance(error, ClientError) else ""


def one_line(error: BaseException) -> str:
    return masked(" ".join(str(error).split()))


def explain(error: Exception, where: str, action: str, endpoint: str) -> Exception:
    """The store's error behind one of boto3's (`CAUGHT`), about the object `where`; missing objects excepted."""
    if isinstance(error, ClientError):
        return _explain_answer(error, where, action)
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return ConfigError(
            f"{where}: no AWS credentials; give the pod an IAM role, or set AWS_PROFILE or AWS_ACCESS_KEY_ID"
        )
    if isinstance(error, (CredentialRetrievalError, MetadataRetrievalError)):
        return Outage(f"{where}: the AWS credentials can't be renewed ({one_line(error)}); check the pod's identity")
    if isinstance(error, FlexibleChecksumError):
        return damaged(f"{where}: {one_line(error)}")
    if isinstance(error, SSLError) and "CERTIFICATE" in str(error).upper():
        return ServiceUnavailable(f"{where}: {one_line(error)}; set AWS_CA_BUNDLE to the server's authority")
    if isinstance(error, _BROKEN_CONNECTION):
        return Outage(
            f"{where}: {masked(endpoint)} can't be reached ({type(error).__name__});"
            " check the network and AWS_ENDPOINT_URL_S3, then run again"
        )
    return ServiceUnavailable(f"{where}: {action} failed ({one_line(error)}); run again")


def damaged(line: str) -> Outage:
    """Bytes that changed on their way, most likely; when they are always wrong, the object is."""
    return Outage(line, tries=REPAIR_TRIES, verdict=DataError(f"{line}; the object is corrupt, write it again"))


def _explain_answer(error: ClientError, where: str, action: str) -> Exception:
    code = code_of(error)
    refused = f"{where}: the server refuses {action} ({code}); run again later"
    if code in EXPIRED:
        line = f"{where}: the AWS credentials are refused ({code}); correct or renew them"
        return Outage(line, tries=REPAIR_TRIES, verdict=ConfigError(line))
    if code in _LOST_RACE or code in _LOST_UPLOAD:
        return Outage(refused, tries=RACE_TRIES)
    if code in _DAMAGED:
        return damaged(f"{where}: the server got other bytes than were sent ({code})")
    if code in _BAD_CREDENTIALS:
        return ConfigError(f"{where}: the AWS credentials are refused ({code}); correct or renew them")
    if code in _WRONG_REGION:
        return ConfigError(f"{where}: the bucket is in another region ({code}); set AWS_REGION to the bucket's")
    if code == "RequestTimeTooSkewed":
        return Outage(f"{where}: this machine's clock is off by more than the server takes ({code}); set it right")
    if code in DENIED:
        return ServiceUnavailable(
            f"{where}: access denied; allow s3:{action} and s3:ListBucket on the bucket to this identity"
        )
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return Outage(refused) if code in PASSING or status >= 500 or status == 429 else ServiceUnavailable(refused)
