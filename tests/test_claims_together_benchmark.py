"""`benchmarks/claims_together.py`: what several recorded runs of claims say together."""

import json
import math
import sys

import claims
import claims_together
import pytest

from autotune.measure.intervals import log_interval


def compared(claimed, measured, half_width=0.05):
    """A claim beside its long trainings, both with intervals of the same relative width."""
    both = [
        log_interval(each, each / math.exp(half_width), each * math.exp(half_width))
        for each in (claimed, measured)
    ]
    return claims.Comparison(claim=both[0], long=both[1])


def test_a_bias_that_no_single_claim_shows_is_seen_in_all():
    """Eight claims that are 5 or 6% too high, each well within its errors: together 1 is outside of the interval."""
    found = claims_together.figures([compared(2.0 * each, 2.0) for each in (1.05, 1.06) * 4])
    bias = found["claim / long, geometric mean"]
    assert found["share of claims that agree"]["value"] == 1.0
    assert bias["value"] == pytest.approx(1.055, abs=1e-3)
    assert bias["ci95"][0] > 1.04


def test_errors_that_claims_understate_are_seen():
    """Differences of three of their standard errors, to either side: no bias, three times what intervals say."""
    error = math.hypot(0.05, 0.05) / 1.96
    found = claims_together.figures([compared(2.0 * math.exp(3 * sign * error), 2.0) for sign in (1, -1) * 4])
    low, high = found["claim / long, geometric mean"]["ci95"]
    assert low < 1 < high
    spread = found["differences in their errors, root mean square"]
    assert spread["value"] == pytest.approx(3.0)
    assert spread["ci95"][0] > 1.5


def test_recorded_runs_are_read_as_they_were_printed(tmp_path, capsys, monkeypatch):
    """What failed disagrees and is in no other figure, what claims nothing is left out; two files are one table."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    good, far = compared(2.0, 2.02), compared(2.0, 3.0)
    claims.write("claims", claims.figures({"a": good, "b": claims.Comparison(counts=False)}), files[0])
    failed = claims.Comparison(claim=good.claim, remark="failed: exit code 1")
    claims.write("claims", claims.figures({"a": far, "c": failed}), files[1])
    monkeypatch.setattr(sys, "argv", ["x", *map(str, files), "--json", str(tmp_path / "all.json")])
    claims_together.main()
    found = json.loads((tmp_path / "all.json").read_text())["figures"]
    assert found["share of claims that agree"]["value"] == pytest.approx(1 / 3)
    assert found["share of claims that agree"]["count"] == 3
    assert found["median miss"]["count"] == 2
    assert found["median miss"]["value"] == pytest.approx((0.01 + 0.5) / 2)
    assert "claim / long, geometric mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        '{"benchmark": "racing", "figures": {}}',
        '{"benchmark": "claims", "figures": {}}',
    ],
)
def test_another_file_is_refused_by_name(text, tmp_path):
    """One line that says which file, and what it should be."""
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=r"other\.json is not what benchmarks/claims\.py --json writes"):
        claims_together.comparisons_in(file)
