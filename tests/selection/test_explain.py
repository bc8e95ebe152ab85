"""What `explain` shows of a measured plan: every figure once, equal buckets merged, nobody's reason lost."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pellucid.selection.args import EngineArgs
from pellucid.selection.evidence import Evidence, Measurement
from pellucid.selection.explain import render, render_decision
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.plan_html import plan_html
from pellucid.selection.registry import discover
from pellucid.selection.resolve import resolve
from pellucid.selection.view import op_lines, rows
from tests.selection.models import KIMI_K25, V2_LITE, kinds, machine, plan

NAMES = ("triton_mla", "flashmla", "flashinfer_mla")
BACKENDS = [replace(b, built_in=True, packages=(), needs_compiler=None) if b.name in NAMES else b for b in discover()]
BUCKETS = (1, 2, 4, 8, 16)


def measured(evidence: Evidence) -> ExecutionPlan:
    args = EngineArgs("model", max_num_seqs=16, max_num_batched_tokens=16)
    return resolve(args, V2_LITE, machine("h200"), evidence, backends=BACKENDS)


def evidence_of(times: dict[str, tuple[float, ...]]) -> Evidence:
    return {
        ("attention.decode", bucket, name): Measurement(us * 1e-6, 0.1e-6)
        for name, column in times.items()
        for bucket, us in zip(BUCKETS, column, strict=True)
    }


CROSSING = measured(evidence_of({"triton_mla": (10, 11, 20, 30, 40), "flashmla": (13, 13, 13, 13.1, 13.2)}))


def decode_rows(found: ExecutionPlan):
    return [row for row in rows(found.decisions) if row.op == "attention.decode"]


def test_neighbouring_buckets_with_one_choice_are_one_row_with_every_figure():
    first, second = decode_rows(CROSSING)
    assert (first.title, first.value, first.how) == ("attention.decode@1..2", "triton_mla", "measured")
    assert (second.title, second.value) == ("attention.decode@4..16", "flashmla")
    assert first.table.candidates == ("triton_mla", "flashmla")
    assert [[cell.text for cell in cells] for _, cells in first.table.rows] == [
        ["10.0 ± 0.1 us", "13.0 ± 0.1 us"],
        ["11.0 ± 0.1 us", "13.0 ± 0.1 us"],
    ]
    assert [[cell.mark for cell in cells] for _, cells in second.table.rows] == [["", "*"]] * 3


def test_one_line_of_a_log_names_every_run_of_buckets():
    lines = list(op_lines([d for d in CROSSING.decisions if d.bucket is not None]))
    assert lines == [
        "attention.prefill=triton_mla (default)",
        "attention.decode=triton_mla (measured) at 1..2, flashmla (measured) at 4..16 tokens",
        "moe=triton_fused (default)",
        "linear.bf16=reference (forced by traits)",
    ]


@given(st.lists(st.sampled_from(("triton_mla", "flashmla")), min_size=5, max_size=5))
def test_the_runs_of_a_log_line_hold_each_bucket_once_with_its_choice(values):
    (line,) = op_lines(
        [
            replace(d, value=value)
            for d, value in zip((d for row in decode_rows(CROSSING) for d in row.decisions), values, strict=True)
        ]
    )
    if len(set(values)) == 1:
        assert line == f"attention.decode={values[0]} (measured)"
        return
    said = {}
    for part in line.removeprefix("attention.decode=").removesuffix(" tokens").split(", "):
        value, _, span = part.replace(" (measured)", "").partition(" at ")
        first, _, last = span.partition("..")
        run = [b for b in BUCKETS if int(first) <= b <= int(last or first)]
        assert not said.keys() & set(run)
        said |= dict.fromkeys(run, value)
    assert said == dict(zip(BUCKETS, values, strict=True))


def test_a_loser_names_the_buckets_where_it_lost_and_the_flag_that_forces_it():
    (lost,) = [loser for loser in decode_rows(CROSSING)[1].losers if loser.name == "triton_mla"]
    assert [(m.kind, m.reason, m.remedy) for m in lost.misfits] == [
        ("slower", "fits; measured slower at 4..16", "--attention-backend triton_mla")
    ]


SLOWER = "step.decode@{}: with the measured choices its step takes 560.0 us, by default 500.0 us"
TAKEN_BACK = measured(
    {
        (op, bucket, name): replace(m, taken_back=SLOWER.format(bucket) if bucket in (4, 8) else "")
        for (op, bucket, name), m in evidence_of({"triton_mla": (20,) * 5, "flashmla": (13,) * 5}).items()
    }
)


def test_a_figure_that_was_taken_back_decides_nothing_and_is_not_called_not_measured():
    assert [d.value for row in decode_rows(TAKEN_BACK) for d in row.decisions] == [
        "flashmla",
        "flashmla",
        "triton_mla",
        "triton_mla",
        "flashmla",
    ]
    text = render_decision(TAKEN_BACK, TAKEN_BACK.decision("attention.decode", 8))
    assert text.startswith("attention.decode@8 = triton_mla  (default)")
    assert f"that fit; measured, but taken back: {SLOWER.format(8)}" in text
    assert "not measured" not in text
    assert "13.0 ± 0.1 us !" in text and "20.0 ± 0.1 us *" in text and "! faster, but taken back" in text
    assert kinds(TAKEN_BACK.decision("attention.decode", 8), "flashmla") == {"order"}


def test_the_row_of_several_buckets_says_where_figures_were_taken_back():
    row = decode_rows(TAKEN_BACK)[1]
    assert row.title == "attention.decode@4..8"
    assert f"measured, but taken back at 4..8: {SLOWER.format(4)}" in row.because
    assert [[cell.mark for cell in cells] for _, cells in row.table.rows] == [["*", "!"]] * 2


def test_what_was_taken_back_survives_json_and_is_missing_from_older_plans():
    stored = json.loads(json.dumps(TAKEN_BACK.to_json(), allow_nan=False))
    assert ExecutionPlan.from_json(stored) == TAKEN_BACK
    for decision in stored["decisions"]:
        for one in decision["measured"]:
            del one["taken_back"]
    older = ExecutionPlan.from_json(stored)
    assert not any(m.taken_back for d in older.decisions for m in d.measured)


def test_a_tie_and_a_wrong_result_are_marked():
    evidence = {
        **evidence_of({"triton_mla": (10,) * 5, "flashmla": (9.9,) * 5}),
        ("attention.decode", 1, "flashinfer_mla"): Measurement(1e-6, 0, False, "row 3 differs by 0.4"),
        ("attention.decode", 2, "flashinfer_mla"): Measurement(float("inf"), 0, False, "hangs"),
    }
    found = measured(evidence)
    table = decode_rows(found)[0].table
    assert [cell.mark for cell in table.rows[0][1]] == ["*", "=", ""]
    assert [(cells[2].text, cells[2].right) for _, cells in table.rows[:2]] == [
        ("wrong: row 3 differs by 0.4", False),
        ("wrong: hangs", False),
    ]
    assert table.rows[2][1][2] is None
    (lost,) = [loser for loser in decode_rows(found)[0].losers if loser.name == "flashinfer_mla"]
    reasons = [m.reason for m in lost.misfits]
    assert "fails the numeric gate at 1..2" in reasons
    assert any(reason.endswith("at 4..16") for reason in reasons)


def test_figures_survive_json_that_knows_no_infinity():
    found = measured({("attention.decode", 1, "flashmla"): Measurement(float("inf"), 0, False, "hangs")})
    stored = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert ExecutionPlan.from_json(stored) == found
    for decision in stored["decisions"]:
        del decision["measured"]
    assert not any(d.measured for d in ExecutionPlan.from_json(stored).decisions)


times = st.sampled_from((10.0, 10.1, 12.0, 30.0))
results = st.builds(Measurement, times.map(lambda us: us * 1e-6), st.just(1e-7), st.booleans(), st.just("differs"))
keys = st.tuples(st.just("attention.decode"), st.sampled_from(BUCKETS), st.sampled_from(NAMES))


@given(st.dictionaries(keys, results, max_size=15))
def test_merging_loses_no_decision_no_figure_and_no_candidate(evidence):
    found = measured(evidence)
    shown = rows(found.decisions)
    assert [d for row in shown for d in row.decisions] == list(found.decisions)
    for row in shown:
        assert len({(d.op, d.value, d.how) for d in row.decisions}) == 1
        assert row.because and all(row.because)
        names = {loser.name for loser in row.losers}
        assert all({r.candidate for r in d.rejected} == names for d in row.decisions)
        assert all(loser.misfits and all(m.reason for m in loser.misfits) for loser in row.losers)
        figures = {(d.bucket, m.candidate) for d in row.decisions for m in d.measured}
        table = [] if row.table is None else row.table.rows
        assert figures == {
            (bucket, name)
            for bucket, cells in table
            for name, cell in zip(row.table.candidates, cells, strict=True)
            if cell is not None
        }
        for bucket, cells in table:
            marked = [name for name, c in zip(row.table.candidates, cells, strict=True) if c and c.mark == "*"]
            assert marked in ([row.value], []), bucket


def test_the_text_has_the_table_once_and_its_legend():
    text = render(CROSSING)
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("attention.decode@4..16"))
    table = [line.split() for line in lines[start:] if line.split()[:1] in (["tokens"], ["4"], ["8"], ["16"])][:4]
    assert table[0] == ["tokens", "triton_mla", "flashmla"]
    assert table[1] == ["4", "20.0", "±", "0.1", "us", "13.0", "±", "0.1", "us", "*"]
    assert text.count("* taken, = a tie") == 1
    assert "* taken" not in render(plan(V2_LITE, "h200"))


def test_one_decision_says_where_the_same_holds_and_shows_its_own_figures():
    text = render_decision(CROSSING, CROSSING.decision("attention.decode", 8))
    assert text.startswith("attention.decode@8 = flashmla  (measured)")
    assert "the same for attention.decode@4..16" in text
    assert "30.0 ± 0.1 us" in text and "20.0" not in text
    assert "because measured 13.1 us, triton_mla 30.0 us" in text


def words_of(page: str) -> str:
    from html import unescape
    from re import sub

    return " ".join(unescape(sub(r"<[^>]+>", " ", page.partition("<body>")[2])).split())


def test_the_page_says_what_the_text_says():
    for found in (CROSSING, plan(KIMI_K25, "rtx-pro-6000x8-pcie"), plan(V2_LITE, "cpu")):
        page = words_of(plan_html(found, ("a note",), "heading"))
        for row in rows(found.decisions):
            assert row.title in page
            for text in (*row.because, *(m.reason for x in row.losers if x.far is None for m in x.misfits)):
                assert " ".join(text.split()) in page
        for text in (*found.model, *found.hardware, *(item.formula for item in found.memory.items), "a note"):
            assert " ".join(text.split()) in page
        for blocker in found.blockers:
            assert blocker.reason in page


def test_the_page_fetches_nothing_runs_nothing_and_escapes_what_a_model_says():
    page = plan_html(CROSSING, ("<script>alert(1)</script>",), "<img src=x>")
    assert "<script" not in page and "<img" not in page
    assert "default-src 'none'" in page
    assert 'name="viewport"' in page
    for word in ("http:", "https:", "url(", "@import", " src="):
        assert word not in page.replace("&lt;img src=x&gt;", "")
