"""The timeline page in a real browser, offline: it draws, zooms, pans and explains, and the console
stays empty.
"""

from __future__ import annotations

import json
import shutil

import pytest

from paceline.diagnostics.report_page import write_report
from paceline.telemetry.status_page import Phase
from paceline.telemetry.trace_writer import Kind, TraceWriter
from tests.unit.test_trace_file import write_run

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1600",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


@pytest.fixture
def browser(tmp_path):
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


def window_of(browser):
    read = (
        "const d = document.getElementById('view').dataset; return [Number(d.from), Number(d.to)]"
    )
    return tuple(browser.execute_script(read))


def colours(browser, canvas):
    """How many different colours a canvas shows."""
    count = """
        const c = document.getElementById(arguments[0]);
        const options = {willReadFrequently: true};
        const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', options);
        copy.drawImage(c, 0, 0);
        const d = copy.getImageData(0, 0, c.width, c.height).data;
        const seen = new Set();
        for (let i = 0; i < d.length; i += 4)
            if (d[i + 3]) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
        return seen.size;
    """
    return browser.execute_script(count, canvas)


@pytest.mark.slow
def test_the_page_works_offline_in_a_browser(tmp_path, browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    write_run(tmp_path)
    page = write_report(tmp_path)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"

    def element(name):
        return browser.find_element(By.ID, name)

    assert "Rank 1 is the one the others wait for" in element("summary").text
    assert "the data loader" in element("waits").text
    assert "body.weight" in element("buckets").text
    assert [row.text.split()[0] for row in element("phases").find_elements(By.TAG_NAME, "tr")][
        1:4
    ] == [
        "loader",
        "forward",
        "backward",
    ]
    assert all(
        colours(browser, canvas) > 3 for canvas in ("view", "overview", "throughput", "loss")
    )

    whole = window_of(browser)
    view = element("view")
    ActionChains(browser).scroll_from_origin(_at(view), 0, -400).perform()
    zoomed = window_of(browser)
    assert zoomed[1] - zoomed[0] < whole[1] - whole[0]
    ActionChains(browser).move_to_element(view).click_and_hold().move_by_offset(
        -150, 0
    ).release().perform()
    panned = window_of(browser)
    assert panned[0] > zoomed[0]
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    view.send_keys("0")
    assert window_of(browser) == whole
    element("step").click()
    few = window_of(browser)
    assert few[1] - few[0] < (whole[1] - whole[0]) / 3
    view.send_keys(Keys.ARROW_LEFT)
    assert window_of(browser)[0] < few[0]

    ActionChains(browser).move_to_element_with_offset(view, 0, -10).perform()
    assert element("tip").text.startswith("rank ")

    light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    element("theme").click()
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    assert colours(browser, "view") > 3

    for width in (1900, 700, 500):
        browser.set_window_size(width, 900)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [
        message["params"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    # The browser's own first page requests much; ours only itself.
    ours = [request for request in requests if request["documentURL"] == page.as_uri()]
    assert [request["request"]["url"] for request in ours] == [page.as_uri()]

    for other in (
        _long_run(tmp_path / "long"),
        _many_ranks(tmp_path / "many"),
        _nothing(tmp_path / "nothing"),
    ):
        browser.get(other.as_uri())
        assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        if other.parent.name == "nothing":
            assert element("summary").text.startswith("Nothing was recorded")
            assert not element("view").is_displayed()
        else:
            assert colours(browser, "view") > 3
    assert browser.get_log("browser") == []


def _long_run(folder):
    """More spans than pixels: the page shows shares of time."""
    write_run(folder, steps=3000)
    return write_report(folder)


def _many_ranks(folder):
    for rank in range(24):
        writer = TraceWriter(folder, rank, 24, capacity=64)
        for step in range(8):
            writer.add(Phase.FORWARD, step * 10**7, step * 10**7 + 10**6 * (3 + rank % 3), step)
            writer.add(
                Kind.SYNC_POINT,
                step * 10**7 + 10**6 * (3 + rank % 3),
                (step + 1) * 10**7,
                step,
                7,
                step,
            )
        writer.close()
    return write_report(folder)


def _nothing(folder):
    TraceWriter(folder, 0, 1, capacity=4).close()
    return write_report(folder)


def _at(element):
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    return ScrollOrigin.from_element(element)
