"""README tables and the report are what the committed results say."""

from __future__ import annotations

import re
import xml.dom.minidom

import pytest

from bench import facts, report, svg


def test_readme_and_page_are_made_from_the_results() -> None:
    """Fails when README.md or docs/report/ and bench/results/ differ: run `make report`."""
    for path, content in report.wanted_files().items():
        assert path.exists(), path
        assert path.read_text() == content, f"{path.name} differs, run make report"


def test_a_changed_number_is_noticed() -> None:
    wanted = report.wanted_files()[report.README]
    rows = [line for line in wanted.splitlines() if line.startswith("| R1 |")]
    assert len(rows) == 1
    number = rows[0].split("|")[3].split()[0]
    edited = wanted.replace(rows[0], rows[0].replace(number, "0.99", 1))
    assert edited != wanted
    assert report._replace(edited, "speed", "x") == report._replace(wanted, "speed", "x")


def test_missing_markers_are_an_error() -> None:
    with pytest.raises(SystemExit, match="expected the markers"):
        report._replace("# no markers", "speed", "")


def test_every_number_says_static_or_measured() -> None:
    files = report.wanted_files()
    for path, content in files.items():
        if path.suffix == ".svg":
            assert "STATIC ESTIMATES" in content, path
            xml.dom.minidom.parseString(content)
    page = files[report.PAGE / "index.html"]
    assert "MEASURED on" in page
    assert "time, us (static)" in page
    for row in facts.load("static.json")["rows"]:
        assert row["kind"] == "static"
    assert facts.load("overhead.json")["kind"] == "measured"


def test_every_case_and_chip_is_in_the_page() -> None:
    page = report.wanted_files()[report.PAGE / "index.html"]
    for case, chip in report.load_rows():
        assert f"<td>{case}</td>" in page
        assert f"<td>{chip}</td>" in page


def test_best_peer_is_the_fastest() -> None:
    rows = {"ours": {"us": 1.0}, "a": {"us": 3.0}, "b": {"us": 2.0}}
    assert report.best_peer(rows) is rows["b"]
    assert report.best_peer({"ours": {"us": 1.0}}) is None


def test_a_bar_beyond_the_axis_is_cut_and_says_so() -> None:
    figure = svg.bars("t", "s", ("ours", "peer"), [svg.Bar("x", (1.0, 9.0), ("", ""))], 2.0)
    assert "» 9.00" in figure
    widths = [float(w) for w in re.findall(r"x='120' y='[\d.]+' width='([\d.]+)'", figure)]
    assert widths == [305.0, 610.0]
