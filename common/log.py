"""One line per event on stderr, with the name of the service in it, as text or as JSON."""

import json
import logging
import sys
import time
from typing import Literal, TextIO


class _TextFormatter(logging.Formatter):
    """`12:00:01.234 INFO    decode-0 decode.service: message`, dates in UTC."""

    converter = time.gmtime

    def __init__(self, service: str) -> None:
        text = f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {service.replace('%', '%%')} %(name)s: %(message)s"
        super().__init__(text, datefmt="%Y-%m-%dT%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    """The same as one JSON object: time, level, service, logger, message and, if there is one, exception."""

    converter = time.gmtime

    def __init__(self, service: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(
    service: str,
    level: Literal["debug", "info", "warning", "error"],
    log_format: Literal["text", "json"],
    stream: TextIO = sys.stderr,
) -> None:
    """Send everything that is logged in this process, Python's warnings included, to the stream; replaces handlers.

    service: the name that every line carries
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_TextFormatter(service) if log_format == "text" else _JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
