"""The regression gate: key cases must cost no more than results/gate.json says."""

from __future__ import annotations

import functools

import pytest

from bench import facts, gate


@functools.cache
def measured() -> gate.Values:
    return gate.measure()


@pytest.mark.xdist_group("bench_gate")  # one compilation of all of them
@pytest.mark.parametrize(("chip", "case"), gate.KEY_CASES)
def test_no_case_got_worse(chip: str, case: str) -> None:
    name = f"{chip} {case}"
    committed = facts.load(gate.RESULT)["cases"]
    now = {name: measured()[name]}
    assert gate.problems(now, {name: committed[name]}) == []


def test_the_gate_covers_every_kernel() -> None:
    committed = facts.load(gate.RESULT)["cases"]
    assert set(committed) == {f"{chip} {case}" for chip, case in gate.KEY_CASES}
    assert len(committed) >= 12
    assert {case[0] for _, case in gate.KEY_CASES} == set("REANQ")


def test_more_than_three_percent_worse_is_named() -> None:
    committed = {"v6e R1": {"schedule_cycles": 1000, "hbm_bytes": 5000}}
    slower = {"v6e R1": {"schedule_cycles": 1031, "hbm_bytes": 5000}}
    larger = {"v6e R1": {"schedule_cycles": 900, "hbm_bytes": 5200}}
    assert gate.problems(slower, committed) == ["v6e R1: schedule_cycles 1000 -> 1031, +3.1%"]
    assert gate.problems(larger, committed) == ["v6e R1: hbm_bytes 5000 -> 5200, +4.0%"]
    close = {"v6e R1": {"schedule_cycles": 1029, "hbm_bytes": 4000}}
    assert gate.problems(close, committed) == []


def test_a_case_that_vanished_or_broke_is_named() -> None:
    committed = {"v6e R1": {"schedule_cycles": 1000, "hbm_bytes": 5000}}
    assert gate.problems({}, committed) == ["v6e R1: does not compile: was not compiled"]
    broken = {"v6e R1": {"error": "out of VMEM"}}
    assert gate.problems(broken, committed) == ["v6e R1: does not compile: out of VMEM"]
    unknown = {"v5e N1": {"schedule_cycles": 1, "hbm_bytes": 1}, **committed}
    assert "no committed value" in gate.problems(unknown, committed)[0]
