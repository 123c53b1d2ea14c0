"""The page and the verb: whole, escaped, and clear words for what is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from swaptrain.cli import main
from swaptrain.store.access.lock import RunLock
from swaptrain.verbs.train import train
from tests.report.making import (
    changed_config,
    full_run,
    metrics_rows,
    new_run,
    start_line,
    trace_events,
    write_lines,
    write_trace,
)
from tests.support.runs import config_of

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' {{ 7*7 }} &amp;"
VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """The elements of a page, each closed where it has to be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def named(self, tag: str) -> Iterator[dict[str, str | None]]:
        """Yield the attributes of each element of this name."""
        return (attributes for name, attributes in self.tags if name == tag)


def page(path: Path) -> Page:
    """Return a page that was written."""
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has everything; tests that change it take a copy."""
    return full_run(tmp_path_factory.mktemp("full") / "run")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_one_file_has_everything(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All sections with their charts; nothing is loaded from anywhere; the path is printed."""
    to = tmp_path / "page.html"
    assert main(["report", str(run), "--to", str(to)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{to}\n" and "to be opened in a browser" in printed.err
    found = page(to)
    plots = [json.loads(a["data-plot"] or "") for _, a in found.tags if "data-plot" in a]
    assert len(plots) == 15 + 3 * 4, "and of each step two widths and two charts"
    losses = next(plot for plot in plots if "curves" in plot)["curves"][0]["y"]
    assert losses == [pytest.approx(row["loss"], rel=1e-5) for row in metrics_rows(60)]
    text = " ".join(found.text)
    for words in (
        "60 of 60", "held-out loss", "Where a step's time went", "found in RAM", "least for both",
        "What held memory over the instructions of step 3", "measured / forecast",
        "it stood still once", "upon a time 60", "A Processor", "torch 2.9", "optimizer:",
    ):  # fmt: skip
        assert words in text, words
    loaded = [a for _, a in found.tags for key in a if key in ("src", "srcset", "data", "action")]
    links = [a.get("href") or "" for _, a in found.tags if "href" in a]
    assert loaded == [] and all(link.startswith("#") for link in links)
    ids = [a["id"] for _, a in found.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)
    content = to.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org)", content)
    assert not re.search(r"#0000(0[1-9]|1)", content), "a colour that the page does not choose"
    assert len(content) < 700_000
    assert not list(tmp_path.glob("*.tmp"))


def test_each_chart_has_what_a_reader_needs(run: Path, tmp_path: Path) -> None:
    """A title, axes by name, a sentence for who does not see it, and a table."""
    to = tmp_path / "page.html"
    assert main(["report", str(run), "--to", str(to)]) == 0
    text = to.read_text()
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(figures) > 15
    for figure in figures:
        assert re.search(r'class="title">[^<]+<', figure)
        assert "<table>" in figure and 'role="img" aria-label="' in figure
        curves = figure.count('"name":')
        assert curves == 1 or 'class="legend"' in figure
        assert re.search(r'class="unit">[^<]*by [a-z]+', figure) or "Timeline of step" in figure


def test_text_of_files_is_shown_and_never_markup(copy: Path, tmp_path: Path) -> None:
    """Whatever a config, a row, a sample, a trace or a start says."""
    changed_config(copy, data={"python": None, "text": [EVIL]})
    write_lines(copy / "samples.jsonl", [{"step": 5, "samples": [{"prompt": EVIL, "text": EVIL}]}])
    row = {"step": 61, "loss": 1.0, f"eval_{EVIL}": 2.0, EVIL: 3}
    write_lines(copy / "metrics.jsonl", [*metrics_rows(60), row])
    start = start_line(1_750_000_000.0, 1)
    start |= {"host": EVIL, "machine": {"processor": EVIL}, "versions": {"torch": EVIL}}
    write_lines(copy / "starts.jsonl", [start])
    memory = {"instructions": [{"operation": EVIL, "held": {"weights": 5}}], "step": EVIL}
    (copy / "memory.json").write_text(json.dumps(memory))
    evil = copy.rename(tmp_path / 'run <b> & "c"')
    to = tmp_path / "page.html"
    assert main(["report", str(evil), "--to", str(to)]) == 0
    found, plain = page(to), page_of_tags(tmp_path)
    assert {tag for tag, _ in found.tags} <= plain
    assert list(found.named("script")) == [{}]
    assert not [key for _, a in found.tags for key in a if key.startswith("on")]
    text = " ".join(found.text)
    assert text.count(EVIL) >= 6 and "49 &" not in text
    assert 'run <b> & "c"' in text


def page_of_tags(folder: Path) -> set[str]:
    """Return the names of the elements of a page without surprises."""
    full_run(folder / "plain")
    assert main(["report", str(folder / "plain")]) == 0
    return {tag for tag, _ in page(folder / "plain" / "report.html").tags}


@pytest.mark.proof
def test_two_runs_side_by_side(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys that differ come first, with both values; charts have both curves."""
    other = full_run(tmp_path / "run", 90)
    changed_config(other, optimizer={"lr": 0.02})
    to = tmp_path / "both.html"
    assert main(["report", str(run), str(other), "--to", str(to)]) == 0
    text = to.read_text()
    table = text[text.index('id="config"') : text.index('id="figures"')]
    cells = [re.findall(r"<t[hd][^>]*>([^<]*)<", r) for r in re.findall(r"<tr>.*?</tr>", table)]
    assert ["optimizer.lr", "0.01", "0.02"] in cells and ["train.steps", "60", "90"] in cells
    assert not any(row[0] in ("optimizer.name", "memory.host") for row in cells)
    found = page(to)
    plots = [json.loads(a["data-plot"] or "") for _, a in found.tags if "data-plot" in a]
    curves = next(plot for plot in plots if "curves" in plot)["curves"]
    assert [len(curve["x"]) for curve in curves] == [60, 90]
    assert [curve["name"] for curve in curves] == [str(run), str(other)], "both are called run"
    assert main(["report", str(run), str(run), "--to", str(to)]) == 0
    assert "<p>Nothing.</p>" in to.read_text()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("metrics.jsonl", "No step is done yet."),
        ("starts.jsonl", "did not record its forecast"),
        ("trace.json", "This run has no trace. run.trace=5 records"),
        ("memory.json", "run.memory=true records"),
    ],
)
def test_what_is_missing_is_said(missing: str, words: str, copy: Path) -> None:
    """And the rest is shown."""
    (copy / missing).unlink()
    assert main(["report", str(copy)]) == 0
    text = " ".join(page(copy / "report.html").text)
    assert words in text and "config.yaml" in text


def test_torn_files_are_said(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the standard error and in the page; the exit code is 0, since the page is there."""
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b'\x00\x00\x00\n{"step": 61, "loss": 1.0}\n{"step": 62, "lo')
    (copy / "trace.json").write_text((copy / "trace.json").read_text()[:9_000])
    (copy / "memory.json").write_text('{"instructions": [')
    (copy / "starts.jsonl").unlink()
    (copy / "starts.jsonl").mkdir()
    assert main(["report", str(copy)]) == 0
    said = capsys.readouterr().err
    for words in (
        "one line of metrics.jsonl cannot be read as a step that follows",
        "trace.json: a part of the trace is torn",
        "memory.json is not what a run writes",
        "starts.jsonl is not what a run writes: it is no file",
    ):
        assert words in said
        assert words in " ".join(page(copy / "report.html").text)
    assert "61 of 60" in (copy / "report.html").read_text()


def test_numbers_that_no_run_has_are_survived(tmp_path: Path) -> None:
    """Very large, negative, of another kind: drawn where they can be, else left out."""
    values = [1e29, -1e29, 10**39, 1e-320, -5, "x", None, True, [], {}, 0]
    rows = metrics_rows(44)
    for number, row in enumerate(rows):
        for name in row.keys() - {"step"}:
            row[name] = values[(number + len(name)) % len(values)]
    run = new_run(tmp_path / "run", rows)
    starts = [start_line(time, 1, step_s=time) for time in (1e29, -1.0, 0.0, 1e9)]
    write_lines(run / "starts.jsonl", [*starts, {"time": 5}, {"time": 1e9, "forecast": [1]}])
    events = trace_events(1)
    events.append({"name": "read", "ph": "X", "tid": 1, "ts": 1.0, "dur": 1.0, "args": [1]})
    write_trace(run / "trace.json", events)
    assert main(["report", str(run)]) == 0
    page(run / "report.html")


def test_a_run_without_steps(tmp_path: Path) -> None:
    """Its page says so, and has its config."""
    run = new_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    text = " ".join(page(run / "report.html").text)
    assert "No step is done yet." in text and "0 of 5" in text and "adamw" in text


def test_one_step_is_drawn(tmp_path: Path) -> None:
    """A single point has no line, and is there."""
    run = new_run(tmp_path / "run", metrics_rows(1))
    write_trace(run / "trace.json", trace_events(1, segments=1, micro_batches=1))
    assert main(["report", str(run)]) == 0
    assert "<figure" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("prepare", "arguments", "words"),
    [
        (lambda folder: folder.mkdir(), [], "is no run: it has no config.yaml"),
        (lambda folder: None, [], "no such run directory"),
        (new_run, ["--to", "DIR"], "is a directory; name a file"),
        (new_run, ["--to", "DIR/no/x.html"], "there is no directory"),
        (new_run, ["--to", "DIR/notes.html"], "is there and is no report"),
        (new_run, ["DIR/other"], "no such run directory"),
        (new_run, ["DIR", "DIR"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_reported_is_refused(
    prepare: object, arguments: list[str], words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Exit code 2, one line, and nothing is written."""
    assert callable(prepare)
    prepare(tmp_path / "run")
    (tmp_path / "notes.html").write_text("my notes")
    given = [word.replace("DIR", str(tmp_path)) for word in arguments]
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", str(tmp_path / "run"), *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    if "unrecognized" not in words:
        assert words in printed.err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "notes.html").read_text() == "my notes"


@pytest.mark.proof
def test_a_report_is_written_over_an_earlier_one(copy: Path) -> None:
    """Aside first: it is whole at every moment."""
    assert main(["report", str(copy)]) == 0
    inode = (copy / "report.html").stat().st_ino
    assert main(["report", str(copy)]) == 0
    assert (copy / "report.html").stat().st_ino != inode


def test_a_package_that_is_missing_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what to install; nothing is written."""
    for name in [n for n in sys.modules if n.startswith(("swaptrain.report", "matplotlib"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    to = tmp_path / "page.html"
    assert main(["report", str(run), "--to", str(to)]) == 2
    said = capsys.readouterr().err
    assert "pip install 'swaptrain[report]'" in said and said.count("\n") == 1
    assert not to.exists()


def test_neither_torch_nor_a_setting_of_the_folder_is_used(run: Path, tmp_path: Path) -> None:
    """A matplotlibrc where the command is given changes nothing."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nlines.linewidth: 99\n")
    script = (
        "import sys; from swaptrain.cli import main; code = main(sys.argv[1:]); assert code == 0;"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", script, "report", str(run), "--to", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stroke-width: 99" not in (tmp_path / "page.html").read_text()


@pytest.mark.trains
def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finished, training now, with a damaged store, and of another format."""
    tree = {
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"host": "64MiB", "segment": "16KiB"},
        "train": {"steps": 3},
        "run": {"dir": str(tmp_path / "run"), "trace": 2},
    }
    config = config_of(tmp_path / "run", tree)
    train(config)
    run, to = config.run.dir, config.run.dir / "report.html"
    assert main(["report", str(run)]) == 0
    text = " ".join(page(to).text)
    for words in ("finished: step 3 of 3 is done", "Step 2", "measured / forecast", "torch 2."):
        assert words in text
    with RunLock(run):
        assert main(["report", str(run)]) == 0
    assert "training now (pid" in " ".join(page(to).text)
    root = run / "store" / "zarr.json"
    whole = root.read_bytes()
    root.write_bytes(whole[:-20] + b" " * 20)
    capsys.readouterr()
    assert main(["report", str(run)]) == 3
    said = capsys.readouterr().err
    assert f"{to} is written, and says nothing of the store" in said
    assert "the store does not verify" in " ".join(page(to).text)
    root.write_bytes(whole)
    recorded = run / "config.yaml"
    recorded.write_text(recorded.read_text().replace("\ntrain:\n", "\ntrain:\n  gone: null\n"))
    before = to.read_bytes()
    assert main(["report", str(run)]) == 2
    assert "train.gone: unknown key" in capsys.readouterr().err
    assert to.read_bytes() == before
    train(config_of(tmp_path / "run", tree), fresh=True)
    assert not to.exists()
