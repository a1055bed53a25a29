"""The page at `/`: what feeds it, and what a person sees of it in headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from cluster.messages.engine import EngineStats, SchedulerStats
from cluster.messages.steps import StepMeter
from cluster.page.live import LiveStream
from parallel.step_cost import StepCost
from tests.conftest import Endpoint
from tests.helpers.scripted_engine import Run, Stack
from worker.protocol import StepFrame

PAGES = {"num_free_pages": 70, "num_cached_pages": 20, "num_evictable_pages": 15, "num_owned_pages": 10}


def _stats(meter: StepMeter, heartbeats: list[float]) -> EngineStats:
    scheduler = SchedulerStats(
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=40,
        total_prefix_hit_tokens=25,
        total_prompt_tokens=100,
        total_preemptions=0,
        total_drafted=8,
        total_accepted=6,
        **PAGES,
    )
    return msgspec.structs.replace(meter.report(scheduler, heartbeats), devices=["cpu", "cpu"], is_preparing=True)


COST = StepCost(1000, 100, 10, ())


def _step(meter: StepMeter, num_sampled: int) -> None:
    meter.launched(StepFrame(1, 1))
    meter.retired(num_sampled)


def test_the_stream_tells_each_step_once_and_the_latest_figures(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        board, meter = stack.engine.board, StepMeter(COST)
        stream = LiveStream(stack.model, board)
        assert stream.view() is None, "the engine has not reported yet"
        for num_sampled in (1, 3):
            _step(meter, num_sampled)
        board.update(_stats(meter, [0.5, 7.0]))
        view = stream.view()
        assert view is not None
        assert (view.running, view.waiting, view.prompt_tokens, view.prefix_hit_tokens) == (3, 2, 100, 25)
        assert (view.drafted, view.accepted) == (8, 6)
        assert view.is_preparing
        assert (view.pages.owned, view.pages.cached, view.pages.evictable, view.pages.free) == (10, 20, 15, 70)
        assert [(step.flops, step.read_bytes) for step in view.steps] == [(0, 1000)] * 2
        assert view.peak_bandwidth == 0, "nothing was measured yet"
        assert sum(second.generated for second in view.seconds) == 4
        assert [rank.device for rank in view.ranks] == ["cpu", "cpu"]
        assert view.ranks[1].heartbeat_age_s == pytest.approx(7.0, abs=1.0)
        _step(meter, 5)
        board.update(_stats(meter, []))
        again = stream.view()
        assert again is not None
        assert len(again.steps) == 1, "the first two were told already"
        assert again.ranks[0].heartbeat_age_s is None
        assert again.seconds[-1].generated >= 5

    run(scenario)


def test_a_stream_ends_when_the_server_stops(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        from cluster.http.active import ActiveRequests
        from cluster.http.context import RequestContext
        from cluster.page.live import LiveServing

        requests = ActiveRequests()
        stack.engine.board.update(_stats(StepMeter(COST), []))
        answer = await LiveServing(stack.model, requests).live(b"", RequestContext(request_id="x"))
        assert answer.streamed
        first = await anext(answer.chunks)
        assert json.loads(first.removeprefix(b"data: "))["model"] == stack.model.model_name
        await requests.drain(0.1)
        with pytest.raises(StopAsyncIteration):
            await anext(answer.chunks)

    run(scenario)


def test_the_page_loads_nothing_from_elsewhere_and_says_so(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.http.get("/")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(""", response.text)
        assert 'style="' not in response.text, "the policy forbids it"

    run(scenario)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        "--headless",
        "--no-sandbox",  # tests may run as root, where Chromium has no sandbox
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1300,850",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as chrome:
        yield chrome


def _wait(browser: webdriver.Chrome, condition: Any, seconds: float = 60) -> Any:
    return WebDriverWait(browser, seconds, poll_frequency=0.1).until(condition)


def _text(browser: webdriver.Chrome, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


@pytest.mark.ray
def test_a_person_chats_and_sees_the_engine_work(endpoint: Endpoint, browser: webdriver.Chrome, tmp_path: Path) -> None:
    browser.get(endpoint.url + "/")
    _wait(browser, lambda it: _text(it, "#state") == "running")
    assert _text(browser, "#model").startswith(endpoint.model)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#ranks tr")) >= 1
    browser.find_element(By.ID, "example").click()
    _wait(browser, lambda it: it.find_elements(By.CSS_SELECTOR, ".message.assistant footer"))
    assert _text(browser, ".message.assistant div") == "The capital of France is Paris."
    browser.find_element(By.ID, "clear").click()
    prompt = browser.find_element(By.ID, "prompt")
    temperature = browser.find_element(By.ID, "temperature")
    temperature.clear()
    temperature.send_keys("0")
    limit = browser.find_element(By.ID, "max-tokens")
    limit.clear()
    limit.send_keys("48")
    prompt.send_keys("Name three rivers.", Keys.ENTER)
    _wait(browser, lambda it: it.find_elements(By.CSS_SELECTOR, ".message.assistant footer"))
    said = _text(browser, ".message.assistant div")
    assert said
    assert "tokens / s" in _text(browser, ".message.assistant footer")
    assert int(_text(browser, "#rate").replace(",", "")) >= 0
    _wait(browser, lambda it: _text(it, "#step") != "–", 10)
    assert float(_text(browser, "#mbu").removesuffix(" %")) > 0
    assert float(_text(browser, "#mfu").removesuffix(" %")) > 0
    # A long answer is stopped, and what was said so far stays.
    limit.clear()
    limit.send_keys("2000")
    prompt.send_keys("Tell a very long story.", Keys.ENTER)
    _wait(browser, lambda it: len(it.find_elements(By.CSS_SELECTOR, ".message.assistant div")[-1].text) > 20)
    _wait(browser, lambda it: _text(it, "#running") != "0", 10)
    browser.find_element(By.ID, "stop").click()
    _wait(browser, lambda it: "stopped" in it.find_elements(By.CSS_SELECTOR, "footer")[-1].text)
    _wait(browser, lambda it: _text(it, "#running") == "0", 10)
    browser.save_screenshot(str(tmp_path / "page.png"))
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe, "a script failed or the policy forbade something"


@pytest.mark.ray
def test_an_error_is_shown_and_the_chat_goes_on(endpoint: Endpoint, browser: webdriver.Chrome) -> None:
    browser.get(endpoint.url + "/")
    _wait(browser, lambda it: _text(it, "#state") == "running")
    limit = browser.find_element(By.ID, "max-tokens")
    limit.clear()
    limit.send_keys("0")
    prompt = browser.find_element(By.ID, "prompt")
    prompt.send_keys("Hello", Keys.ENTER)
    _wait(browser, lambda it: it.find_elements(By.CSS_SELECTOR, ".message.error"))
    assert "max_tokens" in _text(browser, ".message.error")
    limit.clear()
    limit.send_keys("4")
    prompt.send_keys("Hello", Keys.ENTER)
    _wait(browser, lambda it: it.find_elements(By.CSS_SELECTOR, ".message.assistant footer"))
