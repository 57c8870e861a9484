from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import GateThresholds
from dflash.data.quality import baseline_of, enforce
from dflash.data.quality_report import Baseline, QualityReport, printable
from dflash.data.report import render_html, render_markdown
from dflash.data.rows import RowFlag
from dflash.errors import DatasetError, GateError
from tests.data.gate_batches import LIMITS, failed, finding, incident, judge, lengths, make_index


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

    def test_what_the_window_left_is_shown_where_it_cut(self) -> None:
        output = np.full(1000, 400) + np.arange(1000)
        flags = np.where(np.arange(1000) < 150, RowFlag.WINDOW_CUT, 0)
        report = judge(make_index(np.where(flags != 0, output // 4, output), output, flags=flags))
        median = f"{report.window_cut_ratio.median:.3f}"
        for text in (render_html(report, "batch"), render_markdown(report)):
            shown = text.replace("\\", "").partition("Loss tokens / output_tokens of rows cut at max_seq_len")[2]
            assert "150" in shown[:200]
            assert median in shown[:250]
        assert "rows cut at max_seq_len" not in render_html(judge(make_index(output)), "batch")

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


class TestAllTurns:
    """The loss tokens are those of every turn; the server's count is the last one's alone."""

    def test_a_sound_batch_passes_with_exact_masks(self) -> None:
        output = lengths(1000)
        report = judge(make_index((output * 2.7).astype(int), output, all_turns=True))
        assert failed(report) == set()
        assert (report.ratio.median, report.ratio.high) == (1.0, 1.0)
        assert (report.rows.equal_output_tokens, report.rows.confirmed) == (1000, 1000)

    def test_lost_last_turns_are_stopped(self) -> None:
        lost, output = incident()
        flags = np.where(lost == 6, RowFlag.OUTPUT_MISMATCH, 0)
        report = judge(make_index(lost + lengths(1000, seed=9), output, flags=flags, all_turns=True))
        assert "ratio_mismatch" in failed(report)
        assert report.rows.equal_output_tokens == 130

    def test_earlier_turns_make_no_mismatch_of_trimmed_whitespace(self) -> None:
        output = lengths(300)
        flags = np.full(300, RowFlag.OUTPUT_MISMATCH | RowFlag.VERBATIM_WHITESPACE)
        report = judge(make_index(output * 3, output, flags=flags, all_turns=True))
        assert failed(report) == set()
        assert (report.rows.equal_output_tokens, report.rows.confirmed) == (0, 300)

    def test_a_row_that_the_window_left_almost_nothing_of_is_tiny_though_it_agreed(self) -> None:
        output = lengths(100)
        loss = np.where(np.arange(100) < 10, 3, output)
        report = judge(make_index(loss, output, flags=np.where(loss == 3, RowFlag.WINDOW_CUT, 0)))
        assert failed(report) == {"tiny_mask"}
        assert report.rows.equal_output_tokens == 90


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
