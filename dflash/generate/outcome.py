"""How a run of a batch ended, and what that means for the batch."""

from __future__ import annotations

from dataclasses import dataclass

from dflash.errors import DatasetError
from dflash.generate.config import GenerateRun


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        is_complete: `_SUCCESS` is there.
        num_prompts: prompts in all.
        num_records: records in the batch.
        num_new: records that this run made.
        num_failed: prompts without a record that were given up.
        num_open: prompts without a record that this run did not give up.
        failures: URI of the list of failed prompts, if any.
        tries: requests made.
        kinds: failed tries by kind.
        output_tokens: of this run.
        seconds: of this run.
    """

    is_complete: bool
    num_prompts: int
    num_records: int
    num_new: int
    num_failed: int
    num_open: int
    failures: str | None
    tries: int
    kinds: dict[str, int]
    output_tokens: int
    seconds: float

    @property
    def failed_share(self) -> float:
        """Failed prompts among all."""
        return self.num_failed / self.num_prompts

    def may_complete(self, run: GenerateRun) -> bool:
        """Whether every prompt has a record or failed within the limit."""
        return not self.num_open and self.failed_share <= run.max_failed_share

    def require_complete(self, run: GenerateRun) -> None:
        """Refuse what isn't.

        Raises:
            DatasetError: too many prompts failed, or some were not tried; says how to go on.
        """
        if self.num_open:
            raise DatasetError(
                f"{self.num_open} of {self.num_prompts} prompts were not tried in {run.batch}: the run was stopped, or "
                "only the failed ones were asked for. Run it again without only_failed."
            )
        if not self.may_complete(run):
            raise DatasetError(
                f"{self.num_failed} of {self.num_prompts} prompts failed ({100 * self.failed_share:.3f} %, allowed "
                f"{100 * run.max_failed_share:.3f} %); failed tries: {self.kinds}. {run.batch} is not complete. They "
                f"are listed in {self.failures}: run this again with --only-failed, or raise max_failed_share."
            )
