from __future__ import annotations

import numpy as np
import pytest

from dflash.config import GateThresholds
from dflash.data.quality_report import Baseline
from dflash.data.rows import RowFlag
from tests.data.gate_batches import failed, finding, judge, lengths, make_index

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

    def test_five_cut_files_among_many_records_are_stopped(self) -> None:
        report = judge(
            make_index(lengths(1000)),
            reject_reasons={"truncated_file": 5},
            num_records=900_000,
            reject_examples={"truncated_file": ["a.jsonl.gz:9", "b.jsonl.gz:7"]},
        )
        assert failed(report) == {"damaged_files"}
        damaged = finding(report, "damaged_files")
        assert (damaged.value_text, damaged.limit_text) == ("5 files", "at most 0 files")
        assert damaged.examples == ("a.jsonl.gz:9", "b.jsonl.gz:7")
        assert "max_damaged_files" in damaged.look_at

    @pytest.mark.parametrize(("limit", "expected"), [(2, {"damaged_files"}), (3, set())])
    def test_each_kind_of_damage_counts_up_to_the_limit(self, limit: int, expected: set[str]) -> None:
        rejects = {"truncated_file": 1, "corrupt_stream": 1, "file_too_large": 1, "torn_line": 1}
        limits = GateThresholds(max_damaged_files=limit)
        report = judge(make_index(lengths(1000)), limits=limits, reject_reasons=rejects, num_records=1004)
        assert failed(report) == expected
        assert finding(report, "damaged_files").count == 3

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
