"""What `baton serve` refuses before it starts anything."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import baton
from common.supervisor import serve


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--max-model-len=10000000",), "--max-model-len: got 10000000, wanted at most the 8192 tokens"),
        (("--model=EMPTY",), "EMPTY/config.json is missing"),
        (("--model=no-such.gguf",), "model 'no-such.gguf' not found"),
    ],
    ids=lambda value: str(value),
)
def test_an_unusable_model_is_refused_once_and_nothing_is_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    assert baton.main(["serve", "--log-dir=logs", *options]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count(named), shown.err.count("\n")) == ("", 1, 1)
    assert not (tmp_path / "logs").exists()


def test_an_interrupt_while_the_model_is_looked_for_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "find_model", interrupt)
    assert baton.main(["serve"]) == 130
