"""An evaluation as a table: one layout for the terminal, the run's artifact and the model card."""

from __future__ import annotations

from dflash.eval.record import EvaluationRecord
from dflash.eval.report import OVERALL, AcceptanceReport, GroupReport

HEADERS = ("source", "prompts", "rounds", "tau", "tokens/s", "plain", "speed", "draft/verify", "identical")


def tau_rows(report: AcceptanceReport) -> list[tuple[str, ...]]:
    """A row for all prompts together, then one for each source, as `HEADERS` names the columns."""
    names = [OVERALL, *(name for name in report.groups if name != OVERALL)]
    return [_row(name, report.groups[name]) for name in names]


def acceptance_rows(report: AcceptanceReport) -> list[tuple[str, ...]]:
    """For slot k = 1.., the share of rounds that accepted it and all slots before it."""
    return [(str(slot), f"{share:.1%}") for slot, share in enumerate(report.groups[OVERALL].acceptance, start=1)]


def losslessness(report: AcceptanceReport) -> str:
    """One sentence on equality with the target's own greedy ids."""
    overall = report.groups[OVERALL]
    if overall.num_identical is None:
        return "Equality with plain decoding was not looked at" + (
            ": sampled sequences differ by chance." if report.temperature else "."
        )
    text = f"Identical to the target's own greedy ids: {overall.num_identical} of {overall.num_prompts}."
    if not report.divergences:
        return text
    first = report.divergences[0]
    largest = max(one.logit_gap for one in report.divergences)
    return (
        f"{text} First divergence: prompt {first.prompt_id}, new token {first.index}, id {first.plain} against "
        f"{first.speculative}, where the likeliest id led by {first.logit_gap:.4g} logits (largest such gap "
        f"{largest:.4g}; a small one is a near tie that rounding flips, a large one a fault)."
    )


def markdown(record: EvaluationRecord) -> str:
    """The whole evaluation as Markdown."""
    report, prompts = record.report, record.prompts
    thinking = ", ".join(f"{name} {count}" for name, count in prompts.thinking.items())
    sampling = "greedy" if not report.temperature else f"temperature {report.temperature:g}"
    held_out = f"none of them in {prompts.checked_against}" if prompts.checked_against else "not checked for leaks"
    return "\n".join(
        (
            f"tau {record.tau:.3f}: {report.definition}; {sampling}, at most {report.max_new_tokens} new tokens.",
            "",
            markdown_table(HEADERS, tau_rows(report)),
            "",
            losslessness(report),
            "",
            f"{prompts.num_prompts} prompts ({held_out}), thinking: {thinking}.",
            "",
            markdown_table(("slot", "accepted"), acceptance_rows(report)),
        )
    )


def markdown_table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; pipes in cells are escaped."""
    lines = [headers, tuple("---" for _ in headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _row(name: str, group: GroupReport) -> tuple[str, ...]:
    plain, identical = group.plain_tokens_per_s, group.num_identical
    return (
        name,
        str(group.num_prompts),
        str(group.num_rounds),
        f"{group.tau:.3f}",
        f"{group.tokens_per_s:.1f}",
        "-" if plain is None else f"{plain:.1f}",
        f"{group.tokens_per_s / plain:.2f}x" if plain else "-",
        f"{group.draft_share:.0%}/{group.verify_share:.0%}",
        "-" if identical is None else f"{identical} of {group.num_prompts}",
    )
