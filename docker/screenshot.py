"""Take the README's picture: the newest run in a Prefect UI, through the system's Chromium without a screen.

    regen demo --limit 32 --out out/demo --keep-ui
    python docker/screenshot.py --url http://127.0.0.1:4200 --out docs/ui-run.png

Needs the `playwright` package (its own browsers are not used) and Chromium: apt-get install chromium.
"""

import argparse
import json
import shutil
import sys
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTH, HEIGHT = 1280, 520
LARGEST_BYTES = 200_000
"""A picture in the repository stays for ever; above this the script fails instead of committing it."""


def newest_run(url: str, name: str) -> str:
    """Id of the newest flow run of the flow `name`."""
    body = {
        "sort": "START_TIME_DESC",
        "limit": 1,
        "flows": {"name": {"any_": [name]}},
        "flow_runs": {"state": {"type": {"any_": ["RUNNING", "COMPLETED"]}}},
    }
    request = urllib.request.Request(
        f"{url}/api/flow_runs/filter",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        runs = json.load(reply)
    if not runs:
        sys.exit(f"no run of the flow {name!r} at {url}: run the demo with --keep-ui first")
    return str(runs[0]["id"])


def chromium() -> str:
    """The system's browser."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    sys.exit("no Chromium on this machine: apt-get install chromium")


def settle(page: Page, address: str, wait_ms: int) -> None:
    """Open a page and let its charts be drawn. The UI keeps a connection open, so the network is never idle."""
    page.goto(address, wait_until="domcontentloaded")
    page.wait_for_timeout(wait_ms)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="the UI, e.g. http://127.0.0.1:4200")
    parser.add_argument("--out", type=Path, default=Path("docs/ui-run.png"))
    parser.add_argument("--flow", default="regen", help="name of the flow")
    parser.add_argument("--page", default="/runs/flow-run/{id}", help="path of the page; {id} is the newest run")
    parser.add_argument("--wait-ms", type=int, default=6000)
    options = parser.parse_args()
    url = options.url.rstrip("/")
    address = url + options.page.format(id=newest_run(url, options.flow))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        settle(page, address, options.wait_ms)
        page.screenshot(path=options.out)
        title = page.title()
        browser.close()
    size = options.out.stat().st_size
    print(json.dumps({"page": address, "title": title, "file": str(options.out), "bytes": size}))
    if size > LARGEST_BYTES:
        sys.exit(f"{options.out} has {size:,} bytes, more than {LARGEST_BYTES:,}: use a smaller page")


if __name__ == "__main__":
    main()
