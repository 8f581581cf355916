// SPDX-License-Identifier: Apache-2.0
// A response of /v1/audio/transcriptions under the waveform of its recording.
"use strict";

const element = (id) => document.getElementById(id);
const audio = element("audio");
const view = element("view");
const track = element("track");
const wave = element("wave");

const COLOURS = ["#2f6fd0", "#c2571a", "#2f8f4e", "#9440b8", "#b3324f", "#18848f", "#8a6d00", "#66707f"];
// Peaks that are kept of a recording, for each second.
const PEAKS_PER_SECOND = 200;

const state = {
  recordingSeconds: 0,
  responseSeconds: 0,
  get duration() {
    return Math.max(this.recordingSeconds, this.responseSeconds);
  },
  peaks: new Float32Array(0),
  units: [], // {start, end, text, speaker, confidence, node}, by start
  current: new Set(),
  loads: 0, // of recordings, so that a slow one does not come in late
};

function say(message, isError = false) {
  element("message").textContent = message;
  element("message").classList.toggle("error", isError);
}

function clock(seconds) {
  const tenths = Math.max(0, Math.round(10 * seconds));
  const rest = String(tenths % 600).padStart(3, "0");
  return `${Math.floor(tenths / 600)}:${rest.slice(0, 2)}.${rest.slice(2)}`;
}

// --- The recording ----------------------------------------------------------------

async function loadRecording(url, bytes) {
  const load = ++state.loads;
  audio.pause();
  audio.src = url;
  element("play").disabled = false;
  state.peaks = new Float32Array(0);
  state.recordingSeconds = 0;
  try {
    // The rate does not matter for a picture, and a low one is quick.
    const context = new OfflineAudioContext(1, 1, 8000);
    const decoded = await context.decodeAudioData(bytes);
    if (load !== state.loads) return;
    state.peaks = peaksOf(decoded);
    state.recordingSeconds = decoded.duration;
  } catch (error) {
    if (load !== state.loads) return;
    say(`This recording cannot be decoded here: ${error.message}`, true);
  }
  layOut();
}

function peaksOf(decoded) {
  const samples = decoded.getChannelData(0);
  const step = decoded.sampleRate / PEAKS_PER_SECOND;
  const peaks = new Float32Array(Math.ceil(samples.length / step));
  for (let i = 0; i < samples.length; i++) {
    const at = Math.floor(i / step);
    peaks[at] = Math.max(peaks[at], Math.abs(samples[i]));
  }
  const highest = peaks.reduce((a, b) => Math.max(a, b), 1e-6);
  return peaks.map((peak) => peak / highest);
}

function drawWave() {
  const scale = window.devicePixelRatio || 1;
  const width = view.clientWidth;
  const height = wave.clientHeight || 96;
  wave.width = width * scale;
  wave.height = height * scale;
  wave.style.width = `${width}px`;
  wave.style.height = `${height}px`;
  const pen = wave.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = getComputedStyle(document.body).color;
  const perPixel = 1 / pixelsPerSecond();
  const start = view.scrollLeft * perPixel;
  for (let x = 0; x < width; x++) {
    const from = Math.floor((start + x * perPixel) * PEAKS_PER_SECOND);
    const to = Math.max(from + 1, Math.floor((start + (x + 1) * perPixel) * PEAKS_PER_SECOND));
    let peak = 0;
    for (let i = from; i < to && i < state.peaks.length; i++) peak = Math.max(peak, state.peaks[i]);
    const bar = Math.max(1, peak * (height - 4));
    pen.fillRect(x, (height - bar) / 2, 1, bar);
  }
}

// --- The response -----------------------------------------------------------------

