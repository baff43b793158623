"""The interval between checkpoints, by the arithmetic of Young and Daly."""

import random

import pytest

from tests.benchmarks import Helper


@pytest.mark.parametrize(("mean", "save"), [(86400.0, 300.0), (1825.0, 0.5), (600.0, 60.0)])
def test_no_other_interval_is_of_more_use_than_dalys(helper: Helper, mean: float, save: float) -> None:
    found = helper("failures").Failures(mean, save, 100.0)
    best = max(found.of_use(found.daly_seconds * factor) for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0))
    assert best < found.of_use(found.daly_seconds) < 1
    assert found.of_use(found.daly_seconds) >= found.of_use(found.young_seconds)


def test_what_is_of_use_is_that_of_a_job_that_fails_at_random(helper: Helper) -> None:
    mean, save, restart, interval = 1000.0, 40.0, 150.0, 250.0
    draw, elapsed, saved = random.Random(0), 0.0, 0
    while saved < 20_000:
        if (lives := draw.expovariate(1 / mean)) >= interval + save:
            elapsed, saved = elapsed + interval + save, saved + 1
            continue
        elapsed += lives
        while (lives := draw.expovariate(1 / mean)) < restart:
            elapsed += lives
        elapsed += restart
    found = helper("failures").Failures(mean, save, restart)
    assert saved * interval / elapsed == pytest.approx(found.of_use(interval), rel=0.02)


def test_llama_405b_failed_every_three_hours(helper: Helper, capsys: pytest.CaptureFixture[str]) -> None:
    """arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days."""
    failures = helper("failures")
    given = failures.parse_arguments(["--params", "405e9"])
    assert failures.failures_of(given, 16384).mean_seconds == pytest.approx(54 * 86400 / 419)
    assert failures.main(["--params", "405e9", "--devices", "100000"]) == 0
    assert "100,000" in capsys.readouterr().out


def test_a_rate_of_nothing_is_refused(helper: Helper, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        helper("failures").main(["--params", "1e9", "--write", "0"])
    assert "--write: expected more than 0, found 0" in capsys.readouterr().err
