"""What every API of the gateway is built on."""

from dataclasses import dataclass

from common.errors import RequestError
from common.metrics import GatewayMetrics
from gateway.backend import Backend
from gateway.served_model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may ask for.

    client_timeout_s: a client that neither sends the rest of its body nor reads for so long is given up
    max_stop_strings: OpenAI has 4; evaluation harnesses send more
    """

    max_body_bytes: int = 32 * 2**20
    client_timeout_s: float = 30.0
    max_stop_strings: int = 16
    max_prompts: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """Passed to the handlers of every API."""

    backend: Backend
    model: ServedModel
    limits: Limits
    metrics: GatewayMetrics

    def check_model(self, name: str | None) -> None:
        """None and "" mean the only model there is. Raises: RequestError 404."""
        if name and name != self.model.name:
            raise RequestError(
                404, f"The model `{name}` does not exist.", "not_found_error", code="model_not_found", param="model"
            )