function loadResponse(response) {
  if (response === null || typeof response !== "object" || typeof response.text !== "string") {
    throw new Error("This is no response of the transcription route: it has no text.");
  }
  const words = (response.words ?? []).map((word) => ({ ...word, text: word.word ?? word.text }));
  const segments = response.segments ?? [];
  const units = (words.length ? words : segments).filter((unit) => Number.isFinite(unit.start));
  if (!units.length && response.text) {
    throw new Error("This response has no times: ask for verbose_json or diarized_json.");
  }
  state.units = units
    .map(({ start, end, text, speaker, confidence, aligned }) => ({
      start,
      end: Math.max(end, start),
      text,
      speaker: speaker ?? "",
      confidence: aligned === false ? 0 : confidence ?? 1,
    }))
    .sort((a, b) => a.start - b.start);
  const ends = state.units.map((unit) => unit.end);
  state.responseSeconds = ends.reduce((a, b) => Math.max(a, b), response.duration ?? 0);
  state.current.clear();
  drawLanes(response);
  drawText(response, segments);
  say("");
  layOut();
}

function colourOf(index) {
  return COLOURS[index % COLOURS.length];
}

function drawLanes(response) {
  const names = [...new Set(state.units.map((unit) => unit.speaker))].sort();
  // Which speaker of the transcript the diarizer's speakers are.
  const named = new Map(Object.entries(response.speaker_map ?? {}).map(([name, n]) => [n, name]));
  const heard = (response.diarization ?? []).map((stretch) => ({
    ...stretch,
    speaker: named.get(stretch.speaker) ?? `heard ${stretch.speaker + 1}`,
  }));
  for (const { speaker } of heard) if (!names.includes(speaker)) names.push(speaker);

  element("lanes").replaceChildren(
    ...names.map((name, index) => {
      const lane = document.createElement("div");
      lane.className = "lane";
      lane.dataset.speaker = name;
      lane.style.setProperty("--voice", colourOf(index));
      const label = document.createElement("div");
      label.className = "lane-name";
      label.textContent = name && (name.startsWith("heard") ? name : `Speaker ${name}`);
      lane.append(label);
      for (const stretch of heard.filter((stretch) => stretch.speaker === name)) {
        lane.append(place(document.createElement("div"), "heard", stretch));
      }
      for (const unit of state.units.filter((unit) => unit.speaker === name)) {
        unit.node = place(document.createElement("button"), "unit", unit);
        unit.node.type = "button";
        unit.node.textContent = unit.text;
        unit.node.title = `${unit.text}\n${clock(unit.start)} – ${clock(unit.end)}`;
        unit.node.classList.toggle("unsure", unit.confidence < 0.5);
        unit.node.addEventListener("click", () => seek(unit.start));
        lane.append(unit.node);
      }
      return lane;
    }),
  );
}

function place(node, className, { start, end }) {
  node.className = className;
  node.dataset.start = start;
  node.dataset.end = end;
  return node;
}

function drawText(response, segments) {
  const lanes = [...document.querySelectorAll(".lane")].map((lane) => lane.dataset.speaker);
  const turns = [];
  for (const { text, speaker = "" } of segments.length ? segments : [response]) {
    const last = turns.at(-1);
    if (last && last.speaker === speaker) last.text += ` ${text}`;
    else turns.push({ text, speaker });
  }
  element("text").replaceChildren(
    ...turns.map(({ text, speaker }) => {
      const line = document.createElement("span");
      line.className = "turn";
      line.style.display = "block";
      if (speaker) {
        const name = document.createElement("b");
        name.textContent = speaker;
        line.style.setProperty("--voice", colourOf(Math.max(0, lanes.indexOf(speaker))));
        line.append(name);
      }
      line.append(text);
      return line;
    }),
  );
}

// --- Time on the screen -----------------------------------------------------------

function pixelsPerSecond() {
  const whole = view.clientWidth / Math.max(state.duration, 0.1);
  // From the whole recording to where a word has room for its letters.
  const close = Math.max(whole, 160);
  return whole * (close / whole) ** (element("zoom").value / 100);
}

