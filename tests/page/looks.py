"""What must be true of the page in a browser, as sentences; each takes a page that shows a server under load."""

from __future__ import annotations

from urllib.parse import urlsplit

from tests.page.browser import Page

# The colour of every cell at a tenth of its height from the bottom, where a block that holds anything is filled.
COLOURS = """(() => {
  const canvas = document.querySelector("canvas.grid"), scale = canvas.width / canvas.clientWidth;
  const { cells, columns, size, gap } = Object.fromEntries(Object.entries(canvas.dataset).map(([k, v]) => [k, +v]));
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return Array.from({ length: cells }, (_, i) => {
    const x = Math.round(((i % columns) * size + (size - gap) * 0.3) * scale);
    const y = Math.round((Math.floor(i / columns) * size + (size - gap) * 0.8) * scale);
    return Array.from(pixels.data.slice(4 * (y * pixels.width + x), 4 * (y * pixels.width + x) + 3)).join();
  });
})()"""
FRAMES = "Number(document.body.dataset.frames ?? 0)"


async def check_page(page: Page, url: str, num_blocks: int) -> None:
    await page.until(f"{FRAMES} > 3")
    cells = await page.value("Number(document.querySelector('canvas.grid').dataset.cells)")
    assert cells == num_blocks, f"the grid holds {cells} cells, the cache {num_blocks} blocks"
    await page.until("Number(document.getElementById('running').textContent) > 4")
    await page.until("Number(document.getElementById('shared').textContent) > 0")
    before = await page.value(COLOURS)
    assert len(before) == num_blocks
    assert len(set(before)) > 5, "requests have colours of their own"
    frames = await page.value(FRAMES)
    await page.until(f"{FRAMES} > {frames + 8}")
    after = await page.value(COLOURS)
    assert sum(a != b for a, b in zip(before, after, strict=True)) > 0, "colours change as blocks change hands"
    shown = await page.value("document.body.innerText")
    assert "team-" not in shown, "words of clients are shown only with --http-names"
    await point_at(page, 1)
    await page.until("document.getElementById('tip').textContent.startsWith('block 1')")
    assert page.complaints == []
    assert {urlsplit(address).netloc for address in page.addresses} == {urlsplit(url).netloc}


async def point_at(page: Page, block_id: int) -> None:
    """Moves the mouse to the middle of a block's cell."""
    x, y, columns, size = await page.value("""(() => {
      const canvas = document.querySelector("canvas.grid"), box = canvas.getBoundingClientRect();
      return [box.x, box.y, +canvas.dataset.columns, +canvas.dataset.size];
    })()""")
    row, column = divmod(block_id - 1, columns)
    place = {"x": x + (column + 0.5) * size, "y": y + (row + 0.5) * size}
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
