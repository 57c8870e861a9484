from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import GateThresholds
from dflash.data.quality import assess, baseline_of, enforce
from dflash.data.quality_report import Baseline, Finding, QualityReport, printable
from dflash.data.rows import RowFlag
from dflash.data.shards import INDEX_SCHEMA
from dflash.errors import DatasetError, GateError

LIMITS = GateThresholds()


def make_index(loss: Any, output: Any = "same", **columns: Any) -> pa.Table:
    """An index whose rows are sound unless a column says otherwise."""
    loss = np.asarray(loss, np.int32)
    count = len(loss)
    start = columns.pop("start", 0)
    given_output = loss if isinstance(output, str) else output
    values = {
        "sample_id": [f"id-{start + row}" for row in range(count)],
        "source": ["chat"] * count,
        "content_hash": [(start + row).to_bytes(16, "big") for row in range(count)],
        "num_tokens": loss + 40,
        "num_loss_tokens": loss,
        "output_tokens": [None] * count if given_output is None else given_output,
        "finish_reason": ["stop"] * count,
        "flags": np.zeros(count, np.uint16),
        "script": ["latin"] * count,
    } | columns
    arrays = [pa.array(values[field.name], field.type) for field in INDEX_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def judge(*indexes: pa.Table, limits: GateThresholds = LIMITS, **options: Any) -> QualityReport:
    options = {"reject_reasons": {}, "num_records": 0} | options
    return assess(indexes, thresholds=limits, **options)


def failed(report: QualityReport) -> set[str]:
    return {finding.rule for finding in report.failures}


def finding(report: QualityReport, rule: str) -> Finding:
    return next(item for item in report.findings if item.rule == rule)


def lengths(count: int, low: int = 200, high: int = 900, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, count).astype(np.int32)


def incident(count: int = 1000, share: float = 0.87) -> tuple[np.ndarray, np.ndarray]:
    """Lost answers: the mask covers six tokens of scaffold, while the server sampled hundreds."""
    output = lengths(count)
    loss = output.copy()
    loss[: int(count * share)] = 6
    order = np.random.default_rng(3).permutation(count)
    return loss[order], output[order]


class TestTheIncident:
    def test_six_tokens_in_most_rows_is_stopped_by_every_rule_that_can_see_it(self) -> None:
        loss, output = incident()
        report = judge(make_index(loss, output))
        assert failed(report) == {"single_loss_count", "tiny_mask", "median_ratio", "ratio_mismatch"}
        single = finding(report, "single_loss_count")
        assert (single.value, single.count) == (0.87, 870)
        assert "most often 6" in single.title
        assert report.top_loss_counts[0].num_loss_tokens == 6
        assert report.top_loss_counts[0].num_unexplained == 870

    def test_examples_are_ten_of_the_affected_rows_spread_over_the_batch(self) -> None:
        loss, output = incident()
        examples = finding(judge(make_index(loss, output)), "single_loss_count").examples
        rows = [int(name.removeprefix("id-")) for name in examples]
        assert len(set(rows)) == 10
        assert all(loss[row] == 6 for row in rows)
        assert rows[0] < 100
        assert rows[-1] > 900

    def test_it_is_stopped_without_output_tokens_too(self) -> None:
        loss, _ = incident()
        assert failed(judge(make_index(loss, None))) == {"single_loss_count", "tiny_mask"}

    @pytest.mark.parametrize("count", [3, 10, 40])
    def test_a_small_batch_is_stopped(self, count: int) -> None:
        loss, output = incident(count)
        assert "ratio_mismatch" in failed(judge(make_index(loss, output)))
        assert "tiny_mask" in failed(judge(make_index(loss, None)))

    def test_six_percent_lost_is_stopped(self) -> None:
        loss, output = incident(share=0.06)
        assert {"single_loss_count", "tiny_mask", "ratio_mismatch"} <= failed(judge(make_index(loss, output)))

    def test_output_tokens_that_disagree_are_stopped_however_the_mask_looks(self) -> None:
        loss = lengths(500)
        report = judge(make_index(loss, loss + 60))
        assert failed(report) == {"median_ratio", "ratio_mismatch"}
        assert finding(report, "ratio_mismatch").value == 1.0

    def test_disagreement_is_judged_among_the_rows_that_have_a_count(self) -> None:
        loss = lengths(1000)
        output: list[int | None] = [None] * 1000
        output[:30] = [int(value) * 3 for value in loss[:30]]
        assert failed(judge(make_index(loss, output))) == {"median_ratio", "ratio_mismatch"}


class TestWhatIsRightPasses:
    def test_a_sound_batch(self) -> None:
        loss = lengths(1000)
        report = judge(make_index(loss), make_index(lengths(10, seed=1), start=1000))
        assert report.passed
        assert (report.num_rows, report.num_loss_tokens) == (1010, int(loss.sum() + lengths(10, seed=1).sum()))
        assert report.rows.confirmed == 1010
        assert enforce(report, LIMITS) is None

    @pytest.mark.parametrize("count", [1, 2, 4, 12])
    def test_a_tiny_sound_batch(self, count: int) -> None:
        assert judge(make_index(lengths(count), None)).passed

    def test_equal_counts_that_the_server_confirms(self) -> None:
        capped = np.full(1000, 128)
        flags = np.full(1000, RowFlag.LENGTH_CUT)
        report = judge(make_index(capped, flags=flags), limits=GateThresholds(max_length_cut_share=1))
        assert report.passed
        assert report.top_loss_counts[0].num_unexplained == 0

    def test_one_word_answers_with_sampled_ids(self) -> None:
        assert judge(make_index(np.full(100, 2), None, flags=np.full(100, RowFlag.SAMPLED_IDS))).passed

    def test_the_servers_cap_explains_equal_counts_without_output_tokens(self) -> None:
        loss = lengths(1000)
        loss[:200] = 900
        flags = np.where(np.arange(1000) < 200, RowFlag.LENGTH_CUT, 0)
        assert judge(make_index(loss, None, flags=flags)).passed
        assert failed(judge(make_index(loss, None))) == {"single_loss_count"}

    def test_rows_cut_at_the_window_are_compared_apart(self) -> None:
        output = lengths(1000)
        loss = np.where(np.arange(1000) < 150, output // 2, output)
        flags = np.where(np.arange(1000) < 150, RowFlag.WINDOW_CUT, 0)
        report = judge(make_index(loss, output, flags=flags))
        assert report.passed
        assert (report.ratio.num_rows, report.window_cut_ratio.num_rows) == (850, 150)
        assert report.window_cut_ratio.median == pytest.approx(0.5, abs=0.01)

    def test_whitespace_that_the_template_trimmed_is_no_mismatch(self) -> None:
        loss = np.full(300, 20)
        table = make_index(loss, loss + 1, flags=np.full(300, RowFlag.VERBATIM_WHITESPACE))
        report = judge(table, limits=GateThresholds(min_median_ratio=0.9))
        assert report.passed
        assert report.rows.verbatim_whitespace == 300

    def test_few_equal_rows_by_chance(self) -> None:
        loss = lengths(20)
        loss[:4] = 300
        assert judge(make_index(loss, None)).passed
        loss[:5] = 300
        assert failed(judge(make_index(loss, None))) == {"single_loss_count"}


FLAG_RULES = [
    ("length_cut", RowFlag.LENGTH_CUT, 0.30),
    ("window_cut", RowFlag.WINDOW_CUT, 0.20),
    ("thinking_only", RowFlag.THINKING_ONLY, 0.05),
    ("undecodable", RowFlag.UNDECODABLE, 0.01),
]


class TestEachRule:
    @pytest.mark.parametrize(("rule", "flag", "limit"), FLAG_RULES)
    def test_flags_are_allowed_up_to_their_share(self, rule: str, flag: RowFlag, limit: float) -> None:
        loss = lengths(1000)
        for extra, expected in ((0, set()), (1, {rule})):
            flags = np.where(np.arange(1000) < limit * 1000 + extra, flag, 0)
            report = judge(make_index(loss, flags=flags))
            assert failed(report) == expected
            assert finding(report, rule).count == limit * 1000 + extra

    def test_a_trace_that_the_server_cut_is_counted_as_cut_alone(self) -> None:
        flags = np.where(np.arange(1000) < 200, RowFlag.THINKING_ONLY | RowFlag.LENGTH_CUT, 0)
        report = judge(make_index(lengths(1000), flags=flags))
        assert report.passed
        assert report.rows.thinking_only == 200
        assert finding(report, "thinking_only").count == 0

    def test_duplicate_ids_and_contents_across_shards(self) -> None:
        first, again = make_index(lengths(50)), make_index(lengths(3))
        report = judge(first, again)
        assert failed(report) == {"duplicate_ids", "duplicate_content"}
        assert finding(report, "duplicate_ids").count == 3
        assert finding(report, "duplicate_ids").examples == ("id-0", "id-1", "id-2")
        moved = make_index(lengths(3), start=0, sample_id=["x", "y", "z"])
        assert failed(judge(first, moved)) == {"duplicate_content"}

    def test_a_limit_of_zero_allows_not_one(self) -> None:
        report = judge(make_index(lengths(50)), make_index([300]), limits=GateThresholds(max_duplicate_share=0))
        assert "duplicate_ids" in failed(report)

    def test_each_reject_reason_and_all_together(self) -> None:
        rejects = {"empty_response": 40, "bad_json": 20}
        report = judge(
            make_index(lengths(940)),
            reject_reasons=rejects,
            num_records=1000,
            reject_examples={"empty_response": ["a.jsonl:3"], "bad_json": ["a.jsonl:9"]},
        )
        assert failed(report) == {"empty", "rejected", "rejected:empty_response"}
        assert finding(report, "rejected:empty_response").examples == ("a.jsonl:3",)
        assert finding(report, "rejected").value == 0.06
        assert report.num_rejected == 60

    def test_nothing_but_rejects(self) -> None:
        report = judge(reject_reasons={"bad_json": 5}, num_records=5)
        assert failed(report) == {"min_rows", "rejected", "rejected:bad_json"}
        assert report.ratio.median is None

    def test_mix_against_the_current_version(self) -> None:
        table = make_index(lengths(200), script=["latin"] * 190 + ["han"] * 10)
        same = Baseline(sources={"chat": 5000}, scripts={"latin": 4700, "han": 300})
        assert judge(table, baseline=same).passed
        other = Baseline(sources={"code": 5000}, scripts={"cyrillic": 5000})
        report = judge(table, baseline=other)
        assert failed(report) == {"script_mix"}
        assert finding(report, "source_mix").value == 1.0
        strict = judge(table, baseline=other, limits=GateThresholds(max_source_shift=0.5))
        assert failed(strict) == {"source_mix", "script_mix"}

    def test_a_small_batch_of_many_sources_is_not_shifted_by_chance(self) -> None:
        baseline = Baseline(sources={f"s{number}": 100 for number in range(50)}, scripts={"latin": 5000})
        table = make_index(lengths(10), source=[f"s{number}" for number in range(0, 50, 5)])
        assert judge(table, baseline=baseline).passed

    def test_a_source_of_its_own_in_every_record_is_no_mix(self) -> None:
        table = make_index(lengths(3000), source=[f"https://example.org/{row}" for row in range(3000)])
        report = judge(table, baseline=Baseline(sources={"(other)": 2000, "x": 1}, scripts={"latin": 9}))
        assert report.passed
        assert len(report.mix.sources) == 1001
        assert sum(report.mix.sources.values()) == 3000


class TestReportAsContract:
    def test_round_trip_and_the_next_baseline(self) -> None:
        before = Baseline(sources={"chat": 10, "code": 5}, scripts={"latin": 15})
        report = judge(make_index(lengths(20)), baseline=before)
        assert QualityReport.from_bytes(report.to_bytes(), "report") == report
        merged = baseline_of(report.model_dump(mode="json"))
        assert merged == Baseline(sources={"chat": 30, "code": 5}, scripts={"latin": 35})
        assert baseline_of({}) is None

    def test_a_damaged_report_is_refused(self) -> None:
        quality = judge(make_index(lengths(20))).model_dump(mode="json")
        with pytest.raises(DatasetError, match="findings contradict"):
            baseline_of(quality | {"passed": False})

    def test_an_index_of_another_schema_is_refused(self) -> None:
        with pytest.raises(DatasetError, match="index 1 of the batch has another schema"):
            judge(make_index(lengths(3)), make_index(lengths(3)).drop_columns(["flags"]))

    @given(cuts=st.lists(st.integers(0, 60), max_size=4), seed=st.integers(0, 50))
    @settings(max_examples=25, deadline=None)
    def test_sharding_changes_nothing(self, cuts: list[int], seed: int) -> None:
        loss = lengths(60, 2, 30, seed)
        table = make_index(loss, np.where(loss % 3 == 0, loss, loss + 1))
        bounds = [0, *sorted(cuts), 60]
        parts = [table.slice(start, end - start) for start, end in itertools.pairwise(bounds)]
        assert judge(*parts) == judge(table)


class TestEnforce:
    def test_the_error_names_rule_numbers_cause_and_examples(self) -> None:
        loss, output = incident()
        with pytest.raises(GateError) as caught:
            enforce(judge(make_index(loss, output)), LIMITS)
        text = str(caught.value)
        assert "4 of" in text
        assert "single_loss_count" in text
        assert "found 87.00 %, allowed at most 5.00 %" in text
        assert "Look at:" in text
        assert "id-" in text
        assert caught.value.exit_code == 3

    def test_an_override_is_given_back_only_where_it_was_needed(self) -> None:
        limits = GateThresholds(override_reason="short answers are wanted here")
        loss, output = incident()
        assert enforce(judge(make_index(loss, output)), limits) == "short answers are wanted here"
        assert enforce(judge(make_index(lengths(50))), limits) is None

    def test_hostile_ids_can_not_steer_a_terminal(self) -> None:
        loss, output = incident(20)
        ids = [f"\x1b[2J\n\u202e{row}" + "x" * 5000 for row in range(20)]
        with pytest.raises(GateError) as caught:
            enforce(judge(make_index(loss, output, sample_id=ids)), LIMITS)
        assert "\x1b" not in str(caught.value)
        assert "\\x1b[2J\\n\\u202e" in str(caught.value)
        assert len(str(caught.value)) < 20_000

    def test_printable_keeps_letters_of_any_script(self) -> None:
        assert printable("हिन्दी 漢字 ok") == "हिन्दी 漢字 ok"
