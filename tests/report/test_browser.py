"""The page in a browser: drawn, readable, reachable, without an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swaptrain.cli import main
from tests.report.browser import Browser, browser_path
from tests.report.making import changed_config, full_run
from tests.support.matrix import matrix

pytestmark = [
    pytest.mark.trains,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed"),
]

CHARTS = """[...document.querySelectorAll('.plot')].filter(p => p.offsetParent).map(p => {
  const marks = [...p.querySelectorAll('path')].filter(e => {
    const style = getComputedStyle(e), box = e.getBBox();
    return (box.width > 20 || box.height > 20)
      && (style.stroke !== 'none' || style.fill !== 'none') && e.closest('defs') === null;
  });
  const box = p.querySelector('svg').getBoundingClientRect();
  return [p.closest('figure').id, marks.length, Math.round(box.width), Math.round(box.height)];
})"""
CONTRAST = """(() => {
  const parse = c => (c.match(/[0-9.]+/g) || []).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.textContent.trim() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    if (element.closest('.skip, script, style')) continue;
    const color = parse(element.namespaceURI.endsWith('svg') ? style.fill : style.color);
    let behind = element, paper = [0, 0, 0, 0];
    while (behind) {
      paper = parse(getComputedStyle(behind).backgroundColor);
      if (paper.length === 3 || paper[3] === 1) break;
      behind = behind.parentElement;
    }
    const [high, low] = [light(color), light(paper)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), parseFloat(style.fontSize), node.textContent.trim()]);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the page of a run, and of two."""
    folder = tmp_path_factory.mktemp("pages")
    run, other = full_run(folder / "a-run"), full_run(folder / "another", 90)
    changed_config(other, optimizer={"lr": 0.02})
    assert main(["report", str(run), "--to", str(folder / "one.html")]) == 0
    assert main(["report", str(run), str(other), "--to", str(folder / "two.html")]) == 0
    return {"one": folder / "one.html", "two": folder / "two.html"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.mark.parametrize(
    ("page", "width", "dark"), matrix(["one", "two"], [400, 1400], [False, True], by_pairs=False)
)
def test_a_page_can_be_read(
    page: str, width: int, dark: bool, pages: dict[str, Path], browser: Browser
) -> None:
    """All charts are drawn, nothing is wider than the window, and text has contrast."""
    browser.open(pages[page], width, dark=dark)
    charts = browser.evaluate(CHARTS)
    assert len(charts) == {"one": 14 + 3, "two": 20 + 2 * 3}[page]
    for name, marks, wide, high in charts:
        assert marks > 2, name
        assert wide > 0.8 * min(width, 480) - 40 and high > 120, (name, wide, high)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    texts = browser.evaluate(CONTRAST)
    assert len(texts) > 200
    assert [text for text in texts if text[0] < 4.5] == []
    assert [text for text in texts if text[1] < 9.5] == []
    assert browser.said == []


def test_without_a_script_all_is_there(pages: dict[str, Path], browser: Browser) -> None:
    """Charts and tables are part of the page; one step of the trace is chosen."""
    browser.open(pages["one"], 1400, script=False)
    document = browser.call("DOM.getDocument")["root"]["nodeId"]
    found = browser.call("DOM.querySelectorAll", nodeId=document, selector=".plot svg path")
    assert len(found["nodeIds"]) > 100
    assert browser.said == []


def test_the_keyboard_reaches_everything(pages: dict[str, Path], browser: Browser) -> None:
    """Tab goes to each chart, table and step; arrows show its values, Escape hides them."""
    browser.open(pages["one"], 1400)
    tip = "document.getElementById('tip')"
    seen: dict[str, Any] = {}
    for _ in range(200):
        browser.press("Tab")
        place = browser.evaluate(
            "(e => e === document.body ? '' : e.matches('.plot') ? e.closest('figure').id : "
            "e.id || e.tagName + ' ' + e.textContent.slice(0, 20))(document.activeElement)"
        )
        if not place or place in seen:
            if not place:
                break
            continue
        browser.press("ArrowRight")
        hidden = browser.evaluate(f"{tip}.hidden")
        seen[place] = None if hidden else browser.evaluate(f"{tip}.innerText")
        browser.press("Escape")
        assert browser.evaluate(f"{tip}.hidden")
    charts = [name for name, *_ in browser.evaluate(CHARTS)]
    assert len(charts) == 14 + 3 and set(charts) <= set(seen)
    assert all(seen[name] for name in charts), "arrows show values"
    assert seen["f1"].split()[:4] == ["step", "1", "loss", "4.9378"]
    assert any(name.startswith("SUMMARY") for name in seen)
    assert browser.said == []


def test_the_pointer_shows_the_values_of_its_step(pages: dict[str, Path], browser: Browser) -> None:
    """The nearest one; and a label of a step shows that step's timeline."""
    browser.open(pages["one"], 1400)
    place = browser.evaluate(
        "(() => { const p = document.querySelector('.plot'); p.scrollIntoView({block: 'center', "
        "behavior: 'instant'}); const b = p.querySelector('svg').getBoundingClientRect(); "
        "return [b.left, b.top, b.width, JSON.parse(p.dataset.plot)]; })()"
    )
    left, top, width, data = place
    (first, _, last, _), (low, high) = data["box"], data["xs"]
    at = left + (first + (last - first) * (40.2 - low) / (high - low)) * width / 500
    browser.move(at, top + 60)
    shown = browser.evaluate("document.getElementById('tip').innerText").split()
    assert shown[:2] == ["step", "40"]
    loss = data["curves"][0]
    assert float(shown[3]) == pytest.approx(loss["y"][loss["x"].index(40)], abs=1e-4)
    shown = "[...document.querySelectorAll('.panel')].map(p => getComputedStyle(p).display)"
    assert browser.evaluate(shown) == ["none", "none", "block"]
    browser.evaluate("document.querySelector('.steps label').click()")
    assert browser.evaluate(shown) == ["block", "none", "none"]
    assert browser.said == []


def test_the_check_finds_faults(pages: dict[str, Path], browser: Browser, tmp_path: Path) -> None:
    """A script of somebody else is refused and said, pale text and a wide line are seen."""
    text = pages["one"].read_text()
    bad = "<p style='color: #999; width: 3000px'>pale and wide</p><script>alert(1)</script>"
    (tmp_path / "bad.html").write_text(text.replace("<footer>", f"{bad}<footer>"))
    browser.open(tmp_path / "bad.html", 1400)
    assert "Content Security Policy" in json.dumps(browser.said)
    assert [t[2] for t in browser.evaluate(CONTRAST) if t[0] < 4.5] == ["pale and wide"]
