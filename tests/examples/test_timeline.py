# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The time line page in a real browser."""

import json

import numpy as np
import pytest
import soundfile

from examples.timeline.write_page import main, write_page
from tests.engine import ROOT
from tests.examples.browser import find_chromium, headless_page

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"
)

SAMPLES = ROOT / "examples" / "demo" / "samples"


def word(text, start, end, speaker, confidence=0.9):
    return {
        "word": text,
        "start": start,
        "end": end,
        "speaker": speaker,
        "confidence": confidence,
    }


VERBOSE = {
    "text": "one <b>this</b> second from",
    "language": "en",
    "duration": 6.0,
    "words": [
        word("one", 0.5, 1.0, "A"),
        word("<b>this</b>", 1.0, 1.6, "A"),
        word("second", 1.6, 2.4, "A", confidence=0.2),
        word("from", 3.1, 3.6, "B"),
    ],
    "segments": [
        {"text": "one <b>this</b> second", "start": 0.5, "end": 2.4, "speaker": "A"},
        {"text": "from", "start": 3.1, "end": 3.6, "speaker": "B"},
    ],
    "diarization": [
        {"speaker": 1, "start": 0.4, "end": 2.5},
        {"speaker": 0, "start": 3.0, "end": 3.7},
        {"speaker": 2, "start": 5.0, "end": 5.5},
    ],
    "speaker_map": {"A": 1, "B": 0},
}
DIARIZED = {
    "text": "left right",
    "duration": 4.0,
    "segments": [
        {"text": "left", "start": 0.2, "end": 1.0, "speaker": "A"},
        {"text": "right", "start": 1.5, "end": 1.4, "speaker": "B", "aligned": False},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("timeline")


@pytest.fixture(scope="module")
def url(folder):
    # Noise where the diarizer hears someone, silence elsewhere.
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 6 * 16000)
    loud = np.zeros_like(noise)
    for stretch in VERBOSE["diarization"]:
        loud[int(16000 * stretch["start"]) : int(16000 * stretch["end"])] = 1
    soundfile.write(folder / "noise.wav", loud * noise, 16000)
    clips = [
        (folder / "noise.wav", VERBOSE),
        (SAMPLES / "compressed.mp3", DIARIZED),
    ]
    return write_page(folder / "page", clips).as_uri()


@pytest.fixture(scope="module")
def browser(folder):
    with headless_page(CHROMIUM, folder) as page:
        yield page


@pytest.fixture
def page(browser, url):
    browser.open(url)
    browser.wait_for("state.peaks.length > 0 && state.units.length > 0")
    yield browser
    assert browser.errors == []


def units(page):
    return page.evaluate(
        """[...document.querySelectorAll(".unit")].map((node) => {
            const box = node.getBoundingClientRect();
            const origin = track.getBoundingClientRect().left;
            return {
                text: node.textContent,
                speaker: node.closest(".lane").dataset.speaker,
                left: (box.left - origin) / pixelsPerSecond(),
                right: (box.right - origin) / pixelsPerSecond(),
            };
        })"""
    )


def test_words_stand_at_their_times_in_the_lane_of_their_speaker(page):
    shown = units(page)
    assert [(unit["text"], unit["speaker"]) for unit in shown] == [
        (word["word"], word["speaker"]) for word in VERBOSE["words"]
    ]
    for unit, expected in zip(shown, VERBOSE["words"]):
        assert unit["left"] == pytest.approx(expected["start"], abs=0.02)
        assert unit["right"] == pytest.approx(expected["end"], abs=0.02)


def test_text_is_never_markup(page):
    assert (
        page.evaluate("document.querySelectorAll('#text b:not(.turn > b)').length") == 0
    )
    assert page.evaluate("document.querySelectorAll('.unit b').length") == 0
    assert page.evaluate(
        "[...document.querySelectorAll('.turn')].map((node) => node.textContent)"
    ) == ["Aone <b>this</b> second", "Bfrom"]


def test_the_diarizer_is_shown_with_the_speakers_it_was_matched_to(page):
    assert page.evaluate(
        """[...document.querySelectorAll(".heard")].map((node) => [
            node.closest(".lane").dataset.speaker, Number(node.dataset.start)])"""
    ) == [["A", 0.4], ["B", 3.0], ["heard 3", 5.0]]


def test_unsure_words_are_marked(page):
    assert page.evaluate(
        "[...document.querySelectorAll('.unsure')].map((node) => node.textContent)"
    ) == ["second"]


def test_the_waveform_is_that_of_the_recording(page):
    """Bars are high where someone speaks, and low in the pause."""
    heights = page.evaluate(
        """(() => {
            const pen = wave.getContext("2d");
            const [width, height] = [wave.width, wave.height];
            const {data} = pen.getImageData(0, 0, width, height);
            return Array.from({length: width}, (_, x) => {
                let filled = 0;
                for (let y = 0; y < height; y++) {
                    filled += data[4 * (y * width + x) + 3] > 0;
                }
                return filled;
            });
        })()"""
    )
    per_second = len(heights) / page.evaluate("state.duration")

    def loudest(start, end):
        return max(heights[int(start * per_second) : int(end * per_second)])

    assert page.evaluate("state.duration") == pytest.approx(6.0, abs=0.05)
    assert loudest(0.3, 2.3) > 60
    assert loudest(2.6, 2.9) < 20


def test_a_click_on_a_word_goes_there(page):
    page.evaluate("document.querySelectorAll('.unit')[3].click()")
    page.wait_for("!audio.seeking")
    assert page.evaluate("audio.currentTime") == pytest.approx(3.1, abs=0.01)
    assert page.evaluate("element('clock').textContent").startswith("0:03.1 / 0:06.0")
    page.wait_for("document.querySelector('.now')?.textContent === 'from'")
    head = page.evaluate(
        "(element('head').getBoundingClientRect().left"
        " - track.getBoundingClientRect().left) / pixelsPerSecond()"
    )
    assert head == pytest.approx(3.1, abs=0.02)


def test_a_click_on_the_waveform_goes_there(page):
    page.evaluate(
        """wave.dispatchEvent(new MouseEvent("click", {
            clientX: wave.getBoundingClientRect().left + 2 * pixelsPerSecond()}))"""
    )
    page.wait_for("!audio.seeking")
    assert page.evaluate("audio.currentTime") == pytest.approx(2.0, abs=0.05)


def test_playback_moves_on_and_marks_the_words(page):
    page.evaluate("document.querySelectorAll('.unit')[0].click()")
    page.evaluate("element('play').click()")
    page.wait_for("!audio.paused && audio.currentTime > 1.05")
    page.wait_for("document.querySelector('.now')?.textContent === '<b>this</b>'", 5)
    assert page.evaluate("element('play').textContent") == "Pause"
    page.evaluate("element('play').click()")
    page.wait_for("audio.paused && element('play').textContent === 'Play'")


def test_zoom_makes_room_and_scrolls(page):
    width = page.evaluate("track.clientWidth")
    assert width == page.evaluate("view.clientWidth")
    page.evaluate(
        """(() => {
            element("zoom").value = 100;
            element("zoom").dispatchEvent(new Event("input"));
        })()"""
    )
    # Six seconds fit as they are; an hour would not.
    assert page.evaluate("pixelsPerSecond()") >= 160
    assert units(page)[0]["left"] == pytest.approx(0.5, abs=0.02)


def test_the_other_clip_is_chosen(page):
    page.evaluate(
        """(() => {
            element("clips").value = 1;
            element("clips").dispatchEvent(new Event("change"));
        })()"""
    )
    page.wait_for("audio.src.startsWith('data:audio/mpeg') && state.peaks.length > 0")
    assert [unit["text"] for unit in units(page)] == ["left", "right"]
    assert page.evaluate("document.querySelectorAll('.unsure').length") == 1


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({"text": "no times"}, "no times: ask for verbose_json"),
        ({"error": {"message": "no"}}, "no response"),
        ([1], "no response"),
        (None, "no response"),
    ],
)
def test_other_responses_are_explained(page, response, message):
    said = page.evaluate(
        """(async () => {
            const file = new File([RESPONSE], "a.json");
            const files = new DataTransfer();
            files.items.add(file);
            element("response-file").files = files.files;
            element("response-file").dispatchEvent(new Event("change"));
            await new Promise((done) => setTimeout(done, 200));
            return element("message").textContent;
        })()""".replace("RESPONSE", json.dumps(json.dumps(response)))
    )
    assert message in said


def test_the_page_starts_without_clips(browser, folder):
    browser.open((ROOT / "examples" / "timeline" / "index.html").as_uri())
    assert browser.evaluate("element('chooser').hidden && element('play').disabled")
    assert "Choose a recording" in browser.evaluate("element('message').textContent")


def test_command_line_writes_a_page(tmp_path, monkeypatch, capsys):
    response = tmp_path / "answer.json"
    response.write_text(json.dumps(VERBOSE))
    recording = SAMPLES / "words.wav"
    monkeypatch.setattr(
        "sys.argv",
        ["write_page.py", *map(str, (tmp_path / "out", recording, response))],
    )
    main()
    page = tmp_path / "out" / "index.html"
    assert capsys.readouterr().out.strip() == str(page) and page.exists()
    assert "data:audio/" in (tmp_path / "out" / "clips.js").read_text()
