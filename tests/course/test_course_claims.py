"""The claims ledger: its file keeps to its schema, and its table says what a reader needs."""

from __future__ import annotations

import json

import pytest

from labcore.course.learner import claims
from labcore.course.learner.claims import BrokenLedger, Claim, claim, ledger, ledger_table, load_claims, verify

ENTRY = {
    "id": "reserve",
    "claim": "reserving 2048 slots for a 200-token request wastes over 85 %",
    "verdict": "holds",
    "figure": 90.2,
    "unit": "% of the reserved slots",
    "how": "computed",
    "source": "2048 - 200 of 2048 slots",
    "notebook": "01",
    "command": "",
}


@pytest.fixture
def book(tmp_path, monkeypatch):
    """Write entries as the project's ledger."""

    def write(*entries):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "claims.json").write_text(json.dumps({"format": 1, "claims": entries}))
        monkeypatch.chdir(tmp_path)

    return write


def test_the_projects_ledger_keeps_to_its_schema():
    assert all(isinstance(entry, Claim) for entry in load_claims())


def test_a_claim_has_one_verdict_in_each_notebook():
    verdicts: dict = {}
    for entry in load_claims():
        assert verdicts.setdefault((entry.id, entry.notebook), entry.verdict) == entry.verdict


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"verdict": "perhaps"}, "verdict is 'perhaps'; it must be one of holds"),
        ({"how": "guessed"}, "how is 'guessed'; it must be one of measured, computed, quoted"),
        ({"figure": None}, "figure must be a number or a short text"),
        ({"figure": ""}, "figure must be a number or a short text"),
        ({"figure": True}, "figure must be a number or a short text"),
        ({"id": "Reserve!"}, "id must be small letters"),
        ({"notebook": 1}, "notebook must be a text"),
        ({"notebook": "1"}, "notebook is '1'"),
        ({"source": ""}, "source must not be empty"),
        ({"sorce": "x"}, "fields missing or unknown: sorce"),
        ({"unit": 3}, "unit must be a text"),
    ],
)
def test_each_fault_of_an_entry_is_named(change, sentence):
    problems = verify([ENTRY | change])
    assert any(sentence in problem and problem.startswith("entry 1") for problem in problems), problems


def test_a_missing_field_and_a_double_entry_are_faults():
    without = {key: value for key, value in ENTRY.items() if key != "unit"}
    assert verify([without]) == ["entry 1 ('reserve'): fields missing or unknown: unit"]
    assert verify([ENTRY, ENTRY]) == ["entry 2 ('reserve'): stands in the ledger twice"]
    assert verify([ENTRY, ENTRY | {"how": "quoted"}]) == []
    assert verify([{key: value for key, value in ENTRY.items() if key != "command"}]) == []


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 2, "claims": []}', '{"claims": []}', '{"format": 1, "claims": [7]}']
)
def test_a_broken_file_is_one_clear_error(tmp_path, content):
    (tmp_path / "claims.json").write_text(content)
    with pytest.raises(BrokenLedger, match="^claims.json: "):
        load_claims(tmp_path / "claims.json")


def test_the_table_shows_claim_verdict_figures_and_how_each_was_got(book, capsys):
    book(ENTRY, ENTRY | {"figure": 3.8, "unit": "% with 16-token blocks", "how": "measured"}, ENTRY | {"id": "util"})
    ledger("reserve", "nothing-of-it")
    assert capsys.readouterr().out.splitlines() == [
        "reserve      “reserving 2048 slots for a 200-token request wastes over 85 %”   HOLDS",
        "             computed  90.2 % of the reserved slots — 2048 - 200 of 2048 slots (notebook 01)",
        "             measured  3.8 % with 16-token blocks — 2048 - 200 of 2048 slots (notebook 01)",
        "nothing-of-it is not in the ledger",
    ]
    assert "util" in ledger_table()


def test_a_figure_is_there_to_be_asserted_against(book):
    book(ENTRY, ENTRY | {"figure": 91, "how": "measured"})
    assert claim("reserve").figure == 90.2
    assert claim("reserve", how="measured").figure == 91
    with pytest.raises(KeyError, match="the ledger has no quoted entry for 'reserve'"):
        claim("reserve", how="quoted")


def test_long_claims_are_wrapped():
    table = ledger_table(claims=[Claim(**(ENTRY | {"claim": "word " * 60, "source": "more " * 60}))])
    assert max(map(len, table.splitlines())) <= 120
    assert claims.VERDICTS