function layOut() {
  const scale = pixelsPerSecond();
  track.style.width = `${state.duration * scale}px`;
  for (const node of document.querySelectorAll(".unit, .heard")) {
    node.style.left = `${node.dataset.start * scale}px`;
    node.style.width = `${Math.max(2, (node.dataset.end - node.dataset.start) * scale)}px`;
  }
  drawRuler(scale);
  drawWave();
  follow(false);
}

function drawRuler(scale) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600];
  const step = steps.find((seconds) => seconds * scale >= 70) ?? 1200;
  const marks = [];
  for (let i = 0; i * step <= state.duration; i++) {
    const mark = document.createElement("span");
    mark.style.left = `${i * step * scale}px`;
    mark.textContent = clock(i * step);
    marks.push(mark);
  }
  element("ruler").replaceChildren(...marks);
}

function seek(seconds) {
  audio.currentTime = Math.min(Math.max(seconds, 0), state.duration);
  follow(false);
}

function follow(scrolls) {
  const now = audio.currentTime;
  const x = now * pixelsPerSecond();
  element("head").style.transform = `translateX(${x}px)`;
  element("clock").textContent = `${clock(now)} / ${clock(state.duration)}`;
  if (scrolls && (x < view.scrollLeft || x > view.scrollLeft + view.clientWidth)) {
    view.scrollLeft = x - view.clientWidth / 10;
  }
  const current = new Set(state.units.filter((unit) => unit.start <= now && now < unit.end));
  for (const unit of state.current) if (!current.has(unit)) unit.node.classList.remove("now");
  for (const unit of current) if (!state.current.has(unit)) unit.node.classList.add("now");
  state.current = current;
}

function run() {
  follow(true);
  if (!audio.paused) requestAnimationFrame(run);
}

// --- Controls ---------------------------------------------------------------------

function togglePlay() {
  if (audio.paused) audio.play().catch((error) => say(`Cannot play: ${error.message}`, true));
  else audio.pause();
}

element("play").addEventListener("click", togglePlay);
audio.addEventListener("play", () => {
  element("play").textContent = "Pause";
  requestAnimationFrame(run);
});
audio.addEventListener("pause", () => (element("play").textContent = "Play"));
audio.addEventListener("seeked", () => follow(true));
element("zoom").addEventListener("input", () => {
  const middle = (view.scrollLeft + view.clientWidth / 2) / track.clientWidth;
  layOut();
  view.scrollLeft = middle * track.clientWidth - view.clientWidth / 2;
});
view.addEventListener("scroll", () => requestAnimationFrame(drawWave));
view.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: -2, ArrowRight: 2 };
  if (event.target !== view) return;
  if (event.key === " ") togglePlay();
  else if (event.key in moves) seek(audio.currentTime + moves[event.key]);
  else return;
  event.preventDefault();
});
wave.addEventListener("click", (event) => seek((view.scrollLeft + event.offsetX) / pixelsPerSecond()));
window.addEventListener("resize", layOut);

element("audio-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (file) await loadRecording(URL.createObjectURL(file), await file.arrayBuffer());
});
element("response-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (!file) return;
  try {
    loadResponse(JSON.parse(await file.text()));
  } catch (error) {
    say(error.message, true);
  }
});

// --- Clips that came with the page ------------------------------------------------

function bytesOf(dataUrl) {
  const text = atob(dataUrl.slice(dataUrl.indexOf(",") + 1));
  return Uint8Array.from(text, (character) => character.charCodeAt(0)).buffer;
}

async function showClip(clip) {
  loadResponse(clip.response);
  await loadRecording(clip.audio, bytesOf(clip.audio));
}

const clips = window.TIMELINE_CLIPS ?? [];
if (clips.length) {
  element("chooser").hidden = false;
  element("clips").replaceChildren(...clips.map(({ name }, index) => new Option(name, index)));
  element("clips").addEventListener("change", ({ target }) => showClip(clips[target.value]));
  showClip(clips[0]).catch((error) => say(error.message, true));
}
