"""Log lines: text and JSON."""

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.log import set_up_logging
from common.machine import num_available_cores


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging is one for the whole process: put back what was there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings():
        yield
        logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_text_line_has_time_level_service_logger_and_message() -> None:
    out = io.StringIO()
    set_up_logging("decode-0", "info", "text", out)
    logging.getLogger("decode.service").info("block %d", 7)
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    decode-0 decode\.service: block 7\n"
    assert re.fullmatch(pattern, out.getvalue())


def test_a_json_line_is_one_object_even_with_an_exception() -> None:
    out = io.StringIO()
    set_up_logging("decode-0", "info", "json", out)
    try:
        raise ValueError("line\nbreak")
    except ValueError:
        logging.getLogger("decode.service").exception("failed")
    (line,) = out.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["service"], entry["message"]) == ("error", "decode-0", "failed")
    assert "ValueError: line\nbreak" in entry["exception"]


def test_less_severe_lines_than_asked_for_are_left_out() -> None:
    out = io.StringIO()
    set_up_logging("gateway", "warning", "text", out)
    logging.getLogger("x").info("quiet")
    assert out.getvalue() == ""


def test_python_warnings_are_logged() -> None:
    out = io.StringIO()
    set_up_logging("gateway", "info", "text", out)
    warnings.simplefilter("always")
    warnings.warn("old ways", stacklevel=1)
    assert "WARNING gateway py.warnings" in out.getvalue()


@pytest.mark.parametrize(("cpu_max", "num_cores"), [("100000 100000", 1), ("50000 100000", 1)])
def test_a_containers_quota_limits_the_cores(tmp_path: Path, cpu_max: str, num_cores: int) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max + "\n")
    assert num_available_cores(tmp_path / "cpu.max") == num_cores


def test_without_a_quota_all_cores_count(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_available_cores(tmp_path / "cpu.max") == num_available_cores(tmp_path / "missing") >= 1
