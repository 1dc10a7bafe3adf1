"""What a client is told instead of an answer: a status of HTTP and a sentence."""

from __future__ import annotations

import re

import tensorflow as tf

from sok.job.agreement import plain_text

# As TensorFlow Serving maps the codes of TensorFlow; all others are 500.
_STATUS = {
    tf.errors.INVALID_ARGUMENT: 400,
    tf.errors.FAILED_PRECONDITION: 400,
    tf.errors.OUT_OF_RANGE: 400,
    tf.errors.PERMISSION_DENIED: 403,
    tf.errors.NOT_FOUND: 404,
    tf.errors.ABORTED: 409,
    tf.errors.RESOURCE_EXHAUSTED: 429,
    tf.errors.UNIMPLEMENTED: 501,
    tf.errors.UNAVAILABLE: 503,
    tf.errors.DEADLINE_EXCEEDED: 504,
}


class Refused(Exception):
    """A request that gets no answer. `version`: which of the model's has seen it; None: none has."""

    def __init__(self, status: int, message: str, version: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.version = version


def refusal_of(error: tf.errors.OpError, version: int | None = None) -> Refused:
    """The status and words for an error of TensorFlow's while that version of a model ran.

    >>> import tensorflow as tf
    >>> refused = refusal_of(tf.errors.InvalidArgumentError(None, None, "indices[0] = 9 is not in [0, 5)"))
    >>> refused.status, str(refused)
    (400, 'indices[0] = 9 is not in [0, 5)')
    """
    return Refused(_STATUS.get(error.error_code, 500), words_of(error), version)


def words_of(error: Exception) -> str:
    """What an error says, without where in the graph TensorFlow has met it.

    >>> import tensorflow as tf
    >>> text = "Graph execution error:\\n\\nDetected at node Gather defined at (most recent call last):\\n"
    >>> text += "<stack traces unavailable>\\n9 is not in [0, 5)\\n\\t [[{{node Gather}}]] [Op:__inference_f_12]"
    >>> words_of(tf.errors.InvalidArgumentError(None, None, text))
    '9 is not in [0, 5)'
    """
    text = re.sub(r" ?\[Op:\w+\]", "", plain_text(error))
    noise = (
        r"Graph execution error:|Detected at node |<stack traces unavailable>|\s*\[\[\{?\{|\s*(File|Original stack) "
    )
    noise += r"|\d+ (root|successful|derived) |\(\d+\) |Errors may have originated|Input Source "
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.match(noise, line)]
    return " ".join(lines) or type(error).__name__
