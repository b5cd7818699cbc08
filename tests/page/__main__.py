"""`python -m tests.page --screenshot FILE`: the page in headless Chromium, with a simulated server under load.

Checks what tests/page/looks.py says, and writes a picture of it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.page.browser import browse, find_browser
from tests.page.looks import check_page
from tests.page.traffic import BLOCKS, NUM_CLIENTS, served


async def look(browser: str, options: argparse.Namespace) -> None:
    async with (
        served(num_clients=options.clients, num_blocks=options.blocks) as here,
        browse(browser, here.url) as page,
    ):
        await page.resize(options.width, options.height, dark=options.dark)
        await check_page(page, here.url, here.num_blocks)
        print(f"the page at {here.url} shows {here.num_blocks} blocks, and they change")
        if options.screenshot:
            await asyncio.sleep(options.seconds)  # for its curves to have a past
            await page.screenshot(options.screenshot)
            print(f"wrote {options.screenshot}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.page", description=__doc__)
    parser.add_argument("--screenshot", type=Path, metavar="FILE", help="write a PNG")
    parser.add_argument("--seconds", type=float, default=20.0, help="of traffic before it; default 20")
    parser.add_argument("--dark", action="store_true", help="as one who prefers dark sees it")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print("no Chromium is installed (Debian: apt-get install --no-install-recommends chromium)", file=sys.stderr)
        return 1
    asyncio.run(look(browser, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
