"""What people do in the Prefect UI, done by a browser; its pictures illustrate the README.

`make test-ui` runs it: it needs Playwright from PyPI and Debian's Chromium, and takes minutes.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflash.storage import open_store

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from embedded.stack import StackConnection

CHROMIUM = Path("/usr/bin/chromium")
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
TOKENIZER = ".dflash/models/smollm2-tokenizer"
SUBMITS = 40  # five seconds apart
WAIT_MS = 180_000  # for an element: on a busy machine the page alone takes a minute
RUN_TIMEOUT_MS = 400_000

pytestmark = [
    pytest.mark.ui,
    pytest.mark.slow,
    # A string, which sees the command line, and is looked at before the stack is started.
    pytest.mark.skipif("'ui' not in config.getoption('-m')", reason="a browser test, run by `make test-ui`"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None or not CHROMIUM.exists(),
        reason="needs Playwright and Debian's Chromium: run `make test-ui`",
    ),
]


@pytest.fixture
def page() -> Iterator[Page]:
    """A browser window that asks nothing outside."""
    from playwright.sync_api import sync_playwright

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=options)
        page = browser.new_page(viewport={"width": 1440, "height": 760}, reduced_motion="reduce")
        page.set_default_timeout(WAIT_MS)
        yield page
        browser.close()


def put_batch(stack: StackConnection, records: list[dict[str, Any]]) -> str:
    """Twelve files on the object store, the eighth of which is no text; returns their folder."""
    uri = f"s3://{stack.bucket}/completions/2026-11-30"
    store = open_store(uri, stack.s3)
    for number in range(12):
        data = _lines(records[30 * number : 30 * number + 30]) if number != 7 else b"\xff\x00 cut off in transfer\n"
        store.put_if_absent(f"part-{number:05d}.jsonl", data)
    return uri


def mend_batch(stack: StackConnection, uri: str, records: list[dict[str, Any]]) -> None:
    """Replace the damaged file by what it should have been."""
    store = open_store(uri, stack.s3)
    etag = store.head("part-00007.jsonl").etag
    store.replace("part-00007.jsonl", _lines(records[210:240]), if_match=etag)


def _lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def field(page: Page, label: str) -> Locator:
    """The input of a form field by its label."""
    named = f"starts-with(normalize-space(.), '{label}')"
    own_class = "contains(concat(' ', @class, ' '), ' schema-form-property ')"
    place = f"//span[contains(@class, 'schema-form-property__label') and {named}]/ancestor::div[{own_class}][1]"
    return page.locator(f"xpath={place}//*[self::textarea or self::input]").first


def visit(page: Page, url: str) -> None:
    """Open a page without waiting for all it loads; whoever looks for an element waits for that."""
    page.goto(url, wait_until="commit")


def picture(page: Page, name: str) -> None:
    """Save what the window shows."""
    page.wait_for_timeout(1_500)  # charts and fonts are drawn without any mark in the page
    IMAGES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=IMAGES / f"{name}.png")


def submit(page: Page) -> str:
    """Press Submit; return the flow run's id. A busy server on SQLite may answer 503: a person presses again."""
    for _ in range(SUBMITS):
        with page.expect_response("**/create_flow_run") as created:
            page.get_by_role("button", name="Submit", exact=True).click()
        if created.value.ok:
            return str(created.value.json()["id"])
        page.wait_for_timeout(5_000)
    pytest.fail(f"the server refused the run: {created.value.status} {created.value.text()}")


def wait_for_state(page: Page, state: str) -> None:
    """Wait until the page of a flow run shows a state; the page asks the server by itself."""
    page.locator(".state-badge", has_text=state).first.wait_for(timeout=RUN_TIMEOUT_MS)


def open_shard_table(page: Page, run_url: str, summary: str) -> None:
    """Open that shard table of a flow run, of which each attempt wrote one, which begins with a summary."""
    for number in range(2):
        visit(page, run_url)
        page.get_by_text("Artifacts", exact=True).first.click()
        page.get_by_text("tokenize-shards", exact=True).nth(number).click()
        page.locator("td").first.wait_for()
        page.get_by_text(" shards: ").first.wait_for()
        if page.get_by_text(summary).count():
            return
    pytest.fail(f"no shard table of {run_url} begins with {summary!r}")


def cells(page: Page, text: str) -> int:
    """How many cells of the table that is shown hold exactly this text."""
    return page.locator("td").get_by_text(text, exact=True).count()


def test_run_from_the_form_shard_table_and_retry(
    page: Page, stack: StackConnection, example_completions: Path, smollm2_tokenizer_dir: Path
) -> None:
    parts = sorted(example_completions.glob("part-*.jsonl"))[:4]
    records = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    source = put_batch(stack, records)
    # A path in the project folder, where flows run: the pictures show no folder of the machine that made them.
    shutil.copytree(smollm2_tokenizer_dir, stack.project / TOKENIZER, dirs_exist_ok=True)

    ui = stack.prefect_api_url.removesuffix("/api")
    visit(page, f"{ui}/deployments")
    # The list shows one page of them.
    page.get_by_placeholder("Search deployments").fill("tokenize-completions")
    link = page.get_by_role("link", name="tokenize-completions", exact=True).first
    link.wait_for()
    picture(page, "ui-deployments")
    link.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").first.click()
    field(page, "Source").fill(source)
    field(page, "Dataset").fill(f"s3://{stack.bucket}/datasets/from-the-form")
    field(page, "Tokenizer").fill(TOKENIZER)
    field(page, "Max Length Cut Share").fill("1")
    field(page, "Files Per Shard").fill("1")
    field(page, "Num Workers").fill("1")
    field(page, "Source").scroll_into_view_if_needed()
    picture(page, "ui-form")
    run_url = f"{ui}/runs/flow-run/{submit(page)}"
    visit(page, run_url)
    wait_for_state(page, "Failed")
    open_shard_table(page, run_url, "12 shards: 11 made, 0 reused, 1 failed.")
    assert cells(page, "failed") == 1
    picture(page, "ui-shard-table")

    mend_batch(stack, source, records)
    visit(page, run_url)
    page.get_by_role("button", name="Retry", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Retry", exact=True).click()
    wait_for_state(page, "Completed")
    picture(page, "ui-completed-run")
    open_shard_table(page, run_url, "12 shards: 1 made, 11 reused, 0 failed.")
    assert (cells(page, "made"), cells(page, "failed")) == (1, 0)
    picture(page, "ui-shard-table-after-retry")
