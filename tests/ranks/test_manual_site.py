"""The built manual: every page is on a shelf, every link leads somewhere, and a browser finds
nothing to complain about.
"""

from __future__ import annotations

import html.parser
import pathlib
import re
import subprocess
import sys
import tomllib
import urllib.parse

import pytest

import paceline
from tests.ranks.test_report_browser import browser  # noqa: F401 - a fixture

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "tools/build_docs.py", "--site", str(directory)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=200,
    )
    return directory


class Links(html.parser.HTMLParser):
    """The links, images and anchors of a page."""

    def __init__(self, page):
        super().__init__()
        self.targets, self.anchors = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        for key in ("href", "src"):
            if attributes.get(key):
                self.targets.append(attributes[key])


def test_every_link_leads_somewhere(site):
    pages = {path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            url = urllib.parse.urlparse(target)
            if url.scheme or url.netloc:
                continue
            found = (page.parent / urllib.parse.unquote(url.path)).resolve() if url.path else page
            if not found.is_file():  # of a directory, a browser without a server shows a list
                broken.append(f"{page.relative_to(site)}: {target}")
            elif url.fragment and found in pages and url.fragment not in pages[found].anchors:
                broken.append(f"{page.relative_to(site)}: {target} (no such anchor)")
    assert len(pages) > 30
    assert not broken


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|link)[^>]*?(?:src|href)=\"(https?:[^\"]*)", page.read_text()
        )
        assert not [url for url in fetched if "w3.org" not in url], page


def test_every_page_is_on_a_shelf_and_has_its_text_beside_it(site):
    shelves = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = {
        path
        for shelf in shelves
        for entries in shelf.values()
        for entry in entries
        for path in ([entry] if isinstance(entry, str) else entry.values())
    }
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert listed == pages
    overview = (site / "llms.txt").read_text()
    for page in pages:
        assert (site / page).read_text() == (DOCS / page).read_text()
        assert f"({page})" in overview


def test_every_example_has_a_page_that_links_to_it():
    programs = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    overview = (DOCS / "examples.md").read_text()
    for program in programs:
        page = DOCS / "examples" / f"{program.partition('.')[0]}.md"
        assert f"[{program}]({program})" in page.read_text()
        assert f"(examples/{page.name})" in overview
    assert len(list((DOCS / "examples").glob("*.md"))) == len(programs)


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "reference" / "api.md").read_text() + (
        DOCS / "reference" / "errors.md"
    ).read_text()
    missing = [name for name in paceline.__all__ if not name.startswith("__") and name not in text]
    missing += [name for name in paceline.optim.__all__ if f"paceline.optim.{name}" not in text]
    assert not missing


def test_the_reference_has_the_signature_of_every_name(site):
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "api.html").read_text())
    names = [name for name in paceline.__all__ if callable(getattr(paceline, name))]
    names += paceline.optim.__all__
    names.remove("SyncBatchNorm")  # its constructor is torch's
    described = (DOCS / "reference" / "errors.md").read_text()
    missing = [name for name in names if f"{name}(" not in text and name not in described]
    assert not missing


def test_every_variable_is_in_the_reference():
    source = "\n".join(
        path.read_text() for pattern in ("src/**/*.py", "csrc/*.c") for path in ROOT.glob(pattern)
    )
    used = set(re.findall(r"\"(PACELINE_[A-Z_]+[A-Z])\"", source))
    described = set(
        re.findall(r"`(PACELINE_[A-Z_]+)`", (DOCS / "reference" / "environment.md").read_text())
    )
    assert used == described


def test_the_page_about_the_command_line_is_what_the_parsers_say():
    code = "import tools.build_docs as b; import sys; sys.stdout.write(b.command_reference())"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert made == (DOCS / "reference" / "cli.md").read_text(), (
        "run tools/build_docs.py --reference"
    )


@pytest.mark.parametrize("page", ["index.html", "concepts/step.html", "reference/api.html"])
@pytest.mark.parametrize("width", [420, 1280])
def test_pages_fit_a_narrow_and_a_wide_window(site, browser, page, width):  # noqa: F811
    browser.set_window_size(width, 900)
    browser.get(f"file://{site / page}")
    assert browser.title
    overflow = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0
    broken = browser.execute_script(
        "return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
    )
    assert not broken
