"""From the body of a :predict request to the body of its answer, in the thread that calls."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from sok.tools.serving.answers import answer_of
from sok.tools.serving.model import Model
from sok.tools.serving.refusal import Refused, refusal_of
from sok.tools.serving.servable import Servable
from sok.tools.serving.tensors import asked_in, tensors_of


@dataclasses.dataclass(frozen=True)
class Answered:
    """An answer, and the version that has given it."""

    version: int
    body: bytes


def predict(model: Model, version: int | None, body: bytes) -> Answered:
    """Answers a request by the newest version of a model, or by that one.

    Raises:
        Refused: with the status and words for the client.
    """
    asked = asked_in(body)
    with model.lease(version) as servable:
        try:
            signature = servable.signatures.get(asked.signature)
            if signature is None:
                known = sorted(servable.signatures)
                raise Refused(400, f'Serving signature name: "{asked.signature}" not found. The model has: {known}.')
            outputs = signature.run(tensors_of(asked, signature.inputs))
            return Answered(servable.number, answer_of(outputs, asked.rows))
        except Refused as refused:
            refused.version = servable.number
            raise
        except tf.errors.OpError as error:
            raise refusal_of(error, servable.number) from error


def metadata(model: Model, version: int | None) -> dict[str, object]:
    """The signatures of a version, as TensorFlow Serving tells them.

    Raises:
        Refused: 404, it is not loaded.
    """
    with model.lease(version) as servable:
        return _metadata(model.name, servable)


def _metadata(name: str, servable: Servable) -> dict[str, object]:
    spec = {"name": name, "signature_name": "", "version": str(servable.number)}
    return {"model_spec": spec, "metadata": {"signature_def": {"signature_def": servable.metadata}}}
